"""How long an all-reduce takes: ring, tree and hierarchical formulas, and the clusters they are asked about."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, get_args

from bench.report import require
from core.errors import UserError
from training.recipe import find

Algorithm = Literal["ring", "tree", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
BYTES_PER_GBIT = 1e9 / 8


def ring_seconds(workers: int, nbytes: float, bandwidth: float, latency: float = 0.0) -> float:
    """Reduce-scatter and all-gather around a ring: 2 (n-1)/n bytes/bandwidth + 2 (n-1) latency.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 2009).
    nbytes: of the whole buffer. bandwidth: bytes/s that a worker sends while it receives as many. latency: s per hop.
    """
    if workers == 1:
        return 0.0
    return 2 * (workers - 1) / workers * nbytes / bandwidth + 2 * (workers - 1) * latency


def tree_seconds(workers: int, nbytes: float, bandwidth: float, latency: float = 0.0) -> float:
    """Pipelined double binary tree: 2 bytes/bandwidth (two workers: bytes/bandwidth) + 2 ceil(log2 n) latency.

    Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (Parallel
    Computing 2009); NCCL has trees since 2.4. Each tree carries half of the buffer up and down again, and a worker is
    an inner node of at most one of them: with two children it sends all bytes twice. The pieces are pipelined, so
    depth costs latency alone.
    """
    if workers == 1:
        return 0.0
    times = 1 if workers == 2 else 2
    return times * nbytes / bandwidth + 2 * math.ceil(math.log2(workers)) * latency


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal workers. Bandwidths are nominal, each way; `efficiency` is what of them an all-reduce gets."""

    nodes: int
    workers_per_node: int = 1
    inter_gbps: float = 1.0
    """Gbit/s of one node's network cards together."""
    intra_gbps: float = 4800.0
    """Gbit/s of one worker to the others in its node."""
    latency: float = 0.0
    """Seconds per hop between nodes."""
    intra_latency: float = 0.0
    """Seconds per hop within a node."""
    efficiency: float = 1.0
    overhead: float = 0.0
    """Seconds that every all-reduce costs whatever its size."""

    def __post_init__(self) -> None:
        require(self, ones="nodes workers_per_node")
        for name in ("inter_gbps", "intra_gbps", "efficiency"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name):g}: give a finite number above 0")
        for name in ("latency", "intra_latency", "overhead"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name):g}: give 0 or a finite number of seconds above it")

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def inter(self) -> float:
        """Bytes/s that an all-reduce gets out of one node."""
        return self.inter_gbps * BYTES_PER_GBIT * self.efficiency

    @property
    def intra(self) -> float:
        """Bytes/s that an all-reduce gets between a node's workers."""
        return self.intra_gbps * BYTES_PER_GBIT * self.efficiency


def hierarchical_seconds(cluster: Cluster, nbytes: float) -> float:
    """Reduce-scatter in each node, rings between nodes, all-gather in each node.

    After the reduce-scatter local rank k holds the k-th of g parts; g rings, one per local rank, reduce 1/g of the
    bytes each at once, and share the node's cards: every ring gets 1/g of their bandwidth. The two intra-node halves
    together cost as much as a ring all-reduce in the node. As in Jia et al., "Highly scalable deep learning training
    system with mixed-precision" (2018) and NCCL's multi-rail rings.
    """
    g = cluster.workers_per_node
    within = ring_seconds(g, nbytes, cluster.intra, cluster.intra_latency)
    return within + ring_seconds(cluster.nodes, nbytes / g, cluster.inter / g, cluster.latency)


def tree_of_nodes_seconds(cluster: Cluster, nbytes: float) -> float:
    """A double binary tree of nodes with a chain of workers in each, as NCCL's: both pipelined into one another."""
    g = cluster.workers_per_node
    if cluster.nodes == 1:
        return tree_seconds(g, nbytes, cluster.intra, cluster.intra_latency)
    between = tree_seconds(cluster.nodes, nbytes, cluster.inter)
    within = 2 * nbytes / cluster.intra if g > 1 else 0.0
    hops = 2 * (math.ceil(math.log2(cluster.nodes)) * cluster.latency + (g - 1) * cluster.intra_latency)
    return max(between, within) + hops


def flat_ring_seconds(cluster: Cluster, nbytes: float) -> float:
    """One ring through all workers: the pace is that of its slowest hop, which leaves a node if there are several."""
    hops = [(cluster.inter, cluster.latency)] if cluster.nodes > 1 else []
    if cluster.workers_per_node > 1:
        hops.append((cluster.intra, cluster.intra_latency))
    return ring_seconds(cluster.workers, nbytes, min(b for b, _ in hops), max(s for _, s in hops))


def allreduce_seconds(cluster: Cluster, nbytes: float, algorithm: Algorithm) -> float:
    """Seconds of one all-reduce of `nbytes` over all workers, its fixed overhead included; 0 for a lone worker."""
    if cluster.workers == 1:
        return 0.0
    formulas = {"ring": flat_ring_seconds, "tree": tree_of_nodes_seconds, "hierarchical": hierarchical_seconds}
    return cluster.overhead + formulas[algorithm](cluster, nbytes)


def fastest(cluster: Cluster, nbytes: float) -> Algorithm:
    """The algorithm that takes least; the first of ALGORITHMS among equals."""
    return min(ALGORITHMS, key=lambda algorithm: allreduce_seconds(cluster, nbytes, algorithm))


@dataclass(frozen=True)
class Preset:
    """A cluster, and which of its numbers are ours: `facts` names those that the CO2 paper or the name states."""

    cluster: Cluster
    facts: tuple[str, ...]


_SHAPE = ("nodes", "workers_per_node")
# 600 GB/s of NVSwitch are both directions together: 2400 Gbit/s each way.
_DGX = Cluster(16, 8, 800.0, 2400.0, latency=10e-6, intra_latency=3e-6, efficiency=0.8, overhead=50e-6)
_INTERNET = Cluster(1000, 1, 1.0, latency=50e-3, efficiency=0.8, overhead=0.1)
PRESETS = {
    "dgx-a100-roce": Preset(_DGX, (*_SHAPE, "inter_gbps", "intra_gbps")),
    "dgx-a100-tcp": Preset(
        dataclasses.replace(_DGX, inter_gbps=80.0, latency=50e-6), (*_SHAPE, "inter_gbps", "intra_gbps")
    ),
    "rtx3090": Preset(Cluster(10, 8, 10.0, 100.0, 50e-6, 5e-6, efficiency=0.8, overhead=50e-6), _SHAPE),
    "internet-1000": Preset(_INTERNET, (*_SHAPE, "inter_gbps")),
    "internet-10000": Preset(dataclasses.replace(_INTERNET, nodes=10_000), (*_SHAPE, "inter_gbps")),
}


def preset(name: str) -> Preset:
    """The preset of that name; else a UserError."""
    return find("preset", name, PRESETS, f"choose one of {', '.join(PRESETS)}")
