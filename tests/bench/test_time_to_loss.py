"""From metrics to a time to the loss, the table, the options, and one small real run of bench.time_to_loss."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import time_to_loss, trainings
from bench.loss_table import CHOSEN, METHODS, OF_CO2, USUAL, Outcome, cells, follow, markdown, speed_up, unpaid
from bench.time_to_loss import TimeToLoss
from bench.trainings import Metrics, split_wire
from core.errors import UserError
from language.recipes import RECIPES
from tests.bench.emulated import python
from training.recipe import parse
from vision import data

KEY = "test_loss"


def closed(number: int, seconds: float, wait: float = 0.0, busy: float = 0.0) -> dict[str, Any]:
    """A row of a round of six steps, whose boundary took nothing but its waiting."""
    times = {"exposed_seconds": wait, "boundary_seconds": wait, "allreduce_seconds": busy, "round": number}
    return {"step": 6 * number, "seconds": seconds} | {f"round/{name}": value for name, value in times.items()}


def evaluated(step: int, seconds: float, loss: float) -> dict[str, Any]:
    return {"step": step, "seconds": seconds, KEY: loss, "test_top1": 0.5}


# -- metrics to a time ------------------------------------------------------------------------------------------

ROWS = [
    closed(1, 2.0, wait=0.5),
    evaluated(6, 2.0, 1.5),
    {"step": 10, "seconds": 3.0, "train_loss": 0.1},
    closed(2, 4.0, wait=0.3),
    evaluated(12, 4.0, 0.9),
    closed(3, 6.0, wait=0.4),
    evaluated(18, 6.0, 0.7),
]


def test_the_first_evaluation_at_the_target_counts():
    outcome = follow(ROWS, KEY, 0.9, 60.0)
    assert outcome == Outcome("reached", 4.0, 12, 0.9, pytest.approx(0.8 / 4.0), 0.0)
    assert str(outcome) == "4.0 s (loss 0.900, 12 steps)"


def test_a_run_above_the_target_is_open_until_it_ends():
    assert follow(ROWS, KEY, 0.5, 60.0) is None
    ended = follow(ROWS, KEY, 0.5, 60.0, ended="not reached")
    assert ended == Outcome("not reached", 6.0, 18, 0.7, pytest.approx(0.2), 0.0)
    assert str(ended) == "not reached (loss 0.700, 18 steps)"
    failed = follow(ROWS, KEY, 0.5, 60.0, ended="failed", reason="rank 1: gone")
    assert str(failed) == "failed (loss 0.700, 18 steps): rank 1: gone"


def test_a_loss_that_came_after_the_limit_does_not_count():
    outcome = follow(ROWS, KEY, 0.7, 5.0)
    assert outcome is not None
    assert (outcome.status, outcome.seconds, outcome.steps, outcome.loss) == ("out of time", 5.0, 12, 0.9)
    assert str(outcome).startswith("> 5.0 s (loss 0.900")


def test_a_run_without_an_evaluation():
    assert follow([], KEY, 0.7, 5.0) is None
    outcome = follow(ROWS[:1], KEY, 0.7, 1.0)
    assert outcome is not None and (outcome.status, outcome.seconds, outcome.loss) == ("out of time", 1.0, None)
    nothing = follow([], KEY, 0.7, 5.0, ended="failed", reason="rank 0: no")
    assert nothing == Outcome("failed", 0.0, 0, None, None, 0.0, "rank 0: no")


def test_not_a_number_is_not_the_target():
    assert follow([evaluated(6, 2.0, float("nan"))], KEY, 1.0, 60.0) is None


def test_rounds_that_were_not_logged_wait_like_the_logged_ones():
    rows = [closed(5, 1.0, wait=0.1), closed(10, 2.0, wait=0.05), evaluated(10, 2.0, 0.1)]  # as ddp's
    outcome = follow(rows, KEY, 0.5, 60.0)
    assert outcome is not None and outcome.exposed_share == pytest.approx((5 * 0.1 + 5 * 0.05) / 2.0)
    late = follow([closed(5, 1.0, wait=0.1), closed(10, 2.0, wait=0.19)], KEY, 0.5, 1.1)
    assert late is not None and late.status == "out of time"
    assert late.exposed_share == pytest.approx((5 * 0.1 + 5 * 0.19) / 2.0), "of the time in which it waited"


def test_what_an_evaluation_hid_is_charged():
    # 1 s of computing a round. The all-reduce takes 3 s: 2 s of waiting; 1.5 s of it passed during the evaluation.
    rows = [
        closed(0, 1.0),  # the first boundary of co2: nothing has been launched
        closed(1, 4.0, wait=2.0, busy=3.0),
        evaluated(12, 4.0, 0.9),
        closed(2, 5.5, wait=0.5, busy=3.0),
        closed(3, 8.5, wait=2.0, busy=3.1),  # no evaluation before it: the measured waiting stands
        evaluated(24, 8.5, 0.4),
    ]
    outcome = follow(rows, KEY, 0.5, 60.0)
    assert outcome is not None
    assert (outcome.seconds, outcome.credit_seconds) == (pytest.approx(10.0), pytest.approx(1.5))
    assert outcome.exposed_share == pytest.approx(0.6)
    limited = follow(rows, KEY, 0.5, 9.0)
    assert limited is not None and limited.status == "out of time"


def test_nothing_is_charged_without_an_all_reduce_under_way():
    assert unpaid(closed(2, 9.0, wait=0.0, busy=0.8), 1.0) == 0.0  # computing hides it anyway
    assert unpaid(closed(2, 9.0, wait=3.0, busy=3.0), 4.0) == 0.0  # slowmo: launched and landed at the boundary


# -- a run of a made-up script ------------------------------------------------------------------------------------


def script(rows: list[dict[str, Any]], then: Callable[[], None]) -> Any:
    """A train script's module: rank 0 writes the rows, then everyone does something else."""

    def main() -> None:
        if os.environ["RANK"] == "0":
            folder = Path(sys.argv[sys.argv.index("--out") + 1])
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.write(1, b"from a rank\n")
        then()

    return SimpleNamespace(__name__="script", evaluate=None, main=main)


