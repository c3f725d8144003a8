"""A run's checkpoints: written in the background, and loaded only if whole and undamaged.

All workers write their files into one folder, step*.tmp-ATTEMPT. Rank 0 then adds a manifest and renames the folder. So
a folder without .tmp holds what one attempt wrote at one step. stored.py has the format.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..flat import local_shard
from ..groups import leave_group, new_group, of_all
from . import stored
from .untrusted import parse_json, reason

KEEP = 2  # checkpoints; the older one serves where the newer is damaged
MANIFEST = "manifest.json"
WRAPPERS = ("module", "_orig_mod", "model")  # what DistributedDataParallel, torch.compile and others put around a model
PATIENCE = 5.0  # seconds that a run which fails gives the checkpoint that it writes


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Returns whether all elements are finite: 0-d, on the first tensor's device. A DTensor's local shard counts."""
    local = [local_shard(t.detach()) for t in tensors if t.numel() and "float4" not in str(t.dtype)]  # always finite
    wide = [t.float() if t.element_size() == 1 else t for t in local]  # aminmax does not support float8
    ends = [torch.stack(torch.aminmax(t)).double() for t in wide]
    return torch.stack([e.to(ends[0].device) for e in ends]).isfinite().all() if ends else torch.tensor(True)


class Saver:
    """Writes checkpoints in a thread, one after the other, over a process group of its own. Every worker makes one.

    Args:
        world_size: 1 means that this worker writes alone.
        attempt: The same on all workers, and another one each time that the run is started.
        timeout: Seconds until a missing worker is an error.
        keep: How many checkpoints stay.
        group: The workers over gloo, used by nothing but write(). None makes a group.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        attempt: str,
        timeout: float = 600.0,
        *,
        keep: int = KEEP,
        group: dist.ProcessGroup | None = None,
    ):
        self.folder, self.rank, self.world_size, self.attempt, self.timeout = folder, rank, world_size, attempt, timeout
        self.keep = keep
        own = world_size > 1 and group is None
        self._group = new_group(None, timeout, torch.device("cpu"), "gloo") if own else group
        self._thread: threading.Thread | None = None
        self._ended: bool | Exception = True  # how the last write ended: whether all models were finite, or its error

    def start(self, step: int, state: Any, tensors: dict[str, Tensor], begun: float | None = None) -> None:
        """Starts to write what stored.take_out returned, after an earlier write; then removes old checkpoints.

        Every worker must call it, at its own time. If a tensor under "model" of any worker is not finite, nothing is
        written or removed. begun: when (time.monotonic) the round closed; the manifest's seconds count from there.
        """
        self.wait()
        job = step, state, tensors, time.monotonic() if begun is None else begun
        self._thread = threading.Thread(target=self._run, args=job, daemon=True)
        self._thread.start()

    def write(self, step: int, state: Any, tensors: dict[str, Tensor], spared: Collection[str] = ()) -> bool:
        """As start() and wait(), in the calling thread. spared: names of the model's tensors that need not be
        finite."""
        self._run(step, state, tensors, time.monotonic(), spared)
        return self.wait()

    def wait(self) -> bool:
        """Waits for the write, on every worker. Returns False if a worker's model was not finite.

        UserError on all workers if one could not write; also the error of a worker that is gone.
        """
        self.abandon(None)
        self._thread, ended = None, self._ended
        if isinstance(ended, Exception):
            self._ended = True
            raise ended
        return ended

    def close(self) -> None:
        """Waits, and leaves the group."""
        self.wait()
        if self._group is not None:
            leave_group(self._group, self.timeout)
            self._group = None

    def abandon(self, patience: float | None = PATIENCE) -> None:
        """After a failure: gives the running write a moment."""
        if self._thread is not None:
            self._thread.join(patience)

    def _run(self, *job: Any) -> None:
        try:
            self._ended = self._write(*job)
        except Exception as error:
            self._ended = error

    def _write(
        self, step: int, state: Any, tensors: dict[str, Tensor], begun: float, spared: Collection[str] = ()
    ) -> bool:
        """Writes a checkpoint, as start() and wait() say."""
        apart = {f"model.{name}" for name in spared}
        of_model = [t for path, t in tensors.items() if path.startswith("model.") and path not in apart]
        weights = [t for t in of_model if t.is_floating_point()]
        finite = self._gather(bool(all_finite(weights)))
        if not all(finite):
            what = f"the model of rank {finite.index(False)} is not finite: no checkpoint is written"
            _say(self.rank, f"warning: step {step}: {what}, the last one stays")
            return False
        target = self.folder / f"step{step:09d}"
        fresh = self.folder / f"{target.name}.tmp-{self.attempt}"
        everyone = self._gather({path: stored.digest(tensor) for path, tensor in tensors.items()})
        digest, failure = "", ""
        try:
            digest = stored.write(fresh, self.rank, state, tensors, everyone)
        except (OSError, RuntimeError) as error:  # torch wraps the system's error in a RuntimeError
            failure = f"{target} cannot be written (rank {self.rank}: {reason(error)})"
        written = self._gather((digest, failure))
        failure = next((failure for _, failure in written if failure), "")
        if self.rank == 0:
            if not failure:
                seconds = round(time.monotonic() - begun, 1)  # slurm/launch.sh reads it
                files = {f"rank{rank}.json": digest for rank, (digest, _) in enumerate(written)}
                others = [f"rank{rank}.pt" for rank in range(self.world_size)]
                manifest = json.dumps({"seconds": seconds, "files": files}, indent=1)
                try:
                    publish(fresh, target, manifest, [*files, *others])
                except OSError as error:
                    failure = f"{target} cannot be written ({reason(error)})"
            tidy(self.folder, step, self.keep)  # before the others go on: they may soon write the next checkpoint
        if failure := self._gather(failure)[0]:
            if self._thread is not None:
                _say(self.rank, f"warning: {failure}: the run stops where the next checkpoint is due")
            raise UserError(f"{failure}: make room or choose another folder; the last checkpoint stays")
        return True

    def _gather(self, mine: Any) -> list[Any]:
        return of_all(mine, self._group) if self._group is not None else [mine]


def load(folder: Path, *, rank: int, alone: bool = False) -> tuple[Any, int] | None:
    """Returns this worker's state in the newest checkpoint that all workers can read, and how many workers wrote it.

    Every worker must call it, except with `alone`. If n other workers wrote it, rank r gets the state of rank r modulo
    n. None if there is no checkpoint. UserError if there are some and none can be read. Rank 0 prints which were
    refused, and why: on a network file system another worker may not see the newest one yet.
    """
    refused, gather = list[str](), (lambda mine: [mine]) if alone else of_all
    if rank == 0:  # publish() may have been killed between its two renames
        for path in folder.glob("step*.tmp-*-old"):
            if not (target := path.with_name(path.name.partition(".tmp-")[0])).exists():
                path.rename(target)
    for name in gather(finished(folder))[0]:
        state, workers, problem = _read(folder / name, rank)
        problems = [f"rank {number}: {problem}" for number, problem in enumerate(gather(problem)) if problem]
        if not problems:
            for line in refused:
                _say(rank, f"warning: {line}; going on from {name}")
            return state, workers
        refused.append(f"{folder / name} is refused ({problems[0]})")
    if refused:
        raise UserError(f"{'; '.join(refused)}: no other checkpoint is left; start afresh with another folder")
    if rank == 0 and folder.exists():
        _say(rank, f"warning: no complete checkpoint in {folder}: starting from step 0")
    return None


def unlike(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """Returns how the names and shapes of two models' state_dicts differ; "" if they do not. Shards count as such."""

    def shape(held: Any) -> list[int] | None:
        return list(local_shard(held).shape) if isinstance(held, Tensor) else None

    for name in sorted(theirs.keys() | mine.keys()):
        was, here = shape(theirs.get(name)), shape(mine.get(name))
        if was != here:
            break
    else:
        return ""
    split = [[name.split(".") for name in names] for names in (theirs, mine)]
    bare = [{tuple(part for part in name if part not in WRAPPERS) for name in names} for names in split]
    if bare[0] != bare[1]:
        return f"{name} is {was} there, {here} here"
    parts = [{part for name in names for part in name if part in WRAPPERS} for names in split]
    there, here = (", ".join(f"'{part}.'" for part in sorted(one - other)) for one, other in (parts, parts[::-1]))
    where = f"{there} there, not here" if there else f"{here} here, not there"
    return f"the names have the prefix {where}, as a wrapper gives it: save and load the model inside the wrapper"


