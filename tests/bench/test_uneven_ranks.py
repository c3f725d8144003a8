"""SSP on real processes: what a worker has seen when a clock begins; without staleness it is Local-SGD."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bench import report
from bench.uneven.real import Real, StaleSync, markdown, run
from core.methods.local_sgd import LocalSGD
from core.testing import run_distributed
from tests.problems import batch, small_net

STALENESS, CLOCKS = 2, 8


def seen(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Worker 0 sleeps in its first steps, and each of its updates counts 1; worker 1's count 100. At the begin of each
    clock: (own updates seen, the other's)."""
    parameter = torch.zeros(1)
    method = StaleSync([parameter], tau=1, staleness=STALENESS)
    found = []
    for clock in range(CLOCKS):
        time.sleep(0.15 if rank == 0 and clock < 5 else 0.0)
        parameter += 2 * (100, 1)[rank == 0]
        assert method.step()
        ones, hundreds = round(float(parameter)) % 100, round(float(parameter)) // 100
        found.append((ones, hundreds) if rank == 0 else (hundreds, ones))
    method.finish()
    assert float(parameter) == 101 * CLOCKS
    method.close()
    return found


def as_local(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The end of 3 clocks of 2 steps without staleness, and of as many rounds of Local-SGD."""
    ends = []
    for make in (lambda p: StaleSync(p, 2, 0), lambda p: LocalSGD(p, 2)):
        net = small_net()
        method, optimizer = make(net.parameters()), torch.optim.SGD(net.parameters(), 0.1)
        for step in range(6):
            inputs, labels = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            method.step()
        method.finish()
        method.close()
        ends.append(nn.utils.parameters_to_vector(net.parameters()).detach())
    return ends[0], ends[1]


def test_at_most_so_many_clocks_of_the_slow_one_are_missing_and_its_own_never():
    slow, fast = run_distributed(seen, 2)
    for clock, (own, other) in enumerate(fast, start=1):
        assert own == clock and max(0, clock - STALENESS) <= other <= clock
    assert (3, 1) in fast, "it did not run ahead"
    assert all(own == clock for clock, (own, _) in enumerate(slow, start=1))


def test_without_staleness_it_is_local_sgd():
    for mine, theirs in run_distributed(as_local, 2):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_command_measures_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["bench.uneven.real"])
    o = Real(workers=2, rate=400.0, tau=6, scenarios=("half",), repeats=1, rounds=2, step_ms=10.0, throttle=True)
    o.check()
    result = report.header("bench.uneven.real", o)
    run(o, result)
    result = json.loads(json.dumps(result, default=str))
    assert len(result["cells"]) == len(o.methods) and len(result["rows"]) == 2 * len(o.methods)
    speeds = {cell["method"]: cell["predicted"] for cell in result["cells"]}
    assert speeds["co2_by_speed"] > 1.2 * speeds["co2_even"] and speeds["ssp8"] > speeds["local"]
    assert "| half | ssp3 |" in markdown(result)
