"""Runs that are stopped and resumed, bit for bit; and workers that are not finite, or die: what is left, and said."""

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2Config, CompressionConfig
from core.checkpoint import runs as checkpoint
from core.errors import CollectiveError, DivergedError
from core.guards.workers import MAX_REPEATS
from core.testing import run_distributed
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import flat
from tests.runs import Loop, Toy, logged, rows, summary
from tests.training import test_run
from training.data.samples import generator
from training.loop.run import Run
from training.optim import OptimConfig

STEPS, STOP_ASKED = 40, 10


SETTLING = CO2Config(tau=3, gap="none", outer_lr=0.4)
CASES: dict[str, dict[str, Any]] = {
    "co2": {},
    "int8": {"co2": CO2Config(tau=3, compression=CompressionConfig("int8"))},
    "shard": {"shard": True},
    "offload": {"offload": True},
    "local": {"method": "local"},
    "slowmo": {"method": "slowmo"},
    "overlap_local": {"method": "overlap_local"},
    "nesterov": {"co2": replace(SETTLING, nesterov=True)},
    "nesterov, gap": {"co2": CO2Config(tau=3, nesterov=True)},
    "diloco": {"method": "diloco"},
    "ddp": {"method": "ddp"},
    "zero 1": {"zero": 1, "per_node": 2},
    "zero 2": {"zero": 2, "per_node": 2},
    "zero 3": {"zero": 3, "per_node": 2},
    "zero 3, ddp": {"zero": 3, "per_node": 2, "method": "ddp"},
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))


def loss_at(loop: Loop, step: int) -> Tensor:
    """On this worker's five samples of a step."""
    return loop.wrapped(torch.randn(5, 4, generator=generator(step, loop.run.rank))).square().mean()


