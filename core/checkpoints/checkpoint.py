"""A run's checkpoints: written in the background, and only a whole and undamaged one is ever loaded.

A checkpoint is written into a folder of its own, step*.tmp-ATTEMPT, which rank 0 renames once all have written
theirs and it has added a manifest. So one without .tmp holds what one attempt wrote at one step. What lies in it:
stored.py.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..flat import local_shard
from ..groups import leave_group, new_group, of_all
from . import stored
from .stored import Rest
from .untrusted import parse_json, reason

KEEP = 2  # checkpoints; the older one serves where the newer is damaged
MANIFEST = "manifest.json"
PATIENCE = 5.0  # seconds that a run which fails gives the checkpoint that it writes


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all their numbers are finite: 0-d, on the first one's device. Of a DTensor the local shard counts."""
    ends = [torch.stack(torch.aminmax(t)).double() for t in (local_shard(t.detach()) for t in tensors) if t.numel()]
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
        stored.library()  # now, and not beside the local steps
        own = world_size > 1 and group is None
        self._group = new_group(None, timeout, torch.device("cpu"), "gloo") if own else group
        self._thread: threading.Thread | None = None
        self._finite = True
        self._begun = 0.0
        self._failure = ""
        self._error: Exception | None = None

    def start(
        self,
        step: int,
        state: Any,
        tensors: dict[str, Tensor],
        begun: float | None = None,
        weights: list[Tensor] | None = None,
    ) -> None:
        """Begins to write, under folder/step*/, what stored.take_out has left and found; removes old checkpoints when
        that is done. Where state["model"] of any worker is not finite nothing is written, and no good one given up.
        Every worker must call it, at its own time. Waits for the one before, if that is not written.

        begun: when (time.monotonic) the round closed whose state it is, from which the manifest's seconds are counted.
        weights: to be looked at in place of state["model"].
        """
        self.wait()
        self._begun = time.monotonic() if begun is None else begun
        looked_at = _floats(state.get("model", {}), tensors) if weights is None else weights
        self._thread = threading.Thread(target=self._run, args=(step, state, tensors, looked_at), daemon=True)
        self._thread.start()

    def write(self, step: int, state: Any, tensors: dict[str, Tensor]) -> bool:
        """As start() and wait(), in the calling thread."""
        self._begun = time.monotonic()
        self._run(step, state, tensors, _floats(state.get("model", {}), tensors))
        return self.wait()

    def wait(self) -> bool:
        """Until what was begun is written; every worker must call it. False where a worker's model was not finite.

        UserError on all of them where one could not write; also the error of a worker that is gone.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, error, self._failure, self._error = self._failure, self._error, "", None
        if error is not None:
            raise error
        if failure:
            raise UserError(f"{failure}: make room or choose another folder; the last checkpoint stays")
        return self._finite

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

    def _run(self, step: int, state: Any, tensors: dict[str, Tensor], weights: list[Tensor]) -> None:
        try:
            finite = self._gather(bool(all_finite(weights)))
            self._finite = all(finite)
            if not self._finite:
                what = f"the model of rank {finite.index(False)} is not finite: no checkpoint is written"
                return _say(self.rank, [f"warning: step {step}: {what}, the last one stays"])
            self._failure = self._write(step, state, tensors)
            if self._failure and self._thread is not None:
                _say(self.rank, [f"warning: {self._failure}: the run stops where the next checkpoint is due"])
        except Exception as error:
            self._error = error

    def _write(self, step: int, state: Any, tensors: dict[str, Tensor]) -> str:
        """Why the checkpoint could not be written, the same on all workers."""
        target = self.folder / f"step{step:09d}"
        fresh = self.folder / f"{target.name}.tmp-{self.attempt}"
        rest, failure = ("", ""), ""
        try:
            rest = stored.write(fresh, state, tensors, self.rank, self._gather, self._group)
        except OSError as error:
            failure = f"{target} cannot be written ({reason(error)})"
        written = self._gather((rest, failure))
        failures = [failure for _, failure in written if failure]
        if self.rank == 0 and not failures:
            seconds = round(time.monotonic() - self._begun, 1)  # slurm/launch.sh reads it
            manifest = {"workers": self.world_size, "seconds": seconds, "rests": [rest for rest, _ in written]}
            try:
                publish(fresh, target, json.dumps(manifest, indent=1))
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
            return f"{name} is {was} there, {here} here"
    return ""


def _shape(state: dict[str, Any], name: str) -> list[int] | None:
    held = state.get(name)
    return list(local_shard(held).shape) if isinstance(held, Tensor) else None


def publish(fresh: Path, target: Path, manifest: str) -> None:
    """Completes a folder that all have written to, and gives it its name, from another of that step if need be."""
    if name := stored.missing(fresh):
        raise OSError(f"another worker's {name} did not come here: the folder must be one that all nodes share")
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


def _floats(state: dict[str, Any], tensors: dict[str, Tensor]) -> list[Tensor]:
    """The floating point numbers of a model's state, as stored.take_out has left and found it."""
    whole = stored.put_back(state, tensors.__getitem__).values()
    return [t for t in whole if isinstance(t, Tensor) and t.is_floating_point()]


def finished(folder: Path) -> list[str]:
    """The names of the complete checkpoints, from the newest."""
    paths = [path for path in folder.glob("step*") if re.fullmatch(r"step\d{9}", path.name) and path.is_dir()]
    return sorted((path.name for path in paths), reverse=True)


def _read(target: Path, rank: int) -> tuple[Any, int, str]:
    """The state that this worker takes, how many workers wrote it, and what is wrong with it."""
    try:
        manifest = parse_json((target / MANIFEST).read_text())
        rests: list[Rest] = [(str(name), str(digest)) for name, digest in manifest["rests"]]
        workers = int(manifest["workers"])
        if workers != len(rests) or sorted(name for name, _ in rests) != stored.rests(target):
            return None, 0, f"{MANIFEST} is damaged, it names other workers than those that wrote the checkpoint"
        return stored.read(target, rests[rank % workers]), workers, ""
    except FileNotFoundError as error:
        return None, 0, f"{Path(error.filename).name} is missing"
    except Exception as error:  # whatever it is: a worker that raised here would leave the others waiting
        return None, 0, f"it cannot be read, {reason(error)}"


def _say(rank: int, lines: list[str]) -> None:
    for line in lines if rank == 0 else []:
        print(line, file=sys.stderr, flush=True)
