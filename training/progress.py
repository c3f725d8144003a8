"""Where a run stands: this worker's place in it, what its loop counts with, and the state of what it trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from core.adaptive.tau import Adaptive
from core.checkpoints.named import load_model, load_optimizer, of_optimizer
from core.checkpoints.snapshot import Snapshot
from core.methods import Method
from core.robust.requests import Requests
from core.rounds import Rounds
from training.recipe import Recipe
from training.workers import make_link, rank, world_size


class Progress:
    """What Run shares with the part of it that knows of other workers (training/fixed.py, training/elastic/run.py).

    Attributes: recipe; device; rank, world_size; step, how many have been taken; total, how many there are; clock;
    means of what is logged; evaluation, when one is due; link, an emulated slow one; data_rank, data_workers, among
    whom batches are dealt out: under a layout several ranks are one of them.
    """

    def __init__(self, recipe: Recipe, device: torch.device):
        self.recipe, self.device = recipe, device
        self.rank, self.world_size = self.data_rank, self.data_workers = rank(), world_size()
        self.step = self.total = 0
        self.clock = Stopwatch()
        self.means = Averages()
        self.evaluation = Every(0)
        self.link = make_link(recipe.link_mbit, device)
        self.requests, self.snapshots = Requests("stop", "save"), Snapshot()

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due at a boundary after so many steps."""
        return step < self.total and self.evaluation.would_be(step)


@dataclass(frozen=True)
class Due:
    """What a loop has to do after a step."""

    evaluation: bool
    checkpoint: bool
    stop: bool


class Every:
    """Says when something that happens every `period` steps is due, though it is asked at some steps only.

    period: 0 for never. start: the step that the run begins or resumes at.
    """

    def __init__(self, period: int, start: int = 0):
        self.period = period
        self._last = start

    def due(self, step: int) -> bool:
        """Whether a multiple of the period has been passed since the last step at which this was True."""
        due = self.would_be(step)
        self._last = step if due else self._last
        return due

    def would_be(self, step: int) -> bool:
        """`due`, which does not count as asked."""
        return self.period > 0 and step // self.period > self._last // self.period


class Timer:
    """Says when `minutes` have passed since it said so last, by this worker's clock; 0 for never."""

    clock = staticmethod(time.monotonic)  # seconds

    def __init__(self, minutes: float):
        self.minutes = minutes
        self.restart()

    def restart(self) -> None:
        self._since = self.clock()

    def due(self) -> bool:
        due = self.minutes > 0 and self.clock() - self._since >= 60 * self.minutes
        if due:
            self.restart()
        return due


class Averages:
    """Running means of scalars, kept on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, scalars: dict[str, Tensor]) -> None:
        """Adds one step's values, 0-d each, always the same names."""
        for name, value in scalars.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach().float()
        self._count += 1

    def pop(self) -> dict[str, Tensor]:
        """The means since the last pop."""
        means = {name: total / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._count = dict(state["sums"]), state["count"]


class Stopwatch:
    """Measures the seconds of training, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None  # the start of the stretch that runs

    @property
    def seconds(self) -> float:
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self, seconds: float = 0.0) -> None:
        """Goes on from `seconds`, those of the run that is resumed."""
        self._seconds, self._since = seconds, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time of the block."""
        self._seconds, self._since = self.seconds, None
        try:
            yield
        finally:
            self._since = time.perf_counter()


# -- what is trained --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """The model, and what trains it: the parts of a checkpoint. What goes along with the method's reductions, requests
    and snapshots, is asked here and nowhere else."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    method: Method
    name: str  # the method's
    requests: Requests
    snapshots: Snapshot

    def state_dict(self) -> dict[str, Any]:
        """Without the method's part, which may come later: see state_of_method."""
        return {
            "model": self.model.state_dict(),
            "optimizer": of_optimizer(self.optimizer, self.model),
            "schedule": self.schedule.state_dict(),
        }

    def state_of_method(self, state: dict[str, Any]) -> dict[str, Any]:
        """The method's part. state: its state_dict."""
        return {"method": {"name": self.name, "state": state}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores both."""
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, self.model, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.method.load_state_dict(state["method"]["state"])

    def snapshot(self, then: Callable[[dict[str, Any]], None]) -> None:
        """Calls `then` with the method's state, once what is in flight has landed."""
        if isinstance(self.method, Rounds):
            self.snapshots.ask(then)
        else:
            then(self.method.state_dict())

    def hand_over(self) -> None:
        """Lets a snapshot that still waits have what there is."""
        if isinstance(self.method, Rounds):
            self.snapshots.hand_over()


def pacing_of(method: Method) -> Adaptive | None:
    """What tells of tau auto's decisions; None where a method has no rounds."""
    pacing = method.pacing if isinstance(method, Rounds) else None
    return pacing if isinstance(pacing, Adaptive) else None


def names_of(method: Rounds, model: nn.Module) -> dict[int, str]:
    """id -> the name in the model, of each parameter that the method trains."""
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return {id(p): name for p, name in zip(method.params, trained, strict=True)}
