"""The format of checkpoint files. Reading them executes no code and detects damage, because files are not trusted."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import os
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from pathlib import Path, PosixPath, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from .buckets import local_shard
from .errors import UserError

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


LARGEST = 2**1000  # limit of integers, because parse_json refuses integers that exceed every float
DEEPEST = LEVELS // 3 - 1  # levels of nested values; each uses up to three levels of JSON
MAPS: dict[str, Any] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter, defaultdict)}
MAKERS: dict[str, Any] = {
    kind.__name__: kind for kind in (int, float, list, dict, set, str)
}  # factories of a defaultdict
DTYPES: dict[str, Any] = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


def _packed(array: Any) -> Tensor:
    """Returns the bytes of an .npy file."""
    np.save(buffer := io.BytesIO(), array, allow_pickle=False)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(data: Tensor) -> Any:
    """Reads the bytes of an .npy file."""
    return np.load(io.BytesIO(data.numpy().tobytes()), allow_pickle=False)


def numpy_makers() -> list[Any]:
    """Returns the classes and functions of NumPy's arrays and scalars, for torch.serialization.safe_globals.

    Calling them runs no code from a file. NumPy 1 had other names for its modules.
    """
    functions = [np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0]]
    named = [(f, f"numpy.{core}.multiarray.{f.__name__}") for f in functions for core in ("core", "_core")]  # pyright: ignore
    return [np.ndarray, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefdUS"}, *named]


# type -> (to simpler values, from simpler values); NumPy arrays become the bytes of an .npy file
TYPES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    deque: (lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    bytes: (bytes.hex, bytes.fromhex),
    PosixPath: (str, PosixPath),
    PurePosixPath: (str, PurePosixPath),
    torch.Size: (list, torch.Size),
    torch.device: (str, torch.device),
    torch.dtype: (str, DTYPES.__getitem__),
    np.ndarray: (_packed, _unpacked),
    np.generic: (_packed, lambda data: _unpacked(data)[()]),
}
NAMED = {kind.__name__: kind for kind in TYPES}


def take_out(state: Any, tensors: dict[str, Tensor], path: str = "", *, copy: bool = True, depth: int = 0) -> Any:
    """Returns `state` as JSON, and moves its tensors to `tensors`, by path, in host memory.

    With `copy`, tensors that are already in host memory are copied, because training changes them. UserError, with the
    value's path, if `load` could not restore a value with its type.
    """

    def inner(value: Any, name: Any = None) -> Any:
        below = path if name is None else f"{path}.{name}" if path else str(name)
        return take_out(value, tensors, below, copy=copy, depth=depth + 1)

    def refusal(why: str) -> UserError:
        return UserError(f"save(): {path or 'the state'} is {why}")

    held: Any = local_shard(state.detach()) if isinstance(state, Tensor) else state
    kind: Any = np.generic if issubclass(type(held), np.generic) else type(held)
    fields = getattr(kind, "_fields", None)  # of a named tuple
    if depth > DEEPEST:
        raise refusal(f"nested more than {DEEPEST} levels deep")
    if kind in (type(None), bool, float, int, str):
        if (kind is int and abs(held) > LARGEST) or (kind is str and held != held.encode(errors="ignore").decode()):
            raise refusal("too large a number" if kind is int else f"a text that is no Unicode: {held!r}")
        return held
    if kind is list:
        return ["list", *(inner(value, i) for i, value in enumerate(held))]
    if kind is dict and all(type(key) is str for key in held):
        # a method's state is under this worker's rank, and its paths must be equal on all workers
        return {inner(key): inner(value, re.sub(r"^rank\d+$", "", key) or None) for key, value in held.items()}
    if kind in MAPS.values():
        made = getattr(held, "default_factory", None)
        if made is not None and made not in MAKERS.values():
            raise refusal(f"a defaultdict of {made!r}: give one of {', '.join(MAKERS)}")
        return [kind.__name__, made and made.__name__, *([inner(k), inner(value, k)] for k, value in held.items())]
    if kind in (np.ndarray, np.generic) and held.dtype.hasobject:
        raise refusal("an array of Python objects: give numbers")
    if kind in TYPES:
        return [kind.__name__, inner(TYPES[kind][0](held))]
    if kind is Tensor:
        if held.layout is not torch.strided or held.is_quantized or held.is_meta:
            raise refusal(f"a tensor with layout {held.layout} on {held.device}: give a dense one, with its numbers")
        while path in tensors:
            path += "'"
        tensors[path] = held.to("cpu", copy=copy).resolve_conj().resolve_neg()
        return ["tensor", path]
    if (name := _name(kind)) not in _registered():
        remedy = "give plain values, or call torch.serialization.add_safe_globals([the class]) before save() and load()"
        raise refusal(f"a {name}, which load() cannot make: {remedy}")
    if hasattr(held, "__tensor_flatten__"):
        names, context = held.__tensor_flatten__()
        parts = {attribute: inner(getattr(held, attribute), attribute) for attribute in names}
        return ["subclass", name, parts, inner(context), inner(held.shape), inner(held.stride())]
    if dataclasses.is_dataclass(held):
        return ["dataclass", name, {f.name: inner(getattr(held, f.name), f.name) for f in dataclasses.fields(held)}]
    if issubclass(kind, tuple) and fields is not None:
        return ["namedtuple", name, *(inner(value, field) for field, value in zip(fields, held, strict=True))]
    raise refusal(f"a {name}, and no dataclass, named tuple or tensor with __tensor_flatten__: give plain values")


def put_back(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Reverses take_out. `tensor` returns the tensor of a path."""
    inner = functools.partial(put_back, tensor=tensor)
    if isinstance(tree, dict):
        return {key: inner(value) for key, value in tree.items()}
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind == "tensor":
        return tensor(rest[0])
    if kind == "list":
        return [inner(value) for value in rest]
    if kind in MAPS:
        pairs = {inner(key): inner(value) for key, value in rest[1:]}
        return defaultdict(rest[0] and MAKERS[rest[0]], pairs) if kind == "defaultdict" else MAPS[kind](pairs)
    if kind in NAMED:
        return TYPES[NAMED[kind]][1](inner(rest[0]))
    name, *values = rest
    made = _registered().get(name)
    if made is None:
        raise UserError(f"it holds a {name}: call torch.serialization.add_safe_globals([the class]) before load()")
    if kind == "subclass":
        return made.__tensor_unflatten__(*map(inner, values))
    if kind == "namedtuple":
        return made(*map(inner, values))
    assert kind == "dataclass", kind
    new = object.__new__(made)  # does not run __init__, which could do anything
    for field, value in inner(values[0]).items():
        object.__setattr__(new, field, value)
    return new


