"""How the payload travels: here as in the paper, by one all-reduce of each flat tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from . import groups
from .flat import Bucket, Scalars
from .flight import Flight
from .groups import Stage


class Reducer:
    """Turns what the workers wrote into flat tensors into its sum or mean over them, in stages. Here one all-reduce of
    each flat tensor, in its own precision: sums land in it. A room's reducer derives from it, and sets all attributes.

    Attributes: kind, its name in a checkpoint; changes, whether it is one of several, and `become` makes it another;
    scale, by which what lands becomes means: 1 over the workers where sums land; state, what a checkpoint holds of it.
    """

    kind, changes = "float32", False

    def __init__(self, flats: Sequence[Tensor], world_size: int):
        self.flats, self.scale = flats, 1 / world_size
        self.state: dict[str, list[Tensor]] = {}

    def become(self, kind: str) -> None:
        """A checkpoint of that kind is loaded next. Only a reducer that is one of several changes."""

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        """One reduction, the `number`-th; group None: there is one worker. Keeps no reference to the group."""
        if group is not None:
            yield groups.all_reduce(self.flats, group)


def all_reduce(buckets: Sequence[Bucket], scalars: Scalars, flight: Flight) -> Reducer:
    """Each bucket's flat tensor is summed in its own precision."""
    return Reducer([b.flat for b in buckets], flight.world_size)
