"""A run's checkpoints: written in the background, and loaded only if complete and undamaged.

All workers write their files into one folder, step*.tmp-ATTEMPT. Rank 0 then adds a manifest and renames the folder. So
a folder without .tmp holds the files of one attempt at one step. stored.py defines the format.

An attempt is one start of a run. Its name begins with a fencing number, which is higher than in all starts before.
Manifests and unfinished folders hold the name. Before a start renames or removes anything, it checks that no later
start has written there. So an old job that is woken removes no checkpoint of the job that took its place.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..buckets import is_dtensor, local_shard
from ..errors import UserError, log, warn
from ..groups import host_group, leave_group, new_group, of_all
from ..guards import failure as peers
from ..guards.workers import all_finite, nonfinite_buffers
from ..hooks import Hook, HookedMethod
from ..local_update import LocalUpdateMethod
from ..state import own_rank
from . import stored
from .stored import reason

KEEP = 2  # checkpoints; the older one is used if the newer is damaged
MANIFEST = "manifest.json"
# names that DistributedDataParallel, torch.compile and other wrappers add to a model's keys
WRAPPERS = ("module", "_orig_mod", "model")
DENIED = "though it may be whole: the system answered"  # for a file that exists and cannot be read
PATIENCE = 5.0  # seconds that a failing run waits for the checkpoint being written


class Saver:
    """Writes checkpoints in a thread, one after the other, over a process group of its own. Every worker makes one.

    Args:
        folder: Folder of the checkpoints.
        rank: This worker's rank.
        world_size: Number of workers.
        attempt: The name of this start of the run, from new_attempt, equal on all workers.
        timeout: Seconds until a missing worker is an error.
        keep: How many checkpoints stay.
        group: The workers over gloo, used by nothing but write(). None makes a group.
        light: For light checkpoints, the rank whose optimizer state stands for this worker's. See save().
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
        light: int | None = None,
    ):
        self.folder, self.rank, self.world_size, self.attempt, self.timeout = folder, rank, world_size, attempt, timeout
        self.keep, self.light = keep, light
        own = world_size > 1 and group is None
        self._group = new_group(None, timeout, torch.device("cpu"), "gloo") if own else group
        self._thread: threading.Thread | None = None
        self._ended: bool | Exception = True  # the last write's error, or whether all models were finite

    def start(self, step: int, state: dict[str, Any], begun: float | None = None) -> None:
        """Starts to write what stored.on_host returned, after any earlier write, and removes old checkpoints.

        Every worker must call it, at any time. If a tensor under "model" is not finite on some worker, nothing is
        written or removed. The manifest counts seconds from `begun`, the time.monotonic() at which the round closed.
        """
        self.wait()
        job = step, state, time.monotonic() if begun is None else begun
        self._thread = threading.Thread(target=self._run, args=job, daemon=True)
        self._thread.start()

    def write(self, step: int, state: dict[str, Any], spared: Collection[str] = (), *, call: str = "save()") -> bool:
        """Copies a state to host memory, and does start() and wait() in the calling thread, if no other write runs.

        A state that `call` may not save on one worker is an error on all. `spared` names tensors of the model that need
        not be finite.
        """
        held: list[Any] = []
        refused = self._try(self.folder, lambda: held.append(stored.on_host(state, call)))
        self._raise(self._gather(refused))
        return self._write(step, held[0], time.monotonic(), spared)

    def wait(self) -> bool:
        """Waits for the write, on every worker. Returns False if some worker's model was not finite.

        UserError on all workers if one could not write. The error of a worker that is gone is raised, too.
        """
        self.abandon(None)
        self._thread, ended = None, self._ended
        if isinstance(ended, Exception):
            self._ended = True
            raise ended
        return ended

    def close(self) -> None:
        """Waits for the write, and leaves the group."""
        self.wait()
        if self._group is not None:
            leave_group(self._group, self.timeout)
            self._group = None

    def abandon(self, patience: float | None = PATIENCE) -> None:
        """Gives the running write at most `patience` seconds, after a failure."""
        if self._thread is not None:
            self._thread.join(patience)

    def _run(self, *job: Any) -> None:
        """Writes, and keeps the result or the error for wait()."""
        try:
            self._ended = self._write(*job)
        except Exception as error:
            self._ended = error

    def _write(self, step: int, state: dict[str, Any], begun: float, spared: Collection[str] = ()) -> bool:
        """Writes a checkpoint, as start() and wait() describe."""
        target = self.folder / f"step{step:09d}"
        fresh = self.folder / f"{target.name}.tmp-{self.attempt}"
        of_model = [t for name, t in state.get("model", {}).items() if name not in spared and isinstance(t, Tensor)]
        weights = [t for t in of_model if t.is_floating_point()]
        refused = self._try(target, lambda: check_later(target, self.attempt)) if self.rank == 0 else ""
        refusals, finite = zip(*self._gather((refused, bool(all_finite(weights)))), strict=True)
        self._raise(refusals)
        if not all(finite):  # all workers decide alike, before anything is written
            what = f"the model of rank {finite.index(False)} is not finite: no checkpoint is written"
            _say(self.rank, f"warning: step {step}: {what}, the last one stays")
            return False
        if self.light is not None and "method" in state:
            state = state | {"method": without_residuals(state["method"])}
        # equal tensors are written once, and in a light checkpoint an optimizer's count as equal in all nodes
        everyone = self._gather((stored.digests(state) if self.world_size > 1 else {}, self.light))
        digests = [found for found, _ in everyone]
        for found, light in everyone:
            theirs = digests[light] if light is not None else {}
            found |= {path: theirs[path] for path in found.keys() & theirs if path.startswith("['optimizer']")}
        mine: list[Any] = []
        failure = self._try(target, lambda: mine.append(stored.write(fresh, self.rank, state, digests)))
        written, failures = zip(*self._gather((mine, failure)), strict=True)
        failure = next(filter(None, failures), "")
        if self.rank == 0:

            def complete() -> None:
                seconds = round(time.monotonic() - begun, 1)  # slurm/launch.sh reads it
                files = {f"rank{rank}.pt": entry for rank, (entry,) in enumerate(written)}
                publish(fresh, target, {"seconds": seconds, "files": files}, self.attempt)

            failure = failure or self._try(target, complete)
            # before other workers may write the next checkpoint
            failure = self._try(target, lambda: tidy(self.folder, step, self.keep, self.attempt)) or failure
        self._raise(self._gather(failure))  # rank 0's outcome, an error on all workers
        return True

    def _try(self, target: Path, act: Callable[[], Any]) -> str:
        """Returns why `act` failed, or ""."""
        try:
            act()
        except UserError as error:
            return str(error)
        except (OSError, RuntimeError) as error:  # torch wraps the system's error in a RuntimeError
            why, remedy = f"rank {self.rank}: {reason(error)}", "make room or choose another folder"
            return f"{target} cannot be written ({why}): {remedy}; the last checkpoint stays"
        return ""

    def _raise(self, failures: Sequence[str]) -> None:
        """Raises the first failure of any rank, if there is one, as a UserError."""
        failure = next(filter(None, failures), "")
        if failure and self._thread is not None:
            _say(self.rank, f"warning: {failure}: the run stops where the next checkpoint is due")
        if failure:
            raise UserError(failure)

    def _gather(self, mine: Any) -> list[Any]:
        """Returns each worker's object, by rank."""
        return of_all(mine, self._group) if self._group is not None else [mine]


