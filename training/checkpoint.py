"""A run's checkpoints: every worker writes its own file, and only a checkpoint with all files is ever loaded."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.errors import UserError

KEEP = 2  # complete checkpoints kept; the older one survives a kill in the middle of saving


def save(folder: Path, step: int, state: dict[str, Any], *, rank: int, world_size: int) -> None:
    """Writes this worker's `state` under folder/step*/, and removes old checkpoints; every worker must call it."""
    target = folder / f"step{step:09d}"
    target.mkdir(parents=True, exist_ok=True)
    path = target / _name(rank, world_size)
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        for old in sorted(folder.glob("step*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)


def load(folder: Path, *, rank: int, world_size: int) -> dict[str, Any] | None:
    """This worker's state in the newest complete checkpoint, in the host's memory; None when there is none, with a
    warning from rank 0 when incomplete ones lie there. Every worker must call it.

    Rank 0 chooses for all: on a network file system the others may not see the newest one yet. UserError when another
    number of workers wrote the checkpoints, for each holds the state of its own optimiser, or when this worker's part
    is not to be seen.
    """
    choice: list[Any] = [_choose(folder, world_size) if rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(choice, src=0)
    name, refusal = choice[0]
    if refusal:
        raise UserError(refusal)
    if name is None:
        if rank == 0 and folder.exists():
            print(f"warning: no complete checkpoint in {folder.parent}: starting from step 0", file=sys.stderr)
        return None
    part = folder / name / _name(rank, world_size)
    if not part.exists():
        raise UserError(f"{part} is missing, though rank 0 sees it: wait for the file system, then resume again")
    return torch.load(part, map_location="cpu", weights_only=True)


def _choose(folder: Path, world_size: int) -> tuple[str | None, str]:
    """The newest complete checkpoint's name, and why there can be none."""
    sizes = set()
    for target in sorted(folder.glob("step*"), reverse=True):
        sizes |= {int(path.stem.split("of")[1]) for path in target.glob("rank*of*.pt")}
        if all((target / _name(r, world_size)).exists() for r in range(world_size)):
            return target.name, ""
    if others := sizes - {world_size}:
        return None, (
            f"{folder} was written by {min(others)} workers, this run has {world_size}: resume with the same number, "
            "or start afresh with another --out"
        )
    return None, ""


def _name(rank: int, world_size: int) -> str:
    return f"rank{rank}of{world_size}.pt"
