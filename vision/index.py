"""An index of a folder of images or shards, so that not every worker lists 1.28 million files on a shared file system.

One worker lists the files, and the cache (training.data.cached) keeps the list for all others and for later runs. It
belongs to the folder's path, its classes (or shards) and their times of change: a file that comes or goes in a class's
folder makes a new one.
"""

from __future__ import annotations

import training.prepared  # noqa: F401

# isort: split
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from PIL import Image
from torchvision.datasets import ImageFolder

from training.data import cached, damaged

T = TypeVar("T")


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

        def place(name: str) -> tuple[str, int] | None:
            label = class_to_idx.get(name.split(os.sep, 1)[0])
            return None if label is None else (os.path.join(directory, name), label)

        return listed_once(Path(directory), list(class_to_idx), names, place)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """(RGB image, class)."""
        path, label = self.samples[index]
        return self.loader(path), label

    def name(self, index: int) -> str:
        return self.samples[index][0]


def listed_once(
    folder: Path, names: list[str], lines: Callable[[], list[str]], read: Callable[[str], T | None]
) -> list[T]:
    """What `read` makes of each line of the folder's index, which `lines` makes where it is not there yet.

    names: the classes or shards in the folder. UserError where there is no line, or `read` gives None.
    """
    state = [str(folder.resolve()), *(f"{name} {(folder / name).stat().st_mtime_ns}" for name in names)]
    key = hashlib.sha256(os.fsencode(os.linesep.join(state))).hexdigest()[:16]

    def build(target: Path) -> None:
        (target / "files.txt").write_text("".join(f"{line}\n" for line in lines()))

    index = cached(f"index-{key}", build) / "files.txt"
    try:
        found = [read(line) for line in index.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise damaged("the images' index", index, type(error).__name__) from None
    if not found or None in found:
        raise damaged("the images' index", index, "a line names no image")
    return found  # pyright: ignore[reportReturnType]
