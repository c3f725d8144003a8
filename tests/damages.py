"""Damages of files, and tar archives, for the tests of what reads them."""

import contextlib
import errno
import functools
import io
import json
import os
import random
import resource
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.checkpoint.stored import file_digest, plain_values


def write_tar(path: Path, members: dict[str, Any] | list[tuple[str, Any]], mode: Any = "w") -> None:
    """members: name -> content, or the member itself, such as a link; a list may have a name twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items() if isinstance(members, dict) else members:
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def forbid(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """From now on the folder cannot be listed. Its permissions would not bind the root user."""

    def listed(really: Callable[[Any], Any], path: Any = ".") -> Any:
        if str(path) == str(folder):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return really(path)

    for name in ("listdir", "scandir"):  # pathlib's iterdir and glob, os.walk
        patch.setattr(os, name, functools.partial(listed, getattr(os, name)))


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Hostile:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(2000))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "odd": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": _garbage,
    "flip": _flip,
    "missing": lambda path: path.unlink(),
    "folder": _folder,
    "text": lambda path: path.write_text("ü not data\n"),
    "deep": lambda path: path.write_text("[" * 100_000 + "\n"),
    "half a surrogate": lambda path: path.write_text('{"text": "\\ud800", "prompt": "\\ud800", "answer": "a"}\n'),
    "another object": lambda path: path.write_text("{}\n"),
    "broken link": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
}


def names(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], Any]:
    """A manifest that names other files; change: of its entries, by file."""
    return lambda path: path.write_text(json.dumps({"files": change(json.loads(path.read_text())["files"])}))


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A worker's file that somebody has changed, with its right checksum; change: of the state."""

    def spoil(path: Path) -> None:
        with plain_values():
            state = torch.load(path, weights_only=True)
        change(state)
        torch.save(state, path)
        signed(path)

    return spoil


def signed(path: Path) -> None:
    """Gives the manifest the size and the checksum of a worker's file, as whoever forges it would."""
    entry = {"bytes": path.stat().st_size, "sha256": file_digest(path)}
    names(lambda files: files | {path.name: entry})(path.with_name("manifest.json"))