def publish(fresh: Path, target: Path, manifest: str, files: Iterable[str]) -> None:
    """Adds the manifest to a folder where all workers have written `files`, and renames it over `target`."""
    if missing := [name for name in files if not (fresh / name).exists()]:
        raise OSError(f"another worker's {missing[0]} did not come here: the folder must be one that all nodes share")
    (fresh / MANIFEST).write_text(manifest)
    if target.exists():
        target.rename(fresh.with_name(f"{fresh.name}-old"))
    fresh.rename(target)


def tidy(folder: Path, step: int, keep: int) -> None:
    """Removes all but the newest checkpoints, those of later steps, and what is left of other attempts."""
    kept = [name for name in finished(folder) if int(name.removeprefix("step")) <= step][:keep]
    for path in folder.glob("step*"):
        if path.name not in kept and re.fullmatch(r"step\d{9}(\.tmp-.*)?", path.name):
            shutil.rmtree(path, ignore_errors=True)


def finished(folder: Path) -> list[str]:
    """Returns the names of the complete checkpoints, the newest first."""
    paths = [path for path in folder.glob("step*") if re.fullmatch(r"step\d{9}", path.name) and path.is_dir()]
    return sorted((path.name for path in paths), reverse=True)


def _read(target: Path, rank: int) -> tuple[Any, int, str]:
    """Returns this worker's state, the number of workers that wrote the checkpoint, and what is wrong with it."""
    try:
        manifest = parse_json((target / MANIFEST).read_text())
        if "rests" in manifest or "layout" in manifest:
            return None, 0, "it is of an older version, or of a run with a layout: resume with what wrote it"
        files = manifest["files"]
        if files.keys() != {path.name for path in target.glob("rank*.json")}:
            return None, 0, f"{MANIFEST} is damaged, it names other workers than those that wrote the checkpoint"
        taken = rank % len(files)
        return stored.read(target, taken, files[f"rank{taken}.json"]), len(files), ""
    except FileNotFoundError as error:
        return None, 0, f"{Path(error.filename).name} is missing"
    except UserError as error:
        return None, 0, str(error)
    except Exception as error:  # whatever it is: a worker that raised here would leave the others waiting
        return None, 0, f"it cannot be read, {reason(error)}"


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