def without_residuals(state: Any) -> Any:
    """Returns a method's state with zeros, which are stored as one number, in place of error-feedback residuals."""

    def one(path: Any, leaf: Any) -> Any:
        fed_back = any(str(getattr(key, "key", "")).endswith("error_feedback") for key in path)
        return leaf.new_zeros(1).expand(leaf.shape) if fed_back and isinstance(leaf, Tensor) else leaf

    return stored.map_leaves(one, state)


def load_newest(
    folder: Path, *, rank: int, alone: bool = False, part: str = "", needs: Mapping[str, type] = {}
) -> tuple[Any, int] | None:
    """Loads the newest checkpoint that all workers can read.

    Every worker must call it, except with `alone`. If n other workers wrote it, rank r gets the state of rank r modulo
    n. Rank 0 prints which checkpoints were refused, and why. On a network file system, another worker may not see the
    newest one yet.

    Args:
        folder: The folder of checkpoints.
        rank: This worker's rank.
        alone: Whether only this worker calls it.
        part: Reads only this part, such as "model".
        needs: Keys that the state must have, with the types of their values.

    Returns:
        This worker's state and the number of workers that wrote it, or None if there is no checkpoint.

    Raises:
        UserError: If there are checkpoints and none can be read.
    """
    refused, gather = list[str](), (lambda mine: [mine]) if alone else of_all
    names, problem = list[str](), ""
    try:
        # publish() may have been killed between its two renames
        for path in folder.glob("step*.tmp-*-old") if rank == 0 else ():
            if not (target := path.with_name(path.name.partition(".tmp-")[0])).exists():
                path.rename(target)
        names = finished(folder)
    except OSError as error:
        problem = f"{folder} cannot be read ({reason(error)}): change its permissions, or give another folder"
    names, problem = gather((names, problem))[0]
    if problem:
        raise UserError(problem)
    for name in names:
        state, workers, problem = _read(folder / name, rank, part, needs)
        problems = [f"rank {number}: {problem}" for number, problem in enumerate(gather(problem)) if problem]
        if not problems:
            for line in refused:
                _say(rank, f"warning: {line}; going on from {name}")
            return state, workers
        refused.append(f"{folder / name} is refused ({problems[0]})")
    if refused:
        whole = any(DENIED in line for line in refused)
        remedy = "make it readable and resume" if whole else "restore its files, or start afresh with another folder"
        raise UserError(f"{'; '.join(refused)}: no other checkpoint is left; {remedy}")
    if rank == 0 and folder.exists():
        _say(rank, f"warning: no complete checkpoint in {folder}: starting from step 0")
    return None


