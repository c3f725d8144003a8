"""What one outer boundary of CO2 costs against the model's size: seconds, share of the copy bandwidth, memory.

python -m bench.boundary [--sizes 1e6 1e7 1e8 1e9] [--ways co2 fast plain compiled] [--device cpu|cuda] [--out FOLDER]

`co2` is core.CO2 with one worker and tau 1, so that each step() is a boundary that waits for nothing; `fast` is its
single pass over memory; `plain` is core/outer.py's `update`, which defines the pass; `compiled` is `update` by
torch.compile. Between the boundaries we time torch's copy_ of a large tensor. Every case has its own process.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from bench import memory, report
from bench.report import MOST_PARAMETERS, Asked, Spread, require, require_device
from core import CO2, CO2Config, UserError, outer
from core.outer import make_boundary
from training.script import launch

MATRIX = 2048  # the model is matrices [2048, 2048] and vectors [2048], as in a transformer of that width
COPY = 1 << 25  # elements of the measured copy: 128 MiB each, beyond the cache
ALPHA, BETA, PHI = 1.0, 0.5, 1.0  # CO2Config's defaults
BYTES = 36  # a float32 parameter: p, d, x, m read and written once, and d read once before for its RMS

COPIES = 3  # x, m and d, each 4 bytes a parameter beyond the live ones
Way = Literal["co2", "fast", "plain", "compiled"]


@dataclass(frozen=True)
class Bench(Asked):
    """The cost of one outer boundary, for models of several sizes."""

    sizes: tuple[float, ...] = (1e6, 1e7, 1e8, 1e9)
    """Parameters, all float32."""
    ways: tuple[Way, ...] = ("co2", "fast", "plain", "compiled")
    threads: int = 0
    """Of torch; 0 for torch's own choice."""
    repeats: int = 5
    """Timed boundaries, and copies in between."""
    device: Literal["cpu", "cuda"] = "cpu"

    def check(self) -> None:
        if not self.sizes or not all(1 <= size <= MOST_PARAMETERS for size in self.sizes):
            numbers = f"numbers of parameters, each 1 to {MOST_PARAMETERS:g}"
            raise UserError(f"sizes={self.sizes}: give one or more {numbers}")
        require(self, ones="repeats")
        if self.threads < 0:
            raise UserError(f"threads={self.threads}: give a number of threads, or 0 for torch's choice")
        require_device(self)


def main() -> None:
    report.run(Bench, "boundary", measure_all, text)


def measure_all(bench: Bench, session: report.Session) -> None:
    threads = f"{bench.threads or torch.get_num_threads()} threads"
    session.result["machine"] = torch.cuda.get_device_name() if bench.device == "cuda" else threads
    cases = ((int(size), way) for size in bench.sizes for way in bench.ways)
    rows = ({"parameters": size, "way": way} | in_process(bench, way, size) for size, way in cases)
    session.take("rows", rows, lambda row: report.row(*cells(row)))


