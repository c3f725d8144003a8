"""What the integrations share: what they refuse, CO2 in a trainer's loop, and each worker's own part of a checkpoint.

All of them follow one policy: before every evaluation and every checkpoint, finish() brings all workers to one model.
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

from ..co2 import CO2
from ..comm import of_all
from ..config import CO2Config
from ..errors import UserError
from ..stats import RoundStats
from ..stored import reason

UNFINISHED = "are not of one checkpoint, as where a run ended while it saved: go on from an older one"
WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel, FSDPModule, DataParallel)


def config_or_recommended(config: CO2Config | None, steps: float = math.inf, **how: Any) -> CO2Config:
    """Returns the config, or CO2Config.recommended for all workers. steps: of the run, infinite if unknown."""
    known = int(steps) if 1 <= steps < math.inf else None
    return config or CO2Config.recommended(_workers(), known, **how)


def check_model(who: str, model: nn.Module) -> None:
    """Raises UserError for a model whose passes communicate, so that every step would wait for all workers."""
    for name, module in model.named_modules():
        if isinstance(module, WRAPPERS):
            raise UserError(
                f"{who}: the model is in {type(module).__name__}, which averages in every step: give the bare model"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"{who}: {name or 'the model'} is SyncBatchNorm, which waits for all workers in every forward pass: "
                "take BatchNorm, whose statistics are averaged with the parameters"
            )


def check_accelerator(who: str, accelerator: Any) -> None:
    """Raises UserError for an accelerate.Accelerator that shards the model or hands it to another engine, or if its
    workers are not those of torch.distributed, as on a CPU without cpu=True."""
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):  # as accelerate's own LocalSGD allows
        raise UserError(f"{who}: distributed_type={kind}: choose plain multi-GPU or multi-CPU in accelerate's config")
    if accelerator.num_processes != (workers := _workers()):
        raise UserError(
            f"{who}: torch.distributed has {workers} workers, accelerate {accelerator.num_processes}: all would read "
            "the same data; without GPUs set Accelerator(cpu=True) or TrainingArguments(use_cpu=True)"
        )
    if getattr(accelerator, "parallelism_config", None) is not None:
        raise UserError(f"{who}: a parallelism_config shards the model: leave it out, or take ShardedCO2 in a loop")


def _workers() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class InLoop:
    """CO2 in a trainer's loop, mixed into the class that the trainer calls. co2: while the training runs, else None."""

    co2: CO2 | None = None

    def begin_co2(self, model: nn.Module, config: CO2Config | None, steps: float, options: dict[str, Any]) -> None:
        """Makes CO2 when the model to start from is in place; rank 0's weights go to all workers."""
        given: dict[str, Any] = {"buffers": model.buffers()} | options
        self.co2 = CO2(model.parameters(), config_or_recommended(config, steps), **given)
        self._closed = self.co2.stats  # of the round that closed last: of later ones only a part is known
        self._is_one_model = self._unlogged = False

    def step_co2(self, *, last: bool = False) -> None:
        """Call it after every update, however many batches are accumulated, also if a GradScaler skipped it."""
        assert self.co2 is not None
        self._is_one_model = False
        if self.co2.step(last=last):
            self._closed, self._unlogged = self.co2.stats, True

    def to_one_model(self) -> None:
        """All workers hold the same model afterwards. Every worker must call it."""
        if self.co2 is not None and not self._is_one_model:
            self.co2.finish()
            self._closed, self._unlogged, self._is_one_model = self.co2.stats, True, True

    def end_co2(self, *, failed: bool = False) -> None:
        """Leaves the other workers; after a failure without waiting for them."""
        co2, self.co2 = self.co2, None
        if co2 is not None and failed:
            co2.leave()
        elif co2 is not None:
            co2.close()
            leave_at_exit()


def save_own(folder: str | os.PathLike[str], rank: int, **parts: Any) -> None:
    """Writes this worker's own state next to what the trainer writes for all. parts: name -> what has state_dict(), or
    None; one is co2."""
    if "://" in str(folder):
        raise UserError(f"{folder}: each worker writes a file of its own: save to a folder that all can reach")
    path = Path(folder, f"rank{rank}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    written: dict[str, Any] = {"workers": _workers(), "rounds": parts["co2"].rounds}
    for name, part in parts.items():
        if part is not None:  # frozen parameters are the same on all workers
            named = part.named_parameters(remove_duplicate=False) if isinstance(part, nn.Module) else ()
            frozen = {name for name, p in named if not p.requires_grad}
            written[name] = {key: value for key, value in part.state_dict().items() if key not in frozen}
    torch.save(written, path)
    path.rename(path.with_suffix(".pt"))


def load_own(who: str, folder: str | os.PathLike[str], rank: int, **parts: Any) -> None:
    """Loads what save_own wrote. Every worker must call it. If n other workers wrote it, rank r takes rank r modulo n's
    part. UserError on all workers if files are missing, or not of one checkpoint."""
    parts = {name: part for name, part in parts.items() if part is not None}
    path, saved, problem = Path(folder, f"rank{rank}.pt"), dict[str, Any](), ""
    any_file = next(path.parent.glob("rank*.pt"), None)
    try:
        if any_file is None:
            problem = f"{folder} is missing, as where a run without CO2 has saved: load the weights alone"
        elif not path.exists():
            workers = torch.load(any_file, map_location="cpu", weights_only=True, mmap=True)["workers"]
            path = path.with_name(f"rank{rank % workers}.pt")
        saved = torch.load(path, map_location="cpu", weights_only=True) if any_file else saved
    except FileNotFoundError:
        problem = f"{path} is missing: the files there {UNFINISHED}"
    except Exception as error:  # whatever it is: a worker that raised here would leave the others waiting
        problem = f"{path} cannot be read ({reason(error)}): go on from an older checkpoint"
    if saved and (lacks := sorted(parts.keys() - saved.keys())):
        problem = f"a file in {folder} holds no {lacks[0]}: go on with the settings of the run that saved it"
    reported = of_all((problem, (saved.get("workers"), saved.get("rounds"))))
    if problem := next((problem for problem, _ in reported if problem), ""):
        raise UserError(f"{who}: {problem}")
    if len({written for _, written in reported}) > 1:
        raise UserError(f"{who}: the files in {folder} {UNFINISHED}")
    for name, part in parts.items():  # a model without what is frozen
        part.load_state_dict(saved[name], **({"strict": False} if isinstance(part, nn.Module) else {}))


def logged(stats: RoundStats) -> dict[str, float]:
    """Returns the statistics of a round, as loggers take them."""
    return {f"co2/{name}": value for name, value in stats.as_dict().items()}


@functools.cache
def leave_at_exit() -> None:
    """Lets the process leave torch.distributed before the interpreter ends, after a training that has ended well. A
    thread of gloo's that drops a tensor later finds no interpreter, and ends the process by std::terminate."""

    def leave() -> None:
        if dist.is_initialized() and not hasattr(sys, "last_type"):  # after an uncaught exception others may wait
            dist.destroy_process_group()

    atexit.register(leave)
