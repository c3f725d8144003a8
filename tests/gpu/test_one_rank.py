"""One rank on a GPU: a process group of NCCL, whose collectives are queued in a stream of their own as with many."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CO2, CO2Config, CompressionConfig, DivergedError
from core.baselines import LocalSGD
from core.baselines.ddp import DDP
from core.guards.workers import forget
from core.testing.reference import Reference
from tests.gpu.problem import (
    CYCLES,
    DEVICE,
    DTYPES,
    METHODS,
    RECOMMENDED,
    STEPS,
    Problem,
    Slow,
    co2,
    distance,
    end,
    go,
    lgreco,
    move,
    one_rank,
    problem,
    synchronisations,
    train,
)

pytestmark = pytest.mark.gpu
WARM_UP, WATCHED = 24, 16  # steps; a round has four
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "gap norm, no clip": {"clip": None, "gap": "norm"},
    "delay 0": {"gap": "none", "delay": 0},
    "delay 0, momentum": {"gap": "none", "delay": 0, "outer_momentum": 0.5, "outer_lr": 0.4},
    "keep_local, delay 2": {"merge": "keep_local", "delay": 2},
    "keep_local, delay 0": {"merge": "keep_local", "delay": 0, "gap": "none"},
}
COMPRESSED = {name: CompressionConfig(name) for name in ("bfloat16", "int8", "int4")}
COMPRESSED |= {f"lgreco {like}": lgreco(like) for like in ("int4", "top0.01", "rank4")}


@pytest.fixture(scope="module")
def on_host() -> dict[str, list[Tensor]]:
    """The parameters that COMPRESSED end with on the host, in float64; by name. "": without compression."""
    found = {name: train(co2(compression=config), "cpu", torch.float64) for name, config in COMPRESSED.items()}
    return found | {"": train(co2(), "cpu", torch.float64)}


@pytest.fixture(scope="module", autouse=True)
def group(on_host: Any) -> Iterator[None]:  # noqa: ARG001
    """One for all tests here: it takes half a second. NCCL moves nothing of a host, so that comes before."""
    with one_rank():
        yield


# -- what is computed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSED)
def test_compression_trains_as_on_the_host(name: str, on_host: dict[str, list[Tensor]]):
    """In float64, so that only a fault rounds to another level. Low rank begins with draws of the device's own."""
    ours = train(co2(compression=COMPRESSED[name]), dtype=torch.float64)
    assert distance(on_host[name], on_host[""]) > 1e-9, "the compression does not round at all"
    assert distance(ours, on_host[name]) < (0.05 if "rank" in name else 1e-6)


def reference(c: Any, steps: int) -> list[Tensor]:
    """One worker of Algorithm 1 in float64."""
    params = problem("cpu", torch.float64).params
    x = torch.cat([p.detach().reshape(-1) for p in params])[None]
    delay = None if c.delay == "boundary" else c.delay
    settings = {"alpha": c.outer_lr, "beta": c.outer_momentum, "gap": c.gap, "phi": c.clip}
    found = Reference(x, c.tau, **settings, delay=delay, merge=c.merge)
    views = [piece.view(p.shape) for piece, p in zip(x[0].split([p.numel() for p in params]), params, strict=True)]
    for step in range(steps):
        move(views, step)
        found.local_step()
    found.finish()
    return views


@pytest.mark.parametrize(("dtype", "most"), [("float64", 1e-9), ("float32", 1e-4)])
@pytest.mark.parametrize("name", SETTINGS)
def test_co2_is_the_reference(name: str, dtype: str, most: float):
    ours = train(co2(**SETTINGS[name]), dtype=DTYPES[dtype])
    assert distance(ours, reference(CO2Config(**{"tau": 4} | SETTINGS[name]), STEPS)) < most


def test_nothing_but_nan_ends_the_run():
    p = problem()
    method = CO2(p.params, CO2Config(tau=2))
    with pytest.raises(DivergedError):
        for step in range(12):
            move(p.params, step)
            if step == 5:
                p.params[4].data.fill_(float("nan"))
            method.step()


# -- beside the computation ---------------------------------------------------------------------------------------


def warmed(make: Any, steps: int = WARM_UP) -> tuple[Problem, Any]:
    """A problem and its method, some rounds old, with nothing queued."""
    p = problem()
    method = make(p)
    go(p.params, method, range(steps))
    torch.cuda.synchronize()
    return p, method


AS_GIVEN = {"as users get it": lambda p: CO2(p.params, replace(CO2Config.recommended(), tau=4), buffers=p.buffers)}


@pytest.mark.parametrize("name", [*METHODS, *AS_GIVEN])
def test_neither_a_step_nor_statistics_make_a_synchronising_call(name: str):
    """AS_GIVEN has delay auto and compression auto: its first rounds find what to take."""
    p, method = warmed((METHODS | AS_GIVEN)[name], WARM_UP * (2 if name in AS_GIVEN else 1))
    with synchronisations() as found:
        go(p.params, method, range(WATCHED))
    torch.cuda.synchronize()
    with synchronisations() as told:
        method.stats.as_dict()
    end(method)
    assert not found and not told, f"in {WATCHED // 4} rounds at {sorted({*found, *told})}"


