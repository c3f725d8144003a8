"""Assigns the documents of a step to ranks of an island, each to the smallest ring that meets a deadline.

Attention costs the square of a document's length, and the rest of the model costs its length. On a ring of g ranks each
rank has a g-th of both, and g - 1 hops during computation. So most documents are best whole, and a document that is too
long for one rank is split over few ranks. Zeppelin has this idea (whole, inside a node, across nodes), with thresholds
that we do not have. We search by bisection for the smallest deadline that all documents meet.

    rings = plan(documents, island)         # documents: cumulative lengths, int64 [documents + 1]
    shares = Shares(documents, rings)       # of language/lengths/ring.py

Every rank computes the same plan from the same arguments, so all sums are Python's, in one order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

Ring = tuple[int, ...]
Load = tuple[float, float, float]  # seconds of attention, seconds of hops, tokens
GRAIN = 0.01  # share of a device's work: documents that cost less stay whole
TRIALS = 6  # halvings of the interval that contains the deadline


@dataclass(frozen=True)
class Island:
    """Nodes of equal devices, and the seconds of one layer, forward and backward.

    Attributes:
        nodes: The number of nodes.
        devices: Devices per node.
        attention: Seconds of attention per squared token of a document.
        linear: Seconds of the rest per token.
        inside: Seconds of a hop inside a node, fixed and per token sent.
        across: The same for a ring over several nodes.
    """

    nodes: int
    devices: int
    attention: float
    linear: float
    inside: tuple[float, float]
    across: tuple[float, float]

    @property
    def size(self) -> int:
        return self.nodes * self.devices

    def whole(self, length: int) -> float:
        """Seconds of a document on one device."""
        return self.attention * length**2 + self.linear * length

    def crosses(self, ring: Ring) -> bool:
        """Whether a ring spans several nodes."""
        return min(ring) // self.devices != max(ring) // self.devices

    def share(self, length: int, ring: Ring) -> Load:
        """The load of a document on each device of its ring. Zigzag chunks make these loads equal."""
        g, (latency, token) = len(ring), self.across if self.crosses(ring) else self.inside
        return self.attention * length**2 / g, (g - 1) * (latency + token * length / g), length / g


class Loads:
    """The load of each device so far.

    Attributes:
        work: Seconds of attention.
        hops: Seconds of hops, which run during attention.
        tokens: Tokens.
        busy: Seconds in all.
    """

    def __init__(self, island: Island):
        self.island = island
        self.work, self.hops, self.tokens, self.busy = ([0.0] * island.size for _ in range(4))

    def after(self, ring: Ring, load: Load) -> float:
        """Busy seconds of a ring's busiest device after adding a load."""
        work, hops, tokens = load
        return max(
            max(self.work[device] + work, self.hops[device] + hops)
            + self.island.linear * (self.tokens[device] + tokens)
            for device in ring
        )

    def add(self, ring: Ring, load: Load) -> None:
        """Adds a load to each device of a ring."""
        work, hops, tokens = load
        for device in ring:
            self.work[device] += work
            self.hops[device] += hops
            self.tokens[device] += tokens
            self.busy[device] = max(self.work[device], self.hops[device]) + self.island.linear * self.tokens[device]


def layer_seconds(lengths: Sequence[int], rings: Sequence[Ring], island: Island) -> float:
    """Seconds of one layer on the busiest device, forward and backward, by this cost model."""
    loads = Loads(island)
    for length, ring in zip(lengths, rings, strict=True):
        loads.add(ring, island.share(length, ring))
    return max(loads.busy)


def plan(documents: Tensor, island: Island) -> list[Ring]:
    """Assigns a ring to each document, from their cumulative lengths, int64 [documents + 1].

    Returns:
        For each document the ranks that hold it. A rank may get no token.
    """
    lengths = documents.diff().tolist()
    bound = least_seconds(lengths, island)
    low, high = bound, bound * (1 + GRAIN / 2)
    while (best := placed(high, lengths, island)) is None:
        low, high = high, high * 1.2
    enough = (1 + GRAIN) * bound
    for _ in range(TRIALS if layer_seconds(lengths, best, island) > enough else 0):
        middle = (low + high) / 2
        if (rings := placed(middle, lengths, island)) is None:
            low = middle
        else:
            high, best = middle, min(best, rings, key=lambda r: layer_seconds(lengths, r, island))
    return best


def least_seconds(lengths: Sequence[int], island: Island) -> float:
    """A lower bound: an even share of the work, or the longest document on its best ring."""
    share = sum(map(island.whole, lengths)) / island.size
    longest, alone = max(lengths, default=0), math.inf
    for g in range(1, island.size + 1):
        links = (island.inside, island.across) if g <= island.devices else (island.across,)
        hops = min((g - 1) * (latency + token * longest / g) for latency, token in links)
        alone = min(alone, max(island.attention * longest**2 / g, hops) + island.linear * longest / g)
    return max(share, alone, 1e-9)  # costs may all be 0


def placed(deadline: float, lengths: Sequence[int], island: Island) -> list[Ring] | None:
    """Puts each document, from the longest to the shortest, on the first ring that meets the deadline.

    Returns:
        Each document's ring. None if a document meets the deadline on no ring, or is too cheap to be split.
    """
    loads, grain = Loads(island), GRAIN * sum(map(island.whole, lengths)) / island.size
    rings: list[Ring] = [()] * len(lengths)
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        for ring in candidates(loads):
            if len(ring) > 1 and island.whole(length) < grain:
                return None
            load = island.share(length, ring)
            if loads.after(ring, load) <= deadline:
                break
        else:
            return None
        loads.add(ring, load)
        rings[number] = ring
    return rings


def candidates(loads: Loads) -> Iterator[Ring]:
    """Rings to try: the least busy device, then 2, 3, ... devices of the least busy node, then of all nodes."""
    island, busy = loads.island, loads.busy
    yield (busy.index(min(busy)),)
    order = sorted(range(island.size), key=busy.__getitem__)
    nodes = [[d for d in order if d // island.devices == node] for node in range(island.nodes)]
    for g in range(2, island.devices + 1):
        best = min(nodes, key=lambda node: busy[node[g - 1]])  # noqa: B023, used at once
        yield tuple(sorted(best[:g]))
    for g in range(2, island.size + 1):
        if island.crosses(ring := tuple(sorted(order[:g]))):
            yield ring
