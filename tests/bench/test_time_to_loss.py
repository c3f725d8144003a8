"""From trajectories to a time to the loss, the options, a run that ends early, and small real runs."""

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
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from bench import time_to_loss
from bench.cluster import Cluster
from bench.peers.adapters import PEERS, Peer, split
from bench.report import holm, paired_ratio
from bench.standin import build_model
from bench.time_to_loss import (
    OURS,
    TASKS,
    ShareOfWaiting,
    TimeToLoss,
    compare,
    limits,
    number_of,
    options_of,
    outcome,
    trajectory,
)
from core.stats import RoundStats
from tests.bench.emulated import python
from training.data.samples import train_keys
from vision import data

# -- trajectories to a time -------------------------------------------------------------------------------------


def lines(*losses: float, seconds: float = 2.0, **more: Any) -> list[dict[str, Any]]:
    """An evaluation every six steps."""
    return [{"step": 6 * i, "seconds": seconds * i, "loss": loss} | more for i, loss in enumerate(losses)]


def of(run: dict[str, Any]) -> dict[str, Any]:
    run = {"task": "vision", "method": "co2", "seed": 0, "ended": "not reached", "reason": "", **run}
    return outcome(TimeToLoss(target=0.9), run)


def test_the_first_evaluation_at_the_target_counts_else_the_runs_end():
    found = of({"trajectory": lines(2.3, 1.5, 0.9, 0.7, exposed_seconds=1.0, tau=4)})
    assert [found[k] for k in ("status", "seconds", "steps", "loss", "tau")] == ["reached", 4.0, 12, 0.9, 4]
    assert found["exposed_share"] == 0.25 and of({"trajectory": lines(2.3, 0.9)})["exposed_share"] is None
    short = {"trajectory": lines(2.3, 1.5, exposed_seconds=0.5)}
    found = of(short)
    assert [found[k] for k in ("status", "seconds", "loss")] == ["not reached", 2.0, 1.5]
    late = of(short | {"ended": "out of time"})
    assert (late["status"], late["seconds"], late["steps"], late["exposed_share"]) == ("out of time", 60.0, 6, 0.25)
    failed = of({"trajectory": [], "ended": "failed", "reason": "rank 1: gone"})
    assert (failed["status"], failed["steps"], failed["loss"]) == ("failed", 0, None)
    assert of({"trajectory": lines(2.3, math.nan)})["status"] == "not reached"


def test_what_hiding_can_be_worth_at_most():
    """30 steps of 0.1 s in 3 rounds, whose 0.5 MB take 0.4 s at 10 Mbit/s."""
    at = {"step": 30, "rounds": 3, "seconds": 4.2, "exposed_seconds": 1.2, "bytes_sent": 1.5e6}
    found = limits(at | {"allreduce_seconds": 1.35}, 10.0)
    assert found == pytest.approx({"step_seconds": 0.1, "allreduce_seconds": 0.45, "link_seconds": 0.4, "limit": 1.4})
    assert limits(at, 1.0)["limit"] == pytest.approx(1.25), "the link takes longer than the steps"
    assert limits({"step": 30, "seconds": 4.2}, 10.0) == limits(at | {"rounds": 0}, 10.0) == {}


def test_a_blocking_methods_tau_from_the_share_of_waiting(monkeypatch: pytest.MonkeyPatch):
    assert number_of("local:compression=int4,share=0.1", "share") == 0.1 and number_of("local:tau=3", "share") is None
    assert options_of("diloco:share=0.1,tau=3") == options_of("diloco:tau=3")
    monkeypatch.setattr(dist, "all_reduce", lambda times, op: times.mul_(2))  # the slowest worker's
    method: Any = SimpleNamespace(stats=RoundStats(step_seconds=0.1, exposed_seconds=0.4))
    schedule, taus = ShareOfWaiting(0.2, method), []
    for number in range(1, 6):
        taus.append(schedule.tau)
        schedule.begin(number)
        method.stats = RoundStats(step_seconds=0.1, exposed_seconds=0.4 if number < 3 else 9.0)
    assert taus == [2, 2, 2, 16, 16] and pytest.approx(0.2) == 0.4 / (16 * 0.1 + 0.4)


