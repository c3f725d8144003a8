"""Fragments in turn: the parameters are cut into parts whose all-reduces follow each other within a round.

An average is late by the local steps of its all-reduce. An all-reduce of a part is short, so its average is fresh,
while a round sends the same bytes. Streaming DiLoCo (Douillard et al., 2025) had this idea first.

Fragment i of F starts its all-reduce i tau / F local steps into the round, and is merged when it arrives. One
all-reduce is in flight at a time. If it is late, the next one starts later; at the boundary a worker waits for what is
left. Fragment 0 starts at the boundary, and carries buffers and scalars. The others carry how many workers count, and
for how many local steps.

Fragments are slices of a worker's flat tensors, in the parameters' order, so another number of fragments moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
        parts: What the all-reduce sends.
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


def slices(numel: int, count: int) -> list[slice]:
    """Returns `count` slices of about equal lengths that cover `numel` elements."""
    unit = UNIT if numel >= 8 * count * UNIT else 1
    ends = [min(numel, -(-numel * i // (count * unit)) * unit) for i in range(count + 1)]
    return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
