"""Correctness: what the device computes against the plain pass, the host and the reference of the algorithm; and what
the checks train: a few tensors of unlike layouts that move by a formula, the same on every device."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bench.gpu.checks import NotRun, Scope, check, one_rank
from core import CO2, CO2Config, DelayedCO2, DelayedConfig, LGrecoConfig, OverlapLocalSGD, ShardedCO2, WireConfig
from core.adaptive.merging import Merge, MergeRule, MergingBoundary, make_boundary
from core.outer import NOTHING_LANDED, Rule
from core.wires import formats as wire
from tests.reference import LateReference

STEPS = 26
SETTINGS = {
    "paper": CO2Config(tau=4),
    "gap norm, no clip": CO2Config(tau=4, clip=None, gap="norm"),
    "gap inner": CO2Config(tau=4, gap="inner"),
    "delay 0": CO2Config(tau=4, gap="none", delay=0),
    "delay 0, momentum": CO2Config(tau=4, gap="none", delay=0, outer_momentum=0.5, outer_lr=0.4),
    "mix": CO2Config(tau=4, merge="mix"),
    "mix, delay 2": CO2Config(tau=4, merge="mix", delay=2),
    "keep, delay 2": CO2Config(tau=4, merge="keep", delay=2),
    "keep, delay 0": CO2Config(tau=4, merge="keep", delay=0, gap="none"),
}
# at a fixed step, so that runs compare
RECOMMENDED = CO2Config(4, outer_momentum=0.0, gap="none", merge="keep", delay=2)


@dataclass
class Problem:
    """params: of unlike shapes and strides; one buffer, as BatchNorm has."""

    params: list[nn.Parameter]
    buffers: list[Tensor]


def problem(device: str, dtype: torch.dtype = torch.float32, width: int = 96, layers: int = 3) -> Problem:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random, dtype=torch.float64) * 0.02).to(device, dtype)

    odd = [draw(8, 3, 5, 5).to(memory_format=torch.channels_last), draw(8), draw(40, 30).t(), draw(1)[0]]
    tensors = [*odd, *(draw(width, width) for _ in range(layers))]
    return Problem([nn.Parameter(t) for t in tensors], [draw(8)])


@torch.no_grad()
def move(tensors: Sequence[Tensor], step: int, rank: int = 0) -> None:
    """A local step of `rank`."""
    for i, p in enumerate(tensors):
        p.mul_(0.99).add_(torch.sin(p * (i + 1)) * 1e-2 * (1 + step % 3) * (1 + rank))


def go(tensors: Sequence[Tensor], method: Any, steps: Iterable[int], rank: int = 0) -> None:
    """Trains."""
    for step in steps:
        move(tensors, step, rank)
        method.step()


def end(method: Any) -> None:
    method.finish()
    method.close()


Make = Callable[[Problem], Any]


def train(
    make: Make, device: str, dtype: torch.dtype = torch.float32, rank: int = 0, steps: int = STEPS
) -> list[Tensor]:
    """The parameters at the end, in float64 on the host."""
    p = problem(device, dtype)
    method = make(p)
    go(p.params, method, range(steps), rank)
    end(method)
    return [t.detach().double().cpu() for t in p.params]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest relative difference of a tensor; infinite where a number is not finite."""
    pairs = [(a.double().cpu(), b.double().cpu()) for a, b in zip(ours, theirs, strict=True)]
    if not all(t.isfinite().all() for pair in pairs for t in pair):
        return float("inf")
    return max(float((a - b).norm() / (b.norm() + 1e-12)) for a, b in pairs)


def near(ours: Sequence[Tensor], theirs: Sequence[Tensor], most: float) -> str:
    found = distance(ours, theirs)
    assert found <= most, f"relative difference {found:.3g}, at most {most:g}"
    return f"relative difference {found:.2g}"


def co2(config: CO2Config) -> Make:
    return lambda p: CO2(p.params, config, buffers=p.buffers)