def seconds_of(method: str, *seconds: float, status: str = "reached", late: float = 1.0) -> list[dict[str, Any]]:
    at = {"task": "vision", "rate_mbit": 40.0, "method": method, "status": status}
    return [
        at | {"seed": seed, "seconds": s, "late": {"status": status, "seconds": late * s}}
        for seed, s in enumerate(seconds)
    ]


def test_methods_are_compared_seed_by_seed_and_a_run_that_missed_counts_with_its_end():
    runs = seconds_of("co2_auto", 1.0, 2.0, 4.0) + seconds_of("ddp", 2.0, 4.0, 8.0, late=2.0)
    runs += seconds_of("local", 9.0, 9.0, 9.0, status="out of time") + seconds_of("slowmo", 1.0, 1.0)
    runs += seconds_of("diloco", 1.0, 2.0, 4.0, status="failed")
    found = {(row["method"], row["target"]): row for row in compare(TimeToLoss(tasks=("vision",), rates=(40.0,)), runs)}
    assert set(found) == {(method, target) for method in ("ddp", "local") for target in ("target", "late")}
    assert [found["ddp", "target"][k] for k in ("ratio", "low", "high")] == pytest.approx([2.0] * 3)
    assert found["ddp", "late"]["ratio"] == pytest.approx(4.0)
    local = found["local", "target"]
    assert (local["missed"], local["against_missed"], found["ddp", "target"]["missed"]) == (3, 0, 0)
    assert [local[k] for k in ("ratio", "low", "high")] == pytest.approx([4.5, 0.8043, 25.178], rel=1e-3), "by t"


def test_a_ratio_needs_three_seeds_and_its_interval_covers_the_ratio_as_often_as_it_says():
    assert paired_ratio({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}) is None
    draws, covered = torch.Generator().manual_seed(0), 0
    for _ in range(2000):  # the ratio 1.2, and 20 % of noise
        noise = torch.randn(5, generator=draws).mul(0.2).exp().tolist()
        found = paired_ratio(dict(enumerate([1.2] * 5)), {seed: 1.2 * n for seed, n in enumerate(noise)})
        assert found is not None and (found.p < 0.05) != (found.low <= 1 <= found.high)
        covered += found.low <= 1 <= found.high
    assert 0.935 < covered / 2000 < 0.965, "a bootstrap of the percentiles covers 0.86 of 5 seeds"


def test_holm_corrects_for_the_number_of_comparisons():
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06]) and holm([0.9, 0.6]) == [1.0, 1.0]
    noise = paired_ratio(dict.fromkeys(range(3), 1.0), dict.fromkeys(range(3), 2.0))
    assert noise == pytest.approx((2, 2, 2, 0)), "no spread"


def test_a_noisy_loss_is_a_mean_of_evaluations():
    o, losses = TimeToLoss(tasks=("cifar10",)), [1.9, 1.6, 1.8, 1.8, 1.8, 1.7, 1.6, 1.6]
    lines = [{"step": 4 * at, "seconds": float(at), "loss": loss} for at, loss in enumerate(losses)]
    run = {"task": "cifar10", "method": "ddp", "seed": 0, "trajectory": lines, "ended": "not reached"}
    assert (outcome(o, run)["status"], outcome(o, run)["seconds"]) == ("reached", 7.0), "not 1.0"
    assert outcome(o, run, late=True)["status"] == "not reached"
    short = outcome(o, run | {"trajectory": lines[:3]})
    assert (short["status"], short["seconds"]) == ("not reached", 2.0), "fewer than five evaluations"


# -- options and runs -------------------------------------------------------------------------------------------