def _registered() -> dict[str, Any]:
    """Returns the classes registered with torch.serialization.add_safe_globals, by name."""
    return {_name(given): given for given in torch.serialization.get_safe_globals() if isinstance(given, type)}


def _name(kind: type) -> str:
    """Returns the class's name with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def write(folder: Path, rank: int, state: Any, tensors: dict[str, Tensor], everyone: list[dict[str, str]]) -> str:
    """Writes this worker's two files, and returns the SHA-256 of the JSON file.

    `state` and `tensors` come from take_out. `everyone` holds the SHA-256 of each worker's tensors, by path, so that
    each tensor is written by the first worker that holds it.
    """
    table = {
        path: [next(r for r, theirs in enumerate(everyone) if theirs.get(path) == found), found]
        for path, found in everyone[rank].items()
    }
    mine = {path: tensors[path] for path, (owner, _) in table.items() if owner == rank}
    # torch.save writes a view's whole storage
    mine = {path: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for path, t in mine.items()}
    text = json.dumps({"state": state, "tensors": table}).encode()
    folder.mkdir(parents=True, exist_ok=True)
    write_flushed(folder / f"rank{rank}.pt", lambda file: torch.save(mine, file))
    write_flushed(folder / f"rank{rank}.json", text)
    return hashlib.sha256(text).hexdigest()


def read(folder: Path, rank: int, known: str, parts: Collection[str] = ()) -> Any:
    """Returns the state of worker `rank`, or these parts of it, in memory of its own.

    `known` is the SHA-256 of its JSON file. UserError if a checksum differs. Any other error means that a file is
    missing, damaged or not readable.
    """
    text = regular(folder / f"rank{rank}.json").read_bytes()
    if hashlib.sha256(text).hexdigest() != known:
        raise UserError(f"rank{rank}.json is damaged, its checksum differs")
    held, files = parse_json(text), dict[str, dict[str, Tensor]]()

    def tensor(path: str) -> Tensor:
        owner, wanted = held["tensors"][path]
        name = f"rank{int(owner)}.pt"
        if name not in files:
            try:  # mapped into memory, so that a worker reads only its part of another worker's file
                files[name] = torch.load(regular(folder / name), map_location="cpu", weights_only=True, mmap=True)
            except (OSError, UserError):
                raise
            except Exception as error:  # torch and zipfile raise errors of many classes
                raise UserError(f"{name} cannot be read, {reason(error)}") from None
        found = files[name][path].clone()
        if digest(found) != wanted:
            raise UserError(f"{name} is damaged, the checksum of {path} differs")
        return found

    return put_back({part: held["state"][part] for part in parts} if parts else held["state"], tensor)


def digest(tensor: Tensor) -> str:
    """Returns the SHA-256 of a tensor's dtype, shape and elements."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)  # hashlib lets other threads run
    return found.hexdigest()
