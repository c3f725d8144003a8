"""Checksums of what should be equal on all workers, in every reduction: settings, and replicas of the outer state.

Workers exchange differences only, so nothing brings replicas together again that have drifted apart: machines with
another number of threads, or of another kind, add in another order, and round otherwise in the last bit.

Each worker sends a checksum c and c^2. All workers have the same c exactly if n sum(c^2) = (sum c)^2, which all of them
find alike, for all got the same sums. The sums are exact in float32, since a checksum has few bits: a difference is
overlooked once in 2^bits times, and seen in one of the next rounds, if it lasts.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..groups import Stage, send_first
from ..rounds import Heard, Rider, Rounds

PARTS = 16  # a round looks at one part of so many: a quarter of a byte read a parameter
REPAIR_EVERY = 100  # rounds, at least, between two exact broadcasts: 2 % of the bytes of CO2


def checksum_of(settings: Any, workers: int) -> int:
    """c of any settings that print alike on all workers."""
    return zlib.crc32(repr(settings).encode()) % (1 << bits(workers))


def checksum(flats: Sequence[Tensor], number: int, workers: int) -> Tensor:
    """c, 0-d on the device of the first, of part `number` modulo PARTS of each 1-d float32 or float64 tensor.

    Integers are added, for which the order does not matter.
    """
    parts = [flat.view(torch.int32).tensor_split(PARTS)[number % PARTS] for flat in flats]
    sums = [part.sum(dtype=torch.int64).to(flats[0].device) for part in parts]
    return torch.stack(sums).sum() & ((1 << bits(workers)) - 1)


def equal(sums: Sequence[float], workers: int) -> bool:
    """Whether all workers sent the same pair; sums: [2], over the workers."""
    return round(workers * round(sums[1])) == round(sums[0]) ** 2


def bits(workers: int) -> int:
    """Of a checksum: as many as leave the sum of the squares below 2^20, and at least one."""
    return max(1, (20 - (workers - 1).bit_length()) // 2)


class Agreement(Rider):
    """Compares settings and replicas in every reduction. Settings that differ are refused, replicas repaired: rank 0's
    are sent to all."""

    shared = {"settings": 2, "replicas": 2}

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        self.restart()

    def restart(self) -> None:
        """As if replicas had never differed; every worker must come to it at the same point."""
        self._repair, self._repaired = False, -REPAIR_EVERY

    def others_came(self) -> None:
        self.restart()

    @property
    def _most(self) -> int:
        """How many checksums are ever summed."""
        return max(self.method.flight.most, self.method.everybody)

    def pack(self) -> None:
        m, most = self.method, self._most
        self._tell("settings", checksum_of(m.settings(), most))
        compared = m.replicas and m.turn is not None
        self._tell("replicas", checksum(m.replicas, m.turn or 0, most) if compared else 0)

    def _tell(self, name: str, c: int | Tensor) -> None:
        """c and c^2."""
        for place, value in zip(self.method.scalars[name], (c, c * c), strict=True):
            place.copy_(value) if isinstance(value, Tensor) else place.fill_(value)

    def stages(self) -> Iterator[Stage]:
        """The first worker's state for all, where replicas were found to differ."""
        m = self.method
        if self._repair and m.flight.group is not None:
            self._repair, self._repaired = False, m.flight.launched
            yield send_first(m.state.shared(), m.flight.group)

    def hear(self, sums: Mapping[str, Sequence[float]], of: Heard) -> None:
        m = self.method
        if not equal(sums["settings"], of.everybody):
            raise UserError(
                f"workers differ in their settings in round {of.round}, where this one has {m.settings()}: "
                "a schedule must give all of them the same, from the round's number alone"
            )
        alike = equal(sums["replicas"], of.workers)
        m.stats.drifted = float(not alike)
        if not alike:
            self._repair = m.flight.launched - self._repaired >= REPAIR_EVERY
            if self._repair and self._repaired < 0 and m.flight.rank == 0:
                warnings.warn(
                    f"the workers' outer state was not the same in round {of.round}, as on unlike machines: "
                    f"rank 0's is sent to all, at most once in {REPAIR_EVERY} rounds",
                    stacklevel=2,
                )

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        """What only as many workers could have alike is forgotten."""
        for name in self.shared if of_others else ():
            self.method.scalars[name].zero_()
