"""Where clouds come from: ShapeNetCore in its two common releases, ModelNet10, and embedded analytic surfaces."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Protocol

import numpy as np

from core import UserError
from pointcloud.surfaces import random_surface
from training.data import data_root, hidden, missing
from training.untrusted import read_arrays

SPLITS = ("train", "test")
STAND_IN = "surfaces_small"


class Source(Protocol):
    """A sequence of clouds of any size, as they are stored."""

    def __len__(self) -> int: ...

    def load(self, index: int) -> np.ndarray:
        """The cloud, unchecked; raises UserError, naming the file, where it cannot be read."""
        ...

    def label(self, index: int) -> str:
        """Its class."""
        ...

    def name(self, index: int) -> str:
        """Where it comes from: the file, and the place in it."""
        ...


class Files:
    """Clouds in a file each, float [n, 3]."""

    files: list[Path]

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> np.ndarray:
        path = self.files[index]
        try:
            return np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path} cannot be read ({error}): copy it again or remove it") from error

    def name(self, index: int) -> str:
        return str(self.files[index])


class ShapeNetPC15k(Files):
    """ShapeNetCore v2 as released with PointFlow (arXiv 1906.12320): 15,000 points a shape.

    Reads `ShapeNetCore.v2.PC15k/<synset>/<split>/<model>.npy` for every synset that is there.
    """

    def __init__(self, root: Path, split: str):
        folder = root / "ShapeNetCore.v2.PC15k"
        self.files = sorted(f for f in folder.glob(f"*/{split}/*.npy") if not hidden(f, folder))
        if not self.files:
            raise missing("data set shapenet", root, f"{folder.name}/<synset>/{split}/<model>.npy", STAND_IN)

    def label(self, index: int) -> str:
        return self.files[index].parent.parent.name


class ShapeNet55(Files):
    """ShapeNet-55 as used by Point-BERT and Point-MAE (arXiv 2203.06604): 8,192 points a shape.

    Reads `ShapeNet55-34/ShapeNet-55/<split>.txt`, a list of file names `<synset>-<model>.npy`, and the files in
    `ShapeNet55-34/shapenet_pc/`.
    """

    def __init__(self, root: Path, split: str):
        folder = root / "ShapeNet55-34"
        listing = folder / "ShapeNet-55" / f"{split}.txt"
        if not listing.is_file():
            files = f"{folder.name}/{{ShapeNet-55/{split}.txt,shapenet_pc/<synset>-<model>.npy}}"
            raise missing("data set shapenet55", root, files, STAND_IN)
        self.files = [folder / "shapenet_pc" / name for name in read_list(listing)]
        if not self.files:
            raise UserError(f"{listing} is empty: it should name one file of {folder / 'shapenet_pc'} a line")

    def label(self, index: int) -> str:
        return self.files[index].name.split("-")[0]


def read_list(file: Path) -> list[str]:
    """The names in a list, one a line; UserError where it is not UTF-8, or names something twice."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason}): convert it") from None
    if "\0" in text:
        raise UserError(f"{file} holds zero bytes, as UTF-16 does: convert it to UTF-8 text")
    names = [name for line in text.split("\n") if (name := line.strip())]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise UserError(f"{file} names {twice} twice: remove one of the lines")
    return names


class ModelNet10:
    """ModelNet10 (Wu et al., CVPR 2015) with 1,024 points a shape, 3,991 for training and 908 for testing.

    Reads `modelnet10_1024_fp16.npz`: x_<split> float16 [n, 1024, 3], y_<split> int [n], cls: the classes' names.
    """

    def __init__(self, root: Path, split: str):
        self.path, self.array = root / "modelnet10_1024_fp16.npz", f"x_{split}"
        if not self.path.is_file():
            files = f"{self.path.name} with x_{split}, y_{split} and cls"
            raise missing("data set modelnet10", root, files, STAND_IN)
        try:
            self.clouds, self.labels, self.classes = read_arrays(self.path, self.array, f"y_{split}", "cls")
        except ValueError as error:
            raise UserError(f"{self.path} cannot be read ({error}): copy it again") from error
        if self.clouds.ndim != 3 or not len(self.clouds) or self.labels.shape != self.clouds.shape[:1]:
            found = f"x_{split} {list(self.clouds.shape)}, y_{split} {list(self.labels.shape)}"
            raise UserError(f"{self.path}: {found}: expected [n, points, 3] and [n]; copy it again")

    def __len__(self) -> int:
        return len(self.clouds)

    def load(self, index: int) -> np.ndarray:
        return self.clouds[index]

    def label(self, index: int) -> str:
        return str(self.classes[self.labels[index]])

    def name(self, index: int) -> str:
        return f"{self.path}, {self.array}[{index}]"


class Surfaces:
    """Embedded: analytic surfaces of random proportions (`pointcloud.surfaces`), each drawn from its own generator."""

    COUNTS = {"train": 4096, "test": 512}
    POINTS = 2048

    def __init__(self, root: Path, split: str):
        self.split, self.stream = split, SPLITS.index(split)

    def __len__(self) -> int:
        return self.COUNTS[self.split]

    def load(self, index: int) -> np.ndarray:
        return self._draw(index, self.POINTS)[1]

    def label(self, index: int) -> str:
        return self._draw(index, 1)[0]

    def name(self, index: int) -> str:
        return f"analytic surface {index} ({self.split})"

    def _draw(self, index: int, points: int) -> tuple[str, np.ndarray]:
        return random_surface(np.random.default_rng((self.stream, index)), points)


SOURCES = {"shapenet": ShapeNetPC15k, "shapenet55": ShapeNet55, "modelnet10": ModelNet10, "surfaces": Surfaces}


def unpacked(name: str, split: str) -> Source:
    """The clouds of a data set's split, from the files of its release; UserError where they are missing."""
    return SOURCES[name](data_root(), split)
