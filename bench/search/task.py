"""What a task of bench.search is: data in three parts (training, tuning, test), a model, an inner optimiser.

Every task fits in memory and draws a batch as a pure function of (seed, step), for all workers at once. No model has a
BatchNorm: under vmap its running statistics cannot be updated in place, so GroupNorm stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench.search.inner import Inner
from core.errors import UserError
from training.sampling import generator

Split = Literal["tuning", "test"]
Shards = Literal["iid", "sorted"]
SHARDS: tuple[Shards, ...] = ("iid", "sorted")
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A model with its data. Inputs and targets of a step: [workers, batch, ...] each."""

    name: str
    about: str
    """For the report."""
    build: Callable[[], nn.Module]
    """The model, its weights drawn from torch's default generator."""
    loss: Callable[[Any, Tensor], Tensor]
    """(outputs, targets) -> 0-d mean."""
    draw: Callable[[int, int, int, int, Shards], Batch]
    """(seed, step, workers, batch, shards) -> the workers' batches. sorted: worker i draws from the i-th of as many
    equal parts of the training set, sorted by label or, of a text, as it is: other books."""
    held_out: Mapping[Split, Batch]
    """Inputs and targets, [n, ...] each."""
    inner: Inner
    """The inner optimiser; its lr is what the search multiplies."""
    batch: int
    """Samples per worker and step."""


def stacked_draw(
    inputs: Tensor, targets: Tensor, labels: Tensor | None = None
) -> Callable[[int, int, int, int, Shards], Batch]:
    """`draw` of a set, with replacement. inputs, targets: [n, ...]; labels: int64 [n], by which shards are sorted; the
    targets by default."""
    by_label = (targets if labels is None else labels).argsort(stable=True)

    def draw(seed: int, step: int, workers: int, batch: int, shards: Shards) -> Batch:
        at = places(len(inputs), seed, step, workers, batch, shards)
        index = by_label[at] if shards == "sorted" else at
        return inputs[index], targets[index]

    return draw


def places(n: int, seed: int, step: int, workers: int, batch: int, shards: Shards) -> Tensor:
    """Numbers below n, int64 [workers, batch]; sorted: those of worker i in the i-th of equal parts of range(n)."""
    rng = generator(seed, step)
    if shards == "iid":
        return torch.randint(n, (workers, batch), generator=rng)
    part = n // workers
    if not part:
        raise UserError(f"workers={workers}: the training set has {n} samples, too few for a part each; choose fewer")
    return torch.randint(part, (workers, batch), generator=rng) + part * torch.arange(workers)[:, None]


def without_batch_norm(model: nn.Module) -> nn.Module:
    """GroupNorm of 4 groups in place of every BatchNorm, in place."""
    for name, child in model.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            setattr(model, name, nn.GroupNorm(4, child.num_features))
        else:
            without_batch_norm(child)
    return model
