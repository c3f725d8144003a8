"""Who measures what, and how the measured losses reach all workers: a few float64 numbers each, in one hop."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from core.errors import CollectiveError, UserError
from core.groups import new_group
from core.robust import peers
from core.testing.link import Link

from .config import ZerothConfig

NUMBERS = 3  # (sum of the samples' losses at W + eps z, the same at W - eps z, samples)


@dataclass(frozen=True)
class Place:
    """What worker `rank` of `workers` measures, on a mesh [data groups, 2 if `pairs` else 1]."""

    rank: int
    workers: int
    pairs: bool

    @classmethod
    def make(cls, rank: int, workers: int, config: ZerothConfig) -> Place:
        """UserError where the workers cannot be shared out."""
        pairs = workers % 2 == 0 if config.pairs is None else config.pairs
        if pairs and workers % 2:
            raise UserError(
                f"pairs=True with {workers} worker{'s' * (workers > 1)}: a pair is two, start an even number of them, "
                "or leave pairs out"
            )
        return cls(rank, workers, pairs)

    @property
    def data_workers(self) -> int:
        """How many groups have data of their own."""
        return self.workers // 2 if self.pairs else self.workers

    @property
    def data_rank(self) -> int:
        """Which of these this worker is in: both of a pair must be given the same batches."""
        return self.rank // 2 if self.pairs else self.rank

    @property
    def signs(self) -> tuple[int, ...]:
        """Of eps z."""
        return (1 - 2 * (self.rank % 2),) if self.pairs else (1, -1)

    def combine(self, rows: Sequence[Sequence[float]]) -> tuple[float, float]:
        """The mean losses over all samples at W + eps z and at W - eps z, from what each worker has sent, in rank
        order: the same bits on all workers. nan where a loss was not finite, or there was no sample."""
        sums, samples = [0.0, 0.0], [0.0, 0.0]
        for rank, (*losses, count) in enumerate(row[:NUMBERS] for row in rows):
            for side in ((1 - sign) // 2 for sign in Place(rank, self.workers, self.pairs).signs):
                sums[side] += losses[side]
                samples[side] += count
        for plus in range(0, self.workers, 2) if self.pairs else ():
            own, other = (rows[rank][NUMBERS - 1] for rank in (plus, plus + 1))
            if own != other:
                raise UserError(
                    f"rank {plus} had {own:g} samples and rank {plus + 1} {other:g}: a pair takes the same batch; deal "
                    "data out by data_rank and data_workers"
                )
        plus, minus = (s / n if n else math.nan for s, n in zip(sums, samples, strict=True))
        return plus, minus


class Exchanged(NamedTuple):
    """rows: every worker's numbers, in rank order. bytes_sent: by this worker. seconds: that it waited."""

    rows: list[list[float]]
    bytes_sent: int
    seconds: float


def exchange(row: list[float], step: int, group: dist.ProcessGroup | None, link: Link | None) -> Exchanged:
    """Sends this worker's numbers to all others, and receives theirs.

    By all-to-all: gloo sends directly to each worker and receives from each, which is one hop, where its all-gather and
    its all-reduce pass numbers on around a ring, in n - 1 and 2 (n - 1).
    """
    if group is None:
        return Exchanged([row], 0, 0.0)
    began, workers = time.perf_counter(), dist.get_world_size(group)
    sent = torch.tensor([row] * workers, dtype=torch.float64)
    received = torch.empty_like(sent)
    bytes_sent = (workers - 1) * 8 * len(row)
    ready_at = link.reserve(bytes_sent) if link else 0.0
    try:
        dist.all_to_all_single(received, sent, group=group)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CollectiveError(
            f"rank {dist.get_rank()}: the scalars of step {step} did not come; {peers.who(peers.find())}: {reason}"
        ) from None
    time.sleep(max(0.0, ready_at - time.perf_counter()))
    return Exchanged(received.tolist(), bytes_sent, time.perf_counter() - began)


def own_group(timeout: float) -> dist.ProcessGroup | None:
    """All workers in a gloo group for scalars alone, whose members can tell who of them is gone."""
    made = new_group(None, timeout, torch.device("cpu"), backend="gloo")
    peers.meet(made)
    return made
