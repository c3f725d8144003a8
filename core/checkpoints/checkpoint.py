"""A run's checkpoints: written in the background, and only a whole and undamaged one is ever loaded.

A checkpoint is written into a folder of its own, step*.tmp-ATTEMPT. Rank 0 adds a manifest and renames the folder once
all workers have written their files. So a folder without .tmp holds what one attempt wrote at one step. stored.py has
the format.
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
    """Whether all their numbers are finite: 0-d, on the first one's device. Of a DTensor the local shard counts."""
    local = [local_shard(t.detach()) for t in tensors if t.numel() and "float4" not in str(t.dtype)]  # which always are
    wide = [t.float() if t.element_size() == 1 else t for t in local]  # aminmax knows no float8
    ends = [torch.stack(torch.aminmax(t)).double() for t in wide]
    return torch.stack([e.to(ends[0].device) for e in ends]).isfinite().all() if ends else torch.tensor(True)


class Saver:
    """Writes checkpoints in a thread, one after the other, over a process group of its own.

    attempt: the same on all workers, and another one each time that the run is started. timeout: seconds until a
    missing worker is an error. keep: how many checkpoints stay. group: the workers, over gloo, where nothing but
    write() is called; None: one of its own. Every one of world_size workers must make one; 1: this worker writes alone.
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
        self._ended: bool | Exception = True  # of the last one: whether all models were finite

    def start(self, step: int, state: Any, tensors: dict[str, Tensor], begun: float | None = None) -> None:
        """Begins to write, under folder/step*/, what stored.take_out has made; removes old checkpoints when that is
        done. Where state["model"] of any worker is not finite nothing is written, and no good one given up.
        Every worker must call it, at its own time. Waits for the one before, if that is not written.

        begun: when (time.monotonic) the round closed whose state it is, from which the manifest's seconds are counted.
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
        """Until what was begun is written; every worker must call it. False where a worker's model was not finite.

        UserError on all of them where one could not write; also the error of a worker that is gone.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        ended = self._ended
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

    def abandon(self) -> None:
        """After a failure: what is being written gets a moment, and is left alone then."""
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _run(
        self, step: int, state: Any, tensors: dict[str, Tensor], begun: float, spared: Collection[str] = ()
    ) -> None:
        try:
            apart = {f"model.{name}" for name in spared}
            of_model = {path: t for path, t in tensors.items() if path.startswith("model.") and path not in apart}
            weights = [t for t in of_model.values() if t.is_floating_point()]
            finite = self._gather(bool(all_finite(weights)))
            self._ended = all(finite)
            if not self._ended:
                what = f"the model of rank {finite.index(False)} is not finite: no checkpoint is written"
                _say(self.rank, [f"warning: step {step}: {what}, the last one stays"])
            elif failure := self._write(step, state, tensors, begun):
                if self._thread is not None:
                    _say(self.rank, [f"warning: {failure}: the run stops where the next checkpoint is due"])
                self._ended = UserError(f"{failure}: make room or choose another folder; the last checkpoint stays")
        except Exception as error:
            self._ended = error

    def _write(self, step: int, state: Any, tensors: dict[str, Tensor], begun: float) -> str:
        """Why the checkpoint could not be written, the same on all workers."""
        target = self.folder / f"step{step:09d}"
        fresh = self.folder / f"{target.name}.tmp-{self.attempt}"
        everyone = self._gather({path: stored.digest(tensor) for path, tensor in tensors.items()})
        digest, failure = "", ""
        try:
            digest = stored.write(fresh, self.rank, state, tensors, everyone)
        except (OSError, RuntimeError) as error:  # the latter of torch, around the system's own
            failure = f"{target} cannot be written (rank {self.rank}: {reason(error)})"
        written = self._gather((digest, failure))
        failures = [failure for _, failure in written if failure]
        if self.rank == 0 and not failures:
            seconds = round(time.monotonic() - begun, 1)  # slurm/launch.sh reads it
            files = {f"rank{rank}.json": digest for rank, (digest, _) in enumerate(written)}
            others = [f"rank{rank}.pt" for rank in range(self.world_size)]
            try:
                publish(fresh, target, json.dumps({"seconds": seconds, "files": files}, indent=1), [*files, *others])
            except OSError as error:
                failures = [f"{target} cannot be written ({reason(error)})"]
        if self.rank == 0:
            tidy(self.folder, step, self.keep)  # while the others wait: they may write the next one soon
        return "".join(self._gather(failures)[0][:1])

    def _gather(self, mine: Any) -> list[Any]:
        return of_all(mine, self._group) if self._group is not None else [mine]


def load(folder: Path, *, rank: int, alone: bool = False) -> tuple[Any, int] | None:
    """This worker's state in the newest checkpoint that all workers can load, in the host's memory, and how many
    workers wrote it; None when there is none, with a warning from rank 0 when unfinished ones lie there. Every worker
    must call it, unless it is `alone`.

    Of another number of workers a worker gets the state of the one with its rank modulo their number. Rank 0 says
    which checkpoints were refused, and why: on a network file system another worker may not see the newest one yet.
    UserError when there are some and none can be loaded.
    """
    refused: list[str] = []

    def gather(mine: Any) -> list[Any]:
        return [mine] if alone else of_all(mine)

    if rank == 0:
        _mend(folder)
    for name in gather(finished(folder))[0]:
        state, workers, problem = _read(folder / name, rank)
        problems = [f"rank {number}: {problem}" for number, problem in enumerate(gather(problem)) if problem]
        if not problems:
            _say(rank, [f"warning: {line}; going on from {name}" for line in refused])
            return state, workers
        refused.append(f"{folder / name} is refused ({problems[0]})")
    if refused:
        raise UserError(f"{'; '.join(refused)}: no other checkpoint is left; start afresh with another folder")
    if rank == 0 and folder.exists():
        _say(rank, [f"warning: no complete checkpoint in {folder}: starting from step 0"])
    return None


def unlike(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """What of another model's state_dict is not as in this one's, for a message; "" where all have one name and shape.
    Tensors are this worker's shards."""
    for name in sorted(theirs.keys() | mine.keys()):
        was, here = _shape(theirs, name), _shape(mine, name)
        if was != here:
            return _wrapped(theirs, mine) or f"{name} is {was} there, {here} here"
    return ""


