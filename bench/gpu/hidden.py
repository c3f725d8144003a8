"""Correctness: what runs beside the computation: streams, priorities, the order of collectives, waits of the host."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.gpu.checks import Scope, check, one_rank, sync, synchronisations
from bench.gpu.equal import METHODS, RECOMMENDED, co2, end, go, move, near, problem, train
from core import CO2, CO2Config, DivergedError, LocalSGD, ShardedCO2, WireConfig
from core.groups import host_group
from core.methods import DDP
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from training.workers import largest_of_workers

WARM_UP, WATCHED = 24, 16  # steps; a round has four
CYCLES = 60_000_000  # of a sleeping kernel: some 30 ms


class Slow:
    """A reducer behind something slow in the stream, or the thread, in which reductions run: `before` is called there
    and returns what has to be waited for."""

    def __init__(self, reducer: Any, before: Any):
        self.reducer, self.before = reducer, before

    @property
    def scale(self) -> float:
        return self.reducer.scale

    @property
    def state(self) -> dict[str, list[Tensor]]:
        return self.reducer.state

    def stages(self, group: Any, number: int) -> Iterator[Any]:
        yield self.before(), 0
        yield from self.reducer.stages(group, number)


class Nap:
    """Stands for a collective on a host, which takes so many seconds."""

    def __init__(self, seconds: float):
        self.until = time.perf_counter() + seconds

    def is_completed(self) -> bool:
        return time.perf_counter() >= self.until

    def wait(self, timeout: Any = None) -> None:
        time.sleep(max(0.0, self.until - time.perf_counter()))


def asleep(scope: Scope, cycles: int = CYCLES, seconds: float = 0.03) -> list[Any]:
    """A slow collective: a sleeping kernel on a GPU, a nap elsewhere."""
    if not scope.cuda:
        return [Nap(seconds)]
    torch.cuda._sleep(cycles)
    return []


@contextlib.contextmanager
def warmed(scope: Scope, name: str) -> Iterator[tuple[Any, Any]]:
    """A problem and its method in a group of one rank, some rounds old."""
    with one_rank(scope):
        p = problem(scope.device)
        method = METHODS[name](p)
        go(p.params, method, range(WARM_UP))
        sync(scope)
        yield p, method
        end(method)


@check("correctness", cases=METHODS, cuda=True)
def step_makes_no_synchronising_call(scope: Scope, case: str) -> str:
    with warmed(scope, case) as (p, method), synchronisations() as found:
        go(p.params, method, range(WATCHED))
    assert not found, f"{len(found) / (WATCHED / 4):g} a round, first at {', '.join(sorted(set(found))[:3])}"
    return "0 synchronisations"


@check("correctness", cases=("co2", "recommended"), cuda=True)
def statistics_make_no_synchronising_call(scope: Scope, case: str) -> str:
    with warmed(scope, case) as (_, method), synchronisations() as found:
        method.stats.as_dict()
    assert not found, f"{len(found)} synchronisations at {', '.join(sorted(set(found))[:3])}"
    return "0 synchronisations"


@check("correctness", cases=("co2", "recommended", "mix", "int4", "overlap_local", "nesterov"))
def a_buffer_in_flight_is_left_alone(scope: Scope, case: str) -> str:
    """While a collective sleeps, nothing that has been sent may change."""
    with one_rank(scope):
        p = problem(scope.device)
        method = METHODS[case](p)
        spoilt = torch.zeros((), dtype=torch.bool, device=scope.device)
        kept: list[Tensor] = []

        def before() -> list[Any]:
            kept[:] = [b.flat.clone() for b in method.buckets]
            return asleep(scope, seconds=0.01)

        class Watched(Slow):
            def stages(self, group: Any, number: int) -> Iterator[Any]:
                yield self.before(), 0
                for flat, copy in zip([b.flat for b in method.buckets], kept, strict=True):
                    spoilt.logical_or_((flat.nan_to_num() != copy.nan_to_num()).any())
                yield from self.reducer.stages(group, number)

        method.reducer = Watched(method.reducer, before)
        go(p.params, method, range(WATCHED))
        end(method)
    assert not spoilt.item(), "something has written to it"
    return f"{WATCHED // 4} reductions"


@check("correctness", cases=("co2", "recommended"), cuda=True)
def a_slow_collective_is_hidden(scope: Scope, case: str) -> dict[str, float]:
    """A sleeping kernel of some 30 ms under steps of as many: the computing stream may wait for little of it."""
    with one_rank(scope):
        p = problem(scope.device)
        method = METHODS[case](p)
        method.reducer = Slow(method.reducer, lambda: asleep(scope))
        stats = []
        for step in range(WARM_UP):
            torch.cuda._sleep(CYCLES)  # the computation
            move(p.params, step)
            if method.step():
                stats.append(method.stats)
        sync(scope)
        seen = [s.as_dict() for s in stats[2:]]
        end(method)
    took, exposed = (min(s[key] for s in seen) for key in ("allreduce_seconds", "exposed_seconds"))
    assert took > 0 and exposed < took / 4, f"{1e3 * exposed:.1f} of {1e3 * took:.1f} ms are exposed"
    return {"reduction, ms": 1e3 * took, "exposed, ms": 1e3 * exposed}


@check("correctness", cuda=True)
def background_stream_has_high_priority(scope: Scope) -> str:
    made, real = [], torch.cuda.Stream

    def stream(device: Any = None, priority: int = 0, **how: Any) -> Any:
        made.append(priority)
        return real(device, priority=priority, **how)

    with one_rank(scope), mock.patch("torch.cuda.Stream", stream):
        end(METHODS["int4"](problem(scope.device)))
    assert made and min(made) < 0, f"priorities of the streams made: {made}"
    return f"priority {min(made)}"


@check("correctness", cuda=True)
def only_the_hidden_group_is_throttled(scope: Scope) -> str:
    """How many of a GPU's multiprocessors NCCL may hold: few under the computation, all where everybody waits."""
    said, real = {}, dist.new_group
    net = nn.Linear(8, 8).to(scope.device)
    for name, make in {
        "co2": lambda: CO2(net.parameters(), CO2Config(tau=2)),
        "local": lambda: LocalSGD(net.parameters(), 2),
        "ddp": lambda: DDP(net),
    }.items():
        asked: list[int] = []

        def new_group(*a: Any, asked: Any = asked, pg_options: Any = None, backend: Any = None, **k: Any) -> Any:
            if backend != "gloo":
                asked.append(0 if pg_options is None else pg_options.config.max_ctas)
            return real(*a, pg_options=pg_options, backend=backend, **k)

        with one_rank(scope), mock.patch("torch.distributed.new_group", new_group):
            end(make())
        said[name] = "throttled" if any(n > 0 for n in asked) else "free"  # not set: 0, or NCCL's least integer
    assert said == {"co2": "throttled", "local": "free", "ddp": "free"}, str(said)
    return str(said)


