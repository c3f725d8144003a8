"""How losses at perturbed weights are measured: the plain way, all on the device, and what any other way must do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from core.errors import UserError
from .replay import Update
from .weights import Weights

Loss = Callable[[nn.Module], Tensor | float]


class Forward(Protocol):
    """How losses at perturbed weights are measured, and where the weights lie meanwhile."""

    pending: list[Update]
    share: dist.ProcessGroup | None
    """The workers with whom this one must make equally many passes."""

    def losses(self, loss: Loss, step: int, direction: int, signs: tuple[int, ...]) -> list[Tensor | float]: ...
    def apply(self, update: Update) -> None: ...
    def flush(self) -> None: ...
    def inference(self) -> contextlib.AbstractContextManager[None]: ...


class ScratchCopy:
    """All weights on their device, and one copy of them, which is perturbed; updates at once."""

    def __init__(self, model: nn.Module, weights: Weights):
        self._model, self._weights = model, weights
        self._scratch = [torch.empty_like(p, requires_grad=False) for p in weights.params]
        self.pending: list[Update] = []  # always empty
        self.share: dist.ProcessGroup | None = None

    def losses(self, loss: Loss, step: int, direction: int, signs: tuple[int, ...]) -> list[Tensor | float]:
        """loss(model) at W + sign eps z for each sign."""
        found = []
        live = [p.data for p in self._weights.params]
        for sign in signs:
            for i, (w, scratch) in enumerate(zip(live, self._scratch, strict=True)):
                self._weights.perturb(i, w, scratch, step, direction, sign)
            try:
                for p, scratch in zip(self._weights.params, self._scratch, strict=True):
                    p.data = scratch
                found.append(loss(self._model))
            finally:
                for p, w in zip(self._weights.params, live, strict=True):
                    p.data = w
        return found

    def apply(self, update: Update) -> None:
        for i, p in enumerate(self._weights.params):
            self._weights.update(i, p.data, update)

    def flush(self) -> None:
        """Nothing is put off here."""

    def inference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be called, at W: as ever, here."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode, and autocast keeps no weights; after it as it was."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        with weights_uncached():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def weights_uncached() -> Iterator[None]:
    """Inside, autocast casts a weight whenever it is used: what it keeps goes by the parameter, whose data change."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def refuse_batch_norm(model: nn.Module) -> None:
    """In eval mode it normalises with statistics that no step here changes."""
    for name, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            continue
        if module.running_mean is None:
            raise UserError(f"{name or 'the model'} is a BatchNorm without running statistics: use another norm")
        if module.num_batches_tracked is not None and not module.num_batches_tracked:
            raise UserError(
                f"{name or 'the model'} is a BatchNorm whose statistics have seen no data, and zeroth-order steps "
                "never change them: start from trained weights, or use another norm"
            )
