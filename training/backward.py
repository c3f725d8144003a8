"""The backward pass of an optimiser step, in micro-batches and with recomputed activations where the recipe says so."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Scalars = dict[str, Tensor]


def backward_in_parts(wrapped: nn.Module, parts: Sequence[Any], part_of: Callable[[Any], Scalars]) -> Scalars:
    """Adds the gradient of the loss over all parts of this worker's batch; returns the scalars' sums over the parts.

    part_of: runs the forward pass of a part and returns 0-d scalars, "train_loss" first of all, each already weighted
    by the part's share in the batch, so that their sums are the whole batch's means.
    """
    sums: Scalars = {}
    for number, part in enumerate(parts, start=1):
        waits = hasattr(wrapped, "no_sync") and number < len(parts)  # DDP reduces once, in the last backward pass
        with wrapped.no_sync() if waits else contextlib.nullcontext():
            scalars = part_of(part)
            scalars["train_loss"].backward()
        for name, value in scalars.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
    return sums


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Has each block keep its input alone: what it computes is computed again in the backward pass."""
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
