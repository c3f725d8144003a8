"""The files of a checkpoint, which torch.save writes. Reading them runs no code and detects damage.

Each worker writes one file, a dict. `elsewhere` in it has the paths of tensors that are None there, and the rank of the
worker whose file holds them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path, PosixPath, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from ..buckets import local_shard
from ..errors import UserError

LEVELS = 64  # of nested lists and objects; our own files have five


def parse_json(text: str | bytes) -> Any:
    """Calls json.loads with additional checks.

    ValueError also for nesting that programs cannot walk, lone surrogates, which no file or screen accepts, and
    integers that exceed every float.
    """

    def check(value: Any, levels: int) -> None:
        if isinstance(value, str):
            value.encode()
        elif isinstance(value, int):
            float(value)
        elif isinstance(value, list | dict):
            if not levels:
                raise RecursionError
            for inner in [*value, *value.values()] if isinstance(value, dict) else value:
                check(inner, levels - 1)

    try:
        check(found := json.loads(text), LEVELS)
    except RecursionError:
        raise ValueError(f"more than {LEVELS} levels") from None
    except OverflowError as error:
        raise ValueError(str(error)) from None
    return found


def reason(error: BaseException) -> str:
    """Returns an error in one line, and for an error of the operating system its message."""
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def regular(path: Path) -> Path:
    """Returns the path. UserError for a FIFO, a device or a folder, because reading it might never end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no regular file: remove it, or put the file back")
    return path


def write_flushed(path: Path, content: bytes | Callable[[IO[bytes]], Any]) -> None:
    """Writes a file, or calls `content` to write it, and waits until the disk has it."""
    with open(path, "wb") as file:
        content(file) if callable(content) else file.write(content)
        file.flush()
        os.fsync(file.fileno())


def plain_values(*more: Any) -> Any:
    """Lets torch.load read, in a `with` block, plain values of Python and NumPy, and `more` classes.

    A schedule may hold NumPy's scalars. Calling the classes and functions of plain values runs no code from a file.
    NumPy 1 had other names for its modules.
    """
    functions = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    named = [(f, f"numpy.{core}.multiarray.{f.__name__}") for f in functions for core in ("core", "_core")]  # pyright: ignore
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefdFDMmVUS"}
    plain = [bytes, frozenset, PosixPath, PurePosixPath, np.ndarray, np.dtype, *dtypes, *named]
    return torch.serialization.safe_globals([*plain, *more])


def load_safely(file: Any, **options: Any) -> Any:
    """Calls torch.load such that it runs no code from the file."""
    with plain_values():
        return torch.load(file, map_location="cpu", weights_only=True, **options)


def unreadable(value: Any, path: str = "") -> str:
    """Describes the first value in a state that `load_safely` would not read back, with its path, or returns "".

    Containers other than dict, list and tuple count as one value.
    """
    kind = type(value)
    if kind in (dict, OrderedDict, list, tuple):
        named = value.items() if isinstance(value, dict) else enumerate(value)
        inner = [(at, part) for name, held in named for at, part in ((path, name), (f"{path}.{name}".strip("."), held))]
        return next((said for at, part in inner if (said := unreadable(part, at))), "")
    if kind in (type(None), bool, int, float, str, Tensor) and not getattr(value, "__dict__", None):
        return ""
    buffer, what = io.BytesIO(), f"{path} is a {kind.__module__}.{kind.__qualname__}"
    try:
        torch.save(value, buffer)
    except Exception as error:  # pickle raises errors of many classes
        return f"{what}, which cannot be saved ({reason(error)}): keep it out of the state_dict"
    try:
        buffer.seek(0)
        load_safely(buffer)
    except Exception:
        buffer.seek(0)
        with plain_values():
            classes = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(buffer)) or "its class"
        remedy = f"call torch.serialization.add_safe_globals([{classes}]) where the program starts"
        return f"{what}, which torch.load cannot read back: give plain values, or {remedy}"
    return ""