def in_process(bench: Bench, way: Way, size: int) -> dict[str, Any]:
    """The case in a fresh process, so that no earlier one's memory is counted; why not, where it does not fit."""
    need = 4 * size * (1 + COPIES) + 8 * COPY + (1 << 30)  # 1 GiB for torch itself
    if need > (free := memory.free_bytes(bench.device)):
        return {"not_run": f"needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, bench, way, size).result()
        except BrokenProcessPool:
            return {"not_run": "the process was killed, most likely for its memory"}


def measure(bench: Bench, way: Way, size: int) -> dict[str, Any]:
    """Seconds of each repeat, and peak bytes beyond parameters and what was there before."""
    if bench.threads:
        torch.set_num_threads(bench.threads)
    # two allocations: halves of one, a power of two apart, copy a fifth slower and would flatter the share
    source, target = (torch.randn(COPY, device=bench.device) for _ in range(2))
    params = model(size, bench.device)
    before = memory.reset_peak(bench.device)
    boundary_once = WAYS[way](params)
    seconds, copies = [], []
    for i in range(bench.repeats + 2):  # the first boundary has nothing to fold in; the second follows no outer step
        with torch.no_grad():
            torch._foreach_mul_(params, 1.001 if i % 2 else 0.999)  # training has moved the parameters
        copies.append(timed(lambda: target.copy_(source), bench.device))
        seconds.append(timed(boundary_once, bench.device))
    peak = memory.peak_bytes(bench.device)
    return {
        "threads": torch.get_num_threads(),
        "seconds": seconds[2:],
        "copy_seconds": copies[2:],
        "copy_bytes_per_second": 8 * COPY / statistics.median(copies[2:]),
        "bytes_moved": size * BYTES,
        "memory_counted": 4 * size * COPIES,
        "memory_measured": peak - before,
    }


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
    values = torch.randn(MATRIX * MATRIX).mul_(0.02).to(device)
    params = []
    while size:
        shape = (MATRIX, MATRIX) if len(params) % 2 == 0 else (MATRIX,)
        n = min(size, torch.Size(shape).numel())
        piece = values[:n].clone()
        params.append(torch.nn.Parameter(piece.view(shape) if n == torch.Size(shape).numel() else piece))
        size -= n
    return params


class CompiledBoundary(outer.Boundary):
    """core/outer.py's `update`, compiled by torch: what the hand-written passes are compared with."""

    def update(self, rule: outer.Rule) -> Tensor:
        return outer.all_seen([compiled()(s, rule) for s in self.segments])


@functools.cache  # once for all buckets
def compiled() -> Any:
    return torch.compile(outer.update, dynamic=False)  # of unknown sizes some strided parameters do not compile


PASSES: dict[Way, Callable[..., outer.Boundary]] = {
    "fast": make_boundary,
    "plain": outer.Boundary,
    "compiled": CompiledBoundary,
}


def pass_way(kind: Way, params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    d, x, m = state(params)
    one = PASSES[kind](params, d, x, m)
    one.run(outer.NOTHING_LANDED)

    def once() -> None:
        c = outer.norm([d]) / len(d) ** 0.5
        one.run(outer.Rule(BETA, ALPHA, ALPHA, PHI, 1.0, c=c))

    return once


@torch.no_grad()
def state(params: list[torch.nn.Parameter]) -> tuple[Tensor, Tensor, Tensor]:
    """d and m of zeros, x the parameters: flat."""
    x = torch.cat([p.view(-1) for p in params])
    return torch.zeros_like(x), x, torch.zeros_like(x)


WAYS: dict[Way, Callable[[list[torch.nn.Parameter]], Callable[[], Any]]] = {
    "co2": lambda params: CO2(params, CO2Config(tau=1, outer_lr=ALPHA, outer_momentum=BETA, clip=PHI)).step,
    **{kind: functools.partial(pass_way, kind) for kind in PASSES},
}


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table. The share is that of the bytes that one pass must move, whichever way was taken."""
    head = [f"{row['parameters']:.3g}", row["way"]]
    if "not_run" in row:
        return [*head, f"not run: {row['not_run']}"]
    took = Spread.of([1e3 * seconds for seconds in row["seconds"]])
    speed = row["copy_bytes_per_second"]
    share = BYTES * row["parameters"] / (took.median / 1e3) / speed
    memory = [f"{row[f'memory_{how}'] / 1e6:.4g}" for how in ("counted", "measured")]
    return [*head, took.show(".4g"), f"{speed / 1e9:.1f}", f"{share:.0%}", *memory]


TITLES = (
    *("parameters", "way", "ms a boundary, median (range)", "copy GB/s", f"share of it: {BYTES} bytes a parameter"),
    *("MB beyond the parameters, counted", "measured"),
)


def text(result: dict[str, Any]) -> str:
    return (
        f"{result['options']['device']}, {result['machine']}, torch {result['versions']['torch']}; "
        f"{report.source(result)}\n\n{report.table(TITLES, map(cells, result['rows']))}\n\n"
        "The share can exceed 100 %: a small model fits into the processor's cache, and a copy also reads what it "
        "overwrites, which we do not count.\n"
    )


if __name__ == "__main__":
    launch(main)