def test_the_plan_is_interleaved_and_always_alike():
    o, runs = TimeToLoss(), 2 * len(OURS)
    plan = o.plan()
    assert plan == o.plan() and len(set(plan)) == 2 * 3 * runs
    groups = [plan[i : i + runs] for i in range(0, len(plan), runs)]
    each = [{(seed, rate)} for seed in (0, 1, 2) for rate in (40.0, 200.0)]
    assert [{(seed, rate) for seed, rate, *_ in g} for g in groups] == each
    assert len({tuple(run[2:] for run in g) for g in groups}) > 1


@pytest.mark.parametrize("method", OURS)
def test_the_train_script_understands_every_method(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    recipe = TASKS["vision"].parse(*options_of(method), "--seed", "3")
    assert recipe.method == method.split("_auto")[0].split("_rec")[0]
    assert (recipe.co2.tau == "auto") == ("auto" in method) and not recipe.co2.nesterov
    expected = "auto" if method in ("co2_recommended", "co2_auto") else "float32"
    assert recipe.co2.compression.format == expected and recipe.seed == 3


def test_a_method_may_have_other_settings():
    def parsed(method: str) -> Any:
        return TASKS["vision"].parse(*options_of(method))

    recipe = parsed("local:tau=12,compression=int4,lr=0.2")
    assert (recipe.co2.tau, recipe.co2.compression.format, recipe.optim.lr) == (12, "int4", 0.2)
    assert parsed("torchft_streaming:tau=24").co2.tau == 24
    own = "ddp:compression=int4,cap=0.25,accumulate=4"
    assert parsed(own).ddp_compression.format == "int4"
    assert [number_of(own, key) for key in ("cap", "accumulate", "nodes")] == [0.25, 4, None]


def test_fragments_are_about_equal_and_a_tied_parameter_belongs_to_one():
    """Layers of 20, 20, 30 and 30 parameters: 40 and 60."""
    layers = [nn.Linear(*size, bias=False) for size in ((4, 5), (4, 5), (6, 5), (6, 5), (4, 5))]
    layers[4].weight = layers[0].weight
    parts = split(nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))), 2)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [40, 60]
    assert [module for part in parts for module in part] == layers[:4]  # pyright: ignore


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
        rank, until = int(os.environ["RANK"]), time.monotonic() + 20
        while rank == 0 and not (folder / "1" / "metrics.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.02)  # as real ranks, which meet before their first step
        written(folder, rank, 0.2)
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


def test_an_absent_package_is_named_and_a_software_throttle_refuses_every_package(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(PEERS, "torchft_streaming", Peer("nosuchpackage-nightly", lambda _: pytest.fail("started")))
    planned, cluster = (0, 40.0, "vision", "torchft_streaming:tau=12"), Cluster(2, 40.0)
    found = time_to_loss.train(TimeToLoss(), cluster, TASKS["vision"], planned, tmp_path)
    assert found["ended"] == "not run" and found["reason"] == "package nosuchpackage-nightly is not installed"
    refused = time_to_loss.train(TimeToLoss(throttle=True), None, TASKS["vision"], planned, tmp_path)
    assert refused["reason"] == "other packages need network namespaces"


def test_a_method_that_failed_is_not_tried_again_and_the_others_go_on(monkeypatch, tmp_path: Path, capsys):
    tried = []

    def train(o, cluster, task, planned, log):
        tried.append(planned)
        reason = "rank 0: gone" if planned[3] == "co2" else ""
        return {"ended": "failed" if reason else "not reached", "reason": reason, "trajectory": lines(2.3, 0.1)}

    monkeypatch.setattr(time_to_loss, "train", train)
    o = TimeToLoss(tasks=("vision",), rates=(40.0,), methods=("co2", "local"), throttle=True)
    result: dict[str, Any] = {}
    time_to_loss.run_all(o, tmp_path, result)
    assert json.loads((tmp_path / "time_to_loss.json").read_text())["runs"] == result["runs"]
    assert [planned[0] for planned in tried if planned[3] == "co2"] == [0]
    assert sorted(planned[0] for planned in tried if planned[3] == "local") == [0, 1, 2]
    assert [r["reason"] for r in result["runs"] if r["method"] == "co2"] == ["rank 0: gone"] * 3
    assert "runs | vision | 40 | local | reached |  | 1 | 2.00 | 6 | 0.100" in capsys.readouterr().out
    assert [r["status"] for r in result["runs"] if r["method"] == "local"] == ["reached"] * 3


# -- real runs --------------------------------------------------------------------------------------------------


def small(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What two workers' runs of the perceptron leave, by method, and the command's output."""
    fixed = ["--tasks", "perceptron", "--seeds", "0", "--workers", "2", "--out"]
    said = python("-m", "bench.time_to_loss", *fixed, folder, *options, timeout=300)
    result = json.loads((folder / "time_to_loss.json").read_text())
    return {run["method"]: run for run in result["runs"]}, said


def two_workers_by_hand(average_every: int, steps: int) -> list[float]:
    """Losses of the mean model after every second step of two workers that average now and then (0: never)."""
    train, test = data.digits()
    torch.manual_seed(0)
    models = [build_model(256), build_model(256)]
    models[1].load_state_dict(models[0].state_dict())
    mean = build_model(256)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in models]
    recipe = SimpleNamespace(seed=0, batch_size=64)
    batches = [train_keys(recipe, len(train), rank, 2, 0, steps) for rank in range(2)]
    losses = []
    for step in range(steps + 1):
        if step:
            for model, optimizer, (_, keys) in zip(models, optimizers, map(next, batches), strict=True):
                index = [i for *_, i in keys]
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
    options = ["--throttle", "--rates", "400", "--eval_every", "2", "--methods"]
    runs, said = small(
        tmp_path,
        *options,
        "local:tau=100",
        "local:tau=4",
        "local:share=0.05",
        "torch_powersgd_rank4",
        "ddp:accumulate=2,cap=0.5",
    )
    for method, every in (("local:tau=100", 0), ("local:tau=4", 4)):
        losses = [line["loss"] for line in runs[method]["trajectory"]]
        assert losses[:7] == pytest.approx(two_workers_by_hand(every, 12), rel=1e-3)
        assert len(losses) == 122 and runs[method]["ended"] == "not reached"
    at_12 = runs["local:tau=4"]["trajectory"][6]
    assert (at_12["step"], at_12["rounds"], at_12["tau"]) == (12, 3, 4)
    assert at_12["bytes_sent"] == pytest.approx(3 * 4 * 282_378, rel=0.01)  # 2 (n - 1) / n = 1; 4 bytes each
    assert runs["local:share=0.05"]["trajectory"][-1]["tau"] > 2 and runs["local:tau=4"]["limit"] > 1
    assert at_12["seconds"] > 0.95 * at_12["bytes_sent"] * 8 / 400e6  # what the link takes
    assert runs["ddp:accumulate=2,cap=0.5"]["trajectory"][6]["rounds"] == 6
    assert runs["ddp:accumulate=2,cap=0.5"]["trajectory"][-1]["loss"] < 0.4
    assert "| torch_powersgd_rank4 | not run | other packages need network namespaces | 1 |" in said


@pytest.mark.root
def test_own_methods_and_other_packages_in_namespaces(tmp_path: Path):
    """Bytes are those of the interface: with headers, above the model's in every round. Steps are paced."""
    options = ["--rates", "100", "--step_ms", "10", "--limit_seconds", "40"]
    runs, said = small(tmp_path, *options, "--methods", "co2", "local:tau=12", "torch_powersgd_rank4")
    assert all(run["trajectory"][-1]["step"] == 242 for run in runs.values()), said
    first, last = (runs["local:tau=12"]["trajectory"][i] for i in (0, -1))
    assert first["bytes_sent"] == 0 and last["rounds"] == 21
    assert 21 * 4 * 282_378 < last["bytes_sent"] < 1.1 * 21 * 4 * 282_378
    assert last["seconds"] > 242 * 0.01
    assert "| torch_powersgd_rank4 | reached |  | 1 |" in said
