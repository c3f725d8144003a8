"""Files of data: the folder of data sets, the cache, and paths and names as users and other programs write them."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np

from core.checkpoint.stored import reason
from core.errors import UserError
from training.start.errors import explained
from training.start.script import from_home

T = TypeVar("T")


def data_root() -> Path:
    """Returns the folder that CO2_DATA names, with ~ expanded, or else `data` in the working directory."""
    return from_home(os.environ.get("CO2_DATA") or "data")


def hidden(path: str | Path, folder: str | Path) -> bool:
    """Returns whether the path's name, or the name of a folder between it and `folder`, begins with a dot."""
    return any(part.startswith(".") for part in Path(path).relative_to(folder).parts)


def unreadable(error: OSError) -> NoReturn:
    """Raises the error for a folder that cannot be listed. os.walk leaves it out without a word, unless `onerror`."""
    raise UserError(f"{error.filename} cannot be read ({error.strerror}): change its permissions, or move it away")


def entries(folder: Path) -> list[Path]:
    """Returns what is in a folder, sorted and without hidden names. Raises UserError, where Path.glob finds nothing."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        unreadable(error)


def missing(what: str, folder: Path, expected: str, stand_in: str, holds: str = "it") -> UserError:
    """Returns the error for a data set that is not there, in one line.

    `expected` names files, or the command that makes them. `stand_in` is a recipe that needs no data, and `holds` the
    part of the data set that must be in CO2_DATA.
    """
    unset = "" if os.environ.get("CO2_DATA") else " (CO2_DATA is not set)"
    return UserError(
        f"no {what} in {folder}{unset}: expected {expected}; set CO2_DATA to the folder that holds {holds}, or train "
        f"{stand_in}, which needs no data"
    )


def cached(name: str, build: Callable[[Path], Any]) -> Path:
    """Returns the folder `name` of the cache (CO2_CACHE, or ~/.cache/co2), and builds it first if it is missing.

    This is safe for several workers, also on several hosts with a shared file system. One builds while all other
    workers wait for its lock, and the folder appears by one atomic rename. `build` fills an empty folder.

    Raises:
        UserError: If the cache cannot be written.
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
        with suppress(OSError):  # without locks in the file system all workers build, and the first rename wins
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return folder if folder.is_dir() else build_whole(folder, build)[0]
        except OSError as error:
            if error.errno is None or error.filename and not Path(os.fsdecode(error.filename)).is_relative_to(cache):
                raise  # an error of the data that was read
            if not folder.is_dir():  # else another host was first
                raise _unwritable(cache, error) from None
    return folder


def share(path: Path) -> None:
    """Lets other users read the *.safetensors files at or in `path`. The library makes them private."""
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        file.chmod(0o644)


def build_whole(folder: Path, build: Callable[[Path], T]) -> tuple[Path, T]:
    """Returns the folder and the result of `build`, which fills an empty folder next to it. Then it is renamed."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        made = build(scratch)
        scratch.chmod(0o755)  # mkdtemp's folders are private
        return scratch.rename(folder), made
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # a write's error names no file
            error.filename = str(folder)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _unwritable(cache: Path, error: OSError) -> UserError:
    return UserError(f"the cache {cache} cannot be written ({reason(error)}): set CO2_CACHE to another folder")


def read_arrays(path: Path, *names: str, remedy: str = "copy it again") -> list[np.ndarray]:
    """Returns arrays of an .npz file. Raises UserError, with the remedy, if it is damaged or lacks one of them."""
    with explained(f"{path} cannot be read", remedy), np.load(path, allow_pickle=False) as file:
        return [np.asarray(file[name]) for name in names]


def printable(text: str) -> str:
    """Returns the text in one printable line. Other characters in a file's name or content are shown as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
