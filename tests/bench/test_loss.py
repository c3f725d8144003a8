"""bench.loss: its runs, its command line, its rows and its table."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.loss import __main__ as command
from bench.loss.__main__ import Options, Plan, Rows, parse, run, search, train
from bench.loss.tasks import Inner, Task, labelled_draw
from core.errors import UserError
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
    return Options(**usual | {"configurations": 4, "rows": folder / "rows.jsonl"} | values)


def plan(task: Task, method: str, **values: Any) -> Plan:
    usual: dict[str, Any] = {"workers": 4, "batch": 4, "steps": 8, "tau": 3, "shards": "iid", "seed": 0}
    return Plan("digits", parse(method)[0], 0.1, **usual | {"split": "test"} | values)


@pytest.mark.parametrize(
    "name",
    [
        *("ddp", "local", "slowmo", "diloco", "overlap_local", "co2", "co2:merge=mix,delay=2", "ddp:wire=int8"),
        *("co2:merge=keep,delay=1", "co2:merge=keep,delay=1,wire=int4", "co2:merge=keep,nesterov=true,beta=0.3"),
    ],
)
def test_every_method_ends_with_equal_workers_and_learns(tiny: Task, name: str):
    stack, method = train(tiny, replace(plan(tiny, name, steps=40), lr=0.05))
    method.finish()
    assert (method.x - method.x[0]).abs().max() < 1e-6
    start, end = (stack.held_out_loss(x, tiny.held_out["test"]) for x in (stack.start(0), method.x[0]))
    assert start is not None and end is not None and end < start and run(tiny, plan(tiny, name))["loss"] is not None


def test_blocking_methods_agree_where_they_should(tiny: Task):
    """SlowMo without momentum is Local-SGD; at tau 1 with SGD so is DDP; and CO2 without delay, penalty and clip."""
    local = run(tiny, plan(tiny, "local"))["loss"]
    assert run(tiny, plan(tiny, "slowmo:beta=0"))["loss"] == pytest.approx(local, rel=1e-5)
    assert run(tiny, plan(tiny, "co2:delay=0,beta=0,gap=none,phi=none"))["loss"] == pytest.approx(local, rel=1e-5)
    one, ddp = run(tiny, plan(tiny, "local", tau=1)), run(tiny, plan(tiny, "ddp"))
    assert one["loss"] == pytest.approx(ddp["loss"], rel=1e-5)


def test_a_run_that_diverges_has_no_loss(tiny: Task):
    result = run(tiny, Plan("digits", parse("ddp")[0], 1e38, 2, 4, 20, 3, "iid", 0, "test"))
    assert result["loss"] is None and result["loss_of_mean"] is None


# -- command ----------------------------------------------------------------------------------------------------


def test_a_method_and_its_options():
    assert [str(s) for s in parse("co2")] == ["co2", "co2:beta=0"]
    both = [str(s) for s in parse("co2:merge=mix,delay=3,beta=0|0.3")]
    assert both == ["co2:beta=0,delay=3,merge=mix", "co2:beta=0.3,delay=3,merge=mix"]
    made: Any = parse("co2:merge=keep,phi=none,nesterov=true")[0].make(torch.zeros(2, 1), 3)
    assert (made.o["merge"], made.o["phi"], made.o["nesterov"], made.delay) == ("keep", "none", True, 3)


def test_every_method_gets_equally_many_configurations(tmp_path: Path, tiny: Task):
    o = Options(rows=tmp_path / "rows.jsonl")
    o.check()
    assert {len(o.candidates(asked)) for asked in o.methods} == {o.configurations}
    assert [p.lr for p in options(tmp_path).plans("digits", 4, "local")] == pytest.approx([0.1, 0.2, 0.05, 0.1414])


def test_a_second_search_runs_nothing_anew(tmp_path: Path, tiny: Task, capsys: pytest.CaptureFixture):
    o = options(tmp_path)
    search(o, Rows(o.rows))
    assert "complete; 12 runs were new" in capsys.readouterr().out
    lines = o.rows.read_text()
    search(o, Rows(o.rows))
    assert "complete; 0 runs were new" in capsys.readouterr().out and o.rows.read_text() == lines
    one_more = options(tmp_path, seeds=(0, 1, 2))
    search(one_more, Rows(o.rows))
    assert "complete; 2 runs were new" in capsys.readouterr().out  # one a method


def test_the_best_on_tuning_seed_and_split_is_reported_on_others(tmp_path: Path, tiny: Task):
    o = options(tmp_path)
    search(o, rows := Rows(o.rows))
    for asked in o.methods:
        tried = o.plans("digits", 4, asked)
        best = min(tried, key=lambda p: found["loss"] if (found := rows.find(p)) else 1e9)
        choice = next(row for row in rows.choices.values() if row["asked"] == asked)
        assert (choice["lr"], choice["options"]) == (best.lr, dict(best.settings.options)) and choice["tried"] == 4
    assert {(r["split"], r["seed"]) for r in rows.runs.values()} == {("tuning", 100), ("test", 0), ("test", 1)}


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path, tiny: Task, capsys: pytest.CaptureFixture):
    o = options(tmp_path, methods=("ddp",), lr_factors=(1.0,))
    search(o, Rows(o.rows))
    o.rows.write_bytes(o.rows.read_bytes()[:-40])
    capsys.readouterr()
    search(o, Rows(o.rows))
    assert "complete; 1 runs were new" in capsys.readouterr().out
    assert len(Rows(o.rows).runs) == 2 and o.rows.read_text().count("\n") == 3
    o.rows.write_text("not a row\n")
    with pytest.raises(UserError, match="line 1 is no row"):
        Rows(o.rows)


def test_the_table(tmp_path: Path, tiny: Task):
    o = options(tmp_path, methods=("local", "co2:beta=0|0.5"))
    rows = Rows(o.rows)
    results = {"local": [0.5, 0.6], "co2": [0.4, None]}

    def add(asked: str, losses: list[float | None]) -> None:
        best = o.plans("digits", 4, asked)[0]
        rows.add_choice(asked, o.tuning, best, 4)
        for seed, loss in enumerate(losses):
            rows.add_run(replace(best, seed=seed, split="test"), {"loss": loss, "loss_of_mean": loss, "seconds": 1.0})

    add("local", results["local"])
    add("co2:beta=0|0.5", results["co2"])
    text = rows.table()
    start = "| digits | 4 | 4 | 9 | 3 | iid | task | each method tuned over 4 configurations |"
    assert f"{start} local | local | 0.1 | 4 | 2 | 0.5500 ± 0.0707 | 0% ± 0% |" in text
    assert rf"{start} co2:beta=0\|0.5 | co2:beta=0 | 0.1 | 4 | 2 | 0.4000 | 50% ± 71% |" in text
    assert Rows(o.rows).table() == text  # from the file alone


def test_ddp_is_the_same_at_any_tau(tmp_path: Path, tiny: Task):
    o = options(tmp_path, methods=("ddp", "local"), lr_factors=(1.0,))
    search(o, rows := Rows(o.rows))
    search(replace(o, tau=4), rows)
    assert [row["method"] for row in rows.runs.values()] == ["ddp", "ddp", "local", "local", "local", "local"]
    assert rows.table().count("| ddp | ddp | 0.1 | 1 | 2 | ") == 2


def test_a_row_that_is_older_than_an_option_or_of_a_removed_method_is_read(tmp_path: Path, tiny: Task):
    o = options(tmp_path, methods=("co2:beta=0",), lr_factors=(1.0,))
    search(o, Rows(o.rows))
    old = [json.loads(line) for line in o.rows.read_text().splitlines()]
    for row in old:
        del row["options"]["wire"]
        row["options"] |= {"fragments": 1, "policy": "penalty"}  # had no effect
    old.append(old[0] | {"task": "surfaces", "method": "des_loc", "options": {"first_every": 3}})  # removed since
    o.rows.write_text("".join(json.dumps(row) + "\n" for row in old))
    lines = o.rows.read_text()
    search(o, rows := Rows(o.rows))
    assert o.rows.read_text() == lines and len(rows.choices) == 2
    assert "des_loc" not in rows.table(), "no run followed this choice"


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    """A real run of digits."""
    rows = tmp_path / "rows.jsonl"
    short = ["--steps", "4", "--tau", "3", "--seeds", "0", "--lr_factors", "1", "--rows", str(rows)]
    run_script("bench.loss", "--tasks", "digits", "--methods", "co2:merge=keep,delay=2", *short)
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["kind"] for row in written] == ["run", "run", "choice", "run"]  # two values of beta are tried
    assert written[-1]["split"] == "test" and written[-1]["loss"] > 0 and written[-1]["commit"]
    assert Rows(rows).table() in capsys.readouterr().out


def test_the_limit_of_the_gradients_norm_is_part_of_a_run(tiny: Task, tmp_path: Path):
    rows = Rows(tmp_path / "rows.jsonl")
    losses = {clip: run(tiny, plan(tiny, "ddp", clip=clip))["loss"] for clip in ("task", "none", "1e-9", "1e9")}
    assert losses["task"] == losses["none"] == losses["1e9"] != losses["1e-9"]
    rows.add_run(plan(tiny, "ddp", clip="1e-9"), {"loss": 1.0})
    assert rows.find(plan(tiny, "ddp", clip="1e-9")) and not rows.find(plan(tiny, "ddp"))
    for wrong in ("0", "-1", "inf", "big"):
        with pytest.raises(UserError, match=f"clip={wrong}: give a number above 0, none, or task"):
            options(tmp_path, clip=wrong).check()
