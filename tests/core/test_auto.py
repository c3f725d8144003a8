"""Method auto: ddp as long as its communication is cheap, then CO2, which goes on exactly from where ddp was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CO2, CO2Config, UserError, WireConfig, make_method
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
    ours = Loop(rank, lambda step: 0.2)
    trace = ours.train(3)
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
    trace = plain.train(4)
    ddp.finish()
    ddp.close()
    plain.wrapped, plain.method = plain.net, CO2(plain.net.parameters(), CONFIG, buffers=plain.net.buffers())
    return seen | {"plain": [*trace, *plain.train(9), plain.end()]}


def test_co2_goes_on_exactly_from_where_ddp_was():
    results = run_distributed(handed_over, 2)
    for r in results:
        assert r["ddp"] is None and (r["look"].step, r["look"].share, r["look"].leaves) == (4, 0.2, True)
        assert r["spread"] == [0.0, 0.0] and torch.equal(r["x"], r["ours"][3])
        for step, (ours, plain) in enumerate(zip(r["ours"], r["plain"], strict=True)):
            assert torch.equal(ours, plain), step
        assert r["apart"] > 0 and r["rounds"] == 4 + 3, "it has trained with local steps since"
        assert torch.equal(r["ours"][-1], results[0]["ours"][-1])
    assert not torch.equal(results[0]["ours"][5], results[1]["ours"][5])


def begun(rank: int, world_size: int) -> list[float]:
    """How far workers are apart, and from the first one's, that come with other weights, and then load some."""
    model, found = net(), []
    for value in (1.0, 3.0):
        for t in [*model.parameters(), *model.buffers()]:
            t.detach().fill_(value + rank)
        if not found:
            _, auto = make_method("auto", model, co2=CONFIG)
        else:
            auto.resync()
        held = flat([*model.parameters(), *(b.float() for b in model.buffers())])
        found += [
            spread(held),
            (held - value).abs().max().item(),
            spread(x := auto.replicas[0]),
            (x - value).abs().max(),
        ]
    auto.close()
    return [float(number) for number in found]


def test_all_begin_as_the_first_worker_and_again_after_weights_were_loaded():
    assert run_distributed(begun, 2) == [[0.0] * 8] * 2


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
        (lambda step: 0.26, {}, 2),  # clear at once
        (lambda step: 0.24, {}, 4),
        (lambda step: 0.16, {}, 4),  # clear
        (lambda step: 0.14, {}, 10),  # not so clear
        (lambda step: 0.11, {}, 10),
        (lambda step: 0.09, {}, None),
        (before(2, 1.0, 0.05), {}, None),  # the first is not measured
        (before(5, 0.05, 1.0), {}, 7),  # the median of six
        (lambda step: 0.09, {"share": 0.08}, 10),
        (lambda step: 0.41, {"share": 0.42}, None),
        (lambda step: 0.14, {"steps": 18}, 19),
        (lambda step: 0.14, {"steps": 1}, 2),
        (before(16, 0.05, 0.15), {"again": 10}, 20),  # the link changes: five of the last nine steps
        (before(17, 0.05, 0.15), {"again": 10}, 30),
        (before(17, 0.05, 0.15), {"again": 33}, 43),
    ],
)
def test_co2_takes_over_where_enough_is_exposed(shares: Shares, own: dict[str, Any], left: int | None):
    assert left_at(shares, own=AutoConfig(**own)) == left


def disagreeing(rank: int, world_size: int) -> list[Any]:
    """Worker 0 waits for the others long, in a step that it begins late."""
    found = []
    for exposed, step in (((0.9, 0.1), (1.0, 1.0)), ((0.9, 0.2), (1.0, 1.0)), ((0.19, 0.19), (0.5, 2.0))):
        loop = Loop(rank, lambda step: 0.0)
        loop.auto.times = lambda ddp, mine=(exposed[rank], step[rank]): mine
        left = [bool(loop.train(1)) and loop.auto.ddp is None for _ in range(22)]
        found.append(left.index(True) + 1 if any(left) else None)
        loop.end()
    return found


def test_all_decide_alike_by_the_shortest_wait_and_the_longest_step():
    one, two = run_distributed(disagreeing, 2)
    assert one == two == [None, 4, None]


def auto_tau(rank: int, world_size: int) -> tuple[Any, ...]:
    """Its tau and its wire once ddp, with 0.6 s of a step's 2 s exposed, has been left."""
    loop = Loop(rank, lambda step: 0.3, config=CO2Config.recommended(world_size))
    loop.train(10)
    pacing = loop.auto.pacing
    found = loop.auto.tau, pacing.apart, loop.auto.at_boundary, pacing.tuned.tuner.decisions[0].step_seconds  # pyright: ignore
    rounds = loop.auto.rounds
    loop.train(loop.auto.tau)
    found = *found, loop.auto.rounds - rounds
    loop.end()
    return found


