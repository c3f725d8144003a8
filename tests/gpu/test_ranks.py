"""Several workers on one GPU, over gloo, because NCCL refuses two there; and workers that come and go."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.chaos.crew import Crew
from core import CO2, CO2Config, testing
from core.elastic import elastic_co2
from core.elastic.allreduce import Script
from core.elastic.members import Members
from core.nodes import node_mesh
from core.testing import run_distributed
from tests.gpu.problem import DEVICE, METHODS, RECOMMENDED, Make, co2, distance, end, move, problem, train

pytestmark = pytest.mark.gpu
RANKS = 4
BETWEEN: dict[str, Make] = {  # what differs between workers only
    **{name: METHODS[name] for name in ("co2", "recommended", "int4", "sharded", "overlap_local")},
    "delay 0": co2(gap="none", delay=0),
    "offload": lambda p: CO2(p.params, CO2Config(tau=4), offload=True, buffers=p.buffers),
    "nodes of two": lambda p: CO2(
        p.params, CO2Config(tau=4, outlier=None), mesh=node_mesh("cpu", 2), buffers=p.buffers
    ),
}
WITH_NAN = ("co2", "recommended")


def trained(rank: int, workers: int, device: str) -> dict[str, Any]:
    """By name, the parameters at the end; in nodes of two, both workers of a node move alike. And, on the device, what
    excluded returns."""
    found: dict[str, Any] = {}
    for name, make in BETWEEN.items():
        mover = rank // 2 if name == "nodes of two" else rank
        found[name] = [t.numpy() for t in train(make, device, torch.float64, mover)]
    return found | {f"{name}, NaN": excluded(rank, device, name) for name in WITH_NAN if device != "cpu"}


def excluded(rank: int, device: str, name: str) -> tuple[list[Any], list[int]]:
    """Rank 2's parameters become NaN in the second round: the parameters at the end, and who was left out by round."""
    warnings.simplefilter("ignore")
    p = problem(device)
    method = METHODS[name](p)
    counts = []
    for step in range(32):
        move(p.params, step, rank)
        if rank == 2 and step == 6:
            p.params[4].data.fill_(float("nan"))
        if method.step():
            counts.append(method.stats.excluded)
    end(method)
    return [t.detach().cpu().numpy() for t in p.params], counts


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    """What `trained` returns by rank: four processes for all cases, because each needs seconds to reach the device."""
    return run_distributed(trained, RANKS, DEVICE, timeout=150)


@pytest.fixture(scope="module")
def ends_on_host() -> dict[str, Any]:
    return run_distributed(trained, RANKS, "cpu", timeout=150)[0]


@pytest.mark.parametrize("name", BETWEEN)
def test_four_ranks_on_one_device_train_as_on_the_host(name: str, ends: list[dict[str, Any]], ends_on_host: Any):
    ours, theirs = [[torch.from_numpy(t) for t in of_rank[name]] for of_rank in ends], ends_on_host[name]
    assert all(all(map(torch.equal, ours[0], other)) for other in ours[1:]), "ranks differ"
    assert distance(ours[0], [torch.from_numpy(t) for t in theirs]) < 1e-6


@pytest.mark.parametrize("name", WITH_NAN)
def test_a_worker_with_nan_is_left_out(name: str, ends: list[dict[str, Any]]):
    first, _ = ends[0][f"{name}, NaN"]
    for values, counts in (of_rank[f"{name}, NaN"] for of_rank in ends):
        assert 1 in counts and max(counts) == 1, f"left out, by round: {counts}"
        assert all(np.isfinite(v).all() for v in values), "NaN has reached another worker"
        assert all((a == b).all() for a, b in zip(values, first, strict=True)), "workers differ at the end"


# -- workers that come ------------------------------------------------------------------------------------------

STEPS, DIES_AT, WAITS_AT = 40, 7, 15  # the third dies; the first two wait at a step until it is about to join again


def comes(folder: str, settings: dict[str, Any], device: str) -> None:
    """One elastic worker: the third dies, and comes again while the others train. Writes where it began and ended."""
    name, rank = os.environ["CO2_WORKER"], int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    p, at = problem(device), {"step": 0}

    class Own(Script):
        def give(self, method: Any) -> dict[str, Any]:
            return {"method": method.state_dict(), "step": at["step"]}

        def take(self, method: Any, state: dict[str, Any]) -> None:
            method.load_state_dict(state["method"])
            at["step"] = state["step"]

    members = Members(store, name, timeout=30.0)
    method = elastic_co2(p.params, CO2Config(**settings), members=members, script=Own(), timeout=30.0)
    if name == "2.1":
        Path(folder, "came").touch()
    joined = method.join()
    began, outer = (numbers(of) if joined else [] for of in (p.params, method.state["outer_iterate"]))
    while at["step"] < STEPS:
        while rank < 2 and at["step"] == WAITS_AT and not Path(folder, "came").exists():
            time.sleep(0.05)
        if name == "2.0" and at["step"] == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        move(p.params, at["step"], rank)
        at["step"] += 1
        method.step()
    method.finish()
    found = {"joined": joined, "began": began, "outer": outer, "end": numbers(p.params)}
    Path(folder, f"{rank}.tmp").write_text(json.dumps(found))
    Path(folder, f"{rank}.tmp").rename(Path(folder, f"{rank}.json"))
    method.end()


def numbers(tensors: Iterable[torch.Tensor]) -> list[float]:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).double().tolist()


@pytest.mark.parametrize("settings", [{}, RECOMMENDED], ids=["paper", "recommended"])
def test_a_newcomer_begins_at_the_outer_iterate(settings: dict[str, Any], tmp_path: Path):
    crew = Crew(testing._context(), comes, (str(tmp_path), {"tau": 4} | settings, DEVICE), 3, 1, late=100.0)
    status = crew.run()
    ends = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("?.json"))]
    assert status == 0 and not crew.timed_out and len(ends) == 3, f"status {status}, {len(ends)} of 3 workers ended"
    assert all(of_worker["end"] == ends[0]["end"] for of_worker in ends), "workers differ at the end"
    newcomer = ends[2]
    assert newcomer["joined"], "the third worker was among the first"
    assert sorted(newcomer["began"]) == sorted(newcomer["outer"])
