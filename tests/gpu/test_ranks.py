"""Workers that come and go on one GPU, over gloo, because NCCL refuses two there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.chaos.crew import Crew
from core import CO2Config, testing
from core.elastic import elastic_co2
from core.elastic.allreduce import Script
from core.elastic.members import Members
from tests.gpu.problem import DEVICE, RECOMMENDED, move, problem

pytestmark = pytest.mark.gpu
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