def begun(rank: int, workers: int, device: str) -> str:
    """The order in which a rank begins all-reduces of the method's group (C) and the default one (D), one mean late."""
    seen, real = [], dist.all_reduce
    p = [nn.Parameter(torch.ones(8, device=device))]
    method = CO2(p, CO2Config(tau=2))
    method.pacing.skip_after = 5.0
    letters = {id(method.flight.group): "C", id(dist.group.WORLD): "D"} | {id(host_group()): ""}

    def spy(tensor: Tensor, *a: Any, group: Any = None, **k: Any) -> Any:
        seen.append(letters[id(group or dist.group.WORLD)])  # control, over gloo, lies in no order of a device's
        return real(tensor, *a, group=group, **k)

    with mock.patch("torch.distributed.all_reduce", spy):
        for step in range(1, 5):
            with torch.no_grad():
                p[0].add_(0.1)
            late = rank == 1 and step == 4
            how = mock.patch("core.adaptive.pacing.lands_within", lambda flight, seconds: False) if late else None
            with how or contextlib.nullcontext():
                method.step()
        _, rounds = largest_of_workers([4, method.rounds])
        method.catch_up(rounds)
    order = "".join(seen)
    method.finish()
    return order


@check("correctness")
def collectives_begin_in_one_order(scope: Scope) -> str:
    """With skip_after, at a checkpoint: torch demands one order of all groups that share a GPU."""
    one, other = run_distributed(begun, 2, scope.device, timeout=100)
    assert one == other, f"rank 0 begins {one}, rank 1 {other} (C: the method's group, D: the default group)"
    return f"{one} on both ranks"


