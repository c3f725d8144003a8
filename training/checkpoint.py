"""A run's checkpoints: every worker writes its own file, and only a whole and undamaged checkpoint is ever loaded.

A checkpoint is written into a folder of its own, step*.tmp-ATTEMPT, which rank 0 renames once all have written
theirs and it has added a manifest with their checksums. So one without .tmp holds what one attempt wrote at one step.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.errors import UserError

KEEP = 2  # checkpoints kept; the older one serves where the newer is damaged
MANIFEST = "manifest.json"


def save(folder: Path, step: int, state: dict[str, Any], *, rank: int, world_size: int, attempt: str) -> None:
    """Writes this worker's `state` under folder/step*/, and removes old checkpoints; every worker must call it.

    attempt: the same on all workers, and another one each time that the run is started. UserError on all workers where
    one of them cannot write.
    """
    target = folder / f"step{step:09d}"
    fresh = folder / f"{target.name}.tmp-{attempt}"
    part = fresh / _name(rank, world_size)
    digest = failure = ""
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            torch.save(state, file)
        digest = _digest(part)
    except (OSError, RuntimeError) as error:  # torch makes the latter of a full disk
        failure = f"{part} cannot be written ({_reason(error)})"
    written = _of_all((part.name, digest, failure))
    failures = [failure for *_, failure in written if failure]
    if rank == 0 and not failures:
        manifest = {"workers": world_size, "sha256": {name: digest for name, digest, _ in written}}
        try:
            _publish(fresh, target, json.dumps(manifest, indent=1))
        except OSError as error:
            failures = [f"{target} cannot be written ({_reason(error)})"]
    if rank == 0:
        _tidy(folder, step)  # while the others wait: they may write the next one soon
    failures = _of_all(failures)[0]
    if failures:
        raise UserError(f"{failures[0]}: make room or name another --out; --resume goes on from the last checkpoint")


def load(folder: Path, *, rank: int, world_size: int) -> dict[str, Any] | None:
    """This worker's state in the newest checkpoint that all workers can load, in the host's memory; None when there is
    none, with a warning from rank 0 when unfinished ones lie there. Every worker must call it.

    Rank 0 says which checkpoints were refused, and why: on a network file system another worker may not see the newest
    one yet. UserError when another number of workers wrote the newest, for each holds the state of its own optimiser,
    or when there are some and none can be loaded.
    """
    refused: list[str] = []
    for name in _of_all(_finished(folder))[0]:
        state, workers, problem = _read(folder / name, rank, world_size)
        seen = _of_all((workers, problem))
        if others := {workers for workers, _ in seen} - {world_size, 0}:
            raise UserError(
                f"{folder / name} was written by {min(others)} workers, this run has {world_size}: resume with as "
                "many, or start afresh with another --out"
            )
        problems = [f"rank {number}: {problem}" for number, (_, problem) in enumerate(seen) if problem]
        if not problems:
            _say(rank, [f"warning: {line}; going on from {name}" for line in refused])
            return state
        refused.append(f"{folder / name} is refused ({problems[0]})")
    if refused:
        raise UserError(f"{'; '.join(refused)}: no other checkpoint is left; start afresh with another --out")
    if rank == 0 and folder.exists():
        _say(rank, [f"warning: no complete checkpoint in {folder.parent}: starting from step 0"])
    return None


def _publish(fresh: Path, target: Path, manifest: str) -> None:
    """Completes a folder that all have written to, and gives it its name, from another of that step if need be."""
    (fresh / MANIFEST).write_text(manifest)
    if target.exists():
        target.rename(fresh.with_name(f"{fresh.name}-old"))
    fresh.rename(target)


def _tidy(folder: Path, step: int) -> None:
    """Removes what is left of other attempts, steps that an earlier attempt has reached and this one has not, and all
    but the newest checkpoints."""
    kept = [name for name in _finished(folder) if int(name.removeprefix("step")) <= step][:KEEP]
    for path in folder.glob("step*"):
        if path.name not in kept and re.fullmatch(r"step\d{9}(\.tmp-.*)?", path.name):
            shutil.rmtree(path, ignore_errors=True)


def _finished(folder: Path) -> list[str]:
    """The names of the complete checkpoints, from the newest."""
    paths = [path for path in folder.glob("step*") if re.fullmatch(r"step\d{9}", path.name) and path.is_dir()]
    return sorted((path.name for path in paths), reverse=True)


def _read(target: Path, rank: int, world_size: int) -> tuple[dict[str, Any] | None, int, str]:
    """This worker's state, how many workers wrote it (0 where that is not known), and what is wrong with it."""
    workers = 0
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        workers, known = int(manifest["workers"]), manifest["sha256"]
        part = target / _name(rank, world_size)
        if workers != world_size:
            return None, workers, "of another number of workers"
        if _digest(part) != known[part.name]:
            return None, workers, f"{part.name} is damaged, its checksum differs"
        return torch.load(part, map_location="cpu", weights_only=True), workers, ""
    except FileNotFoundError as error:
        return None, workers, f"{Path(error.filename).name} is missing"
    except Exception as error:  # whatever it is: a worker that raised here would leave the others waiting
        return None, workers, f"it cannot be read, {_reason(error)}"


def _of_all(mine: Any) -> list[Any]:
    """What each worker gives, by rank; nobody goes on before all have come here."""
    if not dist.is_initialized():
        return [mine]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _say(rank: int, lines: list[str]) -> None:
    for line in lines if rank == 0 else []:
        print(line, file=sys.stderr, flush=True)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: BaseException) -> str:
    """One line; of an error of the operating system, what that says."""
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _name(rank: int, world_size: int) -> str:
    return f"rank{rank}of{world_size}.pt"
