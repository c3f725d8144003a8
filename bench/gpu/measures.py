"""Measurements on a GPU: the costs of boundaries and of compression.

Copies are timed in between, so that disturbances of the device affect both. "Bytes a parameter" converts the time of a
measurement to the bytes that a copy moves in it. A boundary that is one pass over memory moves `least` bytes.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu.command import Scope, check
from core import CompressionConfig, LGrecoConfig, outer
from core.buckets import Scalars, make_buckets
from core.outer import Merge, OuterStep, Rule, make_outer_step

PASSES: dict[str, Callable[..., OuterStep]] = {"fast": make_outer_step, "plain": OuterStep}
PARAMETERS = 350_000_000
REPEATS = 7
COPY = 1 << 28  # elements: 1 GiB, which takes long enough to time
MATRIX = 2048
ASLEEP = 20_000_000  # cycles: about 10 ms, in which the host queues a thousand kernels
# bytes a float32 parameter: the norm reads d; the pass reads p, d, x, m and writes p, x, m, and d if it sends as well;
# keep sends before, which reads p and x and writes d and sent, and its pass reads sent
LEAST = {"restart": 36, "keep_local": 52}


def timed(fn: Callable[[], Any], device: str, asleep: int = 0) -> float:
    """Seconds; on CUDA between two events. asleep: cycles that the stream first sleeps, while the host queues."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if asleep:
            torch.cuda._sleep(asleep)
        start.record()
        fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def model(size: int, device: str) -> list[torch.nn.Parameter]:
    """`size` float32 parameters: [2048, 2048], [2048], [2048, 2048], ... and what is left as one vector."""
    values = torch.randn(MATRIX**2).mul_(0.02).to(device)
    params = []
    while size:
        shape = (MATRIX, MATRIX) if len(params) % 2 == 0 else (MATRIX,)
        n = min(size, torch.Size(shape).numel())
        piece = values[:n].clone()
        params.append(torch.nn.Parameter(piece.view(shape) if n == torch.Size(shape).numel() else piece))
        size -= n
    return params


def beside_copies(scope: Scope, once: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of `once`, and median bytes a second that a copy moves in between (read and written).

    On a GPU, the host queues the work while the device sleeps, so that launches do not count.
    """
    n = scope(COPY, 1 << 16)
    source, target = (torch.randn(n, device=scope.device) for _ in range(2))
    took, copied = [], []
    for repeat in range(2 + scope(REPEATS, 2)):  # the first two warm up
        one = timed(lambda: target.copy_(source), scope.device, ASLEEP)
        other = timed(once, scope.device, ASLEEP)
        if repeat > 1:
            copied.append(one)
            took.append(other)
    return statistics.median(took), 8 * n / statistics.median(copied)


@torch.no_grad()
def state(params: list[torch.nn.Parameter]) -> tuple[Tensor, Tensor, Tensor]:
    """d and m of zeros, x the parameters: flat."""
    x = torch.cat([p.view(-1) for p in params])
    return torch.zeros_like(x), x, torch.zeros_like(x)


@check("costs")
def copy_bandwidth(scope: Scope) -> dict[str, float]:
    return {"GB/s, read and written": beside_copies(scope, lambda: None)[1] / 1e9}


CASES = [f"{merge}, {kind}" for merge in LEAST for kind in PASSES]


@check("costs", CASES)
def a_boundarys_bytes_a_parameter(scope: Scope, case: str) -> dict[str, Any]:
    merge, _, kind = case.partition(", ")
    params = model(scope(PARAMETERS, 50_000), scope.device)
    d, x, m = state(params)
    sent = x.clone() if merge == "keep_local" else None
    one = PASSES[kind](params, d, x, m, sent)

    def once() -> None:
        if merge == "keep_local":
            one.take()
        c = outer.norm([d]) / len(d) ** 0.5
        one.run(
            Rule(0.5, 1.0, 1.0, 1.0, 1.0, delta_rms=c, merge=cast(Merge, merge), takes_difference=merge != "keep_local")
        )

    seconds, rate = beside_copies(scope, once)
    found = seconds * rate / len(d)
    figures = {"ms": 1e3 * seconds, "bytes": found, "least": LEAST[merge], "share of copy": LEAST[merge] / found}
    return figures | {"kernels": kernels(scope, once)} if scope.cuda else figures


def kernels(scope: Scope, once: Callable[[], Any]) -> int:
    """The number of kernels that a call queues on the device."""
    scope.sync()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        once()
        scope.sync()
    return sum(event.count for event in seen.key_averages() if event.device_type != torch.autograd.DeviceType.CPU)


@check("costs", ("bfloat16", "int8", "int4", "lgreco int4"))
def a_reductions_bytes_a_parameter(scope: Scope, case: str) -> dict[str, Any]:
    """Encoding, error feedback, decoding and averaging of one worker, both steps. L-GreCo includes its choices."""
    uniform = LGrecoConfig(rule="uniform", every=2, first=1)
    compression = (
        CompressionConfig("lgreco", like="int4", lgreco=uniform) if " " in case else CompressionConfig(cast(Any, case))
    )
    params = model(scope(PARAMETERS, 50_000), scope.device)
    scalars = Scalars({"steps": 1, "weight": 1})
    buckets = make_buckets(params, [], scalars.numel)
    scalars.attach(buckets[0].scalars)
    reducer, number = compression.reducer(buckets, scalars, 0, 1), 0
    queued: list[float] = []

    def once() -> None:
        nonlocal number
        scalars.set("steps", 1.0)
        scalars.set("weight", 1.0)
        began = time.perf_counter()
        for works, _ in reducer.stages(None, number):
            for work in works:
                work.wait()
        queued.append(time.perf_counter() - began)
        number += 1

    for bucket in buckets:
        bucket.payload.normal_(std=1e-3)
    seconds, rate = beside_copies(scope, once)
    figures = {
        "ms": 1e3 * seconds,
        "bytes": seconds * rate / buckets[0].numel,
        "host ms": 1e3 * statistics.median(queued),
    }
    return figures | {"kernels": kernels(scope, once)} if scope.cuda else figures
