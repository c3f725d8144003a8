"""From trajectories to a time to the loss, the table, the options, a run that ends early, and small real runs."""

import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bench import loss_table, time_to_loss
from bench.cluster import Cluster
from bench.loss_table import cells, markdown, outcome, speed_up
from bench.peers.adapters import PEERS, Peer
from bench.standin import build_model
from bench.time_to_loss import METHODS, OURS, TASKS, TimeToLoss, options_of, trajectory
from core.errors import UserError
from tests.bench.emulated import python
from training.sampling import worker_batches
from vision import data

# -- trajectories to a time -------------------------------------------------------------------------------------


def lines(*losses: float, seconds: float = 2.0, **more: Any) -> list[dict[str, Any]]:
    """An evaluation every six steps."""
    return [{"step": 6 * i, "seconds": seconds * i, "loss": loss} | more for i, loss in enumerate(losses)]


def of(run: dict[str, Any], target: float = 0.9, others: list[dict[str, Any]] = []) -> dict[str, Any]:  # noqa: B006
    run = {"task": "vision", "method": "co2", "seed": 0, "ended": "not reached", "reason": "", **run}
    result = {"tasks": {"vision": {"target": target}}, "options": {"limit_seconds": 60.0}, "runs": [*others, run]}
    return outcome(result, run)


def test_the_first_evaluation_at_the_target_counts():
    found = of({"trajectory": lines(2.3, 1.5, 0.9, 0.7, exposed_seconds=1.0, tau=4)})
    assert [found[k] for k in ("status", "seconds", "steps", "loss", "tau")] == ["reached", 4.0, 12, 0.9, 4]
    assert found["exposed_share"] == 0.25
    assert loss_table.say(found) == "4.0 (12 steps)"


def test_a_run_that_did_not_reach_the_target_is_told_by_its_end():
    short = {"trajectory": lines(2.3, 1.5)}
    assert loss_table.say(of(short)) == "not reached (loss 1.500) (6 steps)"
    late = of(short | {"ended": "out of time"})
    assert (late["seconds"], loss_table.say(late)) == (60.0, "> 60.0 (6 steps)")
    failed = of({"trajectory": [], "ended": "failed", "reason": "rank 1: gone"})
    assert loss_table.say(failed) == "failed (0 steps): rank 1: gone" and failed["loss"] is None


def test_not_a_number_is_not_the_target():
    assert of({"trajectory": lines(2.3, math.nan)})["status"] == "not reached"


def test_the_exposed_share_is_what_the_run_without_communication_did_not_need():
    free = {"task": "vision", "method": "none", "seed": 0, "trajectory": lines(2.3, 1.5, 1.2, seconds=1.5)}
    run = {"trajectory": lines(2.3, 1.5, 0.9, exposed_seconds=0.1)}
    assert of(run, others=[free])["exposed_share"] == 0.25
    assert of(run, others=[free | {"seed": 1}])["exposed_share"] == pytest.approx(0.1 / 4.0)
    assert of({"trajectory": lines(2.3, 0.9)})["exposed_share"] is None  # another package's


# -- the table --------------------------------------------------------------------------------------------------


def run(method: str, seed: int, seconds: float, status: str = "reached", **more: Any) -> dict[str, Any]:
    """A row of results from before trajectories were kept."""
    values = {"task": "vision", "rate_mbit": 40.0, "method": method, "seed": seed, "status": status, "reason": ""}
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
    "versions": {"torch": "1.2"},
    "link": "namespaces + tbf",
    "verified_mbit": {"40": 40.02},
    "cpu_count": 2,
    "options": {"workers": 4, "limit_seconds": 60.0, "methods": ["ddp", "local", "co2", "hivemind"]},
    "tasks": {"vision": {"target": 0.25, "command": "digits_small"}},
    "runs": RUNS,
}


def test_the_table():
    shown = markdown(RESULT).splitlines()
    assert shown[2:5] == [
        "| vision | 40 Mbit/s | ddp | 1 of 2 | 48.0, > 60.0 |  | 100 | 50% | 0.500 ± 0.424 |  |",
        "| vision | 40 Mbit/s | local | 1 of 2 | 20.0, not reached (loss 0.310) |  | 100 | 50% | 0.255 ± 0.078 |  |",
        "| vision | 40 Mbit/s | co2 | 2 of 2 | 11.0 ± 1.4 | > 4.9 x | 100 ± 14 | 38% | 0.200 ± 0.000 | 6, 12 |",
    ]
    text = "\n".join(shown[5:])
    for said in ("4 workers", "40: 40.0", "share 2 CPU cores", "after 60 s", "target loss 0.25", "commit abc"):
        assert said in text
    assert "hivemind: Optimizer, use_local_updates" in text and "torch 1.2" in text
    assert "Link: throttled in software" in markdown(RESULT | {"link": "throttled in software"})
    part = vars(replace(TASKS["cifar10"], settings=()))
    said = "cifar10: the parts of `vision.train cifar10_small`, target loss 1.6, on one of 5 images of the test set."
    assert said in markdown(RESULT | {"tasks": RESULT["tasks"] | {"cifar10": part}})


