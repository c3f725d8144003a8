"""bench.slow_links on small things."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench import report, slow_links, time_to_loss
from bench.report import TUNING_SEED
from bench.slow_links import METHODS, SlowLinks, best_lr
from bench.time_to_loss import options_of
from language.recipes import RECIPES
from tests.bench.emulated import python


@pytest.mark.parametrize("method", METHODS)
def test_the_train_script_understands_every_method(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    recipe = SlowLinks().task.parse(*options_of(METHODS[method]))
    own = RECIPES[slow_links.RECIPE]
    assert (recipe.name, recipe.batch_size, recipe.model) == (slow_links.RECIPE, own.batch_size, own.model)
    assert (recipe.epochs, recipe.epoch_steps, own.optim.lr) == (5, 24, slow_links.LR)
    compression = recipe.co2.compression if recipe.method == "co2" else recipe.ddp_compression
    assert ("lgreco" in method) <= (compression.format == "lgreco" and compression.lgreco.rule == "lgreco")


def test_each_method_gets_its_own_best_learning_rate():
    rows = [
        {"method": "ddp", "lr": 0.5, "loss": 3.0},
        {"method": "ddp", "lr": 1.0, "loss": 2.5},
        {"method": "ddp", "lr": 2.0, "loss": math.nan},
        {"method": "co2", "lr": 2.0, "failed": "x"},
    ]
    assert best_lr(rows, "ddp") == 1.0 and best_lr(rows, "co2") is None


def test_a_row_has_speed_bytes_and_loss_of_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def train(o: Any, cluster: Any, task: Any, planned: Any, log: Path) -> dict[str, Any]:
        asked.append((o.eval_every, planned))
        last = {"step": 120, "seconds": 60.0, "loss": 4.0, "bytes_sent": 240.0, "tau": 6}
        return {"ended": "not reached", "reason": "", "trajectory": [last | {"step": 0, "seconds": 0.0}, last]}

    monkeypatch.setattr(time_to_loss, "train", train)
    row = slow_links.measure(SlowLinks(), None, "ddp_int4", 50.0, 7, 0.5, tmp_path)
    assert (row["samples_per_second"], row["bytes_a_step"], row["loss"], row["tau"]) == (64.0, 2.0, 4.0, 6)
    assert row["evaluations"] == [(0, 240.0, 4.0), (120, 240.0, 4.0)]
    slow_links.measure(SlowLinks(eval_every=1), None, "co2", 50.0, 7, 0.5, tmp_path)
    planned = {120: "ddp:compression=int4,lr=0.002", 24: "co2_auto:lr=0.002"}
    assert asked == [(every, (7, 50.0, slow_links.RECIPE, method)) for every, method in planned.items()]
    gone = {"ended": "failed", "reason": "rank 1: gone", "trajectory": []}
    monkeypatch.setattr(time_to_loss, "train", lambda *_: gone)
    assert slow_links.measure(SlowLinks(), None, "ddp", 50.0, 7, 0.5, tmp_path)["failed"] == "rank 1: gone"


def test_every_method_is_tuned_with_a_seed_of_its_own_then_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[tuple[Any, ...]] = []

    def measure(o: SlowLinks, cluster: Any, *run: Any) -> dict[str, Any]:
        method, rate, seed, lr, _ = run
        made.append((method, rate, seed, lr))
        return {"method": method, "rate_mbit": rate, "seed": seed, "lr": lr, "loss": abs(lr - 1.0) + 1}

    monkeypatch.setattr(slow_links, "measure", measure)
    o = SlowLinks(methods=("ddp", "lgreco_int4"), rates=(50.0, 200.0), throttle=True, out=tmp_path)
    session = report.Session("slow_links", tmp_path, report.header("bench.slow_links", o), slow_links.TABLES)
    slow_links.run_all(o, session)
    tuning, rows = made[:6], made[6:]
    assert {run[2] for run in tuning} == {TUNING_SEED} and not {run[2] for run in rows} & {TUNING_SEED}
    assert len(set(made)) == len(made) == 2 * 3 + 2 * 2 * 3 and {run[3] for run in rows} == {1.0}
    assert len(session.result["rows"]) == 12


@pytest.mark.slow
def test_a_real_run_over_a_throttled_link(tmp_path: Path):
    options = "--throttle --workers 2 --rates 500 --seeds 0 --lrs 1 --epochs 1 --epoch_steps 12"
    methods = ("--methods", "ddp", "lgreco_int4")
    python("-m", "bench.slow_links", *options.split(), *methods, "--out", tmp_path / "out", timeout=400)
    result = json.loads((tmp_path / "out" / "slow_links.json").read_text())
    by = {row["method"]: row for row in result["rows"]}
    assert by["lgreco_int4"]["bytes_a_step"] < 0.5 * by["ddp"]["bytes_a_step"]
    assert abs(by["lgreco_int4"]["loss"] - by["ddp"]["loss"]) < 1
