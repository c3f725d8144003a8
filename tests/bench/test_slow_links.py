"""bench.slow_links on small things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import report, slow_links
from bench.slow_links import METHODS, SlowLinks, text
from bench.trainings import TUNING_SEED
from core.lgreco.choices import parse as choice
from language.recipes import RECIPES
from tests.bench.emulated import python
from training.recipe import parse


def unlike() -> list[torch.Tensor]:
    """Nearly of rank 1, of many ranks, sparse, and a vector."""
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(60, 1, generator=draw) @ torch.randn(1, 80, generator=draw)
    sparse = torch.randn(70, 50, generator=draw) ** 5
    return [100 * low, 0.1 * torch.randn(64, 64, generator=draw), sparse, torch.randn(200, generator=draw)]


@pytest.mark.parametrize("like", slow_links.LIKES)
def test_never_more_bytes_for_about_the_error(like: str):
    """The curves leave out the second rounding of the ints, and have more power iterations for low rank."""
    row = slow_links.compare("none", unlike(), like, 4)
    assert row["lgreco_bytes"] <= row["uniform_bytes"] < row["plain_bytes"] and len(row["choices"]) == 4
    assert row["lgreco_error"] <= 1.3 * row["uniform_error"], row
    assert f"| none | {like} | 4 |" in slow_links.text_of_errors([row])


def test_measured_errors_are_the_reducers():
    """rank 2 of a matrix of rank 1 loses nothing, and of one of many ranks nearly all."""
    low, many, *_ = unlike()
    lost = slow_links.Sender([low, many], "rank4").errors([choice("rank2"), choice("rank2")])
    assert lost[0] < 1e-3 * float(low.norm()) and lost[1] > 0.5 * float(many.norm())


def test_gradients_are_added_up_over_the_last_steps(monkeypatch: pytest.MonkeyPatch):
    def small(steps: int) -> Any:
        model = torch.nn.Linear(2, 1, bias=False)
        losses = (lambda i=i: model(torch.full((1, 2), float(i))).sum() for i in range(steps))
        return model, torch.optim.SGD(model.parameters(), 0.1), losses

    monkeypatch.setitem(slow_links.LOSSES, "small", small)
    (total,) = slow_links.gradients("small", steps=3, summed=2)
    assert total.tolist() == [[3.0 + 4.0] * 2]


@pytest.mark.parametrize("method", METHODS)
def test_the_train_script_understands_every_command(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    o = SlowLinks()
    recipe = parse(RECIPES, o.command(method, 50.0, 7, 0.5, Path("somewhere")))
    assert recipe.name == slow_links.RECIPE and recipe.seed == 7 and recipe.optim.lr == 0.5 * slow_links.LR
    assert recipe.batch_size == slow_links.BATCH and RECIPES[slow_links.RECIPE].optim.lr == slow_links.LR
    wire = recipe.co2.wire if recipe.method == "co2" else recipe.ddp_wire
    assert ("lgreco" in method) <= (wire.format == "lgreco" and wire.lgreco.rule == "lgreco")


def test_the_table():
    row = {"rate_mbit": 50.0, "lr": 1.0, "tau": 1, "deciding_share": 0.01, "bytes_a_step": 2e6}
    rows = [row | {"method": "ddp", "seed": s, "samples_per_second": 10.0 + s, "loss": 3.0} for s in range(2)]
    rows += [row | {"method": "lgreco_rank4", "seed": 0, "samples_per_second": 31.5, "loss": None}]
    rows += [{"rate_mbit": 50.0, "method": "ddp_int4", "failed": "no answer"}]
    result = {"options": {"workers": 4, "rates": [50.0]}, "rows": rows, "commit": "c", "date": "d"}
    shown = text(result)
    assert "| ddp | 1 | 10.5 ± 0.7 | 1.00 | 3.000 ± 0.000 | 2.000 | 1 | 1.00% |" in shown
    assert "| lgreco_rank4 | 1 | 31.5 | 3.00 | not finite | 2.000 | 1 | 1.00% |" in shown
    assert "| ddp_int4 | failed: no answer |" in shown


def test_bytes_to_one_loss():
    """By hand: the target is the higher of the last losses, but for the end's, which are of other text."""
    logged = [{"step": s, "round/bytes_sent": 10.0} for s in range(1, 5)]
    logged = [logged[0], logged[1], {"step": 2, "val_loss": 5.0}, *logged[2:], {"step": 4, "val_loss": 4.0}]
    assert slow_links.evaluations(logged, "val_loss") == [(2, 20.0, 5.0), (4, 40.0, 4.0)]
    uniform = [(10, 100e6, 6.0), (20, 200e6, 5.0), (30, 300e6, 4.0), (40, 400e6, 9.0)]
    own = [(10, 50e6, 6.5), (20, 100e6, 5.5), (30, 150e6, 4.5), (40, 200e6, 9.0)]
    assert slow_links.reached(uniform, 4.5) == (25, 250e6)
    assert slow_links.reached(uniform, 6.5) is None and slow_links.reached(uniform, 3.0) is None
    by = {"ddp_top1": uniform, "lgreco_top1": own, "ddp_rank4": uniform}
    rows = [{"method": m, "seed": s, "rate_mbit": 50.0, "evaluations": e} for s in range(2) for m, e in by.items()]
    failed = {"method": "ddp_int4", "seed": 0, "rate_mbit": 50.0, "failed": "no answer"}
    shown = slow_links.text_of_pairs([*rows, failed])
    gain = "4.500 ± 0.000 | 250.00 ± 0.00 | 150.00 ± 0.00 | 1.67 ± 0.00"
    assert f"| ddp_top1 | lgreco_top1 | 2 | {gain} |" in shown and "rank4" not in shown
    assert slow_links.text_of_pairs([row | {"evaluations": []} for row in rows]) == ""
    assert {m for pair in slow_links.PAIRS for m in pair} <= set(METHODS)


