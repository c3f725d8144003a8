"""Whether workers that should be equal are: checksums of a few bits, which travel with every reduction.

Workers exchange differences only, so nothing brings replicas together again that have drifted apart: machines with
another number of threads, or of another kind, add in another order, and round otherwise in the last bit.

Each worker sends a checksum c and c^2. All workers have the same c exactly if n sum(c^2) = (sum c)^2, which all of them
find alike, for all got the same sums. The sums are exact in float32, since a checksum has few bits: a difference is
overlooked once in 2^bits times, and seen in one of the next rounds, if it lasts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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


def agree(sums: Sequence[float], workers: int) -> bool:
    """Whether all workers sent the same pair; sums: [2], over the workers."""
    return round(workers * round(sums[1])) == round(sums[0]) ** 2


def bits(workers: int) -> int:
    """Of a checksum: as many as leave the sum of the squares below 2^20, and at least one."""
    return max(1, (20 - (workers - 1).bit_length()) // 2)
