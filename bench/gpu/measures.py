"""Measurements on a GPU: the costs of boundaries and of compression.

Copies are timed in between, so that disturbances of the device affect both. "Bytes a parameter" converts the time of a
measurement to the bytes that a copy moves in it. A boundary that is one pass over memory moves `least` bytes.
"""

import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench import report
from core import CompressionConfig, LGrecoConfig, outer
from core.buckets import Scalars, make_buckets
from core.errors import UserError
from core.outer import Merge, OuterStep, Rule
from core.shares import make_outer_step
from training.folder.settings import version

NAME, PART = "gpu", "costs"
SAME = ("commit", "device", "torch")  # of a row that is not measured again
PASSES: dict[str, Callable[..., OuterStep]] = {"fast": make_outer_step, "plain": OuterStep}
PARAMETERS = 350_000_000
REPEATS = 7
COPY = 1 << 28  # elements: 1 GiB, which takes long enough to time
MATRIX = 2048
ASLEEP = 20_000_000  # cycles: about 10 ms, in which the host queues a thousand kernels
# bytes a float32 parameter: the norm reads d; the pass reads p, d, x, m and writes p, x, m, and d if it sends as well;
# keep sends before, which reads p and x and writes d and sent, and its pass reads sent
LEAST = {"restart": 36, "keep_local": 52}


@dataclass(frozen=True)
class Scope:
    """Where a measurement runs. tiny: small sizes, to test the command."""

    device: str
    tiny: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def __call__(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


Measure = Callable[[Scope], dict[str, Any]]  # returns figures by name; raises AssertionError where one cannot be
CHECKS: dict[str, Measure] = {}


def check(cases: Iterable[str] = ("",)) -> Callable[[Any], Any]:
    """Makes a measurement of f(scope, case) for each case. Its name is the function's, and the case."""

    def add(f: Any) -> Any:
        for case in cases:
            name = f.__name__.replace("_", " ") + f": {case}" * bool(case)
            CHECKS[name] = functools.partial(f, case=case) if case else f
        return f

    return add


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


@check()
def copy_bandwidth(scope: Scope) -> dict[str, float]:
    return {"GB/s, read and written": beside_copies(scope, lambda: None)[1] / 1e9}


CASES = [f"{merge}, {kind}" for merge in LEAST for kind in PASSES]


@check(CASES)
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


@check(("bfloat16", "int8", "int4", "lgreco int4"))
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


# -- the command ------------------------------------------------------------------------------------------------------


def measured(name: str, scope: Scope) -> dict[str, Any]:
    """Runs a measurement and returns its row. state: ok or failed."""
    began = time.monotonic()
    try:
        figures = CHECKS[name](scope)
        says = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        row: dict[str, Any] = {"state": "ok", "says": says, "figures": figures}
    except Exception as error:
        says = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        row = {"state": "failed", "says": says, "traceback": traceback.format_exc()}
    return {"part": PART, "name": name} | row | {"seconds": round(time.monotonic() - began, 2)}


@dataclass(frozen=True)
class Options:
    """The report of a GPU. A measurement that has a row of this commit, device and torch is not repeated."""

    checks: tuple[str, ...] = ()
    """Only measurements whose names contain one of these words, even if they have a row."""
    device: Literal["cuda", "cpu"] = "cuda"
    tiny: bool = False
    """Small sizes that a CPU can run, too, to test the command."""
    out: Path = Path("results")
    commit: str = ""
    """The commit of the code, if there is no git."""

    def check(self) -> None:
        report.require_device(self)
        if not self.chosen():
            raise UserError(f"checks={' '.join(self.checks)}: choose among {', '.join(sorted(CHECKS))}")

    def chosen(self) -> list[str]:
        return [name for name in CHECKS if any(word in name for word in self.checks or ("",))]


def main() -> None:
    o = report.read_options(Options, "bench.gpu")
    o.out.mkdir(parents=True, exist_ok=True)
    file = o.out / f"{NAME}.json"
    rows = report.read_rows(file)  # also of checks that are tests now
    result = report.header("bench.gpu", o) | facts(o) | {"rows": rows}
    now = {key: result[key] for key in SAME}
    for name in o.chosen():
        known = {row["name"]: row for row in result["rows"]}
        if not o.checks and now.items() <= known.get(name, {}).items():
            continue
        known[name] = row = measured(name, Scope(o.device, o.tiny)) | now
        result["rows"] = list(known.values())
        report.save(o.out, NAME, result)
        print(f"{row['state']:8}{row['seconds']:6.1f} s  {name}", flush=True)
    rows = [row for row in result["rows"] if row["name"] in CHECKS]
    titles = ("name", "state", "says", "commit", "device")
    print(report.table(titles, [[row.get(title, "") for title in titles] for row in rows]))
    sys.exit(any(row["state"] == "failed" for row in rows))


def facts(o: Options) -> dict[str, Any]:
    """The device and the versions."""
    name = "cpu"
    if o.device == "cuda":
        name = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / (1 << 30):.0f} GiB"
    found = {"device": name + ", tiny sizes: a test of the command" * o.tiny, "torch": str(torch.__version__)}
    found |= {"cuda": torch.version.cuda or "none", "triton": version("triton") or "none"}
    return found | ({"commit": o.commit} if o.commit else {})
