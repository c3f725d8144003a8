"""Shared parts of the integrations: checks, CO2 in a trainer's loop, and each worker's own part of a checkpoint.

All integrations follow one policy: before every evaluation and checkpoint, finish() gives all workers the same model.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..checkpoint.runs import Saver, load_newest, new_attempt, restore_optimizer
from ..co2 import CO2
from ..config import CO2Config
from ..errors import UserError
from ..groups import host_group, of_all
from ..state import own_rank
from ..stats import RoundStats
from .loading import shield

WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule, DataParallel)


def config_or_recommended(config: CO2Config | None, steps: float = math.inf) -> CO2Config:
    """Returns the config, or CO2Config.recommended for so many optimizer steps, infinite if their number is unknown."""
    known = int(steps) if 1 <= steps < math.inf else None
    return config or CO2Config.recommended(steps=known)


def check_model(who: str, model: nn.Module) -> None:
    """Raises UserError for a model that communicates in its forward or backward pass.

    With such a model every step would wait for all workers.
    """
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            raise UserError(
                f"{who}: the model is in {type(module).__name__}, which averages in every step: give the bare model"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"{who}: {name or 'the model'} is SyncBatchNorm, which waits for all workers in every forward pass: "
                "use BatchNorm, whose statistics are averaged with the parameters, or in CO2Hook its option sync_bn"
            )


def check_accelerator(who: str, accelerator: Any) -> None:
    """Raises UserError for an accelerate.Accelerator that CO2 cannot work with.

    These shard the model, hand it to another engine, or do not use the workers of torch.distributed, such as on a CPU
    without cpu=True.
    """
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):  # as accelerate's own LocalSGD allows
        raise UserError(f"{who}: distributed_type={kind}: choose plain multi-GPU or multi-CPU in accelerate's config")
    if accelerator.num_processes != (workers := _workers()):
        raise UserError(
            f"{who}: torch.distributed has {workers} workers, accelerate {accelerator.num_processes}: all would read "
            "the same data; without GPUs set Accelerator(cpu=True) or TrainingArguments(use_cpu=True)"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise UserError(f"{who}: a parallelism_config shards the model: leave it out, or use CO2 with mesh= in a loop")


def check_mesh(who: str, options: dict[str, Any]) -> None:
    """Raises UserError for mesh=, whose ranks would have to average gradients inside a node."""
    if options.get("mesh") is not None:
        raise UserError(
            f"{who}: mesh=: the model is bare here, so nothing averages gradients inside a node: leave it out, or use "
            "CO2 in your own loop, with DistributedDataParallel or FSDP2 inside a node"
        )


def check_optimizers(who: str, count: int) -> None:
    """Raises UserError unless the trainer has one optimizer."""
    if count != 1:
        raise UserError(f"{who}: {count} optimizers: use one, so that it is clear what a step is")


def check_loader(who: str, loader: Any, where: str) -> None:
    """Raises UserError for a loader of accelerate whose batches rank 0 sends out. `where` names its setting's place."""
    if type(loader).__name__ == "DataLoaderDispatcher":
        raise UserError(
            f"{who}: dispatch_batches=True: rank 0 sends out every batch, so all workers wait for it: set it to "
            f"False in {where}"
        )


def _workers() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def make_co2(model: nn.Module, config: CO2Config | None, steps: float, options: dict[str, Any]) -> CO2:
    """Makes CO2, after the initial weights are loaded. Rank 0's weights go to all workers."""
    given: dict[str, Any] = {"buffers": model.buffers()} | options
    return CO2(model.parameters(), config_or_recommended(config, steps), **given)


class InLoop:
    """A method in a trainer's loop, a base class of the object that the trainer calls.

    Attributes:
        co2: The method while training runs, else None.
    """

    co2: Any = None

    def begin_co2(self, method: Any) -> None:
        self.co2 = method
        self._closed = method.stats  # of the last round that closed; an open round's statistics are incomplete
        self._is_one_model = self._unlogged = False

    def step_co2(self, *, last: bool = False) -> None:
        """Counts one optimizer update. Call it after every update, also after one that a GradScaler skipped."""
        self._is_one_model = False
        if self.co2.step(last=last):
            self._closed, self._unlogged = self.co2.stats, True

    def to_one_model(self) -> None:
        """Gives all workers the same model. Every worker must call it."""
        if self.co2 is not None and not self._is_one_model:
            self.co2.finish()
            self._closed, self._unlogged, self._is_one_model = self.co2.stats, True, True

    def end_co2(self, *, failed: bool = False) -> None:
        """Closes CO2. After a failure it does not wait for the other workers."""
        co2, self.co2 = self.co2, None
        if co2 is not None and failed:
            co2.leave()
        elif co2 is not None:
            co2.close()
            leave_at_exit()


def shield_loaders(accelerator: Any) -> None:
    """Shields the loaders that an accelerate.Accelerator has prepared and will prepare."""
    for loader in accelerator._dataloaders:
        shield(loader)
    prepare = accelerator.prepare_data_loader
    accelerator.prepare_data_loader = lambda *args, **kwargs: shield(prepare(*args, **kwargs))


def save_own(who: str, folder: str | os.PathLike[str], **parts: Any) -> None:
    """Writes each worker's own state next to the trainer's checkpoint, which has the model, equal on all workers.

    Every worker must call it. The folder then holds one checkpoint of core/checkpoint.

    Args:
        who: Name of the integration, for error messages.
        folder: Local folder that all workers can reach.
        **parts: Objects with a state_dict(), by name, or None. "co2" is required.

    Raises:
        UserError: On all workers, if a state holds what load_own could not read. Nothing is written.
    """
    if "://" in str(folder):
        raise UserError(f"{folder}: each worker writes its own file: save to a folder that all workers can reach")
    state = {name: part.state_dict() for name, part in parts.items() if part is not None}
    state["step"] = step = parts["co2"].rounds
    attempts = of_all(new_attempt(Path(folder)))
    Saver(Path(folder), own_rank(), len(attempts), attempts[0], keep=1, group=host_group()).write(step, state, call=who)


def load_own(who: str, folder: str | os.PathLike[str], **parts: Any) -> None:
    """Loads what save_own wrote. Every worker must call it.

    If n workers wrote the checkpoint and n has changed, rank r loads the state of rank r modulo n.

    Raises:
        UserError: On all workers, if files are missing or damaged, or are not of one checkpoint.
    """
    parts = {name: part for name, part in parts.items() if part is not None}
    try:
        found = load_newest(Path(folder), rank=own_rank(), needs=dict.fromkeys(parts, dict))
    except UserError as error:
        raise UserError(f"{who}: {error}, or resume from an older checkpoint") from None
    if found is None:
        raise UserError(f"{who}: {folder} is missing, as when a run without CO2 saved: load only the weights")
    saved, workers = found
    if workers != _workers():
        parts.pop("random", None)  # else several workers would draw the same
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            restore_optimizer(part, saved[name])
        else:
            part.load_state_dict(saved[name])


def logged(stats: RoundStats) -> dict[str, float]:
    """Returns a round's statistics under the names that loggers show."""
    return {f"co2/{name}": value for name, value in stats.as_dict().items()}


@functools.cache
def leave_at_exit() -> None:
    """Destroys the process group before the interpreter exits, after a training that ended well.

    Without this, a gloo thread that frees a tensor later finds no interpreter and ends the process by std::terminate.
    """

    def leave() -> None:
        if dist.is_initialized() and not hasattr(sys, "last_type"):  # after an exception other workers may still wait
            dist.destroy_process_group()

    atexit.register(leave)
