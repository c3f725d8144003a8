"""What is refused: parameters with which training would go wrong, in one line that names the remedy."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .errors import UserError


def tensors_of(given: Iterable[Any], name: str) -> list[Tensor]:
    """As a list, however they were given."""
    if isinstance(given, Tensor | nn.Module) or not isinstance(given, Iterable):
        raise UserError(
            f"{name}: one {type(given).__name__} is given: give a list of tensors, as a model's {name}() returns"
        )
    tensors = list(given)
    if others := [type(t).__name__ for t in tensors if not isinstance(t, Tensor)]:
        raise UserError(f"{name}: a {others[0]} is among them: give tensors, as model.{name}() returns")
    return tensors


def check_inputs(given: Sequence[Tensor], params: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """given: the parameters as the user gave them; params: those that are trained, DTensors' shards among them."""
    if not params:
        raise UserError("no parameter requires a gradient: nothing to train")
    if not any(p.numel() for p in given if p.requires_grad):  # of a DTensor's all shards
        raise UserError("no parameter has an element: nothing to train")
    for p in params:
        if not p.is_floating_point():
            raise UserError(f"a parameter of dtype {p.dtype}: only floating point can be averaged")
    for t in [*params, *buffers]:
        if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise UserError(
                f"a tensor of shape {tuple(t.shape)} is expanded, several elements being one: give it memory of "
                "its own, as clone() does"
            )
    refuse_shared_storage(params)


def check_group() -> None:
    """Refuses to train alone where others were started."""
    if (workers := int(os.environ.get("WORLD_SIZE", 1))) > 1 and not dist.is_initialized():
        raise UserError(
            f"WORLD_SIZE={workers}, but torch.distributed is not initialised: this worker would train alone; call "
            "init_process_group first"
        )


def refuse_shared_storage(params: Sequence[Tensor]) -> None:
    """Two parameters over the same memory would be moved twice at every boundary."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for p in (p for p in params if p.numel()):
        last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
        if last + 1 == p.numel():  # others, such as columns of one matrix, may lie between each other
            start = int(p.storage_offset())
            spans.setdefault(p.untyped_storage().data_ptr(), []).append((start, start + last))
    for taken in spans.values():
        taken.sort()
        if any(following[0] <= one[1] for one, following in itertools.pairwise(taken)):
            raise UserError(
                "two parameters share their memory: give the tensor that holds both, or one of them, as the same object"
            )
