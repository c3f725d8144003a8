"""Method auto: ddp as long as its communication is cheap, then CO2, which goes on exactly from where ddp was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CO2, CO2Config, WireConfig, make_method
from core.methods.auto import Auto, AutoConfig
from core.testing import run_distributed
from tests import problems
from tests.problems import flat

# without a clock: means are merged after a number of steps
CONFIG = CO2Config(tau=3, merge="keep", delay=1, gap="none", outer_momentum=0.4, wire=WireConfig("int8"))
Shares = Callable[[int], float]  # number of a step, from 1 -> the exposed share of it that a worker measures


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


class Loop:
    """A worker's training. shares: what it measures, in place of the clock."""

    def __init__(self, rank: int, shares: Shares, own: AutoConfig | None = None, config: CO2Config = CONFIG):
        self.rank, self.net, self.taken = rank, net(), 0
        self.wrapped, method = make_method("auto", self.net, co2=config, auto=own)
        assert isinstance(method, Auto)
        self.auto = self.method = method
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        method.times = lambda ddp: (2.0 * shares(ddp.rounds), 2.0)

    def train(self, steps: int) -> list[Tensor]:
        """The parameters after each step."""
        trace = []
        for _ in range(steps):
            problems.loss(self.wrapped, problems.batch(self.rank, self.taken, dtype=torch.float32)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.method.step()
            self.taken += 1
            trace.append(flat(self.net.parameters()))
        return trace

    def end(self) -> Tensor:
        self.method.finish()
        self.method.close()
        return flat([*self.net.parameters(), *(b.float() for b in self.net.buffers())])

    def moments(self) -> Tensor:
        return flat(t for state in self.optimizer.state.values() for t in state.values())


def spread(t: Tensor) -> float:
    """The largest difference among the workers."""
    low, high = t.clone(), t.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    return (high - low).max().item()


# -- the hand-over --------------------------------------------------------------------------------------------


def handed_over(rank: int, world_size: int) -> dict[str, Any]:
    """Beside it ddp alone for as many steps, and a CO2 that is made there."""
    ours = Loop(rank, lambda step: 0.5)
    trace = ours.train(4)
    assert ours.auto.ddp is not None and spread(flat(b.float() for b in ours.net.buffers())) > 0
    trace += ours.train(1)
    there = [spread(flat([*ours.net.parameters(), *(b.float() for b in ours.net.buffers())])), spread(ours.moments())]
    state = flat(f for flats in ours.auto.state.values() for f in flats)
    seen = {"spread": there, "look": ours.auto.look, "ddp": ours.auto.ddp, "x": state[: len(trace[-1])]}
    trace += ours.train(9)
    seen |= {"apart": spread(ours.moments()), "rounds": ours.auto.rounds, "ours": [*trace, ours.end()]}
    plain = Loop(rank, lambda step: 0.0)
    plain.end()
    plain.wrapped, ddp = make_method("ddp", plain.net, ddp_wire=WireConfig("int4"))
    plain.method = ddp  # pyright: ignore[reportAttributeAccessIssue]
    trace = plain.train(5)
    ddp.finish()
    ddp.close()
    plain.wrapped, plain.method = plain.net, CO2(plain.net.parameters(), CONFIG, buffers=plain.net.buffers())
    return seen | {"plain": [*trace, *plain.train(9), plain.end()]}


def test_co2_goes_on_exactly_from_where_ddp_was():
    results = run_distributed(handed_over, 2)
    for r in results:
        assert r["ddp"] is None and (r["look"].step, r["look"].share, r["look"].leaves) == (5, 0.5, True)
        assert r["spread"] == [0.0, 0.0] and torch.equal(r["x"], r["ours"][4])
        for step, (ours, plain) in enumerate(zip(r["ours"], r["plain"], strict=True)):
            assert torch.equal(ours, plain), step
        assert r["apart"] > 0 and r["rounds"] == 5 + 3, "it has trained with local steps since"
        assert torch.equal(r["ours"][-1], results[0]["ours"][-1])
    assert not torch.equal(results[0]["ours"][6], results[1]["ours"][6])


# -- the decision ---------------------------------------------------------------------------------------------


def left_at(shares: Shares, steps: int = 60, own: AutoConfig | None = None, rank: int = 0) -> int | None:
    """After how many steps CO2 took over; None: ddp has stayed."""
    loop = Loop(rank, shares, own)
    found = next((i for i in range(steps) if loop.train(1) and loop.auto.ddp is None), None)
    loop.end()
    return None if found is None else found + 1


def before(number: int, early: float, late: float) -> Shares:
    return lambda step: early if step < number else late


@pytest.mark.parametrize(
    ("shares", "own", "left"),
    [
        (lambda step: 0.41, {}, 5),  # clear
        (lambda step: 0.39, {}, 20),  # not so clear
        (lambda step: 0.21, {}, 20),
        (lambda step: 0.19, {}, None),
        (before(3, 1.0, 0.1), {}, None),  # the first two are not measured
        (before(5, 0.1, 1.0), {}, 8),  # the median of six
        (lambda step: 0.19, {"share": 0.18}, 20),
        (lambda step: 0.41, {"share": 0.42}, None),
        (lambda step: 0.39, {"steps": 7}, 9),
        (before(21, 0.1, 0.3), {"again": 10}, 30),  # the link changes: nine of eighteen are 0.3 then, ten at the next
        (before(20, 0.1, 0.3), {"again": 10}, 30),
        (before(20, 0.1, 0.3), {"again": 33}, 53),
    ],
)
def test_co2_takes_over_where_enough_is_exposed(shares: Shares, own: dict[str, Any], left: int | None):
    assert left_at(shares, own=AutoConfig(**own)) == left
