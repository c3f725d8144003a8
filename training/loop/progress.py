"""The progress of a run: this worker's place in it, its counters, and the state of what it trains."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from core.baselines.table import Method
from core.checkpoint.runs import Snapshot, load_model, load_optimizer, of_optimizer
from core.groups import host_group
from core.hooks import Requests
from core.local_update import LocalUpdateMethod
from training.counters import Averages, Period, Stopwatch
from training.recipe import Recipe
from training.start.workers import has_bfloat16, make_link, rank, world_size


class Progress:
    """The state that Run shares with its part for other workers (training/loop/static_run.py, training/elastic.py).

    Under a layout several ranks count as one of the data_workers. `step` of `total` steps are taken.
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
        total = values.cpu()
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


@dataclass(frozen=True)
class TrainState:
    """The model and all that trains it, the parts of a checkpoint. `extra` has more objects with a state, by name."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    method: Method
    name: str
    snapshots: Snapshot
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> dict[str, type]:
        """The keys of a checkpoint that load_state_dict reads, with the types of their values."""
        return dict.fromkeys(("model", "optimizer", "schedule", "method", *self.extra), dict)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state without the method's part, which may come later (state_of_method)."""
        return {
            "model": self.model.state_dict(),
            "optimizer": of_optimizer(self.optimizer, self.model),
            "schedule": self.schedule.state_dict(),
        } | {name: part.state_dict() for name, part in self.extra.items()}

    def state_of_method(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"method": {"name": self.name, "state": state}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, self.model, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.method.load_state_dict(state["method"]["state"])
        for name, part in self.extra.items():
            part.load_state_dict(state[name])

    def snapshot(self, then: Callable[[dict[str, Any]], None]) -> None:
        """Calls `then` with the method's state, once the all-reduce in flight has arrived."""
        if isinstance(self.method, LocalUpdateMethod):
            self.snapshots.ask(then)
        else:
            then(self.method.state_dict())

    def hand_over(self) -> None:
        """Completes a snapshot that is still waiting with the present state."""
        if isinstance(self.method, LocalUpdateMethod):
            self.snapshots.hand_over()
