"""The doctor's measurements: all-reduces within and across nodes, and CO2's own reductions of a sample."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import linear_regression, median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..co2 import CO2
from ..comm import ring_bytes
from ..compression.config import CompressionConfig, Format
from ..config import CO2Config
from ..groups import host_group, of_all

SMALLEST, MOST_BYTES = 4, 1 << 28  # bytes of an all-reduce
FROM, REPEATS, LONG = 1 << 12, 5, 0.6  # bytes of the second size; repeats; seconds after which sizes stop growing
SAMPLE_SECONDS, MOST_PARAMS, MOST_ALONE, ROUNDS = 0.6, 1 << 25, 1 << 24, 3  # MOST_ALONE: parameters without a link
FORMATS: tuple[Format, ...] = ("float32", "int4")  # between which compression auto chooses


@dataclass(frozen=True)
class Link:
    """Times of all-reduces among some workers.

    Attributes:
        workers: Number of workers.
        points: (bytes, seconds) of each all-reduce, in increasing order.
    """

    workers: int
    points: list[tuple[int, float]]

    @property
    def line(self) -> tuple[float, float]:
        """Seconds at 0 bytes, and seconds per byte, by least squares.

        Sizes below a quarter of the largest are left out, because network buffers may hide them.
        """
        used = [(n, s) for n, s in self.points if n >= self.points[-1][0] / 4]
        slope, start = linear_regression(*zip(*used, strict=True)) if len(used) > 1 else (0.0, 0.0)
        return (start, slope) if slope > 0 else (0.0, used[-1][1] / used[-1][0])

    def seconds(self, nbytes: float) -> float:
        start, each = self.line
        return max(1e-9, start + each * nbytes)

    @property
    def bandwidth(self) -> float:
        """Bits per second that each worker sends in large all-reduces, 2 (n - 1) / n times their bytes."""
        return 8 * ring_bytes(1 << 20, self.workers) / (self.line[1] * (1 << 20))

    def as_dict(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "latency_seconds": self.points[0][1],  # time of the smallest all-reduce
            "bandwidth_bits_per_second": self.bandwidth,
            "allreduce": [{"bytes": nbytes, "seconds": seconds} for nbytes, seconds in self.points],
        }


def sound(device: torch.device) -> str:
    """Returns an error message if an all-reduce of known numbers is wrong, else ""."""
    right = sum(range(1, dist.get_world_size() + 1))
    x = torch.full((1 << 16,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(x)
    wrong = f"an all-reduce of {device.type} tensors makes {x[0].item():g} of {right:g}"
    return "" if bool((x == right).all()) else wrong


def links(nodes: list[list[int]], device: torch.device) -> dict[str, Link]:
    """Returns the measured links by name.

    "all" connects all workers. "within" connects the workers of a node, and "across" one worker of each node, if there
    are several.
    """
    found = {"all": link(None, device)}
    if len(nodes) == 1:
        return {"within": found["all"]} | found
    if all(len(node) == 1 for node in nodes):
        return {"across": found["all"]} | found
    for name, groups in (("within", [node for node in nodes if len(node) > 1]), ("across", [[n[0] for n in nodes]])):
        # The groups share no rank, so all are timed at once. The slowest group counts.
        made = zip([dist.new_group(ranks) for ranks in groups], groups, strict=True)
        mine = [group for group, ranks in made if dist.get_rank() in ranks]
        own = link(cast(dist.ProcessGroup, mine[0]), device) if mine else None
        for group in mine:  # torch names later groups by how many a rank has
            dist.destroy_process_group(cast(dist.ProcessGroup, group))
        found[name] = min((Link(**one) for one in of_all(own and vars(own)) if one), key=lambda one: one.bandwidth)
    return {name: found[name] for name in ("within", "across", "all")}


def link(group: dist.ProcessGroup | None, device: torch.device) -> Link:
    """Times all-reduces of growing size, until one takes longer than LONG. All members of the group must call it."""
    points: list[tuple[int, float]] = []
    nbytes = SMALLEST
    while nbytes <= MOST_BYTES:
        x, took = torch.zeros(nbytes // 4, device=device), list[float]()
        for _ in range(REPEATS):
            dist.barrier(group=host_group(group))
            began = time.perf_counter()
            dist.all_reduce(x, group=group)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            took.append(time.perf_counter() - began)
        points.append((nbytes, median(max(times) for times in zip(*of_all(took, group), strict=True))))
        if points[-1][1] > LONG:
            break
        nbytes = max(FROM, nbytes * 2)
    return Link(dist.get_world_size(group), points)


def compressions(
    params: int, among: Link, device: torch.device, timeout: float, mesh: DeviceMesh | None = None
) -> dict[str, dict[str, float]]:
    """Returns the seconds of CO2's reductions of the whole model, by format. With a mesh, a worker is a node.

    A reduction that would take longer than SAMPLE_SECONDS is extrapolated from a sample.
    """
    found = {}
    for compression in FORMATS:
        each = CompressionConfig(compression).choices[compression]
        start, each_byte = among.line
        nbytes = (SAMPLE_SECONDS - min(SAMPLE_SECONDS / 2, start)) / each_byte
        size = max(1, min(params, MOST_PARAMS, int(nbytes / each)))
        took, _ = reduce_sample(compression, size, device, timeout, mesh=mesh)
        found[compression] = {"seconds": extrapolated(took, size, params, each, among)}
        found[compression] |= {"sample_params": size, "sample_seconds": took}
    return found


def extrapolated(took: float, size: int, params: int, each: float, among: Link) -> float:
    """Returns the seconds of a reduction of the whole model, estimated from a sample of `size` that `took` seconds.

    The estimate is the link's time for all bytes, plus the sample's time beyond its link time (such as for encoding) in
    proportion to the parameters.

    Args:
        took: Seconds of the sample's reduction.
        size: Parameters of the sample.
        params: Parameters of the model.
        each: Bytes per parameter.
        among: The link among all workers.
    """
    if params == size:
        return took
    return among.seconds(each * params) + max(0.0, took - among.seconds(each * size)) * params / size


def boundary(params: int, device: torch.device, timeout: float) -> float:
    """Returns the slowest worker's seconds for a round boundary's own work. The sample is larger: it uses no link."""
    size = min(params, MOST_ALONE)
    alone = cast(dist.ProcessGroup, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    return max(of_all(reduce_sample("float32", size, device, timeout, alone)[1])) * params / size


def reduce_sample(
    compression: Format,
    numel: int,
    device: torch.device,
    timeout: float,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[float, float]:
    """Returns the seconds of a reduction and of a round boundary's own work, measured as TauTuner measures them.

    It runs rounds of CO2 with the recommended settings over `numel` elements. Between two reductions the link rests as
    it does in training, because some links send faster after a rest. The reduction's time is the median over the rounds
    of the time at the worker that launched last. The boundary's time is the smallest over the rounds of the slowest
    worker's time.
    """
    config = replace(CO2Config.recommended(), tau=1, fragments=1, compression=CompressionConfig(compression))
    param = nn.Parameter(torch.zeros(numel, device=device))
    co2, told = CO2([param], config, timeout=timeout, group=group, mesh=mesh), list[tuple[float, float]]()
    for round in range(ROUNDS + 2):  # nothing arrives in the first round; the second one's all-reduce opens connections
        with torch.no_grad():
            param.add_(round + 1.0)
        began = time.perf_counter()
        while co2.allreduce.in_flight and not co2.allreduce.arrived():
            time.sleep(1e-3)
        waited = min(of_all(time.perf_counter() - began, group))
        time.sleep(config.tau_margin * waited)
        co2.step()
        stats = co2.stats.as_dict()
        own = stats["boundary_seconds"] + stats["merge_seconds"] - stats["exposed_seconds"]
        told.append((stats["allreduce_seconds"], max(0.0, own)))
    co2.allreduce.restore(co2.rounds, in_flight=False)
    co2.close()
    rounds = [*zip(*of_all(told[2:], group), strict=True)]
    return (
        median(min(seconds for seconds, _ in of_each) for of_each in rounds),
        min(max(boundary for _, boundary in of_each) for of_each in rounds),
    )