def unlike(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """Describes how names and shapes of two models' state_dicts differ, by local shards. "" if they do not."""

    def shape(held: Any) -> list[int] | str:
        return list(local_shard(held).shape) if isinstance(held, Tensor) else "missing"

    for name in sorted(theirs.keys() | mine.keys()):
        was, here = shape(theirs.get(name)), shape(mine.get(name))
        if was != here:
            break
    else:
        return ""
    bare = [sorted(".".join(p for p in n.split(".") if p not in WRAPPERS) for n in names) for names in (theirs, mine)]
    wrapped = bare[0] == bare[1] and theirs.keys() != mine.keys()
    remedy = ", as a wrapper gives names a prefix: save and load the model inside the wrapper" if wrapped else ""
    return f"{name} is {was} there, {here} here{remedy}"


def new_attempt(folder: Path) -> str:
    """Returns a name for a new start of the run in this folder, with a fencing number above all numbers there."""
    numbers = [_number(_attempt_of(path)) for path in folder.glob("step*")]
    return f"{1 + max(numbers, default=0)}-{secrets.token_hex(4)}"


def _number(attempt: str) -> int:
    """Returns an attempt's fencing number, or 0 for the name of an older version, or of a run that has not loaded."""
    return int(found[1]) if (found := re.match(r"(\d{1,18})-", attempt)) else 0


def _attempt_of(path: Path) -> str:
    """Returns which attempt has written a checkpoint or an unfinished folder, or "" if that cannot be read."""
    if found := re.fullmatch(r"step\d{9}\.tmp-(.*?)(-old)?", path.name):
        return found[1]
    try:
        return str(read_manifest(path)["attempt"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _is_ours(path: Path, attempt: str) -> bool:
    """Whether this attempt may replace or remove a folder: its own, or an earlier attempt's."""
    wrote = _attempt_of(path)
    return wrote == attempt or _number(wrote) < _number(attempt)


def check_later(target: Path, attempt: str) -> None:
    """Raises UserError if a checkpoint that is not ours is as late as `target`, or is of a later start of this run."""
    mine = _number(attempt)
    for name in finished(folder := target.parent):
        path = folder / name
        if _is_ours(path, attempt) or (name < target.name and not 0 < mine < _number(_attempt_of(path))):
            continue
        if mine:
            raise UserError(
                f"{path} is of another start of this run, which has taken this one's place: nothing is written; end "
                "this process, or choose another folder"
            )
        raise UserError(
            f"{path} is a checkpoint that this process neither wrote nor loaded: call load() before training, or "
            "choose another folder"
        )


def publish(fresh: Path, target: Path, manifest: dict[str, Any], attempt: str) -> None:
    """Adds the manifest to a folder in which all workers have written their files, and renames it to `target`."""
    check_later(target, attempt)
    if missing := [name for name in manifest["files"] if not (fresh / name).exists()]:
        raise OSError(f"another worker's {missing[0]} is missing: the folder must be one that all nodes share")
    stored.write_flushed(fresh / MANIFEST, json.dumps({"attempt": attempt} | manifest, indent=1).encode())
    check_later(target, attempt)  # again, because this process may have been stopped in between
    if target.exists():
        target.rename(fresh.with_name(f"{fresh.name}-old"))
    fresh.rename(target)


def tidy(folder: Path, step: int, keep: int, attempt: str) -> None:
    """Removes our checkpoints of later steps, all others but the newest `keep`, and our unfinished folders."""
    check_later(folder / f"step{step:09d}", attempt)
    kept = [name for name in finished(folder) if int(name.removeprefix("step")) <= step][:keep]
    for path in folder.glob("step*"):
        if path.name not in kept and re.fullmatch(r"step\d{9}(\.tmp-.*)?", path.name) and _is_ours(path, attempt):
            shutil.rmtree(path, ignore_errors=True)


def finished(folder: Path) -> list[str]:
    """Returns the names of the complete checkpoints, newest first. OSError if the folder cannot be read."""
    names = os.listdir(folder) if folder.exists() else []
    return sorted((n for n in names if re.fullmatch(r"step\d{9}", n) and (folder / n).is_dir()), reverse=True)


def read_manifest(target: Path) -> Any:
    """Returns the content of a checkpoint's manifest.json."""
    return stored.parse_json(stored.regular(target / MANIFEST).read_text())


def _read(target: Path, rank: int, part: str, needs: Mapping[str, type]) -> tuple[Any, int, str]:
    """Returns this worker's state, the number of workers that wrote the checkpoint, and what is wrong with it."""
    try:
        manifest = read_manifest(target)
        files = manifest.get("files", ())
        if manifest.keys() & {"layout", "rests"} or "rank0.json" in files:
            return None, 0, "it is of an older version: resume with the version that wrote it"
        there = {path.name for path in target.glob("rank*.pt")}
        if missing := sorted(files.keys() - there):
            return None, 0, f"{missing[0]} is missing"
        if files.keys() != there:
            return None, 0, f"{MANIFEST} is damaged, it names other workers than those that wrote the checkpoint"
        state = stored.read(target, rank % len(files), files, part)
        if state["step"] != int(target.name.removeprefix("step")):
            return None, 0, f"it holds step {state['step']!r:.20}, unlike its name"
        if lacks := [key for key, kind in needs.items() if not isinstance(state.get(key), kind)]:
            return None, 0, f"it holds no {lacks[0]}: resume with what wrote it"
        return state[part] if part else state, len(files), ""
    except FileNotFoundError as error:
        return None, 0, f"{Path(error.filename).name} is missing"
    except UserError as error:
        return None, 0, str(error)
    except OSError as error:
        return None, 0, f"{Path(error.filename or target).name} cannot be read, {DENIED} {reason(error)!r}"
    except Exception as error:  # if a worker raised here, the others would wait for it
        return None, 0, f"it cannot be read, {reason(error)}"


def _say(rank: int, line: str) -> None:
    """Prints a line to stderr on rank 0."""
    if rank == 0:
        print(line, file=sys.stderr, flush=True)


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Returns the optimizer's state_dict with parameter names in place of numbers."""
    state = optimizer.state_dict()
    names = _numbered(optimizer, model)
    # what belongs to no parameter has a name already, such as MADGRAD's step counter
    named = {names[key] if isinstance(key, int) else key: values for key, values in state["state"].items()}
    return state | {"state": named}


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Restores what of_optimizer returned. For sharded parameters, tensors are this worker's shards."""
    params = dict(model.named_parameters())
    numbers = {name: number for number, name in enumerate(_numbered(optimizer, model))}
    values = dict[Any, Any]()
    for name, held in state["state"].items():
        of_one = isinstance(held, dict) and name in numbers
        values[numbers[name] if of_one else name] = (
            {key: as_shard(value, params.get(name)) for key, value in held.items()} if of_one else held
        )
    restore_optimizer(optimizer, state | {"state": values})


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restores optimizer.state_dict() with its types.

    torch's own load_state_dict casts a parameter's state to the parameter's dtype, takes text and containers apart, and
    fails for a named tuple or an array. Here only the device is torch's choice. state_dict() must return the tensors
    that the optimizer uses, as torch's does.
    """

    def copied(value: Any, to: torch.device) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(to, copy=True), value, is_leaf=lambda v: isinstance(v, torch.Size))

    params = _params(optimizer)
    saved = {key: held for key, held in state["state"].items() if isinstance(key, int) and isinstance(held, dict)}
    walked = {number: {key: v for key, v in held.items() if _is_walked(v)} for number, held in saved.items()}
    optimizer.load_state_dict(state | {"state": state["state"] | walked})
    live = optimizer.state_dict()["state"]
    for number, held in saved.items():
        for key, value in held.items():
            if isinstance(value, Iterable):  # a tensor is one
                now = live[number].get(key)
                of = now if isinstance(now, Tensor) and isinstance(value, Tensor) else params[number]
                live[number][key] = copied(value, of.device)


def _is_walked(value: Any) -> bool:
    """Whether torch's load_state_dict can copy a value: it makes containers of other classes from one iterator."""
    if type(value) in (list, tuple) or isinstance(value, dict):
        return all(map(_is_walked, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor | str) or not isinstance(value, Iterable)


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Restores model.state_dict(). For sharded parameters, tensors are this worker's shards."""
    here = model.state_dict()
    model.load_state_dict(with_versions({name: as_shard(value, here.get(name)) for name, value in state.items()}, here))


def with_versions(state: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Returns `state` with the modules' versions in the state_dict `here`.

    Without them, a module that has renamed its parameters takes the state for an old one.
    """
    versioned: Any = OrderedDict(state)
    versioned._metadata = getattr(here, "_metadata", {})
    return versioned


def as_shard(value: Any, like: Any) -> Any:
    """Returns this worker's shard of a tensor sharded as `like` as a DTensor, anything else as it is."""
    if not (is_dtensor(like) and isinstance(value, Tensor) and value.shape == like.to_local().shape):
        return value
    shard = value.to(like.device)
    place = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return type(like).from_local(shard, like.device_mesh, like.placements, **place)


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the parameters in the order of the optimizer's state_dict, with ZeRO-1 only this rank's."""
    return [p for group in getattr(optimizer, "optim", optimizer).param_groups for p in group["params"]]


def _numbered(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Returns the names of _params."""
    names, params = {id(p): name for name, p in model.named_parameters()}, _params(optimizer)
    if missing := sum(id(p) not in names for p in params):
        raise UserError(
            f"the optimizer has {missing} parameters that the model lacks: give one module that holds all, such as "
            "an nn.ModuleList"
        )
    return [names[id(p)] for p in params]


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns the states of torch's global generators: the CPU's, and the GPU's if the model is on one."""
    on_gpu = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | on_gpu


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Restores what random_state returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:  # no: a CPU wrote it
        torch.cuda.set_rng_state(state["cuda"], device)


STEPS = 10**9  # limit of the folder names' digits
# each method's attempt in each folder that it was loaded from or saved to
_attempts = weakref.WeakKeyDictionary[Any, dict[Path, str]]()


class Stateful(Protocol):
    """A method, or any object with these two methods."""

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
    others: Mapping[str, Any] | None = None,
    light: bool = False,
) -> bool:
    """Writes folder/stepNNNNNNNNN, from which `load` resumes bit for bit, even in the middle of a round.

    Every worker must call it, and saves its own model, optimizer, method and torch's random state. Data that is equal
    on several workers is written once. The folder gets its name after all workers have written their files. If a worker
    is killed, the previous checkpoint remains. `save` waits for the all-reduce in flight.

    Args:
        folder: Folder of the checkpoints, on a file system that all workers share. `~` is the home folder.
        model: The model.
        optimizer: Its optimizer, if any.
        co2: CO2 or any other method.
        step: Number of steps that the loop has taken.
        keep: How many checkpoints stay. Older checkpoints are removed. After a load() from this folder, checkpoints of
            later steps are removed, too.
        others: More objects with a state_dict(), and plain values such as the best loss, by name. Plain values,
            tensors, NumPy arrays and numbers, paths, lists, tuples, sets and dicts are restored with their types.
            Named tuples, dataclasses and tensor subclasses need torch.serialization.add_safe_globals([the class])
            before save() and load().
        light: Whether to leave out error-feedback residuals, which then start from zero, and the optimizer's tensors
            of all workers but the first, or of all nodes but the first. All workers then resume with these tensors.

    Returns:
        False if some worker's model is not finite: nothing was written, and the last checkpoint stays.

    Raises:
        UserError: On all workers, if a state holds a value that `load` could not restore, if a worker cannot write, or
            if some workers have continued without calling save(), or call it at another step. Also if the folder has a
            checkpoint of this step or later that this process neither wrote nor loaded, or of a later start of the run.
    """
    if not isinstance(step, int) or not 0 <= step < STEPS:
        raise UserError(f"step={step!r}: give the number of steps taken, from 0 to {STEPS - 1}")
    if not isinstance(keep, int) or keep < 1:
        raise UserError(f"keep={keep!r}: give the number of checkpoints that stay, 1 or more")
    _begin("save", folder, model, optimizer, co2)
    _refuse_other_places(of_all((step, getattr(co2, "rounds", 0))))
    scheduled = getattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched", False)  # by torch's schedulers
    if scheduled and not any(hasattr(other, "get_last_lr") for other in (others or {}).values()):
        warn(
            "save() gets no learning-rate scheduler, though one belongs to the optimizer: after load() it would start "
            'anew; give others={"schedule": scheduler} to save() and load()',
        )
    own = {name: o for name, o in (others or {}).items() if hasattr(o, "state_dict") and not isinstance(o, type)}
    whole = {
        "model": model.state_dict(),
        "optimizer": of_optimizer(optimizer, model) if optimizer is not None else {},
        "optimizer_kind": type(optimizer).__name__,
        "method": co2.state_dict(),
        "trained": _trained_names(model, co2),
        "others": {**(others or {}), **{name: o.state_dict() for name, o in own.items()}},
        "random": random_state(next(model.parameters()).device),
        "step": step,
    }
    attempts = of_all(_attempts.setdefault(co2, {}).setdefault(_key(folder), f"0-{secrets.token_hex(4)}"))
    rank, group = own_rank(), host_group()
    across = co2.allreduce.group if isinstance(co2, LocalUpdateMethod) else None
    first = dist.get_process_group_ranks(across)[0] if across is not None else 0  # of this rank's place in the nodes
    place = Path(folder).expanduser(), rank, len(attempts), attempts[0]
    saver = Saver(*place, keep=keep, group=group, light=first if light else None)
    return saver.write(step, whole, spared=_need_not_be_finite(model, co2))


def _begin(call: str, folder: Any, model: Any, optimizer: Any, co2: Any) -> None:
    """Waits until all workers call save() or load().

    UserError if arguments are of other kinds, as in another order, and for elastic workers, some of which may have
    joined later, and cannot make the call.
    """
    is_path = isinstance(folder, str | os.PathLike)
    kinds = [type(given).__name__ for given in (model, optimizer, co2)]
    shown = f"{call}({', '.join([repr(os.fspath(folder)) if is_path else type(folder).__name__, *kinds])})"
    fits = is_path and isinstance(model, nn.Module) and (optimizer is None or hasattr(optimizer, "param_groups"))
    if not fits or not hasattr(co2, "load_state_dict") or isinstance(co2, nn.Module | torch.optim.Optimizer):
        what = "the folder, the model, its optimizer or None, and the method, which is made before"
        raise UserError(f"{shown}: give {what}, in this order")
    if isinstance(co2, LocalUpdateMethod) and co2.allreduce.is_elastic:
        raise UserError(
            f"{call}() needs all workers, and elastic workers leave and join: let the first worker write what its "
            "give() returns with torch.save, and read it in the function that join(found=...) calls"
        )
    peers.come_together(call)


@torch.inference_mode(False)  # the optimizer's new state could not be written to later
def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    co2: Stateful,
    *,
    others: MutableMapping[str, Any] | None = None,
) -> int | None:
    """Resumes from the newest complete checkpoint that every worker can read.

    Every worker must call it, with the arguments of `save`, and the objects as they were made for the first step. Rank
    0 prints which checkpoints are damaged. With a different number of workers, worker r gets the state of worker r
    modulo the former number. It warns, and torch's random states start anew. Plain values in `others` are replaced in
    the dict that you give.

    Returns:
        The checkpoint's step, or None if there is none.

    Raises:
        UserError: If there are checkpoints and none can be read, or the newest is of another model, optimizer or
            method.
    """
    _begin("load", folder, model, optimizer, co2)
    rank = own_rank()
    here = {} if others is None else others
    folders = of_all(str(_key(folder)))
    for other, theirs in enumerate(folders):
        if theirs != folders[0]:
            raise UserError(f"load(): {folders[0]} on rank 0 and {theirs} on rank {other}: give all workers one folder")
    found = load_newest(folder := Path(folder).expanduser(), rank=rank, needs=NEEDS)
    if found is None:
        if rank == 0:
            log.info("no checkpoint in %s: training starts afresh", folder)
        _attempts.setdefault(co2, {})[_key(folder)] = new_attempt(folder)
        return None
    state, before = found
    problems = of_all(_misfit(state, model, optimizer, co2, here))  # checked on all workers before anything is loaded
    if any(problems):
        raise UserError(f"{folder}: the checkpoint of step {state.get('step', '?')} {max(problems)}")
    load_model(model, state["model"])
    if optimizer is not None:
        load_optimizer(optimizer, model, state["optimizer"])
    try:
        co2.load_state_dict(state["method"])
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    for name, held in state["others"].items():
        if hasattr(here[name], "load_state_dict"):
            here[name].load_state_dict(held)
        else:
            here[name] = held
    _attempts.setdefault(co2, {})[_key(folder)] = new_attempt(folder)
    if before == (workers := len(problems)):
        set_random_state(state["random"], next(model.parameters()).device)
    elif rank == 0:
        wrote = f"{before} workers wrote the checkpoint of step {state['step']}, {workers} go on"
        taken = f"each takes what the worker of its rank modulo {before} held; torch's random states begin anew"
        warn(f"{wrote}: {taken}")
    return state["step"]


NEEDS = {"optimizer_kind": str, "model": dict, "optimizer": dict, "method": dict, "others": dict, "random": dict}


def _key(folder: str | Path) -> Path:
    """Returns a folder's place in _attempts."""
    return Path(folder).expanduser().resolve()


def _refuse_other_places(places: Sequence[tuple[int, int]]) -> None:
    """Raises UserError unless all workers save the same step of the same round. places: (step, rounds) by rank."""
    rank = next((rank for rank, place in enumerate(places) if place != places[0]), 0)
    (first, before), (step, rounds) = places[0], places[rank]
    if step != first:
        raise UserError(f"save(): step={first} on rank 0 and step={step} on rank {rank}: give the same on all workers")
    if rounds != before:
        raise UserError(
            f"save() after {before} rounds on rank 0 and {rounds} on rank {rank}: all workers need as many calls of "
            "step(), so call it for a skipped batch, too, or finish() before save()"
        )


def _trained_names(model: nn.Module, co2: Stateful) -> list[str]:
    """Returns the names of the method's parameters, in its order, none for DDP."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names.get(id(p), "") for p in (co2.trained if isinstance(co2, LocalUpdateMethod) else [])]


def _need_not_be_finite(model: nn.Module, co2: Stateful) -> set[str]:
    """Returns the names of buffers that need not be finite.

    The method does not average them, or their only non-finite numbers were there at construction, as in a causal mask.
    """
    bad = [b for _, b in nonfinite_buffers(co2)] if isinstance(co2, LocalUpdateMethod) else []
    return {name for name, b in model.named_buffers(remove_duplicate=False) if not any(b is other for other in bad)}


def _misfit(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    co2: Stateful,
    others: Mapping[str, Any],
) -> str:
    """Returns why this state cannot be loaded, "" if it can. The method has its own checks later."""
    if differs := unlike(state["model"], model.state_dict()):
        return f"is of another model: {differs}; give the model that was saved, or choose another folder"
    if (was := state["optimizer_kind"]) != (kind := type(optimizer).__name__):
        return f"is of the optimizer {was}, here it is {kind}: resume with the optimizer that was saved"
    if optimizer is not None:
        now = of_optimizer(optimizer, model)
        sizes = [[len(group["params"]) for group in s["param_groups"]] for s in (state["optimizer"], now)]
        if sizes[0] != sizes[1]:
            return f"has an optimizer of {sizes[0]} parameters per group, here it has {sizes[1]}: make it as it was"
    if (was := state.get("trained", [])) != (now := _trained_names(model, co2)) and sorted(was) == sorted(now):
        return "holds the method's parameters in another order: give them to it in the order of the run that wrote it"
    if (was := sorted(state["others"])) != (here := sorted(others)):
        return f"has others={was}, here it is {here}: give the same names"
    for name, held in state["others"].items():
        if hasattr(others[name], "load_state_dict") and not isinstance(held, dict):
            return f"has the plain value {held!r:.40} as others[{name!r}]: give a plain value here, too"
    return ""


class Snapshot(Hook):
    """Delivers the state at a boundary once the all-reduce in flight has arrived, without waiting for it."""

    def attach(self, method: HookedMethod) -> None:
        super().attach(method)
        self._callback: Callable[[dict[str, Any]], None] | None = None
        self._current: dict[str, Any] = {}  # state that the next local steps change

    def ask(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Calls `callback` with this boundary's state_dict(), at the next boundary at the latest.

        Copy parameters and optimizer now. An earlier request is answered first, which waits.
        """
        self.hand_over()
        self._callback, self._current = callback, {"local_steps": self.method.local_steps}
        if not self.method.allreduce.in_flight:
            self.hand_over()

    def hand_over(self) -> None:
        """Waits for the all-reduce in flight, and answers the request, if any."""
        if self._callback is not None:
            callback, self._callback = self._callback, None
            state = self.method.state_dict(alone=True)  # the round's first all-reduce is in flight, on all workers
            callback({rank: part | self._current for rank, part in state.items()})

    def after_allreduce(self) -> None:
        self.hand_over()