def lgreco(like: str) -> WireConfig:
    return WireConfig("lgreco", like=like, lgreco=LGrecoConfig(rule="uniform", every=2, first=1))


METHODS: dict[str, Make] = {
    "co2": co2(CO2Config(tau=4)),
    "recommended": co2(RECOMMENDED),
    "mix": co2(CO2Config(tau=4, merge="mix", delay=2)),
    "int8": co2(CO2Config(tau=4, wire=WireConfig("int8"))),
    "int4": co2(CO2Config(tau=4, wire=WireConfig("int4"))),
    "lgreco": co2(CO2Config(tau=4, wire=lgreco("int4"))),
    "sharded": lambda p: ShardedCO2(p.params, CO2Config(tau=4), shard=True, buffers=p.buffers),
    "overlap_local": lambda p: OverlapLocalSGD(p.params, 4, buffers=p.buffers),
    "nesterov": lambda p: DelayedCO2(p.params, CO2Config(tau=4), DelayedConfig(nesterov=True), buffers=p.buffers),
}


ROOT = Path(__file__).parents[2]
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
PASSES: dict[str, Callable[..., MergingBoundary]] = {"fast": make_boundary, "plain": MergingBoundary}
ROUNDING = {torch.float32: 5e-6, torch.float64: 1e-13, torch.bfloat16: 5e-3}


class Pass:
    """A boundary over the problem's parameters, filled as in the middle of a run."""

    def __init__(self, kind: Any, scope: Scope, dtype: torch.dtype, merge: Merge):
        self.params = problem(scope.device, dtype).params
        n = sum(p.numel() for p in self.params)
        random = torch.Generator().manual_seed(1)
        state = torch.float64 if dtype == torch.float64 else torch.float32

        def draw() -> Tensor:
            return (torch.randn(n, generator=random, dtype=torch.float64) * 0.02).to(scope.device, state)

        self.d, self.x, self.m = draw(), draw(), draw()
        self.sent = draw() if merge == "keep" else None
        self.boundary: MergingBoundary = PASSES[kind](self.params, self.d, self.x, self.m, self.sent)

    def held(self) -> list[Tensor]:
        flats = [f for f in (self.d, self.x, self.m, self.sent) if f is not None]
        return [t.detach().clone() for t in (*self.params, *flats)]


def both(scope: Scope, dtype: torch.dtype, merge: Merge) -> list[Pass]:
    return [Pass(kind, scope, dtype, merge) for kind in ("fast", "plain")]


def rules(scope: Scope, merge: Merge) -> list[Rule]:
    """Every kind of gap with and without a clip, first with a number and then with a tensor as scale."""
    number = torch.tensor(0.03, dtype=torch.float64, device=scope.device)
    gaps: list[dict[str, Any]] = [{}, {"gap": 1.5 + number}, {"c": number}]
    how = {"merge": merge, "share": 0.3, "sends": merge != "keep"}
    return [
        MergeRule(0.5, 0.7, 0.7, phi, scale, **gap, **how)
        for gap, phi, scale in itertools.product(gaps, (None, 0.01), (0.25, 10 * number))
    ]


@check("correctness", cases=[f"{merge} {dtype}" for merge in ("outer", "mix", "keep") for dtype in DTYPES])
def boundary_is_the_plain_pass(scope: Scope, case: str) -> str:
    merge, dtype = case.split()
    fast, plain = both(scope, DTYPES[dtype], cast(Merge, merge))
    worst = 0.0
    todo = [NOTHING_LANDED] if merge == "outer" else []
    for number, rule in enumerate([*todo, *rules(scope, cast(Merge, merge))]):
        seen = []
        for one in (fast, plain):
            move(one.params, number)
            if merge == "keep":
                one.boundary.take()
                move(one.params, number + 1)
            seen.append(one.boundary.run(rule))
        worst = max(worst, distance([*fast.held(), seen[0]], [*plain.held(), seen[1]]))
        assert worst <= ROUNDING[DTYPES[dtype]], f"{rule}: relative difference {worst:.3g}"
    return f"{number + 1} rules, {type(fast.boundary).__name__}, relative difference {worst:.2g}"