def test_tau_auto_begins_with_what_ddp_has_measured():
    """2.5 times 0.6 s takes two steps of 1.4 s; and no worker begins a round ahead of the others."""
    assert run_distributed(auto_tau, 2) == [(2, False, True, pytest.approx(1.4), 1)] * 2


# -- checkpoints ----------------------------------------------------------------------------------------------

AT = {3: "ddp, before the third time that counts", 7: "the first round of CO2 closes", 10: "its mean has been merged"}


def resumed(rank: int, world_size: int) -> dict[int, list[Tensor]]:
    """The end, undisturbed and from a checkpoint after so many steps, the early ones of which were otherwise."""
    ends = {}
    for at in AT:
        first = Loop(rank, lambda step: 0.2)
        first.train(at)
        state = copy.deepcopy([t.state_dict() for t in (first.auto, first.net, first.optimizer)])
        first.train(16 - at)
        shares = (lambda step: 0.2) if at < 4 else (lambda step: 0.0)
        second = Loop(rank, shares)
        second.train(2)
        for t, saved in zip((second.auto, second.net, second.optimizer), state, strict=True):
            t.load_state_dict(saved)
        second.taken = at
        second.train(16 - at)
        ends[at] = [first.end(), second.end(), torch.tensor(second.auto.rounds - first.auto.rounds)]
    return ends


def test_a_run_resumes_in_the_phase_of_its_checkpoint():
    for result in run_distributed(resumed, 2):
        for at, (first, second, more) in result.items():
            assert torch.equal(first, second) and more == 0, AT[at]


def test_a_checkpoint_of_the_other_phase_is_refused_where_there_is_no_way_back():
    of_ddp = Loop(0, lambda step: 0.0).auto.state_dict()
    gone = Loop(0, lambda step: 0.5)
    gone.train(4)
    with pytest.raises(UserError, match="load it into a new one"):
        gone.auto.load_state_dict(of_ddp)


# -- the rest -------------------------------------------------------------------------------------------------


def sums_of_parts(rank: int, world_size: int, shares: Shares, steps: int) -> tuple[Tensor, Tensor]:
    """The gradient of a step in two parts, of which the first averages nothing, behind so many steps; the worker's."""
    loop = Loop(rank, shares, AutoConfig(wire=WireConfig("float32")))
    loop.train(steps)
    own = copy.deepcopy(loop.net)
    parts = [problems.batch(rank, 10 + i, dtype=torch.float32) for i in range(2)]
    with loop.wrapped.no_sync():
        problems.loss(loop.wrapped, parts[0]).backward()
    problems.loss(loop.wrapped, parts[1]).backward()
    for part in parts:
        problems.loss(own, part).backward()
    loop.end()
    return flat(p.grad for p in loop.net.parameters()), flat(p.grad for p in own.parameters())


@pytest.mark.parametrize(("share", "averages"), [(0.0, True), (0.5, False)])
def test_gradients_are_averaged_in_ddps_phase_alone(share: float, averages: bool):
    (ours, own), (theirs, other) = run_distributed(sums_of_parts, 2, partial(constant, share), 6)
    torch.testing.assert_close(ours, (own + other) / 2 if averages else own)
    torch.testing.assert_close(theirs, ours if averages else other)


def constant(share: float, step: int) -> float:
    return share


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"share": 1.0}, "share=1.0: give a share"),
        ({"share": 0}, "share=0: give a share"),
        ({"steps": 0}, "steps=0: give a whole number"),
        ({"again": 2.5}, "again=2.5: give a whole number"),
        ({"wire": "int4"}, "give a WireConfig"),
        ({"wire": WireConfig("auto")}, "ddp's gradients need a format"),
    ],
)
def test_bad_settings_are_refused(own: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        AutoConfig(**own)


def wires(rank: int, world_size: int) -> list[int]:
    sent = []
    for own in (AutoConfig(), AutoConfig(wire=WireConfig("int8"))):
        loop = Loop(rank, lambda step: 0.0, own)
        loop.train(2)
        sent.append(loop.auto.stats.bytes_sent)
        loop.end()
    return sent


def test_the_wire_is_of_ddps_gradients():
    int4, int8 = run_distributed(wires, 2)[0]
    assert 0 < int4 < int8


def test_other_settings_than_the_recommended_ones_are_the_users():
    def config(**given: Any) -> Any:
        return make_method("auto", net(), **given)[1].config  # pyright: ignore[reportAttributeAccessIssue]

    assert config() == CO2Config.recommended(1) and config(co2=CONFIG) == CONFIG


@pytest.mark.parametrize("given", [{"shard": True}, {"offload": True}, {"schedule": lambda number: {}}])
def test_what_ddp_does_not_have_is_refused(given: dict[str, Any]):
    with pytest.raises(UserError, match="method 'auto' does not have it"):
        make_method("auto", net(), **given)
