"""What is timed: all-reduces within and across nodes, and CO2's own reductions of a sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression, median
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..assembly import CO2, CO2Config
from ..assembly.wire import Format, WireConfig
from ..groups import host_group, of_all, ring_bytes

SMALLEST, MOST_BYTES = 4, 1 << 28  # bytes of an all-reduce
FROM, REPEATS, LONG = 1 << 12, 5, 0.6  # the second size; repeats; seconds after which no larger one is timed
SAMPLE_SECONDS, MOST_PARAMS, ROUNDS = 0.6, 1 << 25, 3  # of a sample that stands for the model
MOST_ALONE = 1 << 24  # parameters of the sample that no link carries
WIRES: tuple[Format, ...] = ("float32", "int8", "int4")


@dataclass(frozen=True)
class Line:
    """y = start + slope * x, through what was measured."""

    start: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Line:
        """By least squares through those points whose x is a quarter of the largest or more: what holds for smaller
        ones, as buffers that swallow them, is left out. Of one point: through 0, too."""
        most = max(x for x, _ in points)
        used = [(x, y) for x, y in points if x >= most / 4]
        if len(used) == 1:
            return cls(0.0, used[0][1] / used[0][0])
        slope, start = linear_regression(*zip(*used, strict=True))
        return cls(start, slope) if slope > 0 else cls(0.0, used[-1][1] / used[-1][0])

    def at(self, x: float) -> float:
        return max(1e-9, self.start + self.slope * x)


@dataclass(frozen=True)
class Link:
    """All-reduces among some workers. points: (bytes, seconds), the smallest first."""

    workers: int
    points: list[tuple[int, float]]

    @property
    def latency(self) -> float:
        """Seconds of the smallest all-reduce."""
        return self.points[0][1]

    @property
    def line(self) -> Line:
        return Line.through(self.points)

    @property
    def bandwidth(self) -> float:
        """Bits a second that each worker, and so each link of a ring, sends in large all-reduces: 2 (n - 1) / n of
        each byte."""
        return 8 * ring_bytes(1 << 20, self.workers) / (self.line.slope * (1 << 20))


@dataclass(frozen=True)
class Wire:
    """CO2's own reductions over one format, of a sample."""

    bytes_each: float
    """Of a parameter."""
    params: int
    measured: float
    """Seconds."""
    copies: float
    """What CO2 holds beyond the parameters, in float32 copies of them."""
    among: Link | None

    def seconds(self, params: int) -> float:
        """Of a model with so many parameters: what the link takes for its bytes, and in proportion to them what the
        sample took beyond the link's time for its own, as encoding, and ways other than a ring's."""
        if params == self.params or self.among is None:
            return self.measured
        line = self.among.line
        beyond = max(0.0, self.measured - line.at(self.bytes_each * self.params))
        return line.at(self.bytes_each * params) + beyond * params / self.params


