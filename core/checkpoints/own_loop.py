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
from ..robust import peers
from ..rounds import Rounds
from . import checkpoint, stored
from .named import load_model, load_optimizer, of_optimizer, random_state, set_random_state

STEPS = 10**9  # what a folder's name has room for


class Stateful(Protocol):
    """A method, a learning rate schedule, a GradScaler, a data loader."""

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
    """Writes folder/stepNNNNNNNNN, from which `load` goes on bit for bit, also in mid-round. Every worker must call it.

    Each worker saves its own model, optimizer, method and torch's random state. What is equal on several workers is
    written once. The folder gets its name when all have written their files, so a worker that is killed leaves the
    checkpoint before. `save` waits for what is in flight.

    Args:
        folder: Where checkpoints lie, on a file system that all workers share. `~` is the home folder.
        co2: CO2 or any other method.
        step: How many steps the loop has taken.
        keep: How many checkpoints stay. Older ones go, and so do those of later steps, of a run that was given up.
        others: What else has a state, by name, such as {"schedule": scheduler}. Plain values, tensors, numpy's arrays
            and numbers, paths and Python's containers are restored with their types. Named tuples, dataclasses and
            tensor subclasses need torch.serialization.add_safe_globals([the class]) before save() and load().

    Returns:
        False if a worker's model is not finite: nothing was written, and the last checkpoint stays.

    Raises:
        UserError: On all workers, if a state holds what `load` could not give back, if one worker cannot write, or if
            some workers went on without calling save().
    """
    if not isinstance(step, int) or not 0 <= step < STEPS:
        raise UserError(f"step={step!r}: give the number of steps taken, from 0 to {STEPS - 1}")
    if not isinstance(keep, int) or keep < 1:
        raise UserError(f"keep={keep!r}: give the number of checkpoints that stay, 1 or more")
    peers.come_together("save()")
    held = {
        "model": model.state_dict(),
        "optimizer": of_optimizer(optimizer, model) if optimizer is not None else {},
        "optimizer_kind": type(optimizer).__name__,
        "method": co2.state_dict(),
        "others": {name: other.state_dict() for name, other in (others or {}).items()},
        "random": random_state(next(model.parameters()).device),
        "step": step,
    }
    tensors, state, problem = dict[str, Tensor](), {}, ""
    try:
        state = stored.take_out(held, tensors)
    except UserError as error:
        problem = str(error)
    group = host_group()
    reported = of_all((secrets.token_hex(4), problem))
    if problem := next((problem for _, problem in reported if problem), ""):
        raise UserError(problem)
    rank = dist.get_rank() if group is not None else 0
    attempt = reported[0][0]
    saver = checkpoint.Saver(Path(folder).expanduser(), rank, len(reported), attempt, keep=keep, group=group)
    return saver.write(step, state, tensors, spared=_constant(model, co2))


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    co2: Stateful,
    *,
    others: Mapping[str, Stateful] | None = None,
) -> int | None:
    """Goes on from the newest whole checkpoint that every worker can read. Every worker must call it, with the objects
    as they were made for the first step.

    Rank 0 prints which checkpoints are damaged. On another number of workers, worker r takes the state of worker r
    modulo the former number, with a warning, and torch's random states begin anew.

    Returns:
        The checkpoint's step, or None if there is none.

    Raises:
        UserError: There are checkpoints, but none can be read, or the newest is of another model, optimizer or method.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = checkpoint.load(folder := Path(folder).expanduser(), rank=rank)
    if found is None:
        return None
    (state, before), here = found, dict(others or {})
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
        set_random_state(state["random"], next(model.parameters()).device)
    elif rank == 0:
        wrote = f"{before} workers wrote the checkpoint of step {state['step']}, {workers} go on"
        taken = f"each takes what the worker of its rank modulo {before} held; torch's random states begin anew"
        warnings.warn(f"{wrote}: {taken}", stacklevel=2)
    return state["step"]


def _constant(model: nn.Module, co2: Stateful) -> set[str]:
    """The names of buffers that need not be finite: those that the method does not average, and those in which nothing
    is other than finite but what they began with, as a causal mask of -inf."""
    spoilt = co2.spoilt_buffers() if isinstance(co2, Rounds) else []
    return {name for name, b in model.named_buffers(remove_duplicate=False) if not any(b is other for other in spoilt)}


def _misfit(
    state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer | None, others: dict[str, Any]
) -> str:
    """Returns why this state cannot be loaded; "" if it can. The method makes checks of its own later."""
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
