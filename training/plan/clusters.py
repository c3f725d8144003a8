"""Devices and clusters: presets, what the doctor wrote, and how long a collective takes on them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.checkpoints.untrusted import parse_json, reason
from core.errors import UserError
from training.plan.model import of_preset, presets
from training.workers import least_seconds

Numbers = Any  # a number, or an array with one for each layout
BITS = 8
REPEATS = 4  # of what is timed


@dataclass(frozen=True)
class Device:
    """Products run at peak * top FLOP/s; the other passes move what a layer keeps `passes` times forward, at bandwidth
    bytes/s, and twice as often backward [O]. memory: bytes. host: bytes/s to the host's memory. calls: seconds of a
    host's thread for a block's forward and backward pass and update; more where TP cuts it; more where FSDP2 does."""

    name: str
    peak: float
    memory: float
    bandwidth: float
    host: float
    top: float = 0.69  # these three as presets.toml says
    passes: float = 2.48
    calls: tuple[float, float, float] = (1e-3, 3e-3, 2e-3)
    gpu: bool = True


@dataclass(frozen=True)
class Cluster:
    """inside: bytes/s of a device to the others of its node. across: bytes/s out of a node, all its devices together.
    latency, inside_latency: seconds of a hop."""

    name: str
    device: Device
    nodes: int
    per_node: int
    inside: float
    across: float
    latency: float
    inside_latency: float

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def crosses(self, ranks: Numbers, stride: Numbers) -> Numbers:
        """Whether a group of so many ranks, `stride` devices apart, spans nodes."""
        return ranks * stride > self.per_node

    def hop(self, ranks: Numbers, stride: Numbers) -> Numbers:
        """Seconds of a hop in such a group."""
        return np.where(self.crosses(ranks, stride), self.latency, self.inside_latency)

    def rate(self, ranks: Numbers, stride: Numbers) -> Numbers:
        """Bytes/s of each of the rings that start in a node: those that leave it share its cards [N sec. 3]."""
        shared = self.across / np.minimum(stride, self.per_node)
        return np.where(self.crosses(ranks, stride), np.minimum(shared, self.inside), self.inside)

    def allreduce(self, size: Numbers, ranks: Numbers, stride: Numbers) -> Numbers:
        """min(2 (n-1)/n S/B + 2 (n-1) A [P], 2 S/B + 2 ceil(log2 n) A [T]) seconds: a ring, or two trees

        size: bytes S. Of n ranks that lie `stride` devices apart, B their bytes/s, A a hop's seconds.
        """
        return collective(size / self.rate(ranks, stride), ranks, self.hop(ranks, stride))


def collective(seconds: Numbers, ranks: Numbers, hop: Numbers, *, trees: bool = True) -> Numbers:
    """Cluster.allreduce's formula. seconds: of the bytes over one link. trees: whether there are any, as NCCL has."""
    n = np.maximum(ranks, 1)
    found = 2 * (n - 1) / n * seconds + 2 * (n - 1) * hop
    if trees:
        found = np.minimum(found, np.where(n > 2, 2, 1) * seconds + 2 * np.ceil(np.log2(n)) * hop)
    return np.where(n > 1, found, 0.0)


def device(key: str) -> Device:
    """Of presets.toml."""
    return Device(**of_preset("devices", key))


def preset(name: str, *, probe: bool = False) -> Cluster:
    """Of presets.toml. probe: its device is measured on this machine."""
    kind, nodes, per_node, inside, across, latency, inside_latency, efficiency = of_preset("clusters", name)
    if probe and not torch.cuda.is_available():
        raise UserError(f"preset={name}: --probe would measure a GPU, this machine has none: leave --probe out")
    found = probed(device(kind).name) if probe else device(kind)
    return Cluster(name, found, nodes, per_node, inside, across * efficiency, latency, inside_latency)


# -- of the doctor ----------------------------------------------------------------------------------------------------


def from_doctor(file: Path, *, probe: bool) -> Cluster:
    """The report of core.doctor (docs/doctor.md). probe: measure the device here, instead of finding it by its name."""
    try:
        report = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {reason(error)}; write it with core.doctor --out {file.name}") from None
    if not isinstance(report, dict) or report.get("format") != 1:
        raise UserError(f"{file}: no report of format 1; write it with core.doctor --out {file.name}")
    nodes = report.get("nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        raise UserError(f"{file}: nodes={nodes!r}: the planner needs a node or more")
    each = _number(file, report, "workers_per_node")  # the doctor has none where nodes differ
    if (per_node := int(each)) != each:
        raise UserError(f"{file}: workers_per_node={each!r}: the planner needs a whole number")
    memory = _number(file, report, "device", "memory_bytes_per_worker")
    name = str(report["device"].get("name", ""))
    inside, inside_latency = _link(file, report, "within", wanted=per_node > 1)
    across, latency = _link(file, report, "across", wanted=len(nodes) > 1)
    if len(nodes) * per_node != _number(file, report, "workers"):
        raise UserError(f"{file}: workers={report['workers']!r}, but {len(nodes)} nodes of {per_node}")
    gpu = report["device"].get("type") != "cpu"
    hosts = Counter(str(node.get("hostname", number)) for number, node in enumerate(nodes))
    crowd = 1 if gpu else per_node * max(hosts.values())  # also where nodes are emulated on one machine
    found = probed(name, crowd) if probe else known(name)
    found = replace(found, memory=memory, gpu=gpu)
    return Cluster(file.stem, found, len(nodes), per_node, inside, across, latency, inside_latency)


def _number(file: Path, report: Any, *path: str) -> float:
    """A finite number above 0."""
    value = report
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{file}: {'.'.join(path)}={value!r}: the planner needs a number above 0")
    return value


def _link(file: Path, report: Any, name: str, *, wanted: bool) -> tuple[float, float]:
    """Bytes/s, and a hop's seconds: the doctor's latency is a whole all-reduce's, 2 (n - 1) hops of a ring [P]."""
    if not wanted:
        return math.inf, 0.0
    workers, bits, latency = (
        _number(file, report, "links", name, key) for key in ("workers", "bandwidth_bits_per_second", "latency_seconds")
    )
    return bits / BITS, latency / max(1.0, 2 * (workers - 1))


def known(name: str) -> Device:
    """The device of presets.toml whose name this one contains."""
    for key, found in presets()["devices"].items():
        if found["name"].lower() in name.lower():
            return replace(device(key), name=name)
    raise UserError(f"device {name!r} is not known to the planner: add --probe where such a one is, which measures it")


def probed(name: str, ranks: int = 1) -> Device:
    """Measures products, float32 on a CPU and bfloat16 on a GPU, and a copy. ranks: how many share the device.

    Programs get the measured rate, so top is 1; we assume the A100's passes.
    """
    gpu = torch.cuda.is_available()
    where, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    width = 8192 if gpu else 1024
    a, b = (torch.ones(width, width, device=where, dtype=dtype) for _ in range(2))
    product = least_seconds(lambda: a @ b, where, REPEATS)
    copied = torch.ones(1 << 26 if gpu else 1 << 23, device=where)
    target = torch.empty_like(copied)
    moved = least_seconds(lambda: target.copy_(copied), where, REPEATS)
    memory = torch.cuda.get_device_properties(0).total_memory if gpu else math.inf
    host = device("a100").host if gpu else 2 * copied.nbytes / moved
    rate, bandwidth = 2 * width**3 / product / ranks, 2 * copied.nbytes / moved / ranks
    return Device(name, rate, memory, bandwidth, host / ranks, top=1.0)