def sound(device: torch.device) -> str:
    """What is wrong with an all-reduce of known numbers; "" where it is right."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for where in dict.fromkeys(("cpu", device.type)):
        x = torch.full((1 << 16,), float(rank + 1), device=where)
        dist.all_reduce(x)
        if not bool(x.isfinite().all()):
            return f"an all-reduce of {where} tensors has made NaN or infinity of finite numbers"
        if not bool((x == n * (n + 1) / 2).all()):
            return f"an all-reduce of {where} tensors is wrong: {x[0].item():g} in place of {n * (n + 1) / 2:g}"
    return ""


def links(nodes: list[list[int]], device: torch.device) -> dict[str, Link]:
    """all, and where a node has several workers and there are several nodes, within and across, of one worker each."""
    found = {"all": link(None, device)}
    if len(nodes) == 1:
        return {"within": found["all"]} | found
    if all(len(node) == 1 for node in nodes):
        return {"across": found["all"]} | found
    rank = dist.get_rank()
    within = _of_some([node for node in nodes if len(node) > 1], rank, device)
    across = _of_some([[node[0] for node in nodes]], rank, device)
    return {"within": within, "across": across} | found


def _of_some(groups: list[list[int]], rank: int, device: torch.device) -> Link:
    """The slowest of these groups, which none shares a rank with another, all at once; for all workers."""
    made = [dist.new_group(ranks) for ranks in groups]
    mine = [group for group, ranks in zip(made, groups, strict=True) if rank in ranks]
    own = link(cast(dist.ProcessGroup, mine[0]), device) if mine else None
    return min((one for one in of_all(own) if one is not None), key=lambda one: one.bandwidth)


def link(group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """Larger and larger all-reduces, until one takes LONG; its members call it together."""
    points: list[tuple[int, float]] = []
    nbytes = SMALLEST
    while nbytes <= MOST_BYTES:
        x = torch.zeros(nbytes // 4, device=device)
        took = [_timed(lambda: dist.all_reduce(x, group=group), group, device) for _ in range(REPEATS)]  # noqa: B023
        points.append((nbytes, median(max(times) for times in zip(*of_all(took, group), strict=True))))
        if points[-1][1] > LONG:
            break
        nbytes = max(FROM, nbytes * 2)
    return Link(dist.get_world_size(group), points)


def _timed(act: Callable[[], object], group: dist.ProcessGroup | None, device: torch.device) -> float:
    dist.barrier(group=host_group(group))
    began = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def wires(params: int, among: Link, device: torch.device, timeout: float) -> Iterator[tuple[str, Wire]]:
    """CO2's reductions of the model's size, or where that would take over SAMPLE_SECONDS, of a smaller one."""
    for wire in WIRES:
        each = WireConfig(wire).choices[wire]
        nbytes = (SAMPLE_SECONDS - min(SAMPLE_SECONDS / 2, among.line.start)) / among.line.slope
        size = max(1, min(params, MOST_PARAMS, int(nbytes / each)))
        seconds, _, copies = reduce_sample(wire, size, device, timeout)
        yield wire, Wire(each, size, seconds, copies, among)


def boundary(params: int, device: torch.device, timeout: float) -> tuple[float, float]:
    """Seconds of a boundary's own work, of the slowest worker, and the copies of one worker alone: without a link, so
    that the sample may be larger."""
    size, alone = min(params, MOST_ALONE), None
    if dist.is_initialized():
        alone = cast(dist.ProcessGroup, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    _, seconds, copies = reduce_sample("float32", size, device, timeout, alone)
    return max(of_all(seconds)) * params / size, copies


def reduce_sample(
    wire: Format, numel: int, device: torch.device, timeout: float, group: dist.ProcessGroup | None = None
) -> tuple[float, float, float]:
    """Seconds of a reduction and of a boundary's own work, as TauTuner takes them from training, and CO2's copies.

    Rounds of CO2 with the recommended settings over a parameter of so many elements; between two reductions the link
    rests as it does in training, for some send faster after a rest. The reduction: as the worker saw it that launched
    last; the median over the rounds. The boundary: the slowest worker's; the least over the rounds.
    """
    workers = dist.get_world_size(group) if dist.is_initialized() else 1
    config = replace(CO2Config.recommended(workers), tau=1, wire=WireConfig(wire))
    param = nn.Parameter(torch.zeros(numel, device=device))
    co2, told = CO2([param], config, timeout=timeout, group=group), list[tuple[float, float]]()
    for round in range(ROUNDS + 2):  # in the first nothing has landed; the second one's landing opened connections
        with torch.no_grad():
            param.add_(round + 1.0)
        began = time.perf_counter()
        while co2.flight.in_flight and not co2.flight.landed():
            time.sleep(1e-3)
        waited = min(of_all(time.perf_counter() - began, group))
        time.sleep(config.tau_margin * waited)
        co2.step()
        stats = co2.stats.as_dict()
        own = stats["boundary_seconds"] + stats["merge_seconds"] - stats["exposed_seconds"]
        told.append((stats["allreduce_seconds"], max(0.0, own)))
    copies = held_bytes(co2) / (4 * numel)
    co2.flight.restore(co2.rounds, in_flight=False)
    co2.close()
    rounds = [*zip(*of_all(told[2:], group), strict=True)]
    return (
        median(min(seconds for seconds, _ in of_each) for of_each in rounds),
        min(max(boundary for _, boundary in of_each) for of_each in rounds),
        copies,
    )


def held_bytes(co2: CO2) -> int:
    """Of all flat tensors that CO2 keeps on the parameters' device."""
    kept: Iterable[Tensor] = (t for flats in (*co2.state.values(), *co2.reducer.state.values()) for t in flats)
    return sum(t.nbytes for t in [*(b.flat for b in co2.buckets), *kept])
