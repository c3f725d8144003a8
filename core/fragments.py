"""Fragments in turn: the parameters are cut into parts whose all-reduces follow each other within a round.

An average is late by the local steps of its all-reduce. An all-reduce of a part is short, so its average is fresh,
while a round sends the same bytes. Streaming DiLoCo (Douillard et al., 2025) had this idea first.

Fragment i of F starts its all-reduce i tau / F local steps into the round, and is merged when it arrives. One
all-reduce is in flight at a time. If it is late, the next one starts later; at the boundary a worker waits for what is
left. Fragment 0 starts at the boundary, and carries buffers and scalars. The other fragments carry how many workers
count, and for how many local steps.

Fragments are slices of a worker's flat tensors, in the parameters' order, so another number of fragments moves nothing.
On a node, fragment i is the i-th slice of each rank's share (shares.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from . import outer
from .buckets import Bucket, BucketShare
from .comm import Reducer

UNIT = 128  # elements: large fragments begin at its multiples, so that blocks of a narrow format are whole


@dataclass
class Fragment:
    """A slice of each payload.

    Attributes:
        parts: The parts of the buckets that the all-reduce sends.
        outer_steps: Steps 3 to 7 on the slices.
        directions: The slices of the last step under Nesterov momentum with a gap.
        reducer: Reduces the parts.
        lag: Local steps from the start of its last all-reduce to the last boundary; negative if it has started since.
        held: The method's numbers that belong to this fragment, by attribute, while another fragment is current.
    """

    parts: Sequence[Bucket | BucketShare]
    outer_steps: list[outer.OuterStep]
    directions: list[Tensor]
    reducer: Reducer
    lag: int = 0
    held: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        self.payloads = [part.payload for part in self.parts]
        self.numel = sum(part.numel for part in self.parts)


def slices(numel: int, count: int, multiple: int = 1) -> list[slice]:
    """Returns `count` slices of about equal lengths that cover `numel` elements, and end at multiples of `multiple`."""
    unit = UNIT if multiple == 1 and numel >= 8 * count * UNIT else multiple
    ends = [min(numel, -(-numel * i // (count * unit)) * unit) for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def slices_alike(sizes: Sequence[tuple[int, int]], count: int) -> list[slice]:
    """Returns slices of tensors that the ranks of a node shard. All ranks cut a tensor that all hold at one element.

    Args:
        sizes: Each tensor's elements on this rank, and on all ranks.
        count: Number of slices.
    """
    starts, ends = [*accumulate((whole for _, whole in sizes), initial=0)], [0]
    for cut in slices(starts[-1], count):  # of the whole tensors
        reached = (min(max(cut.stop - start, 0), whole) for start, (_, whole) in zip(starts, sizes, strict=False))
        ends.append(sum(-(-own * n // max(1, whole)) for n, (own, whole) in zip(reached, sizes, strict=True)))
    return [slice(a, b) for a, b in pairwise(ends)]
