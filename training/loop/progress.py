"""The progress of a run: this worker's place in it and its counters, which an evaluation has too."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.checkpoint.runs import Snapshot
from core.groups import host_group
from core.hooks import Requests
from training.counters import Averages, Period, Stopwatch
from training.recipe import Recipe
from training.start.workers import has_bfloat16, make_link, rank, world_size


class Progress:
    """This worker's place in a run. `step` of `total` steps are taken.

    Under a layout several ranks count as one of the data_workers.
    """

    def __init__(self, recipe: Recipe, device: torch.device):
        self.recipe, self.device = recipe, device
        self.rank, self.world_size = self.data_rank, self.data_workers = rank(), world_size()
        self.step = self.total = 0
        self.clock = Stopwatch()
        self.means = Averages()
        self.evaluation = Period(0)
        self.link = make_link(recipe.link_mbit, device)
        self.scaler = torch.amp.GradScaler(device.type) if recipe.precision == "float16" else None
        by_time = recipe.interval("eval_every", 1)[1] > 0
        self.requests, self.snapshots = Requests("stop", "save", *["evaluate"] * by_time), Snapshot()

    @property
    def draws(self) -> bool:
        """Whether an evaluation on this worker shows samples in TensorBoard."""
        return self.rank == 0

    @property
    def eval_batch(self) -> int:
        """Samples that a worker evaluates at once, as many as in a micro-batch."""
        return max(1, self.recipe.batch_size // self.data_workers // self.recipe.accumulate)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Returns autocast to the recipe's precision if the device supports it."""
        kind = getattr(torch, self.recipe.precision)
        return torch.autocast(self.device.type, kind) if self._mixed() else contextlib.nullcontext()

    def _mixed(self) -> bool:
        if self.recipe.precision == "float16":
            return self.device.type == "cuda"
        return self.recipe.precision == "bfloat16" and has_bfloat16(self.device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss for the backward pass, which float16 scales."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def sum(self, *values: float | Tensor) -> list[float]:
        """Returns the sums over all workers, in float64. Every worker must call it."""
        mine = torch.tensor([float(v) for v in values], dtype=torch.float64, device=self.device)
        return self.sum_tensor(mine).tolist()

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Returns the sum over all workers, in the host's memory. Every worker must call it."""
        return self._sum(values.cpu())

    def _sum(self, total: Tensor) -> Tensor:
        if dist.is_initialized():
            dist.all_reduce(total, group=host_group())
        return total

    def evaluates(self, step: int) -> bool:
        """Returns whether an evaluation is due at a boundary after `step` steps."""
        return step < self.total and self.evaluation.would_be(step)


@dataclass(frozen=True)
class Actions:
    """The actions that a loop has to take after a step."""

    evaluation: bool
    checkpoint: bool
    stop: bool
