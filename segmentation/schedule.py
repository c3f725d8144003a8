"""The polynomial learning-rate decay that semantic segmentation uses, beside core's schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from core import UserError
from training import optim


@dataclass(frozen=True)
class PolyOptimConfig(optim.OptimConfig):
    """core's OptimConfig with one schedule more."""

    schedule: Literal["poly", "cosine", "inverse_sqrt", "constant"] = "poly"  # type: ignore[assignment]
    power: float = 1.0
    """Of poly: 0.9 is usual for SGD, 1.0 (linear) for AdamW."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.power > 0:
            raise UserError(f"optim power={self.power}: give a number above 0")


def lr_factor(step: int, total_steps: int, config: PolyOptimConfig) -> float:
    """The learning rate of 0-based `step` as a share of the peak: core's, or from 1 down to min_lr_share by `power`."""
    if config.schedule != "poly" or step < config.warmup_steps:
        return optim.lr_factor(step, total_steps, config)
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    return config.min_lr_share + (1 - config.min_lr_share) * (1 - progress) ** config.power


def make_schedule(
    optimizer: torch.optim.Optimizer, total_steps: int, config: PolyOptimConfig
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule as a torch scheduler: call its step() after every optimiser step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total_steps, config))