def train(recipe: Toy, stop_asked: int = 0) -> Any:
    """Trains under Run; the end's parameters and buffers, or the step of the stop."""
    with Run(recipe) as run:
        loop = Loop(run, network(), STEPS)
        for step in range(loop.start, STEPS):
            if stop_asked and step == stop_asked:
                signal.raise_signal(signal.SIGUSR1)
            if loop.step(loss_at(loop, step)).stop:
                run.stop()
                return run.step
        loop.method.finish()
        run.end({})
        held = [*loop.model.parameters(), *loop.model.buffers()]
        return [(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in held]


def stopped_and_whole(rank: int, world_size: int, folder: str, cases: list[str]) -> dict[str, list[Any]]:
    """By case: the ends of a run that was not stopped, and of one that was; and of how many steps the latter's were."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    ends = {}
    for name in cases:
        recipe = Toy(out=Path(folder, name), **CASES[name])
        gc.collect()
        whole = train(replace(recipe, out=Path(folder, f"{name} whole")))
        gc.collect()
        stopped = train(recipe, STOP_ASKED)
        gc.collect()  # methods that are gone leave torch's list of hooks now, and not while it is gone through
        ends[name] = [whole, train(replace(recipe, resume=True)), stopped]
    return ends


def check(folder: Path, cases: list[str]) -> None:
    for ends in run_distributed(stopped_and_whole, 2, str(folder), cases, timeout=240):
        for name, (whole, resumed, stopped) in ends.items():
            assert isinstance(stopped, int) and STOP_ASKED < stopped < STEPS, name
            assert len(whole) == len(resumed)
            assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True)), name
    for name in cases:
        of_both = rows(folder / name), rows(folder / f"{name} whole")
        losses, wanted = ([(r["step"], r["train_loss"]) for r in of if "train_loss" in r] for of in of_both)
        assert losses == wanted, name


def test_a_stop_does_not_change_the_run(tmp_path: Path):
    check(tmp_path, ["co2", "ddp"])


@pytest.mark.slow
def test_a_stop_changes_no_methods_run(tmp_path: Path):
    check(tmp_path, list(CASES))


@on_ranks(4, timeout=120)
def test_one_worker_of_a_node_stops_and_saves_for_all(rank: int, tmp_path: Path):
    """One worker alone gets the signal, or asks for a checkpoint; means are over those of its place in their nodes."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    recipe = Toy(out=tmp_path / "stopped", method="local", per_node=2, batch_size=8)
    stopped = train(recipe, STOP_ASKED if rank == 1 else 0)
    gc.collect()
    ends = train(replace(recipe, out=tmp_path / "saved", checkpoint_every="1e-9minutes"))
    assert isinstance(stopped, int) and STOP_ASKED < stopped < STEPS and total_world_size(stopped) == [stopped] * 4
    assert alike(*ends[:4])


def one_ahead(rank: int, world_size: int, folder: str, resume: bool) -> tuple[int, int, Tensor]:
    """Worker 1 gets the signal after its step 13, with worker 0 in finish(). The steps at which the run began and
    ended, and its end."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    there = Path(folder, "there")
    with Run(Toy(out=Path(folder, "run"), timeout=20.0, resume=resume)) as run:
        loop = Loop(run, nn.Linear(4, 2), total=16, epoch=99)
        for step in range(loop.start, run.total):
            if rank == 0 and step == 14:
                there.touch()
            while rank == 1 and step == 13 and not there.exists():
                time.sleep(0.01)
            if rank == 1 and step == 13:
                time.sleep(0.5)
                signal.raise_signal(signal.SIGTERM)
            due = loop.step(loss_at(loop, step), last=run.at_last_step)
            if due.stop:
                run.stop()
                break
        else:
            loop.method.finish()
            run.end({})
        return loop.start, run.step, flat(loop.model.parameters())


@pytest.mark.slow
def test_a_stop_that_comes_too_late_ends_nothing(tmp_path: Path):
    for resume in (False, True):
        zero, one = run_distributed(one_ahead, 2, str(tmp_path), resume, timeout=120)
        assert zero[:2] == one[:2] == (16 * resume, 16) and torch.equal(zero[2], one[2])
        assert "stopped_by_signal" not in summary(tmp_path / "run")


# -- a worker that is not finite, or dies -----------------------------------------------------------------------------


ADAM = OptimConfig("adamw", lr=0.01, schedule="constant")


def steps(run: Run, total: int, before: Callable[[int], None]) -> nn.Module:
    """`total` steps of a model of few parameters; before(step) may do harm, before each of them."""
    loop = Loop(run, nn.Linear(4, 2), total, epoch=3)
    for step in range(total):
        before(step)
        factor = float("nan") if getattr(run, "spoilt", False) else 1.0
        due = loop.step((loop.wrapped(torch.ones(1, 4) * (1 + run.rank)) - 1).square().sum().mul(factor))
        if due.evaluation:
            before(-1)
            run.sum(1.0)
        if due.checkpoint:
            before(-2)
            run.save()
    loop.method.finish()
    run.end({"loss": float("nan")})
    return loop.model


def not_finite(rank: int, world_size: int, folder: str, method: str, bad_steps: list[int]) -> dict[str, Any]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    out = Path(folder, "run")
    settings: dict[str, Any] = {"batch_size": 2, "method": method, "checkpoint_every": 1, "optim": ADAM}
    recipe = test_run.Toy(out=out, **settings)
    found: dict[str, Any] = {"error": ""}

    def harm(step: int) -> None:
        run.spoilt = rank == 1 and step in bad_steps  # type: ignore[attr-defined]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Run(recipe) as run:
                model = steps(run, 36, harm)
                found["finite"] = all(bool(p.isfinite().all()) for p in model.parameters())
        except DivergedError as error:
            found["error"] = str(error)
    found["checkpoints"] = sorted(path.name for path in (out / "checkpoints").glob("*"))
    return found


def finite_checkpoints(folder: Path) -> bool:
    paths = [path for path in folder.glob("run/checkpoints/step*") if ".tmp" not in path.name]
    states = [checkpoint._read(path, rank, "", {}) for path in paths for rank in (0, 1)]
    assert all(problem == "" for _, _, problem in states)
    return bool(states) and all(bool(p.isfinite().all()) for state, *_ in states for p in state["model"].values())


SLOWER = [pytest.param(method, marks=pytest.mark.slow) for method in ("local", "overlap_local")]


@pytest.mark.parametrize("method", ["co2", *SLOWER])
def test_a_worker_that_is_spoilt_once_goes_on_with_the_others(method: str, tmp_path: Path):
    """NaN in a gradient: Adam's moments are NaN too, and would spoil every round from there on."""
    for found in run_distributed(not_finite, 2, str(tmp_path), method, [13], timeout=120):
        assert found["error"] == "" and found["finite"]
    assert finite_checkpoints(tmp_path)
    end = summary(tmp_path / "run")
    assert end["steps"] == 36 and end["loss"] is None and sum(logged(tmp_path / "run", "round/excluded")) == 1


@pytest.mark.parametrize("method", ["co2", "ddp"])
def test_where_it_goes_on_the_run_ends_and_the_last_good_checkpoint_stays(method: str, tmp_path: Path):
    results = run_distributed(not_finite, 2, str(tmp_path), method, list(range(13, 36)), timeout=120)
    for found in results:
        assert found["error"] == results[0]["error"] and "\n" not in found["error"]
        last = 12 if method == "ddp" else 3 * (4 + MAX_REPEATS + 1)
        assert found["checkpoints"][-1] <= f"step{last:09d}"
    said = "rank 1 is excluded from the average of round 7" if method == "co2" else "the parameters are not finite"
    assert said in results[0]["error"] and finite_checkpoints(tmp_path)
    assert not (tmp_path / "run" / "summary.json").exists()


# -- the dead are named ---------------------------------------------------------------------------------------

PATHS = {  # what of the recipe, the process that dies, and where: a step, -1 in an evaluation, -2 in a save
    "evaluation": ({}, 2, -1),
    "save": ({}, 1, -2),
    "ddp": ({"method": "ddp"}, 0, 7),
    "node": ({"per_node": 2}, 3, 7),
    "node_of_rank_0": ({"per_node": 2, "method": "local"}, 0, 7),
    "shards": ({"per_node": 2, "zero": 2}, 1, 7),
}


def dies(rank: int, world_size: int, folder: str, path: str) -> str:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    options, who, where = PATHS[path]
    settings: dict[str, Any] = {"batch_size": 4, "timeout": 20.0, "checkpoint_every": 1, "optim": ADAM} | options
    recipe = test_run.Toy(out=Path(folder, path), **settings)

    def harm(step: int) -> None:
        if rank == who and step == where:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with Run(recipe) as run:
            steps(run, 60, harm)
    except CollectiveError as error:
        time.sleep(1.0 + rank)  # as a process that ends takes some time to
        return str(error)
    return ""


SLOW = [pytest.param(path, marks=pytest.mark.slow) for path in PATHS if path != "save"]


@pytest.mark.parametrize("path", ["save", *SLOW])
def test_every_survivor_names_the_dead(path: str, tmp_path: Path):
    world_size, who = 4, PATHS[path][1]
    said = run_distributed(dies, world_size, str(tmp_path), path, timeout=120, expect_death=(who,))
    for rank in set(range(world_size)) - {who}:
        assert f"no answer from rank {who} " in said[rank] or f"no answer from rank {who}:" in said[rank], said
        assert said[rank].startswith(f"rank {rank}:") and "\n" not in said[rank]
