"""wire auto: begins with the narrow format, and changes to what has been chosen from times that all have heard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch.distributed as dist
from torch import Tensor

from ..flat import Bucket, Scalars
from ..flight import Flight, Reducer
from ..groups import Stage
from .formats import Wire
from .quantized import Quantized, nothing_held_back


class AutoWire(Reducer):
    """A reducer that is one of several. kind: the format of what is sent first; `become`, which a Tuned calls before
    a launch, changes it."""

    changes = True

    def __init__(
        self,
        kind: str,
        error_feedback: bool,
        buckets: Sequence[Bucket],
        scalars: Scalars,
        flight: Flight,
    ):
        self._feeds_back = error_feedback
        self._buckets, self._scalars, self._flight = buckets, scalars, flight
        self.kind, self._now = "", cast(Reducer, None)
        self.become(kind)

    @property
    def scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._now.scale

    @property
    def state(self) -> dict[str, list[Tensor]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same keys and shapes over any wire."""
        if self._now.state or not self._feeds_back:
            return self._now.state
        return nothing_held_back(self._buckets, self._flight.world_size, "cpu")

    def become(self, kind: str) -> None:
        """What is sent from now on; nothing may be in flight. Error feedback begins with nothing held back; what the
        format before has held back goes along with the payload. On a GPU not in the background's stream: memory that
        is let go there would be used again while that stream still reads it."""
        if kind == self.kind:
            return
        if isinstance(self._now, Quantized):
            self._now.release()
        self.kind = kind
        if kind == "float32":
            self._now = Reducer([b.flat for b in self._buckets], self._flight.world_size)
        else:
            workers = self._flight.rank, self._flight.world_size
            self._now = Quantized(self._buckets, self._scalars, *workers, cast(Wire, kind), self._feeds_back)

    def stages(self, group: dist.ProcessGroup | None, number: int) -> Iterator[Stage]:
        yield from self._now.stages(group, number)