@pytest.mark.parametrize("name", ["co2", "recommended", "int4", "overlap_local", "nesterov"])
def test_a_buffer_in_flight_is_left_alone(name: str):
    """While a collective sleeps, nothing that has been sent may change."""
    p = problem()
    method = METHODS[name](p)
    spoilt = torch.zeros((), dtype=torch.bool, device=DEVICE)
    kept: list[Tensor] = []

    class Watched(Slow):
        def stages(self, group: Any, number: int) -> Iterator[Any]:
            kept[:] = [b.flat.clone() for b in method.buckets]
            torch.cuda._sleep(CYCLES)
            yield [], 0
            for flat, copy in zip([b.flat for b in method.buckets], kept, strict=True):
                spoilt.logical_or_((flat.nan_to_num() != copy.nan_to_num()).any())
            yield from self.reducer.stages(group, number)

    method.reducer = Watched(method.reducer)
    go(p.params, method, range(WATCHED))
    end(method)
    assert kept and not spoilt.item()


@pytest.mark.parametrize("name", ["co2", "recommended"])
def test_a_slow_collective_is_hidden(name: str):
    """A sleeping kernel of some 30 ms under steps of as many: the computing stream may wait for little of it."""
    p = problem()
    method = METHODS[name](p)
    method.reducer = Slow(method.reducer)
    stats = []
    for step in range(WARM_UP):
        torch.cuda._sleep(CYCLES)  # the computation
        move(p.params, step)
        if method.step():
            stats.append(method.stats)
    torch.cuda.synchronize()
    seen = [s.as_dict() for s in stats[2:]]
    end(method)
    took, exposed = (min(s[key] for s in seen) for key in ("allreduce_seconds", "exposed_seconds"))
    assert took > 0 and exposed < took / 4, f"{1e3 * exposed:.1f} of {1e3 * took:.1f} ms are exposed"


@pytest.mark.parametrize(("name", "throttled"), [("co2", True), ("local", False), ("ddp", False)])
def test_only_the_hidden_group_is_throttled(name: str, throttled: bool):
    """How many of a GPU's multiprocessors NCCL may hold: few under the computation, all where everybody waits."""
    asked, real = [], dist.new_group

    def new_group(*a: Any, pg_options: Any = None, backend: Any = None, **k: Any) -> Any:
        if backend != "gloo":
            asked.append(0 if pg_options is None else pg_options.config.max_ctas)
        return real(*a, pg_options=pg_options, backend=backend, **k)

    net = nn.Linear(8, 8).to(DEVICE)
    with mock.patch("torch.distributed.new_group", new_group):
        made = {"co2": lambda: CO2(net.parameters(), CO2Config(tau=2)), "local": lambda: LocalSGD(net.parameters(), 2)}
        end(made[name]() if name in made else DDP(net))
    assert any(n > 0 for n in asked) is throttled, asked  # not set: 0, or NCCL's least integer


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["co2", "recommended", "int4", "sharded"])
def test_a_checkpoint_takes_no_copy_on_the_device(name: str):
    """The peak while state_dict() is made: at most one flat tensor's, about one copy of the parameters."""
    p = problem(width=1024, layers=6)
    method = METHODS[name](p)
    go(p.params, method, range(9))
    gc.collect()
    torch.cuda.synchronize()
    now = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state = method.state_dict()
    torch.cuda.synchronize()
    added = (torch.cuda.max_memory_allocated() - now) / sum(t.nbytes for t in p.params)
    del state
    end(method)
    assert added <= 1.1, f"adds {added:.2f} copies of the parameters"


# -- loops of one's own -------------------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2)]
    found = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return found.to(DEVICE, memory_format=torch.channels_last)


def batches(count: int = 24) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(count):
        x, y = torch.randn(8, 3, 16, 16, generator=random), torch.randint(10, (8,), generator=random)
        yield x.to(DEVICE).contiguous(memory_format=torch.channels_last), y.to(DEVICE)


@pytest.mark.parametrize("settings", [{}, RECOMMENDED], ids=["paper", "recommended"])
def test_autocast_and_grad_scaler(settings: dict[str, Any]):
    """With a batch whose loss is infinite, whose step the scaler leaves out while the round goes on."""
    model = net()
    strides = [p.stride() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    method = CO2(model.parameters(), CO2Config(**{"tau": 4} | settings), buffers=model.buffers())
    method.on_excluded = forget(optimizer)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    closed, scales = [], []
    for step, (x, y) in enumerate(batches()):
        with torch.autocast(DEVICE, torch.float16 if DEVICE == "cuda" else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if step == 9 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        closed.append(method.step())
        scales.append(scaler.get_scale())
    end(method)
    assert closed == [(i + 1) % 4 == 0 for i in range(len(closed))]
    assert scales[9] < scales[8], "the scaler has not left the step out"
    assert all(p.isfinite().all() for p in model.parameters())
    assert strides == [p.stride() for p in model.parameters()]
