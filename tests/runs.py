"""Runs of small models, a step at a time, and what their folders say."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from core import CO2Config
from training.loop.progress import Actions
from training.loop.run import Run
from training.optim import OptimConfig, make_optimizer, make_schedule
from training.recipe import Recipe


@dataclass(frozen=True)
class Plain(Recipe):
    """A recipe of a test."""

    name: str = "toy"
    device: Any = "cpu"


@dataclass(frozen=True)
class Toy(Plain):
    """Rounds of three steps, a logged line every four."""

    co2: CO2Config = CO2Config(tau=3)
    optim: OptimConfig = OptimConfig("adamw", lr=0.01, warmup_steps=8)
    batch_size: int = 12
    log_every: int = 4
    checkpoint_every: Any = 0


class Loop:
    """A train script's loop, a step at a time. Attributes: start, the steps that were taken before; and its parts.

    epoch: steps between evaluations and checkpoints; the whole run's by default. samples: of the data, of elastic runs.
    """

    def __init__(self, run: Run, model: nn.Module, total: int, epoch: int | None = None, samples: int = 0):
        self.run, self.model = run, run.shard(model)
        self.optimizer = run.shard_optimizer(make_optimizer(self.model, run.recipe.optim))
        self.schedule = make_schedule(self.optimizer, total, run.recipe.optim)
        self.wrapped, self.method = run.make_method(self.model, self.optimizer)
        parts = self.model, self.optimizer, self.schedule, self.method
        self.start = run.begin(*parts, epoch=epoch or total, total=total, samples=samples)

    def step(self, loss: Tensor, **how: Any) -> Actions:
        """loss: without a gradient nothing is trained. how: what the method's step is told."""
        if loss.requires_grad:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return self.run.after_step(self.method.step(**how), train_loss=loss)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics.jsonl; none before it is there."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def logged(folder: Path, name: str = "train_loss") -> list[Any]:
    """What its lines have of that name."""
    return [row[name] for row in rows(folder) if name in row]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