def fail() -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("target", "then", "status", "reason"),
    [
        (0.9, lambda: time.sleep(60), "reached", ""),
        (0.5, lambda: None, "not reached", ""),
        (0.7, lambda: None, "reached", ""),
        (0.5, fail, "failed", "ValueError: no such thing"),
    ],
)
def test_a_script_is_followed(target: float, then: Callable[[], None], status: str, reason: str, tmp_path: Path):
    o = TimeToLoss(workers=2, vision_loss=target, throttle=True)
    started = time.monotonic()
    outcome = time_to_loss.train(o, None, script(ROWS, then), (0, 40.0, "vision", "co2"), tmp_path)
    assert outcome.status == status and outcome.reason.endswith(reason)
    assert time.monotonic() - started < 15 and not multiprocessing.active_children()
    assert "from a rank" in (tmp_path / "log.txt").read_text()


def test_a_user_s_mistake_in_a_script_is_told(tmp_path: Path):
    def refuse() -> None:
        raise UserError("batch_size=7: no")

    with pytest.raises(UserError, match="batch_size=7: no"):
        time_to_loss.train(TimeToLoss(workers=2), None, script([], refuse), (0, 40.0, "vision", "co2"), tmp_path)


# -- the table --------------------------------------------------------------------------------------------------


def run(method: str, seed: int, seconds: float, status: str = "reached", **more: Any) -> dict[str, Any]:
    values = {"task": "vision", "rate_mbit": 40.0, "method": method, "seed": seed, "status": status}
    return values | {"seconds": seconds, "steps": 100, "loss": 0.2, "exposed_share": 0.5} | more


