"""What a task of bench.search is: data in three parts (training, tuning, test), a model, an inner optimiser.

Every task fits in memory and draws a batch as a pure function of (seed, step), for all workers at once. No model has a
BatchNorm: under vmap its running statistics cannot be updated in place, so GroupNorm stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from core.errors import UserError
from training.sampling import generator

Split = Literal["tuning", "test"]
Shards = Literal["iid", "sorted"]
Batch = tuple[Tensor, Tensor]
Matrix = tuple[slice, int, int]  # where it lies in a row of parameters; its rows and columns
MUON_MOMENTUM = 0.95  # torch's default
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Keller Jordan's coefficients, torch's default


# -- the inner optimiser, on stacked flat parameters: every worker has a row and a state of its own --------------------


@dataclass(frozen=True)
class Inner:
    """An inner optimiser. SGD has no weight decay. muon: torch.optim.Muon for `matrices`, AdamW for the rest."""

    name: Literal["sgd", "adamw", "muon"]
    lr: float
    """Peak learning rate."""
    momentum: float = 0.9
    """SGD's."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    """AdamW's, of all parameters."""
    clip: float | None = None
    """The norm to which each row's gradient is clipped; None for no clipping."""
    matrices: tuple[Matrix, ...] = ()
    """Muon's."""

    def start(self, x: Tensor) -> InnerState:
        return InnerState(self, torch.zeros_like(x), None if self.name == "sgd" else torch.zeros_like(x))


@dataclass
class InnerState:
    """An optimiser under way, with the formulas of torch.optim.SGD and AdamW. first, second: [workers, n]."""

    inner: Inner
    first: Tensor
    second: Tensor | None
    steps: int = 0

    def copy(self) -> InnerState:
        second = None if self.second is None else self.second.clone()
        return InnerState(self.inner, self.first.clone(), second, self.steps)

    def moments(self) -> list[tuple[Tensor, float]]:
        """What is kept from step to step, [workers, n] each, and the share of it that a step leaves."""
        if self.second is None:
            return [(self.first, self.inner.momentum)]
        return list(zip((self.first, self.second), self.inner.betas, strict=True))

    def step(self, x: Tensor, gradient: Tensor, lr: float) -> None:
        """Moves x in place. x, gradient: [workers, n]."""
        gradient = clip_rows(gradient, self.inner.clip)
        self.steps += 1
        if self.second is None:
            self.first.mul_(self.inner.momentum).add_(gradient)
            x.sub_(self.first, alpha=lr)
            return
        one, two = self.inner.betas
        before = [self.first[:, where].clone() for where, *_ in self.inner.matrices]
        x.mul_(1 - lr * self.inner.weight_decay)
        self.first.lerp_(gradient, 1 - one)
        self.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        root = (self.second.sqrt() / math.sqrt(1 - two**self.steps)).add_(1e-8)
        kept = [x[:, where].clone() for where, *_ in self.inner.matrices]
        x.addcdiv_(self.first, root, value=-lr / (1 - one**self.steps))
        for (where, *shape), momentum, values in zip(self.inner.matrices, before, kept, strict=True):
            self.first[:, where] = momentum.lerp_(gradient[:, where], 1 - MUON_MOMENTUM)
            nesterov = gradient[:, where].lerp(momentum, MUON_MOMENTUM)
            step = orthogonal(nesterov.view(-1, *shape)).flatten(1)
            x[:, where] = values.sub_(step, alpha=lr * 0.2 * math.sqrt(max(shape)))  # adjust_lr_fn="match_rms_adamw"


def orthogonal(matrices: Tensor) -> Tensor:
    """Muon's five steps of Newton and Schulz in bfloat16, [workers, rows, columns] each. torch's takes one matrix."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def matrices_inside(model: nn.Module, inside: str) -> tuple[Matrix, ...]:
    """The matrices among the parameters whose names begin with `inside`, as Muon takes them."""
    found, start = [], 0
    for name, p in model.named_parameters():
        if p.ndim == 2 and name.startswith(inside):
            found.append((slice(start, start + p.numel()), *p.shape))
        start += p.numel()
    return tuple(found)


def clip_rows(gradient: Tensor, limit: float | None) -> Tensor:
    """Each row at most of norm `limit`, as torch.nn.utils.clip_grad_norm_ does it."""
    if limit is None:
        return gradient
    return gradient * (limit / (gradient.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)


def cosine(step: float, total: float) -> float:
    """The learning rate of 0-based `step`, or after so many of `total` seconds, as a share of the peak."""
    return 0.5 * (1 + math.cos(math.pi * step / total))


# -- the task ---------------------------------------------------------------------------------------------------


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