def test_a_trajectory_and_an_older_row_stand_in_one_table_and_a_reason_below_it():
    new = {"task": "vision", "rate_mbit": 40.0, "method": "hivemind", "seed": 0, "reason": ""}
    whole = new | {"ended": "not reached", "trajectory": lines(2.3, 0.2, 0.1)}
    missing = new | {"seed": 1, "ended": "not run", "reason": "package hivemind is not installed", "trajectory": []}
    text = markdown(RESULT | {"runs": [*RUNS, whole, missing]})
    assert "| hivemind | 1 of 2 | 2.0, not run |  | 6 |  | 0.100 |  |" in text
    assert "- hivemind: package hivemind is not installed." in text


def test_the_limit_is_ddp_without_communication_where_its_steps_are_known_for_every_seed():
    assert "| limit |" not in markdown(RESULT)
    faster = run("ddp", 1, 15.0, rate_mbit=200.0, steps=80)  # as many steps as over any link
    shown = markdown(RESULT | {"runs": [*RUNS, faster]}).splitlines()
    assert shown[5] == "| vision | 40 Mbit/s | limit |  | 11.0 ± 1.4 |  |  |  |  |  |"  # 100 x 0.1 s and 80 x 0.15 s


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
    assert plan == o.plan() and len(set(plan)) == 2 * 2 * len(OURS) * 3
    groups = [plan[i : i + 2 * len(OURS)] for i in range(0, len(plan), 2 * len(OURS))]
    assert [{(seed, rate) for seed, rate, *_ in g} for g in groups] == [
        {(seed, rate)} for seed in (0, 1, 2) for rate in (40.0, 200.0)
    ]
    assert len({tuple((task, method) for *_, task, method in g) for g in groups}) > 1