def _wrapped(theirs: Iterable[str], mine: Iterable[str]) -> str:
    """Which wrapper's prefix the names of one state_dict have and those of the other lack; "" if they differ beyond."""

    def bare(names: Iterable[str]) -> set[str]:
        return {".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names}

    if bare(theirs) != bare(mine):
        return ""
    parts = [{part for name in names for part in name.split(".") if part in WRAPPERS} for names in (theirs, mine)]
    there, here = (", ".join(f"'{part}.'" for part in sorted(one - other)) for one, other in (parts, parts[::-1]))
    where = f"{there} there, not here" if there else f"{here} here, not there"
    return f"the names have the prefix {where}, as a wrapper gives it: save and load the model inside the wrapper"


def _shape(state: dict[str, Any], name: str) -> list[int] | None:
    held = state.get(name)
    return list(local_shard(held).shape) if isinstance(held, Tensor) else None


def publish(fresh: Path, target: Path, manifest: str, files: Iterable[str]) -> None:
    """Completes a folder to which all workers have written `files`, and gives it its name. A folder of that name makes
    way."""
    if missing := [name for name in files if not (fresh / name).exists()]:
        raise OSError(f"another worker's {missing[0]} did not come here: the folder must be one that all nodes share")
    (fresh / MANIFEST).write_text(manifest)
    if target.exists():
        target.rename(fresh.with_name(f"{fresh.name}-old"))
    fresh.rename(target)


def _mend(folder: Path) -> None:
    """A kill inside publish may leave a step's checkpoint without its name, and the new one without it, too."""
    for path in folder.glob("step*.tmp-*-old"):
        if not (target := path.with_name(path.name.partition(".tmp-")[0])).exists():
            path.rename(target)


def tidy(folder: Path, step: int, keep: int) -> None:
    """Removes what is left of other attempts, steps that an earlier attempt has reached and this one has not, and all
    but the newest checkpoints."""
    kept = [name for name in finished(folder) if int(name.removeprefix("step")) <= step][:keep]
    for path in folder.glob("step*"):
        if path.name not in kept and re.fullmatch(r"step\d{9}(\.tmp-.*)?", path.name):
            shutil.rmtree(path, ignore_errors=True)


def finished(folder: Path) -> list[str]:
    """The names of the complete checkpoints, from the newest."""
    paths = [path for path in folder.glob("step*") if re.fullmatch(r"step\d{9}", path.name) and path.is_dir()]
    return sorted((path.name for path in paths), reverse=True)


def _read(target: Path, rank: int) -> tuple[Any, int, str]:
    """The state that this worker takes, how many workers wrote it, and what is wrong with it."""
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


def _say(rank: int, lines: list[str]) -> None:
    for line in lines if rank == 0 else []:
        print(line, file=sys.stderr, flush=True)
