"""bench.loss: its command line, rows and table; Muon against torch's; its tasks. test_loss_ranks has its methods."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.loss import __main__ as command
from bench.loss import tasks
from bench.loss.__main__ import Options, Plan, Rows, Stack, parse, run, search, train
from bench.loss.methods import CUTS, Fragments, parts_of
from bench.loss.tasks import TASKS, ByteGPT, Inner, Task, labelled_draw, load_task, next_loss, with_muon
from core import UserError
from tests.problems import small_net
from tests.scripts import run_script


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task that takes a moment, in place of digits."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(240, 6, generator=generator)
    labels = inputs[:, :3].argmax(dim=1)
    held = {"tuning": (inputs[:20], labels[:20]), "test": (inputs[20:40], labels[20:40])}
    draw = labelled_draw(inputs[40:], labels[40:])
    cross_entropy = torch.nn.functional.cross_entropy
    build = lambda: small_net(torch.float32)  # noqa: E731
    task = Task(build, cross_entropy, draw, held, Inner("sgd", 0.1), batch=4)
    monkeypatch.setattr(command, "load_task", lambda name: task)
    return task


def options(folder: Path, **values: Any) -> Options:
    usual: dict[str, Any] = {"tasks": ("digits",), "methods": ("local", "co2"), "steps": 9, "tau": 3, "seeds": (0, 1)}
    return Options(**usual | {"rows": folder / "rows.jsonl"} | values)


def plan(task: Task, method: str, **values: Any) -> Plan:
    usual: dict[str, Any] = {"workers": 4, "batch": 4, "steps": 8, "tau": 3, "seed": 0}
    return Plan("digits", parse(method)[0], 0.1, **usual | {"split": "test"} | values)


def test_a_run_that_diverges_has_no_loss(tiny: Task):
    result = run(tiny, Plan("digits", parse("ddp")[0], 1e38, 2, 4, 20, 3, 0, "test"))
    assert result["loss"] is None


# -- command ----------------------------------------------------------------------------------------------------


def test_a_method_and_its_options():
    assert [str(s) for s in parse("co2")] == ["co2"]
    assert [str(s) for s in parse("fragments:delay=2,fragments=4")] == ["fragments:delay=2,fragments=4"]
    both = [str(s) for s in parse("co2:merge=keep_local,delay=3,beta=0|0.3")]
    assert both == ["co2:beta=0,delay=3,merge=keep_local", "co2:beta=0.3,delay=3,merge=keep_local"]
    made: Any = parse("co2:merge=keep_local,phi=none,nesterov=true")[0].make(torch.zeros(2, 1), 3)
    assert (made.o["merge"], made.o["phi"], made.o["nesterov"], made.delay) == ("keep_local", "none", True, 3)


def test_every_value_is_tried_at_every_rate(tmp_path: Path, tiny: Task):
    plans = options(tmp_path).plans("digits", 4, "co2:beta=0|0.5")
    assert [p.lr for p in plans] == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.05, 0.05])
    assert [dict(p.settings.options)["beta"] for p in plans] == [0.0, 0.5] * 3


def test_the_best_on_tuning_seed_and_split_is_reported_on_others(tmp_path: Path, tiny: Task):
    o = options(tmp_path)
    search(o, rows := Rows(o.rows))
    for asked in o.methods:
        tried = o.plans("digits", 4, asked)
        best = min(tried, key=lambda p: found["loss"] if (found := rows.find(p)) else 1e9)
        choice = next(row for row in rows.choices.values() if row["asked"] == asked)
        assert (choice["lr"], choice["options"]) == (best.lr, dict(best.settings.options)) and choice["tried"] == 3
    assert {(r["split"], r["seed"]) for r in rows.runs.values()} == {("tuning", 100), ("test", 0), ("test", 1)}


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path, tiny: Task, capsys: pytest.CaptureFixture):
    o = options(tmp_path, methods=("ddp",), lr_factors=(1.0,))
    search(o, Rows(o.rows))
    search(o, Rows(o.rows))
    assert "complete; 0 runs were new" in capsys.readouterr().out
    o.rows.write_bytes(o.rows.read_bytes()[:-40])
    search(o, Rows(o.rows))
    assert "complete; 1 runs were new" in capsys.readouterr().out
    assert len(Rows(o.rows).runs) == 2 and o.rows.read_text().count("\n") == 3
    o.rows.write_text("not a row\n")
    with pytest.raises(UserError, match="line 1 is no row"):
        Rows(o.rows)


def test_ddp_is_the_same_at_any_tau(tmp_path: Path, tiny: Task):
    o = options(tmp_path, methods=("ddp", "local"), lr_factors=(1.0,))
    search(o, rows := Rows(o.rows))
    search(replace(o, tau=4), rows)
    assert [row["method"] for row in rows.runs.values()] == ["ddp", "ddp", "local", "local", "local", "local"]
    assert rows.table().count("| ddp | ddp | 0.1 | 1 | 2 | ") == 2 and Rows(o.rows).table() == rows.table()


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A real run of digits."""
    short = ["--steps", "4", "--tau", "3", "--seeds", "0", "--lr_factors", "1", "--rows", str(tmp_path / "rows.jsonl")]
    run_script("bench.loss", "--tasks", "digits", "--methods", "co2:merge=keep_local,delay=2,beta=0|0.5", *short)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["run", "run", "choice", "run"]
    assert rows[-1]["split"] == "test" and rows[-1]["loss"] > 0 and rows[-1]["commit"]
    assert "| co2:merge=keep_local,delay=2,beta=0\\|0.5 |" in capsys.readouterr().out