OUT_OF_TIME = {"status": "out of time", "loss": 0.8}
RUNS = [
    run("co2", 1, 12.0, steps=110, exposed_share=0.25, tau=12),
    run("co2", 0, 10.0, steps=90, tau=6),
    run("ddp", 0, 48.0),
    run("ddp", 1, 60.0, **OUT_OF_TIME),
    run("local", 0, 20.0),
    run("local", 1, 30.0, "not reached", loss=0.31),
]
RESULT = {
    "date": "2026-01-02 03:04:05",
    "commit": "abc",
    "command": "python -m bench.time_to_loss",
    "link": "namespaces + tbf",
    "verified_mbit": {"40": 40.02},
    "cpu_count": 2,
    "options": {"workers": 4, "limit_seconds": 60.0},
    "tasks": {"vision": {"loss": KEY, "target": 0.25, "command": "digits_small --method METHOD"}},
    "runs": RUNS,
}


def test_the_table():
    lines = markdown(RESULT).splitlines()
    assert lines[2:5] == [
        "| vision | 40 Mbit/s | ddp | 1 of 2 | 48.0, > 60.0 |  | 100 | 50% | 0.500 ± 0.424 |  |",
        "| vision | 40 Mbit/s | local | 1 of 2 | 20.0, not reached (loss 0.310) |  | 100 | 50% | 0.255 ± 0.078 |  |",
        "| vision | 40 Mbit/s | co2 | 2 of 2 | 11.0 ± 1.4 | > 4.9 x | 100 ± 14 | 38% | 0.200 ± 0.000 | 6, 12 |",
    ]
    text = "\n".join(lines[5:])
    for said in ("4 workers", "40: 40.0", "share 2 CPU cores", "after 60 s", "target test_loss 0.25", "commit abc"):
        assert said in text
    assert "link: throttled in software" in markdown(RESULT | {"link": "throttled in software"})
    part = {"loss": KEY, "target": 1.6, "command": "cifar10_small", "package": "vision", "held_out": 5}
    said = "cifar10: `vision.train cifar10_small`, target test_loss 1.6, on one of 5 images of the test set."
    assert said in markdown(RESULT | {"tasks": {"cifar10": part}})


def test_the_limit_is_ddp_without_communication_where_its_steps_are_known_for_every_seed():
    assert "| limit |" not in markdown(RESULT)
    faster = run("ddp", 1, 15.0, rate_mbit=200.0, steps=80)  # as many steps as over any link
    lines = markdown(RESULT | {"runs": [*RUNS, faster]}).splitlines()
    assert lines[5] == "| vision | 40 Mbit/s | limit |  | 11.0 ± 1.4 |  |  |  |  |  |"  # 100 x 0.1 s and 80 x 0.15 s


def test_tasks_and_rates_stand_apart():
    other = [r | {"rate_mbit": 200.0} for r in RUNS[:2]] + [r | {"task": "language"} for r in RUNS[:2]]
    rows = [line.split(" | ")[:5] for line in markdown(RESULT | {"runs": other + RUNS}).splitlines()[2:7]]
    assert [row[1:3] for row in rows[:4]] == [["40 Mbit/s", m] for m in ("ddp", "local", "co2")] + [
        ["200 Mbit/s", "co2"]
    ]
    assert rows[4][:3] == ["| language", "40 Mbit/s", "co2"]


def test_speed_up_needs_the_same_seeds_and_a_known_time():
    co2, ddp = [run("co2", 0, 10.0)], [run("ddp", 0, 48.0)]
    assert speed_up(co2, ddp) == "4.8 x"
    assert speed_up(co2, [run("ddp", 0, 60.0, **OUT_OF_TIME)]) == "> 6.0 x"
    assert speed_up(co2, [run("ddp", 1, 48.0)]) == ""
    assert speed_up(co2, [run("ddp", 0, 48.0, "not reached")]) == ""
    assert speed_up([run("co2", 0, 60.0, **OUT_OF_TIME)], ddp) == ""


def test_a_method_whose_runs_all_failed():
    failed = run("co2", 0, 0.0, "failed", loss=None, exposed_share=None)
    assert cells([failed], []) == ["0 of 1", "failed", "", "", "", "no evaluation", ""]


# -- options and runs -------------------------------------------------------------------------------------------


