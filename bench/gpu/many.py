"""Correctness with several workers: four of gloo on one GPU, for NCCL refuses two there; and workers that come."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.chaos.crew import Crew
from bench.gpu.checks import NotRun, Scope, check
from bench.gpu.equal import METHODS, RECOMMENDED, SETTINGS, co2, distance, move, problem, train
from core import CO2, CO2Config, ShardedCO2, testing
from core.assembly import elastic_co2
from core.elastic.members import Members
from core.sharded.mesh import node_mesh
from core.testing import run_distributed

RANKS = 4
BETWEEN = {  # what differs between workers only
    "co2": METHODS["co2"],
    "recommended": METHODS["recommended"],
    "int4": METHODS["int4"],
    "sharded": METHODS["sharded"],
    "overlap_local": METHODS["overlap_local"],
    "delay 0": co2(SETTINGS["delay 0"]),
    "offload": lambda p: ShardedCO2(p.params, CO2Config(tau=4), offload=True, buffers=p.buffers),
    "nodes of two": lambda p: ShardedCO2(
        p.params, CO2Config(tau=4, outlier=None), mesh=node_mesh("cpu", 2), buffers=p.buffers
    ),
}


def trained(rank: int, workers: int, device: str, name: str) -> list[Any]:
    """The parameters at the end; in nodes of two, both workers of a node move alike."""
    mover = rank // 2 if name == "nodes of two" else rank
    return [t.numpy() for t in train(BETWEEN[name], device, torch.float64, mover)]


@check("correctness", cases=BETWEEN)
def four_ranks_on_one_device_train_as_on_the_host(scope: Scope, case: str) -> str:
    if scope.tiny and case not in ("co2", "recommended"):
        raise NotRun("left out of a test of the command")
    ours = run_distributed(trained, RANKS, scope.device, case, timeout=100)
    theirs = run_distributed(trained, RANKS, "cpu", case, timeout=100) if scope.cuda else ours
    tensors = [[torch.from_numpy(t) for t in of_rank] for of_rank in (*ours, theirs[0])]
    assert all(all(map(torch.equal, tensors[0], other)) for other in tensors[1:RANKS]), "ranks differ"
    found = distance(tensors[0], tensors[-1])
    assert found < 1e-6, f"relative difference {found:.3g}"
    return f"relative difference {found:.2g}"


def left_out(rank: int, workers: int, device: str, name: str) -> tuple[list[Any], list[int]]:
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
            counts.append(method.stats.left_out)
    method.finish()
    return [t.detach().cpu().numpy() for t in p.params], counts


@check("correctness", cases=("co2", "recommended"))
def a_worker_with_nan_is_left_out(scope: Scope, case: str) -> str:
    ends = run_distributed(left_out, RANKS, scope.device, case, timeout=100)
    for values, counts in ends:
        assert 1 in counts and max(counts) == 1, f"left out, by round: {counts}"
        assert all(torch.from_numpy(v).isfinite().all() for v in values), "NaN has reached another worker"
        pairs = zip(values, ends[0][0], strict=True)
        assert all((a == b).all() for a, b in pairs), "workers differ at the end"
    return f"left out, by round: {ends[0][1]}"


# -- workers that come ------------------------------------------------------------------------------------------

STEPS, DIES_AT, WAITS_AT = 40, 7, 15  # the third dies; the first two wait at a step until it is about to join again


def comes(folder: str, device: str, settings: dict[str, Any]) -> None:
    """One elastic worker: the third dies, and comes again while the others train. Writes where it began and ended."""
    name, rank = os.environ["CO2_WORKER"], int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
    p, at = problem(device), {"step": 0}
    members = Members(store, name, timeout=30.0)
    method, joining = elastic_co2(p.params, CO2Config(**settings), members=members, timeout=30.0)
    joining.give = lambda: {"method": method.state_dict(), "step": at["step"]}

    def take(state: dict[str, Any]) -> None:
        method.load_state_dict(state["method"])
        at["step"] = state["step"]

    joining.take = take
    joining.flight.tell = lambda: {"step": at["step"]}
    if name == "2.1":
        Path(folder, "came").touch()
    joined = joining.join()
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
    joining.flight.sum_of_all(torch.zeros(1))
    members.end()
    method.close()


def numbers(tensors: Iterable[torch.Tensor]) -> list[float]:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).double().tolist()


@check("correctness", cases=("paper", "keep"))
def a_newcomer_begins_at_the_outer_iterate(scope: Scope, case: str) -> str:
    if scope.tiny:
        raise NotRun("left out of a test of the command")
    settings = {"tau": 4} if case == "paper" else {k: getattr(RECOMMENDED, k) for k in ("tau", "merge", "gap", "delay")}
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(testing._context(), comes, (folder, scope.device, settings), 3, 1, late=100.0)
        status = crew.run()
        ends = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("?.json"))]
    assert status == 0 and not crew.timed_out and len(ends) == 3, f"status {status}, {len(ends)} of 3 workers ended"
    assert all(end["end"] == ends[0]["end"] for end in ends), "workers differ at the end"
    newcomer = ends[2]
    assert newcomer["joined"], "the third worker was among the first"
    gap = max(abs(a - b) for a, b in zip(sorted(newcomer["began"]), sorted(newcomer["outer"]), strict=True))
    assert gap == 0, f"the newcomer began {gap:.3g} away from the outer iterate"
    return "3 workers equal at the end"


def timed(rank: int, workers: int, device: str, width: int, case: str) -> dict[str, float]:
    """Milliseconds of a round of four workers that share a device."""
    p = problem(device, width=width)
    method = CO2(p.params, {"paper": CO2Config(tau=4), "recommended": RECOMMENDED}[case])
    found = []
    for step in range(28):
        move(p.params, step)
        if method.step():
            found.append(method.stats)
    seen = found[-2].as_dict()
    method.finish()
    return {key: 1e3 * seen[f"{key}_seconds"] for key in ("allreduce", "exposed", "boundary", "step")}


@check("costs", cases=("paper", "recommended"))
def four_ranks_over_gloo_on_one_device_ms(scope: Scope, case: str) -> dict[str, float]:
    """They share the device, and gloo moves everything through the host: no figure of a network."""
    return run_distributed(timed, RANKS, scope.device, scope(2048, 64), case, timeout=100)[0]