def test_every_method_is_tuned_with_a_seed_of_its_own_then_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[Any, ...]] = []

    def measure(o: SlowLinks, cluster: Any, module: Any, run: tuple[Any, ...], folder: Path) -> dict[str, Any]:
        made.append(run)
        method, rate, seed, lr = run
        row = {"method": method, "rate_mbit": rate, "seed": seed, "lr": lr, "loss": abs(lr - 1.0) + 1}
        return row | {"samples_per_second": 3.0, "bytes_a_step": 1e6, "tau": 1, "deciding_share": 0.0}

    monkeypatch.setattr(slow_links, "measure", measure)
    o = SlowLinks(methods=("ddp", "lgreco_int4"), rates=(50.0, 200.0), models=(), throttle=True, out=tmp_path)
    session = report.Session("slow_links", tmp_path, report.header("bench.slow_links", o), text)
    slow_links.run_all(o, session)
    tuning, rows = made[:6], made[6:]
    assert {run[2] for run in tuning} == {TUNING_SEED} and not {run[2] for run in rows} & {TUNING_SEED}
    assert len(set(made)) == len(made) == 2 * 3 + 2 * 2 * 3 and {run[3] for run in rows} == {1.0}
    assert len(session.result["rows"]) == 12 and session.result["errors"] == []
    assert "| lgreco_int4 | 1 | 3.0 ± 0.0 |" in (tmp_path / "slow_links.md").read_text()


@pytest.mark.slow
def test_a_real_run_over_a_throttled_link(tmp_path: Path):
    options = "--throttle --workers 2 --rates 500 --seeds 0 --lrs 1 --epochs 1 --epoch_steps 12 --models resnet"
    methods = ("--methods", "ddp", "lgreco_int4")
    python("-m", "bench.slow_links", *options.split(), *methods, "--out", tmp_path / "out", timeout=400)
    result = json.loads((tmp_path / "out" / "slow_links.json").read_text())
    by = {row["method"]: row for row in result["rows"]}
    assert by["lgreco_int4"]["bytes_a_step"] < 0.5 * by["ddp"]["bytes_a_step"]
    assert abs(by["lgreco_int4"]["loss"] - by["ddp"]["loss"]) < 1
    assert {row["like"] for row in result["errors"]} == set(slow_links.LIKES)