def on_host(state: Any, call: str = "save()") -> Any:
    """Returns a state with copies of its tensors in host memory, because training changes them. Shards stay shards.

    UserError, with its path, for a value that `read` could not restore. The message begins with the user's `call`.
    """

    def copied(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        try:
            return local_shard(leaf.detach()).to("cpu", copy=True)
        except RuntimeError as error:
            raise UserError(f"{call}: {name_of(path)} cannot be copied to host memory ({reason(error)})") from None

    try:
        found = map_leaves(copied, state)
        if problem := unreadable(found):
            raise UserError(f"{call}: {problem}")
    except RecursionError:
        raise UserError(f"{call}: the state is nested too deeply: give a flat one") from None
    return found


def map_leaves(act: Callable[[Any, Any], Any], state: Any) -> Any:
    """Returns a state with act(path, value) in place of each value."""
    return tree_map_with_path(act, state, is_leaf=_is_size)


def _leaves(state: Any) -> dict[str, Any]:
    """Returns the values of a state by path."""
    return {name_of(path): leaf for path, leaf in tree_flatten_with_path(state, is_leaf=_is_size)[0]}


def _is_size(value: Any) -> bool:
    """Whether torch would take a torch.Size apart, and make it a tuple."""
    return isinstance(value, torch.Size)


def name_of(path: Any) -> str:
    """Returns a value's path as text, without the key of a worker's rank, which would differ between workers."""
    return re.sub(r"\['rank\d+'\]", "", keystr(path))


def digests(state: Any) -> dict[str, str]:
    """Returns the SHA-256 of each tensor's dtype, shape and elements, by path."""

    def digest(tensor: Tensor) -> str:
        found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized:
            elements = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
            found.update(elements.view(torch.uint8).numpy().data)  # hashlib lets other threads run
        else:
            torch.save(tensor, buffer := io.BytesIO())
            found.update(buffer.getbuffer())
        return found.hexdigest()

    return {path: digest(leaf) for path, leaf in _leaves(state).items() if isinstance(leaf, Tensor)}


def file_digest(path: Path) -> str:
    """Returns a file's SHA-256."""
    with open(regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path, rank: int, state: dict[str, Any], everyone: list[dict[str, str]]) -> dict[str, Any]:
    """Writes this worker's file, and returns its entry in the manifest.

    `state` comes from on_host. `everyone` holds each worker's digests. A tensor is written by the first worker that
    holds it.
    """

    def own(path: Any, leaf: Any) -> Any:
        if name_of(path) in elsewhere:
            return None
        whole = type(leaf) is Tensor and leaf.layout is torch.strided  # torch.save writes a view's whole storage
        return leaf.clone() if whole and leaf.untyped_storage().nbytes() > leaf.nbytes else leaf

    owners = {
        path: next(r for r, theirs in enumerate(everyone) if theirs.get(path) == found)
        for path, found in everyone[rank].items()
    }
    elsewhere = {path: owner for path, owner in owners.items() if owner != rank}
    content = map_leaves(own, state) | {"elsewhere": elsewhere}
    folder.mkdir(parents=True, exist_ok=True)
    write_flushed(path := folder / f"rank{rank}.pt", lambda file: torch.save(content, file))
    return {"bytes": path.stat().st_size, "sha256": file_digest(path)}


def read(folder: Path, rank: int, files: Mapping[str, Any], part: str = "") -> dict[str, Any]:
    """Returns the state of worker `rank`, or its step and one part of it, in memory of its own.

    `files` are the manifest's entries. UserError if a file is damaged. Any other error means that a file is missing or
    not readable.
    """

    def opened(number: int) -> dict[str, Any]:
        path = regular(folder / (name := f"rank{number}.pt"))
        if path.stat().st_size != files[name]["bytes"]:
            raise UserError(f"{name} is damaged, its size differs")
        if file_digest(path) != files[name]["sha256"]:
            raise UserError(f"{name} is damaged, its checksum differs")
        try:  # mapped into memory, so that a worker reads only its part of another worker's file
            return load_safely(path, mmap=True)
        except OSError:
            raise
        except Exception as error:  # torch and zipfile raise errors of many classes
            raise UserError(f"{name} cannot be read, {reason(error)}") from None

    held = opened(rank)
    elsewhere = held.pop("elsewhere")
    wanted = {key: held[key] for key in ("step", part)} if part else held
    owners = {elsewhere[path] for path in _leaves(wanted) if path in elsewhere}
    theirs = {owner: _leaves(opened(owner)) for owner in owners}

    def restored(path: Any, leaf: Any) -> Any:
        if (name := name_of(path)) in elsewhere:
            leaf = theirs[elsewhere[name]][name]
        return leaf.clone() if type(leaf) is Tensor else leaf

    return map_leaves(restored, wanted)
