"""What all tasks share of their data: where it lies, what is made of it once, and the key of each sample in a batch."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from core.checkpoints.untrusted import reason
from core.errors import UserError
from training.sampling import eval_share, worker_batches

T = TypeVar("T")
Key = tuple[int, int, int]  # (seed, epoch, index): a sample's random numbers follow from it alone


def data_root() -> Path:
    """The folder that CO2_DATA names, ~ being the home folder; `data` in the working directory where it is not set."""
    return from_home(os.environ.get("CO2_DATA") or "data")


def from_home(path: str | Path) -> Path:
    """The path with ~ and ~user replaced by that home folder, as a shell does only at the start of a word."""
    found = os.path.expanduser(path)
    if (first := found.split(os.sep)[0]).startswith("~") and not os.path.lexists(first):
        raise UserError(f"{path}: {first} is no user here: give the whole path")
    return Path(found)


def paths_from_home(options: T) -> T:
    """The dataclass with from_home applied to every path in its fields, in tuples too."""
    changed = {}
    for f in dataclasses.fields(options):  # pyright: ignore[reportArgumentType]
        value = getattr(options, f.name)
        if isinstance(value, Path) and str(value).startswith("~"):
            changed[f.name] = from_home(value)
    return dataclasses.replace(options, **changed) if changed else options  # pyright: ignore[reportArgumentType]


def hidden(path: str | Path, folder: str | Path) -> bool:
    """Whether the path's name, or that of a folder between it and `folder`, begins with a dot."""
    return any(part.startswith(".") for part in Path(path).relative_to(folder).parts)


def missing(what: str, folder: Path, expected: str, stand_in: str, holds: str = "it") -> UserError:
    """The one line of a data set that is not there. folder: where it was looked for. expected: files, or what makes
    them. holds: what of it lies in CO2_DATA. stand_in: a recipe that needs no data."""
    unset = "" if os.environ.get("CO2_DATA") else " (CO2_DATA is not set)"
    return UserError(
        f"no {what} in {folder}{unset}: expected {expected}; set CO2_DATA to the folder that holds {holds}, or train "
        f"{stand_in}, which needs no data"
    )


def cached(name: str, build: Callable[[Path], Any]) -> Path:
    """The folder `name` of the cache (CO2_CACHE, or ~/.cache/co2), made by `build(empty folder)` where it is missing.

    Safe for several workers, also of several hosts on a shared file system: one builds while the others wait for its
    lock, and the folder appears by one atomic rename.
    """
    cache = from_home(os.environ.get("CO2_CACHE") or "~/.cache/co2")
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / f".{name}.lock", "w")  # noqa: SIM115, closed below
    except OSError as error:
        raise _unwritable(cache, error) from None
    with lock:
        with suppress(OSError):  # a file system without locks: all build, the first rename wins
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return folder if folder.is_dir() else build_whole(folder, build)[0]
        except OSError as error:
            if error.errno is None or error.filename and not Path(os.fsdecode(error.filename)).is_relative_to(cache):
                raise  # about what is read
            if not folder.is_dir():  # otherwise another host was first
                raise _unwritable(cache, error) from None
    return folder


def build_whole(folder: Path, build: Callable[[Path], T]) -> tuple[Path, T]:
    """The folder, made by `build(an empty one beside it)`, and what that returned; it appears only when complete."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        made = build(scratch)
        scratch.chmod(0o755)  # mkdtemp's folders are private
        return scratch.rename(folder), made
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unwritable(cache: Path, error: OSError) -> UserError:
    return UserError(f"the cache {cache} cannot be written ({reason(error)}): set CO2_CACHE to another folder")


def damaged(what: str, file: Path, why: object) -> UserError:
    """The one line of a file in the cache that does not hold what was written."""
    return UserError(f"{file}: the cache of {what} is damaged ({why}): remove {file.parent}, it is made again")


# -- which samples a batch holds --------------------------------------------------------------------------------------


def train_keys(
    recipe: Any, samples: int, rank: int, world_size: int, start: int, total: int, repeats: int = 1
) -> Iterator[tuple[tuple[int, ...], list[Key]]]:
    """This worker's batches from step `start` to `total`: (the batch's key, its samples' keys).

    A batch's key is (seed, epoch, number in the epoch, rank). recipe: has the seed and the global batch_size. repeats:
    see training.sampling.epoch_batches; a copy's index is the sample's plus a multiple of `samples`.
    """
    of = dict(seed=recipe.seed, rank=rank, world_size=world_size, start=start, total=total, repeats=repeats)
    for epoch, number, indices in worker_batches(samples, recipe.batch_size, **of):
        yield (recipe.seed, epoch, number, rank), [(recipe.seed, epoch, i) for i in indices.tolist()]


def eval_keys(samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[list[Key]]:
    """The keys of this worker's share of a held-out set, (0, 0, index), in batches of at most batch_size."""
    share = eval_share(samples, rank=rank, world_size=world_size)
    return ([(0, 0, i) for i in share[at : at + batch_size]] for at in range(0, len(share), batch_size))
