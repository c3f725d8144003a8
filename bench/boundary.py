"""The cost of one outer boundary of CO2 by model size: seconds, share of the copy bandwidth, memory.

python -m bench.boundary [--sizes 1e6 1e7 1e8 1e9] [--device cpu|cuda] [--out FOLDER]

core.CO2 has one worker and tau 1, so that each step() is a boundary that waits for nothing. Between the boundaries we
time torch's copy_ of a large tensor. Every size has its own process.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench import report
from bench.report import MOST_PARAMETERS, Asked, Summary, require, require_device
from core import CO2, CO2Config, UserError
from training.script import launch

MATRIX = 2048  # the model is matrices [2048, 2048] and vectors [2048], as in a transformer of that width
COPY = 1 << 25  # elements of the measured copy: 128 MiB each, beyond the cache
BYTES = 36  # a float32 parameter: p, d, x, m read and written once, and d read once before for its RMS
COPIES = 3  # x, m and d, each 4 bytes a parameter beyond the live ones


@dataclass(frozen=True)
class Bench(Asked):
    """The cost of one outer boundary, for models of several sizes."""

    sizes: tuple[float, ...] = (1e6, 1e7, 1e8, 1e9)
    """Parameters, all float32."""
    threads: int = 0
    """Threads of torch. 0 for torch's own choice."""
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
    report.run(Bench, "boundary", measure_all, TABLES)


def measure_all(bench: Bench, session: report.Session) -> None:
    threads = f"{bench.threads or torch.get_num_threads()} threads"
    session.result["machine"] = torch.cuda.get_device_name() if bench.device == "cuda" else threads
    session.take("rows", ({"parameters": int(s), "way": "co2"} | in_process(bench, int(s)) for s in bench.sizes))


def in_process(bench: Bench, size: int) -> dict[str, Any]:
    """Measures one size in a fresh process, so that only its memory counts. Reports why if it does not fit."""
    need = 4 * size * (1 + COPIES) + 8 * COPY + (1 << 30)  # 1 GiB for torch itself
    if need > (free := free_bytes(bench.device)):
        return {"not_run": f"needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, bench, size).result()
        except BrokenProcessPool:
            return {"not_run": "the process was killed, most likely for its memory"}


def measure(bench: Bench, size: int) -> dict[str, Any]:
    """Seconds of each repeat, and peak bytes beyond parameters and what was there before."""
    if bench.threads:
        torch.set_num_threads(bench.threads)
    # two allocations: halves of one, a power of two apart, copy a fifth slower and would flatter the share
    source, target = (torch.randn(COPY, device=bench.device) for _ in range(2))
    params = model(size, bench.device)
    before = reset_peak(bench.device)
    boundary_once = CO2(params, CO2Config.paper(tau=1)).step
    seconds, copies = [], []
    for i in range(bench.repeats + 2):  # the first boundary has nothing to fold in; the second follows no outer step
        with torch.no_grad():
            torch._foreach_mul_(params, 1.001 if i % 2 else 0.999)  # training has moved the parameters
        copies.append(timed(lambda: target.copy_(source), bench.device))
        seconds.append(timed(boundary_once, bench.device))
    peak = peak_bytes(bench.device)
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


def free_bytes(device: str = "cpu") -> int:
    """Memory that the device, or this machine, can still give away."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else _field("/proc/meminfo", "MemAvailable")


def reset_peak(device: str = "cpu") -> int:
    """Forgets the peak so far; returns what the process holds now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _field("/proc/self/status", "VmRSS")


def peak_bytes(device: str = "cpu") -> int:
    """The peak since reset_peak: of torch's allocator on CUDA, else of this process's resident memory."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _field("/proc/self/status", "VmHWM")


def _field(path: str, name: str) -> int:
    """The value of `name:` in a file of /proc, which gives it in kB."""
    rows = (row.split() for row in Path(path).read_text().splitlines())
    return 1024 * int(next(row[1] for row in rows if row and row[0] == f"{name}:"))


MEMORY = {"memory_counted": ".4g", "memory_measured": ".4g"}
SHOWN = {"seconds": ".4g", "bytes_moved": ".4g", "copy_bytes_per_second": ".4g"} | MEMORY
TABLES = {"rows": Summary("parameters not_run", SHOWN)}

if __name__ == "__main__":
    launch(main)