@check("correctness", cases=("outer", "mix", "keep"))
def boundary_takes_and_restarts(scope: Scope, case: str) -> str:
    """take() and restart(), by which delay 0 sends and a newcomer begins: each has to change what it is to change."""
    told = []
    for name, call in {
        "take": lambda b: b.take(),
        "restart": lambda b: b.restart(),
        "restart where": lambda b: b.restart(torch.ones((), dtype=torch.bool, device=scope.device)),
        "restart nowhere": lambda b: b.restart(torch.zeros((), dtype=torch.bool, device=scope.device)),
    }.items():
        fast, plain = both(scope, torch.float32, cast(Merge, case))
        before = fast.held()
        for one in (fast, plain):
            call(one.boundary)
        changed = not all(map(torch.equal, before, fast.held()))
        assert changed == (name != "restart nowhere"), f"{name}: {'something' if changed else 'nothing'} has changed"
        assert all(map(torch.equal, fast.held(), plain.held())), f"{name}: unlike the plain pass"
        told.append(name)
    return f"{', '.join(told)}: equal"


def blocks() -> Tensor:
    """float32 [n]: ordinary blocks, one of zeros, of tiny, of huge and of mixed numbers, and one with a NaN last."""
    random = torch.Generator().manual_seed(2)
    x = torch.randn(64, wire.BLOCK, generator=random)
    x[1], x[2, ::2] = 0.0, 0.0
    x[3] *= 1e-30
    x[4] *= 1e30
    x[5, 0] = 1e4
    x[-1, 7] = float("nan")
    return x.view(-1)


@check("correctness", cases=wire.WIRES[1:])
def plain_codec_gives_the_hosts_bytes(scope: Scope, case: str) -> str:
    """And they decode within half a level, which the host's own bytes are held to as well."""
    x, sound = blocks(), slice(0, 63 * wire.BLOCK)
    ours, theirs = wire.encode(x.to(scope.device), case), wire.encode(x, case)
    unlike = int((ours.cpu() != theirs)[: wire.nbytes(case, 63 * wire.BLOCK)].sum())
    assert unlike == 0, f"{unlike} of {len(theirs)} bytes differ"
    found = wire.decode(ours, case).cpu()
    assert torch.equal(found[sound], wire.decode(theirs, case)[sound]), "decoded numbers differ"
    assert not found[-wire.BLOCK :].isfinite().all(), "a NaN has become a number"
    top = x.view(-1, wire.BLOCK).abs().amax(1, keepdim=True)
    level = top / wire.LEVELS[case] if case in wire.LEVELS else x.view_as(found).view(-1, wire.BLOCK).abs() * 2**-7
    level = level + (top * 2**-28 if case == "float16" else 0)
    beyond = ((found - x).view(-1, wire.BLOCK).abs() > 0.501 * level)[:63]
    assert not beyond.any(), f"{int(beyond.sum())} numbers are off by more than half a level"
    lost = x.to(scope.device, copy=True)
    wire.encode(lost.clone(), case, lost=lost)
    assert torch.equal(lost.cpu()[sound], (x - found)[sound]), "what is lost is not what is missing"
    return f"{len(theirs)} bytes equal"


@check("correctness", cases=("bfloat16", "int8", "int4", "lgreco int4", "lgreco rank4"))
def wire_trains_as_on_the_host(scope: Scope, case: str) -> str:
    """In float64, so that only a fault rounds to another level. Low rank begins with draws of the device's own."""
    sent = lgreco(case.split()[1]) if " " in case else WireConfig(cast(Any, case))
    make = co2(CO2Config(tau=4, wire=sent))
    with one_rank(scope):
        ours = train(make, scope.device, torch.float64)
    exact, theirs = train(co2(CO2Config(tau=4)), "cpu", torch.float64), train(make, "cpu", torch.float64)
    assert distance(theirs, exact) > 1e-9, "the wire does not round at all"
    return near(ours, theirs, 0.05 if "rank" in case else 1e-6)


