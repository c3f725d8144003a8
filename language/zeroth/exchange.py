"""The settings, who measures what, and how the measured losses reach all workers: a few float64 numbers each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from core.config import is_number, require
from core.errors import CollectiveError, UserError
from core.groups import new_group
from core.robust import peers
from core.testing.link import Link

NUMBERS = 3  # (sum of the samples' losses at W + eps z, the same at W - eps z, samples)


@dataclass(frozen=True)
class ZerothConfig:
    """Two forward passes a step, at W + eps z and W - eps z, and W <- W - lr (g z + weight_decay W)."""

    eps: float = 1e-3
    """How far the weights are moved along z to measure the slope; MeZO's."""
    weight_decay: float = 0.0
    """Of matrices, embeddings among them; not of biases and norms, which are vectors."""
    seed: int = 0
    """Of z, which depends on (seed, step, tensor, place in it) and nothing else."""
    pairs: bool | None = None
    """Two ranks (2 i and 2 i + 1) take the same data, one at W + eps z, one at W - eps z. None: where the number of
    workers is even. Otherwise every worker does both."""
    rng: Literal["device", "host"] = "device"
    """Where z is drawn. Devices of different kinds draw different numbers: workers that mix them need host."""

    def __post_init__(self) -> None:
        require(self, is_number(self.eps) and 0 < self.eps < math.inf, "eps", "give a number above 0, such as 1e-3")
        decays = is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf
        require(self, decays, "weight_decay", "give 0 or more")
        seeds = type(self.seed) is int and 0 <= self.seed < 1 << 63
        require(self, seeds, "seed", "give a whole number from 0 to 2^63 - 1")
        require(self, self.pairs in (None, True, False), "pairs", "give True, False or None")
        require(self, self.rng in ("device", "host"), "rng", "choose device or host")


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
        """The mean losses at W + eps z and W - eps z, from each worker's numbers: the same bits on all workers.

        nan where a loss was not finite, or there was no sample.
        """
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


def exchange(
    row: list[float], step: int, group: dist.ProcessGroup | None, link: Link | None
) -> tuple[list[list[float]], int, float]:
    """Every worker's numbers, in rank order; the bytes that this worker sent; the seconds that it waited.

    gloo's all-to-all takes one hop, its all-gather n - 1, its all-reduce 2 (n - 1).
    """
    if group is None:
        return [row], 0, 0.0
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
            f"rank {dist.get_rank()}: the scalars of step {step} did not come; {peers.gone()}: {reason}"
        ) from None
    time.sleep(max(0.0, ready_at - time.perf_counter()))
    return received.tolist(), bytes_sent, time.perf_counter() - began


def own_group(timeout: float) -> dist.ProcessGroup | None:
    """All workers in a gloo group for scalars alone, whose members find out who has failed."""
    made = new_group(None, timeout, torch.device("cpu"), backend="gloo")
    peers.meet(made)
    return made