@check("correctness")
def nothing_but_nan_ends_the_run(scope: Scope) -> str:
    with one_rank(scope):
        p = problem(scope.device)
        method = CO2(p.params, CO2Config(tau=2))
        try:
            for step in range(12):
                move(p.params, step)
                if step == 5:
                    p.params[4].data.fill_(float("nan"))
                method.step()
        except DivergedError as error:
            return f"step {step}: {error}"
        raise AssertionError("12 steps without a DivergedError")


@check("correctness", cases=("mesh (1, 1)", "offload", "shard"))
def shared_state_trains_as_unshared(scope: Scope, case: str) -> str:
    def make(p: Any) -> ShardedCO2:
        how = {"offload": {"offload": True}, "shard": {"shard": True}}.get(case) or {"mesh": node_mesh(scope.device, 1)}
        return ShardedCO2(p.params, CO2Config(tau=4), buffers=p.buffers, **how)

    with contextlib.nullcontext() if case == "offload" else one_rank(scope):
        ours = train(make, scope.device)
    return near(ours, train(METHODS["co2"], scope.device), 2e-5)


@check("correctness", cases=("float32", "bfloat16", "int8"))
def ddp_trains_with_one_rank(scope: Scope, case: str) -> str:
    def run(grouped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(scope.device)
        ddp = DDP(net, wire=WireConfig(case)) if grouped else None  # pyright: ignore[reportArgumentType]
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        x = torch.randn(20, 16, 64, generator=torch.Generator().manual_seed(1)).to(scope.device)
        for batch in x:
            (ddp.model if ddp else net)(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if ddp:
                ddp.step()
        if ddp:
            end(ddp)
        return [p.detach() for p in net.parameters()]

    with one_rank(scope):
        ours = run(True)
    return near(ours, run(False), {"float32": 1e-5}.get(case, 0.05))


@check("correctness")
def delay_0_sends_what_was_just_done(scope: Scope) -> str:
    """One worker with delay 0, alpha 1 and no momentum is where its local steps have led it, at every boundary."""
    config = CO2Config(tau=2, gap="none", delay=0, outer_momentum=0.0, clip=None)
    alone = problem(scope.device)
    for step in range(8):
        move(alone.params, step)
    ours = train(co2(config), scope.device, steps=8)
    return near(ours, [t.detach() for t in alone.params], 1e-5)


@check("correctness", cuda=True)
def recommended_settings_make_no_synchronising_call(scope: Scope) -> str:
    """With delay auto and wire auto, as users get them, once the first rounds have found what to take."""
    with one_rank(scope):
        p = problem(scope.device)
        method = CO2(p.params, replace(CO2Config.recommended(1), tau=RECOMMENDED.tau), buffers=p.buffers)
        go(p.params, method, range(2 * WARM_UP))
        sync(scope)
        with synchronisations() as found:
            go(p.params, method, range(WATCHED))
        end(method)
    assert not found, f"{len(found)} in {WATCHED // 4} rounds, first at {', '.join(sorted(set(found))[:3])}"
    return "0 synchronisations"