def reference(c: CO2Config, steps: int) -> list[Tensor]:
    """One worker of Algorithm 1 in float64."""
    params = problem("cpu", torch.float64).params
    x = torch.cat([p.detach().reshape(-1) for p in params])[None]
    delay = None if c.delay == "boundary" else cast(int, c.delay)
    settings = {"alpha": c.outer_lr, "beta": c.outer_momentum, "gap": c.gap, "phi": c.clip}
    found = LateReference(x, cast(int, c.tau), **settings, delay=delay, merge=c.merge, kappa=c.mix)
    views = [piece.view(p.shape) for piece, p in zip(x[0].split([p.numel() for p in params]), params, strict=True)]
    for step in range(steps):
        move(views, step)
        found.local_step()
    found.finish()
    return views


@check("correctness", cases=[f"{name}, {dtype}" for name in SETTINGS for dtype in ("float64", "float32")])
def co2_is_the_reference(scope: Scope, case: str) -> str:
    """Over a process group of one rank; in float32 as near as it holds the numbers."""
    name, _, dtype = case.rpartition(", ")
    with one_rank(scope):
        ours = train(co2(SETTINGS[name]), scope.device, DTYPES[dtype])
    return near(ours, reference(SETTINGS[name], STEPS), 1e-9 if dtype == "float64" else 1e-4)


@check("correctness", cases=METHODS)
def method_in_a_group_is_that_alone(scope: Scope, case: str) -> str:
    """One rank, whose collectives are queued in a stream of their own, against no process group at all."""
    with one_rank(scope):
        ours = train(METHODS[case], scope.device)
    return near(ours, train(METHODS[case], scope.device), 2e-5)


@check("correctness")
def a_restart_from_a_checkpoint_goes_on(scope: Scope) -> str:
    """Parameters and state_dict() taken at a boundary, with a mean in flight, and loaded into new objects."""
    told = []
    for name in ("co2", "recommended", "int4"):
        whole, p = train(METHODS[name], scope.device), problem(scope.device)
        method = METHODS[name](p)
        go(p.params, method, range(12))
        state, kept = method.state_dict(), [t.detach().clone() for t in p.params]
        again = problem(scope.device)
        other = METHODS[name](again)
        with torch.no_grad():
            for t, value in zip(again.params, kept, strict=True):
                t.copy_(value)
        other.load_state_dict(state)
        go(again.params, other, range(12, STEPS))
        other.finish()
        assert all(map(torch.equal, [t.detach().double().cpu() for t in again.params], whole)), f"{name} differs"
        told.append(name)
    return f"{', '.join(told)}: bit for bit"


@check("correctness", cuda=True, limit=200.0)
def tests_marked_gpu(scope: Scope) -> str:
    """`pytest -m gpu`, where there is a pytest."""
    if find_spec("pytest") is None:
        raise NotRun("pytest is not installed here")
    files = [str(f) for f in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--tb=line", "-rfE", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    told = [
        text for text in done.stdout.splitlines() if re.match(r"FAILED|ERROR|=* ?\d+ (passed|failed|skipped)", text)
    ]
    assert done.returncode == 0, "; ".join(told) or done.stdout[-500:] + done.stderr[-500:]
    return told[-1] if told else done.stdout[-200:]


@check("correctness")
def channels_last_and_transposed_parameters_keep_their_strides(scope: Scope) -> str:
    p = problem(scope.device)
    strides, places = [t.stride() for t in p.params], [t.data_ptr() for t in p.params]
    method = CO2(p.params, CO2Config(tau=2))
    go(p.params, method, range(6))
    method.finish()
    assert strides == [t.stride() for t in p.params] and places == [t.data_ptr() for t in p.params]
    p.params[0].data = nn.Parameter(p.params[0].detach().clone(memory_format=torch.contiguous_format)).data
    move(p.params, 0)
    assert method.step() is False and method.step(), "a parameter whose storage was replaced stops the rounds"
    return f"{len(strides)} parameters"
