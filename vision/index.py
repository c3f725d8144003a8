"""An index of a folder of images or shards, so that not every worker lists 1.28 million files on a shared file system.

One worker lists the files, and the cache (training.data.cached) keeps the list for all others and for later runs. It
belongs to the folder's path, its classes (or shards), and the times of change of these and of all folders in them: a
file that comes or goes makes a new one. Hidden files and folders, such as .ipynb_checkpoints, are left out.
"""

from __future__ import annotations

import training.prepared  # noqa: F401

# isort: split
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from core import UserError
from training.data import cached, damaged
from training.images import read_rgb

T = TypeVar("T")
END, PARTS = b"\0", b"\0\0"  # after each entry and between the two lists; no name of a file has a zero byte


class IndexedFolder(ImageFolder):
    """torchvision's ImageFolder, which lists its files once for all workers and runs."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """torchvision's, without hidden folders."""
        classes = [name for name in super().find_classes(directory)[0] if not name.startswith(".")]
        if not classes:
            raise FileNotFoundError("no class folder in it")
        return classes, {name: i for i, name in enumerate(classes)}

    @staticmethod
    def make_dataset(
        directory: str | Path,
        class_to_idx: dict[str, int],
        extensions: tuple[str, ...] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
    ) -> list[tuple[str, int]]:
        """[(path, class)], as torchvision's."""

        def place(name: str) -> tuple[str, int] | None:
            label = class_to_idx.get(name.split(os.sep, 1)[0])
            return None if label is None else (os.path.join(directory, name), label)

        return listed_once(Path(directory), list(class_to_idx), lambda: pictures(Path(directory), class_to_idx), place)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """(RGB image, class)."""
        path, label = self.samples[index]
        return read_rgb(path, path), label

    def name(self, index: int) -> str:
        return self.samples[index][0]


def pictures(root: Path, classes: Iterable[str]) -> tuple[list[str], list[str]]:
    """The images of the classes, and the folders inside the classes, relative to root, in torchvision's order.

    UserError names a class without an image.
    """
    files, folders = list[str](), list[str]()
    for name in sorted(classes):
        before = len(files)
        walked = []
        for folder, below, found in os.walk(root / name, followlinks=True):
            below[:] = [inner for inner in below if not inner.startswith(".")]
            walked.append((folder, found))
        for folder, found in sorted(walked):
            relative = os.path.relpath(folder, root)
            folders += [relative] if relative != name else []
            shown = (file for file in sorted(found) if not file.startswith("."))
            files += [os.path.join(relative, file) for file in shown if file.lower().endswith(IMG_EXTENSIONS)]
        if len(files) == before:
            raise UserError(
                f"{root / name}: a class's folder without an image ({', '.join(IMG_EXTENSIONS)}): remove it, or put "
                "the class's images there"
            )
    return files, folders


def listed_once(
    folder: Path, names: list[str], entries: Callable[[], tuple[list[str], list[str]]], read: Callable[[str], T | None]
) -> list[T]:
    """What `read` makes of each entry of the folder's index, which `entries` makes where it is not there yet.

    Args:
        folder: holds what is listed.
        names: the classes or shards in the folder.
        entries: returns the entries, and the folders inside the classes whose changes make the index outdated.
        read: None for an entry that cannot be.

    Raises:
        UserError: there is no entry, or `read` gives None.
    """
    key = _hash(str(folder.resolve()), *_states(folder, names))
    while True:
        index = cached(f"index-{key}", lambda target: _write(target / "files", folder, *entries())) / "files"
        try:
            content = index.read_bytes()
            listed, folders = ([os.fsdecode(n) for n in part.split(END) if n] for part in content.split(PARTS))
            found = [read(entry) for entry in listed]
        except (OSError, ValueError) as error:
            raise damaged("the images' index", index, type(error).__name__) from None
        if not found or None in found or len(folders) % 2:
            raise damaged("the images' index", index, "an entry names no image")
        now = _states(folder, folders[::2])
        if now == folders[1::2]:
            return found  # pyright: ignore[reportReturnType]
        key = _hash(key, *now)  # of the index that has these changes


def _states(folder: Path, names: list[str]) -> list[str]:
    """The name, time of change and, for files, size of each."""
    found = []
    for name in names:
        try:
            state = (folder / name).stat()
            found.append(f"{name} {state.st_mtime_ns} {state.st_size}")
        except OSError:
            found.append(f"{name} is gone")
    return found


def _write(target: Path, folder: Path, listed: list[str], folders: list[str]) -> None:
    pairs = [text for pair in zip(folders, _states(folder, folders), strict=True) for text in pair]
    target.write_bytes(PARTS.join(END.join(map(os.fsencode, part)) for part in (listed, pairs)))


def _hash(*parts: str) -> str:
    return hashlib.sha256(END.join(map(os.fsencode, parts))).hexdigest()[:16]