def test_the_plan_is_interleaved_and_always_alike():
    o = TimeToLoss()
    plan = o.plan()
    assert plan == o.plan() and len(set(plan)) == 2 * 2 * len(USUAL) * 3
    groups = [plan[i : i + 2 * len(USUAL)] for i in range(0, len(plan), 2 * len(USUAL))]
    assert [{(seed, rate) for seed, rate, *_ in g} for g in groups] == [
        {(seed, rate)} for seed in (0, 1, 2) for rate in (40.0, 200.0)
    ]
    assert len({tuple((task, method) for *_, task, method in g) for g in groups}) > 1


@pytest.mark.parametrize("method", METHODS)
def test_the_train_script_understands_every_command(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    recipe = parse(RECIPES, TimeToLoss().command(40.0, "language", method, 3, "F"))
    name, wire = split_wire(method)
    assert (
        recipe.method == {"diloco": "delayed"}.get(name, name.split("_auto")[0].split("_rec")[0]) and recipe.seed == 3
    )
    assert (recipe.co2.tau == "auto") == ("auto" in method) and recipe.delayed.nesterov == (name == "diloco")
    expected = "lgreco" if "lgreco" in method else "auto" if method in (*OF_CO2, *CHOSEN) else wire
    assert (recipe.ddp_wire if name == "ddp" else recipe.co2.wire).format == expected


def test_tau_at_the_end_is_kept():
    rows = [closed(1, 2.0) | {"round/tau": 4}, closed(2, 4.0) | {"round/tau": 11}, evaluated(12, 4.0, 0.9)]
    outcome = follow(rows, KEY, 0.9, 60.0)
    assert outcome is not None and outcome.tau == 11


def test_the_emulated_link_is_an_option_of_the_recipe():
    command = TimeToLoss(throttle=True).command(40.0, "vision", "co2", 3, "F")
    assert command[0] == "digits_small" and command[-2:] == ["--link_mbit", "40.0"]
    assert "--link_mbit" not in TimeToLoss().command(40.0, "vision", "co2", 3, "F")


def test_a_part_of_the_test_set_is_evaluated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    load, found = data.load, []
    monkeypatch.setattr(data, "load", load)  # which the rank below replaces
    module: Any = SimpleNamespace(data=data)
    monkeypatch.setattr(trainings, "run_script", lambda *_: found.extend(module.data.load("digits")))
    time_to_loss.run_task(module, [], tmp_path, held_out=5)
    train_set, test_set = load("digits")
    assert len(found[0]) == len(train_set) == 1437 and len(test_set) == 360
    assert all(torch.equal(getattr(found[1], of), getattr(test_set, of)[::5]) for of in ("images", "labels"))


def small(folder: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    """Runs and output of two workers on digits, with a target that the first evaluation meets."""
    fixed = ["--tasks", "vision", "--seeds", "0", "--workers", "2", "--vision_loss", "50", "--out"]
    said = python("-m", "bench.time_to_loss", *fixed, folder, *options, timeout=120)
    return json.loads((folder / "time_to_loss.json").read_text())["runs"], said


@pytest.mark.slow
def test_a_small_run(tmp_path: Path):
    (co2,), output = small(tmp_path, "--throttle", "--rates", "400", "--methods", "co2")
    assert (co2["status"], co2["steps"], co2["method"]) == ("reached", 24, "co2")  # the first boundary after 22 steps
    folder = tmp_path / "runs" / "vision-400mbit-co2-seed0"
    rows = Metrics(folder).read()
    evaluation = next(row for row in rows if KEY in row)
    assert co2["loss"] == evaluation[KEY]
    assert co2["seconds"] == pytest.approx(evaluation["seconds"] + co2["credit_seconds"])
    assert not (folder / "summary.json").exists()
    assert "1 of 1" in output and (tmp_path / "time_to_loss.md").read_text() in output


@pytest.mark.root
def test_a_small_run_in_namespaces(tmp_path: Path):
    runs, output = small(tmp_path, "--rates", "100", "--methods", "ddp", "slowmo")
    assert {run["method"]: run["steps"] for run in runs} == {"ddp": 22, "slowmo": 24}
    assert all(run["status"] == "reached" and run["exposed_share"] > 0.1 for run in runs)
    assert "joined by shaped links" in output
