"""What is read from files that nobody should trust, and names of theirs that are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

LEVELS = 64  # of lists and objects in each other; our own files have five


def parse_json(text: str | bytes) -> Any:
    """As json.loads. ValueError where the text is none, is nested deeper than programs walk, or holds half a surrogate,
    which no file or screen takes, or a whole number that no float can be."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"more than {LEVELS} levels") from None
    try:
        _check(found, LEVELS)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    return found


def _check(value: Any, levels: int) -> None:
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, int):
        float(value)
    elif isinstance(value, list | dict):
        if not levels:
            raise ValueError(f"more than {LEVELS} levels")
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            _check(inner, levels - 1)


def read_arrays(path: Path, *names: str) -> list[np.ndarray]:
    """Arrays of an .npz file; ValueError, of one line, where it is none or lacks one of them."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return [np.asarray(file[name]) for name in names]
    except Exception as error:  # zipfile, zlib and NumPy raise nearly any
        raise ValueError(reason(error)) from None


def reason(error: BaseException) -> str:
    """One line; of an error of the operating system, what that says."""
    cause = error if isinstance(error, OSError) else error.__context__
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")


def printable(text: str) -> str:
    """The text in one line of what a terminal shows: of a file's name or content, each other character as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
