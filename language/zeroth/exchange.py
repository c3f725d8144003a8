"""Who measures what, and how the measured losses reach all workers: a few float64 numbers each, in one hop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from core.errors import CollectiveError, UserError
from core.groups import new_group
from core.robust import peers
from core.testing.link import Link
from .config import ZerothConfig

NUMBERS = 3  # of a direction: (sum of the samples' losses at W + eps z, the same at W - eps z, samples)


@dataclass(frozen=True)
class Place:
    """What worker `rank` of `workers` measures, on a mesh [data groups, 2 if `pairs` else 1]."""

    rank: int
    workers: int
    pairs: bool
    directions: int

    @classmethod
    def make(cls, rank: int, workers: int, config: ZerothConfig) -> Place:
        """UserError where the workers cannot be shared out."""
        pairs = workers % 2 == 0 if config.pairs is None else config.pairs
        if pairs and workers % 2:
            raise UserError(
                f"pairs=True with {workers} worker{'s' * (workers > 1)}: a pair is two, start an even number of them, "
                "or leave pairs out"
            )
        place = cls(rank, workers, pairs, config.directions)
        groups = place.data_workers
        if config.directions % groups and groups % config.directions:
            raise UserError(
                f"directions={config.directions} over {groups} groups of workers with data of their own: give a "
                f"divisor or a multiple of {groups}"
            )
        return place

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

    @property
    def mine(self) -> range:
        """The directions that it measures."""
        each, shared = divmod(self.directions, self.data_workers)
        if shared:  # fewer directions than groups
            number = self.data_rank * self.directions // self.data_workers
            return range(number, number + 1)
        return range(self.data_rank * each, (self.data_rank + 1) * each)

    def combine(self, rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean losses over all samples at W + eps z and at W - eps z of each direction, from what each worker has
        sent, in rank order: the same bits on all workers. nan where a loss was not finite, or there was no sample."""
        sums = [[0.0, 0.0] for _ in range(self.directions)]
        samples = [[0.0, 0.0] for _ in range(self.directions)]
        places = [Place(rank, self.workers, self.pairs, self.directions) for rank in range(self.workers)]
        for place, row in zip(places, rows, strict=True):
            for slot, direction in enumerate(place.mine):
                *losses, count = row[NUMBERS * slot : NUMBERS * (slot + 1)]
                for side in ((1 - sign) // 2 for sign in place.signs):
                    sums[direction][side] += losses[side]
                    samples[direction][side] += count
        for plus in range(0, self.workers, 2) if self.pairs else ():
            own, other = (rows[rank][NUMBERS - 1] for rank in (plus, plus + 1))
            if own != other:
                raise UserError(
                    f"rank {plus} had {own:g} samples and rank {plus + 1} {other:g}: a pair takes the same batch; deal "
                    "data out by data_rank and data_workers"
                )
        plus, minus = (
            tuple(s[side] / n[side] if n[side] else float("nan") for s, n in zip(sums, samples, strict=True))
            for side in (0, 1)
        )
        return plus, minus


def own_group(timeout: float) -> dist.ProcessGroup | None:
    """All workers in a gloo group for scalars alone, whose members can tell who of them is gone."""
    made = new_group(None, timeout, torch.device("cpu"), backend="gloo")
    peers.meet(made)
    return made


class Exchange:
    """One worker's numbers on their way to all others, and theirs on the way here.

    By all-to-all: gloo sends directly to each worker and receives from each, which is one hop, where its all-gather and
    its all-reduce pass numbers on around a ring, in n - 1 and 2 (n - 1).
    """

    def __init__(self, row: list[float], group: dist.ProcessGroup | None, link: Link | None):
        self.bytes_sent = 0
        self.exposed_seconds = 0.0
        self._rows = [row]
        self._work: Any = None
        self.started = self.landed = time.perf_counter()
        if group is None:
            return
        workers = dist.get_world_size(group)
        self._sent = torch.tensor([row] * workers, dtype=torch.float64)
        self._received = torch.empty_like(self._sent)
        self.bytes_sent = (workers - 1) * 8 * len(row)
        self._ready_at = link.reserve(self.bytes_sent) if link else 0.0
        try:
            self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)
        except RuntimeError as error:  # another worker has left already
            raise _failure("the scalars cannot be sent", error) from None

    def wait(self, step: int) -> list[list[float]]:
        """Every worker's numbers, in rank order."""
        if self._work is not None:
            began = time.perf_counter()
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _failure(f"the scalars of step {step} did not come", error) from None
            finally:
                self._work = None
            time.sleep(max(0.0, self._ready_at - time.perf_counter()))
            self.landed = time.perf_counter()
            self.exposed_seconds = self.landed - began
            self._rows = self._received.tolist()
        return self._rows


def _failure(what: str, error: RuntimeError) -> CollectiveError:
    reason = str(error).strip().partition("\n")[0]
    return CollectiveError(f"rank {dist.get_rank()}: {what}; {peers.who(peers.find())}: {reason}")
