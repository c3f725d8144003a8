"""Checkpoints of a loop of one's own: everything of every worker, in one call each."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UserError
from ..groups import host_group, of_all
from . import checkpoint, stored
from .named import load_model, load_optimizer, of_optimizer, random_state, set_random_state

STEPS = 10**9  # what a folder's name has room for


class Stateful(Protocol):
    """A method, a learning rate's schedule, a GradScaler, a data loader."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    co2: Stateful,
    *,
    step: int,
    keep: int = 2,
    others: Mapping[str, Stateful] | None = None,
) -> bool:
    """Writes folder/stepNNNNNNNNN, from which `load` goes on bit for bit, also in mid-round. Every process must call
    it.

    co2: CO2 or any other method, of which all is saved, what is in flight included: it waits for that to land. step:
    how many the loop has taken. keep: so many checkpoints stay, older ones go, and those of later steps, of a run that
    was given up. others: what else has a state, by name, such as {"schedule": scheduler}. torch's random state goes
    along. Each process writes its own model, shards, optimiser and method; what is equal is written once.

    The folder gets its name when all have written theirs: a process that is killed at any moment leaves the checkpoint
    before. False: a worker's model is not finite, nothing was written, and the last one stays. UserError on all
    workers where one cannot write.
    """
    if not isinstance(step, int) or not 0 <= step < STEPS:
        raise UserError(f"step={step!r}: give the number of steps taken, from 0 to {STEPS - 1}")
    if not isinstance(keep, int) or keep < 1:
        raise UserError(f"keep={keep!r}: give the number of checkpoints that stay, 1 or more")
    held = {
        "model": model.state_dict(),
        "optimizer": of_optimizer(optimizer, model) if optimizer is not None else {},
        "optimizer_kind": type(optimizer).__name__,
        "method": co2.state_dict(),
        "others": {name: other.state_dict() for name, other in (others or {}).items()},
        "random": random_state(_device(model)),
        "step": step,
    }
    tensors: dict[str, Tensor] = {}
    state = stored.take_out(held, tensors)
    group = host_group()
    rank, workers = (dist.get_rank(), dist.get_world_size()) if group is not None else (0, 1)
    attempt = of_all(secrets.token_hex(4))[0]
    return checkpoint.Saver(Path(folder), rank, workers, attempt, keep=keep, group=group).write(step, state, tensors)


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    co2: Stateful,
    *,
    others: Mapping[str, Stateful] | None = None,
) -> int | None:
    """Goes on from the newest whole checkpoint that every worker can read: its step; None where there is none.

    Every process must call it, with the objects as they were made for the first step. Which checkpoints are damaged is
    said, and the one before is taken. On another number of workers each takes the state of the one whose rank is its
    own modulo the former number, with a warning, and torch's random state is left alone; a method whose outer state is
    unlike on all workers refuses. UserError, of one line, where the checkpoint is of another model, optimiser or
    method, or where there are some and none can be read: then nothing may be trained on.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = checkpoint.load(Path(folder), rank=rank)
    if found is None:
        return None
    state, before = found
    here = dict(others or {})
    problems = of_all(_misfit(state, model, optimizer, here))
    if any(problems):
        raise UserError(f"{folder}: the checkpoint of step {state.get('step', '?')} {max(problems)}")
    load_model(model, state["model"])
    if optimizer is not None:
        load_optimizer(optimizer, model, state["optimizer"])
    co2.load_state_dict(state["method"])
    for name, other in here.items():
        other.load_state_dict(state["others"][name])
    if before == (workers := len(problems)):
        set_random_state(state["random"], _device(model))
    elif rank == 0:
        wrote = f"{before} workers wrote the checkpoint of step {state['step']}, {workers} go on"
        taken = f"each takes what the worker of its rank modulo {before} held; torch's random states begin anew"
        warnings.warn(f"{wrote}: {taken}", stacklevel=2)
    return state["step"]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _misfit(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None, others: dict[str, Any]
) -> str:
    """Why this state cannot be gone on from; "" if it can, as far as is known before the method has looked."""
    if "optimizer_kind" not in state:
        return "was not written by save(): resume with what wrote it, or choose another folder"
    if differs := checkpoint.unlike(state["model"], model.state_dict()):
        return f"is of another model: {differs}; give the model that was saved, or choose another folder"
    if (was := state["optimizer_kind"]) != (kind := type(optimizer).__name__):
        return f"is of the optimiser {was}, here it is {kind}: resume with the one that was saved"
    if optimizer is not None:
        now = of_optimizer(optimizer, model)
        sizes = [[len(group["params"]) for group in s["param_groups"]] for s in (state["optimizer"], now)]
        if sizes[0] != sizes[1]:
            return f"has an optimiser of {sizes[0]} parameters, by group, here it has {sizes[1]}: make it as it was"
    if (was := sorted(state["others"])) != (here := sorted(others)):
        return f"has the others {was}, here they are {here}: give the same names"
    return ""
