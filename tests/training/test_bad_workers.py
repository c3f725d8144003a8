"""A worker that is not finite, or dies, in a run: what is left behind, and what the others say."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.checkpoints import checkpoint
from core.errors import CollectiveError, DivergedError
from core.robust.guard import LEFT_OUT_AGAIN
from core.testing import run_distributed
from tests.runs import Loop, logged, summary
from tests.training.test_run import Toy
from training.optim import OptimConfig
from training.run import Run

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
    recipe = Toy(name="toy", out=out, device="cpu", **settings)
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
    states = [checkpoint._read(path, rank) for path in paths for rank in (0, 1)]
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
    assert end["steps"] == 36 and end["loss"] is None and sum(logged(tmp_path / "run", "round/left_out")) == 1


@pytest.mark.parametrize("method", ["co2", "ddp"])
def test_where_it_goes_on_the_run_ends_and_the_last_good_checkpoint_stays(method: str, tmp_path: Path):
    results = run_distributed(not_finite, 2, str(tmp_path), method, list(range(13, 36)), timeout=120)
    for found in results:
        assert found["error"] == results[0]["error"] and "\n" not in found["error"]
        last = 12 if method == "ddp" else 3 * (4 + LEFT_OUT_AGAIN + 1)
        assert found["checkpoints"][-1] <= f"step{last:09d}"
    said = "rank 1 is left out of the mean of round 7" if method == "co2" else "the parameters are not finite"
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
    recipe = Toy(name="toy", out=Path(folder, path), device="cpu", **settings)

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
