"""An index of a folder of images or shards, so that not every worker lists 1.28 million files on a shared file system.

The first worker of a node lists the files and writes the index, unless it is there; the others wait for it and read. It
lies in CO2_CACHE, ~/.cache/co2 unless that is set, and belongs to the folder's path, its classes (or shards) and their
times of change: a file that comes or goes in a class's folder makes a new one.
"""

from __future__ import annotations

import training.prepared  # noqa: F401

# isort: split
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from torchvision.datasets import ImageFolder

from core import UserError

PATIENCE = 3600.0  # seconds that a worker waits for the index of its node's first


class IndexedFolder(ImageFolder):
    """torchvision's ImageFolder, which lists its files once for all workers and runs."""

    @staticmethod
    def make_dataset(
        directory: str | Path,
        class_to_idx: dict[str, int],
        extensions: tuple[str, ...] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> list[tuple[str, int]]:
        """[(path, class)], as torchvision's."""

        def names() -> list[str]:
            files = ImageFolder.make_dataset(directory, class_to_idx, extensions, is_valid_file, allow_empty)
            return [os.path.relpath(file, directory) for file, _ in files]

        index = index_path(Path(directory), list(class_to_idx))
        listed = listed_once(index, names)
        if not listed or not all(name.split(os.sep, 1)[0] in class_to_idx for name in listed):
            raise damaged(index)
        return [(os.path.join(directory, name), class_to_idx[name.split(os.sep, 1)[0]]) for name in listed]

    def read(self, index: int) -> tuple[Image.Image, int]:
        """(RGB image, class)."""
        path, label = self.samples[index]
        return self.loader(path), label

    def name(self, index: int) -> str:
        return self.samples[index][0]


def listed_once(path: Path, lines: Callable[[], list[str]]) -> list[str]:
    """The lines of the index, which `lines` makes on the first worker of a node where it is not there yet."""
    if int(os.environ.get("LOCAL_RANK", 0)) == 0 and not path.exists():
        _write(path, lines())
    _wait_for(path)
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        raise damaged(path) from None


def damaged(index: Path) -> UserError:
    return UserError(f"{index}: the index of the images is damaged: remove it, it is made again")


def index_path(folder: Path, names: list[str]) -> Path:
    """Where the folder's index lies or will lie."""
    state = [str(folder.resolve()), *(f"{name} {(folder / name).stat().st_mtime_ns}" for name in names)]
    cache = Path(os.environ.get("CO2_CACHE") or Path.home() / ".cache" / "co2")
    return cache / f"index-{hashlib.sha256(os.fsencode(os.linesep.join(state))).hexdigest()[:16]}.txt"


def _write(path: Path, names: list[str]) -> None:
    """All at once, so that nobody reads half of it and two nodes may race."""
    partial = path.with_name(f"{path.stem}.{os.uname().nodename}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(f"{name}\n" for name in names))
        partial.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): set CO2_CACHE to another folder") from None


def _wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            raise UserError(f"{path} did not come from this node's first worker: set CO2_CACHE to a folder of all")
        time.sleep(0.2)