@pytest.mark.parametrize("task", ["vision", "language"])
@pytest.mark.parametrize("method", METHODS)
def test_the_train_script_understands_every_method(method: str, task: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    recipe = TASKS[task].parse(*options_of(method), "--seed", "3")
    own = method if method in OURS else "local"
    assert recipe.method == {"diloco": "delayed"}.get(own, own.split("_auto")[0].split("_rec")[0])
    assert (recipe.co2.tau == "auto") == ("auto" in method) and recipe.delayed.nesterov == (method == "diloco")
    expected = "lgreco" if "lgreco" in method else "auto" if method in ("co2_recommended", "co2_auto") else "float32"
    assert recipe.co2.wire.format == expected and recipe.seed == 3


def test_a_method_may_have_another_wire_tau_and_learning_rate():
    recipe = TASKS["vision"].parse(*options_of("local:tau=12,wire=int4,lr=0.2"))
    assert (recipe.co2.tau, recipe.co2.wire.format, recipe.optim.lr) == (12, "int4", 0.2)
    assert TASKS["vision"].parse(*options_of("ddp:wire=int8")).ddp_wire.format == "int8"
    assert TASKS["vision"].parse(*options_of("hivemind:tau=24")).co2.tau == 24
    with pytest.raises(UserError, match="'local:beta=1' has 'beta=1'; give one of wire, tau, lr"):
        options_of("local:beta=1")


def test_the_parts_of_the_perceptrons_task():
    recipe = TASKS["perceptron"].parse()
    assert (recipe.optim.schedule, recipe.optim.weight_decay, recipe.batch_size) == ("constant", 0.0, 64)
    assert sum(p.numel() for p in TASKS["perceptron"].model(recipe).parameters()) == 282_378
    steps, batches = TASKS["perceptron"].batches(recipe, 0, 4)
    assert steps == 242 and next(batches)[0].shape == (16, 1, 8, 8)


def test_a_part_of_the_test_set_is_evaluated():
    train_set, test_set = replace(TASKS["vision"], held_out=5).data()
    _, whole = data.digits()
    assert len(train_set) == 1437 and torch.equal(test_set.images, whole.images[::5]) and len(test_set) == 72


# -- a run of made-up ranks ---------------------------------------------------------------------------------------


def written(folder: Path, rank: int, seconds: float, steps: tuple[int, ...] = (0, 6)) -> None:
    """As a rank that has evaluated so often, after `seconds` a step."""
    (folder / str(rank)).mkdir()
    rows = [{"step": step, "seconds": step * seconds, "tau": 2} for step in steps]
    for step in steps:
        model = build_model(256)
        with open(folder / f"{step}.{rank}", "wb") as file:
            for tensor in model.parameters():
                tensor.detach().fill_(1e-3 * rank).numpy().tofile(file)
    (folder / str(rank) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_evaluation_is_of_the_mean_and_at_the_slowest_workers_time(tmp_path: Path):
    written(tmp_path, 0, 0.1, steps=(0, 6, 12))
    written(tmp_path, 1, 0.2)  # has not come to step 12
    o = TimeToLoss(workers=2)
    found = trajectory(o, TASKS["perceptron"], tmp_path)
    mean = build_model(256)
    for p in mean.parameters():
        p.detach().fill_(0.5e-3)
    loss = TASKS["perceptron"].loss(TASKS["perceptron"].parse(), mean)
    assert [(line["step"], line["seconds"], line["tau"]) for line in found] == [(0, 0.0, 2), (6, pytest.approx(1.2), 2)]
    assert [line["loss"] for line in found] == [pytest.approx(loss)] * 2
    assert len(trajectory(replace(o, limit_seconds=1.0), TASKS["perceptron"], tmp_path)) == 1


def fail() -> None:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("limit", "then", "ended", "reason"),
    [
        (1.0, lambda: time.sleep(60), "out of time", ""),
        (60.0, lambda: None, "not reached", ""),
        (60.0, fail, "failed", "ValueError: no such thing"),
    ],
)
def test_a_run_ends(limit: float, then: Callable[[], None], ended: str, reason: str, tmp_path: Path, monkeypatch):
    def work(o, run, task, interface, folder, log):
        written(folder, int(os.environ["RANK"]), 0.2)
        log.write_text("from a rank")
        then()

    monkeypatch.setattr(time_to_loss, "work", work)
    o, began = TimeToLoss(workers=2, limit_seconds=limit), time.monotonic()
    planned = (0, 40.0, "perceptron", "co2")
    found = time_to_loss.train(o, None, TASKS["perceptron"], planned, tmp_path / "log")
    assert found["ended"] == ended and found["reason"].endswith(reason)
    assert [line["step"] for line in found["trajectory"]] == ([0] if limit == 1.0 else [0, 6])
    assert time.monotonic() - began < 30 and not multiprocessing.active_children()
    assert (tmp_path / "log").read_text() == "from a rank"


def test_a_users_mistake_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def work(*_: Any) -> None:
        raise UserError("batch_size=7: no")

    monkeypatch.setattr(time_to_loss, "work", work)
    with pytest.raises(UserError, match="batch_size=7: no"):
        time_to_loss.train(TimeToLoss(workers=2), None, TASKS["vision"], (0, 40.0, "vision", "co2"), tmp_path / "log")


def test_an_absent_package_is_named_and_a_software_throttle_refuses_every_package(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(PEERS, "hivemind", Peer("nosuchpackage-nightly", lambda _: pytest.fail("started"), ""))
    planned, cluster = (0, 40.0, "vision", "hivemind:tau=12"), Cluster(2, 40.0)
    found = time_to_loss.train(TimeToLoss(), cluster, TASKS["vision"], planned, tmp_path)
    assert found["ended"] == "not run" and found["reason"] == "package nosuchpackage-nightly is not installed"
    refused = time_to_loss.train(TimeToLoss(throttle=True), None, TASKS["vision"], planned, tmp_path)
    assert refused["reason"] == "other packages need network namespaces"
    assert PEERS["torch_powersgd"].missing() == ""


def test_a_method_that_failed_is_not_tried_again_and_the_others_go_on(monkeypatch, tmp_path: Path, capsys):
    tried = []

    def train(o, cluster, task, planned, log):
        tried.append(planned)
        reason = "rank 0: gone" if planned[3] == "co2" else ""
        return {"ended": "failed" if reason else "not reached", "reason": reason, "trajectory": lines(2.3, 0.1)}

    monkeypatch.setattr(time_to_loss, "train", train)
    o = TimeToLoss(tasks=("vision",), rates=(40.0,), methods=("co2", "local"), throttle=True)
    session = SimpleNamespace(result={"options": {"limit_seconds": 60.0}, "runs": []}, folder=tmp_path)
    session.take = lambda part, rows, say: session.result[part].extend(rows)
    time_to_loss.run_all(o, session)  # pyright: ignore[reportArgumentType]
    assert [planned[0] for planned in tried if planned[3] == "co2"] == [0]
    assert sorted(planned[0] for planned in tried if planned[3] == "local") == [0, 1, 2]
    assert [r["reason"] for r in session.result["runs"] if r["method"] == "co2"] == ["rank 0: gone"] * 3
    assert "local seed 2: 2.0 (6 steps)" in capsys.readouterr().out


# -- real runs --------------------------------------------------------------------------------------------------


def small(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What two workers' runs of the perceptron leave, by method, and the command's output."""
    fixed = ["--tasks", "perceptron", "--seeds", "0", "--workers", "2", "--out"]
    said = python("-m", "bench.time_to_loss", *fixed, folder, *options, timeout=300)
    result = json.loads((folder / "time_to_loss.json").read_text())
    assert (folder / "time_to_loss.md").read_text() in said
    return {run["method"]: run for run in result["runs"]}, said


def two_workers_by_hand(average_every: int, steps: int) -> list[float]:
    """Losses of the mean model after every second step of two workers that average now and then (0: never)."""
    train, test = data.digits()
    torch.manual_seed(0)
    models = [build_model(256), build_model(256)]
    models[1].load_state_dict(models[0].state_dict())
    mean = build_model(256)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in models]
    order = dict(seed=0, world_size=2, start=0, total=steps)
    batches = [worker_batches(len(train), 64, rank=rank, **order) for rank in range(2)]
    losses = []
    for step in range(steps + 1):
        if step:
            for model, optimizer, (*_, index) in zip(models, optimizers, map(next, batches), strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(train.normalise(train.images[index])), train.labels[index]).backward()
                optimizer.step()
        with torch.no_grad():
            for m, a, b in zip(mean.parameters(), *(model.parameters() for model in models), strict=True):
                m.copy_((a + b) / 2)
                if average_every and step % average_every == 0:
                    a.copy_(m)
                    b.copy_(m)
            if step % 2 == 0:
                losses.append(F.cross_entropy(mean(test.normalise(test.images)), test.labels).item())
    return losses


@pytest.mark.slow
def test_the_loop_against_two_workers_by_hand(tmp_path: Path):
    """Over an emulated link; a round of two workers sends the model once."""
    options = [
        "--throttle",
        "--rates",
        "400",
        "--eval_every",
        "2",
        "--methods",
        "none",
        "local:tau=4",
        "torch_powersgd",
    ]
    runs, said = small(tmp_path, *options)
    for method, every in (("none", 0), ("local:tau=4", 4)):
        losses = [line["loss"] for line in runs[method]["trajectory"]]
        assert losses[:7] == pytest.approx(two_workers_by_hand(every, 12), rel=1e-3)
        assert len(losses) == 122 and runs[method]["ended"] == "not reached"
    at_12 = runs["local:tau=4"]["trajectory"][6]
    assert (at_12["step"], at_12["rounds"], at_12["tau"]) == (12, 3, 4)
    assert at_12["bytes_sent"] == pytest.approx(3 * 4 * 282_378, rel=0.01)  # 2 (n - 1) / n = 1; 4 bytes each
    assert at_12["seconds"] > 0.95 * at_12["bytes_sent"] * 8 / 400e6  # what the link takes
    assert "torch_powersgd seed 0: not run (0 steps): other packages need network namespaces" in said


@pytest.mark.root
def test_own_methods_and_other_packages_in_namespaces(tmp_path: Path):
    """Bytes are those of the interface: with headers, above the model's in every round. Steps are paced."""
    options = ["--rates", "100", "--step_ms", "10", "--limit_seconds", "40"]
    runs, said = small(tmp_path, *options, "--methods", "co2", "torch_post_local:tau=12", "torch_powersgd", "none")
    assert all(run["trajectory"][-1]["step"] == 242 for run in runs.values()), said
    first, last = (runs["torch_post_local:tau=12"]["trajectory"][i] for i in (0, -1))
    assert first["bytes_sent"] == 0 and last["rounds"] == 21
    assert 21 * 4 * 282_378 < last["bytes_sent"] < 1.1 * 21 * 4 * 282_378
    assert runs["none"]["trajectory"][-1]["seconds"] > 242 * 0.01
    assert "joined by shaped links" in said and "torch_post_local:tau=12 | 1 of 1" in said