def test_the_limit_of_the_gradients_norm_is_part_of_a_run(tiny: Task, tmp_path: Path):
    rows = Rows(tmp_path / "rows.jsonl")
    losses = {clip: run(tiny, plan(tiny, "ddp", clip=clip))["loss"] for clip in ("task", "none", "1e-9", "1e9")}
    assert losses["task"] == losses["none"] == losses["1e9"] != losses["1e-9"]
    rows.add_run(plan(tiny, "ddp", clip="1e-9"), {"loss": 1.0})
    assert rows.find(plan(tiny, "ddp", clip="1e-9")) and not rows.find(plan(tiny, "ddp"))


# -- against plain formulas -------------------------------------------------------------------------------------------


def test_muon_takes_the_matrices_and_adamw_the_rest(monkeypatch: pytest.MonkeyPatch):
    """Against torch's, row by row, without its rounding to bfloat16. bytes_muon marks the matrices of its layers."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(2, 17, generator=rng, dtype=torch.float64)
    state = Inner("muon", 0.1, weight_decay=0.2, matrices=((slice(3, 15), 3, 4),)).start(x)
    parts = [[nn.Parameter(part.clone()) for part in row.split([3, 12, 2])] for row in x]
    rows = [(a, nn.Parameter(m.detach().view(3, 4)), b) for a, m, b in parts]
    adam = [torch.optim.AdamW([a, b], 0.1, weight_decay=0.2) for a, _, b in rows]
    muon = [torch.optim.Muon([m], 0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw") for _, m, _ in rows]
    for _ in range(3):
        gradients = torch.randn(2, 17, generator=rng, dtype=torch.float64)
        state.step(x, gradients, 0.1)
        for row, gradient, *optimizers in zip(rows, gradients, adam, muon, strict=True):
            for p, g in zip(row, gradient.split([3, 12, 2]), strict=True):
                p.grad = g.view_as(p).clone()
            for optimizer in optimizers:
                optimizer.step()
    torch.testing.assert_close(x, torch.stack([torch.cat([p.detach().flatten() for p in row]) for row in rows]))
    task = with_muon(Task(ByteGPT, next_loss, None, {}, Inner("adamw", 0.1), 8))  # type: ignore[arg-type]
    assert [shape for _, *shape in task.inner.matrices] == [[144, 48], [48, 48], [192, 48], [48, 192]] * 2


def test_ddp_sends_compressed_gradients():
    x = torch.zeros(2, 2)
    method, inner = parse("ddp:compression=int4")[0].make(x, 1), Inner("sgd", 1.0, momentum=0.0).start(x)
    for step in range(2):
        method.train_step(lambda x, _: torch.tensor([[7.0, 0.4], [7.0, 0.4]]), (), inner, 1.0)
        assert x.tolist() == [[-7.0 * (step + 1), -float(step)]] * 2


def test_the_cuts_of_fragments(tiny: Task):
    """Every element is in one part, and the workers end alike."""
    found = {cut: parts_of([5, 20, 3, 2], 3, cut) for cut in CUTS}
    thirds = [slice(0, 10), slice(10, 20), slice(20, 30)]
    assert found["bytes"] == [[part] for part in thirds] == found["reversed"][::-1]
    assert found["layers"] == [[slice(0, 5)], [slice(5, 25)], [slice(25, 30)]]
    assert found["interleaved"] == [[slice(0, 5), slice(28, 30)], [slice(5, 25)], [slice(25, 28)]]
    ends = {}
    for cut in CUTS:
        _, method = train(tiny, plan(tiny, f"fragments:fragments=3,cut={cut}"))
        assert isinstance(method, Fragments) and sum(part.x.shape[1] for part in method.parts) == method.x.shape[1]
        method.finish()
        assert (method.x == method.x[0]).all()
        ends[cut] = method.x[0].clone()
    assert len({end.sum().item() for end in ends.values()}) == len(CUTS), "the order and the cuts matter"


def test_parts_that_start_together_arrive_one_after_the_other(tiny: Task):
    _, method = train(tiny, plan(tiny, "fragments:fragments=3,delay=4,together=true", tau=6))
    assert isinstance(method, Fragments)
    assert [(part.delay, part.into) for part in method.parts] == [(2, 2), (3, 2), (4, 2)]
    assert [len(part.in_flight) for part in method.parts] == [0, 1, 1], "two steps after the boundary"


def test_a_row_without_a_newer_option_still_counts(tiny: Task, tmp_path: Path):
    rows, asked = Rows(tmp_path / "rows.jsonl"), plan(tiny, "fragments:fragments=3")
    rows.add_run(asked, {"loss": 1.0})
    rows.path.write_text(rows.path.read_text().replace(', "cut": "bytes"', ""))
    known = Rows(rows.path)
    assert known.find(asked) and not known.find(plan(tiny, "fragments:fragments=3,cut=layers"))


# -- tasks, their data and models -------------------------------------------------------------------------------------


def test_digits_have_three_parts():
    task = load_task("digits")
    inputs, iid = task.draw(0, 0, 4, 16)
    assert inputs.shape == (4, 16, 1, 8, 8) and len(iid[0].unique()) > 3
    again = task.draw(0, 0, 4, 16)[0]
    other = task.draw(0, 1, 4, 16)[0]
    assert torch.equal(inputs, again) and not torch.equal(inputs, other)
    tuning, test = (task.held_out[split][0].flatten(1) for split in ("tuning", "test"))
    assert (tuning[:, None] - test[None]).abs().amax(dim=2).min() > 0  # no image in both


def test_a_byte_model_sees_no_later_byte():
    torch.manual_seed(0)
    model, text = tasks.ByteGPT(), torch.randint(256, (1, tasks.CONTEXT))
    changed = text.clone()
    changed[0, 30] = (changed[0, 30] + 1) % 256
    same = (model(text) - model(changed)).abs().amax(dim=2)[0] < 1e-6
    assert same[:30].all() and not same[30:].any()
    inputs, targets = tasks.windows(torch.arange(200, dtype=torch.uint8), torch.tensor([[5], [9]]))
    assert inputs.shape == (2, 1, tasks.CONTEXT) and torch.equal(inputs + 1, targets)


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise in place of the data that would have to be there."""
    rng = torch.Generator().manual_seed(0)
    text = torch.randint(256, (5000,), generator=rng, dtype=torch.uint8)
    images, labels = torch.randn(64, 3, 16, 16, generator=rng), torch.arange(64) % 10
    held: Any = {"tuning": (images[:9], labels[:9]), "test": (images[9:20], labels[9:20])}
    monkeypatch.setattr(tasks, "books", lambda: (text, {"tuning": text[:999], "test": text[999:2222]}))
    monkeypatch.setattr(tasks, "cifar_data", lambda: ((images, labels), held))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_runs_stacked(no_data: None, name: str):
    """Workers have gradients of their own, as each would have alone; no buffer would have to change in training."""
    found = TASKS[name]()
    batch = found.draw(0, 1, 2, 4)
    assert all(torch.equal(*pair) for pair in zip(batch, found.draw(0, 1, 2, 4), strict=True))
    stack = Stack(found)
    assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in stack.model.modules())
    x = torch.stack([stack.start(0), stack.start(1)])
    rows = stack.gradient(x, batch)
    for i in range(2):
        alone = stack.gradient(x[i : i + 1], tuple(part[i : i + 1] for part in batch))
        torch.testing.assert_close(rows[i : i + 1], alone, rtol=1e-3, atol=1e-5)
    assert rows.isfinite().all() and (rows.norm(dim=1) > 0).all()
    inputs, targets = found.held_out["test"]
    assert stack.held_out_loss(x[0], (inputs[:5], targets[:5])) is not None


@pytest.mark.parametrize("asked", ["ddp:compression=int4", "fragments:fragments=2,compression=int4"])
def test_all_workers_lie_on_the_device(no_data: None, asked: str):
    """With the device "meta", whose tensors have no numbers, and which refuses an operation on two devices."""
    task = TASKS["bytes"]()
    plan = Plan("bytes", parse(asked)[0], 0.1, 2, 2, 3, 2, 0, "test")
    assert train(task, plan, device="meta")[1].x.is_meta
