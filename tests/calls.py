"""Counts the calls of Python functions below a folder: what a reader goes through who follows an action."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import core

CORE = Path(core.__file__).parent


class Calls(NamedTuple):
    """The calls of an action in their order, each as (file below the folder, function's qualified name)."""

    made: list[tuple[str, str]]

    @property
    def changes(self) -> int:
        """How often a function is called in another file than the function called before it."""
        return sum(before != after for (before, _), (after, _) in pairwise(self.made))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.made}

    def __str__(self) -> str:
        head = f"{len(self.made)} calls, {self.changes} changes of file, {len(self.files)} files"
        return "\n".join([head, *(f"{file}: {function}" for file, function in self.made)])


def calls_of(act: Callable[[], Any], folder: Path = CORE) -> Calls:
    """Runs act() in this thread and returns the calls of functions that files below `folder` define.

    A call is where a function begins: a generator that goes on is no second one, nor is a comprehension or a lambda,
    which stands where it is read (Python 3.12 makes no call of most comprehensions).
    """
    prefix, made, begun = f"{folder}/", [], set[FrameType]()

    def note(frame: FrameType, event: str, arg: Any) -> None:  # noqa: ARG001
        code = frame.f_code
        if event != "call" or frame in begun or not code.co_filename.startswith(prefix):
            return
        begun.add(frame)
        if not code.co_name.startswith("<"):
            made.append((code.co_filename.removeprefix(prefix), code.co_qualname))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return Calls(made)
