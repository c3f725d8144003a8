"""The data sets: ShapeNetCore in its two common releases, ModelNet10, and embedded analytic surfaces.

A source gives whole clouds; `PointClouds` turns them into fixed-size training items. What an item holds is a pure
function of (seed, epoch, index): neither the rank nor the number of loader workers changes it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from core import UserError
from pointcloud.recipes import PointCloudRecipe
from pointcloud.surfaces import random_surface
from training.sampling import eval_share, load_batches, worker_batches

SPLITS = ("train", "test")


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


class ShapeNetPC15k:
    """ShapeNetCore v2 as released with PointFlow (arXiv 1906.12320): 15,000 points a shape.

    Reads `ShapeNetCore.v2.PC15k/<synset>/<split>/<model>.npy`, float [n, 3], for every synset that is there.
    """

    def __init__(self, root: Path, split: str):
        folder = root / "ShapeNetCore.v2.PC15k"
        self.files = sorted(folder.glob(f"*/{split}/*.npy"))
        if not self.files:
            raise _missing(root, f"{folder.name}/<synset>/{split}/<model>.npy")

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> np.ndarray:
        return _load_npy(self.files[index])

    def label(self, index: int) -> str:
        return self.files[index].parent.parent.name

    def name(self, index: int) -> str:
        return str(self.files[index])


class ShapeNet55:
    """ShapeNet-55 as used by Point-BERT and Point-MAE (arXiv 2203.06604): 8,192 points a shape.

    Reads `ShapeNet55-34/ShapeNet-55/<split>.txt`, a list of file names `<synset>-<model>.npy`, and the files, float
    [n, 3], in `ShapeNet55-34/shapenet_pc/`.
    """

    def __init__(self, root: Path, split: str):
        folder = root / "ShapeNet55-34"
        listing = folder / "ShapeNet-55" / f"{split}.txt"
        if not listing.is_file():
            raise _missing(root, f"{folder.name}/{{ShapeNet-55/{split}.txt,shapenet_pc/<synset>-<model>.npy}}")
        self.files = [folder / "shapenet_pc" / name for name in listing.read_text().split()]
        if not self.files:
            raise UserError(f"{listing} is empty: it should name one file of {folder / 'shapenet_pc'} a line")

    def __len__(self) -> int:
        return len(self.files)

    def load(self, index: int) -> np.ndarray:
        return _load_npy(self.files[index])

    def label(self, index: int) -> str:
        return self.files[index].name.split("-")[0]

    def name(self, index: int) -> str:
        return str(self.files[index])


class ModelNet10:
    """ModelNet10 (Wu et al., CVPR 2015) with 1,024 points a shape, 3,991 for training and 908 for testing.

    Reads `modelnet10_1024_fp16.npz`: x_<split> float16 [n, 1024, 3], y_<split> int [n], cls: the classes' names.
    """

    def __init__(self, root: Path, split: str):
        self.path, self.array = root / "modelnet10_1024_fp16.npz", f"x_{split}"
        if not self.path.is_file():
            raise _missing(root, f"{self.path.name} with x_{split}, y_{split} and cls")
        try:
            with np.load(self.path, allow_pickle=False) as file:
                self.clouds, self.labels, self.classes = file[self.array], file[f"y_{split}"], file["cls"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
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
    """Embedded: analytic surfaces of random proportions (`pointcloud.surfaces`), 2,048 points a shape.

    Every shape is drawn from its own generator, so it is the same wherever and however often it is loaded. The
    two splits draw from the same distribution and share no shape.
    """

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
EMBEDDED = {"surfaces"}
STAND_IN = "surfaces_small, which needs no data"


def load(recipe: PointCloudRecipe) -> tuple[PointClouds, PointClouds]:
    """(training set, test set) of the recipe, from the folder CO2_DATA unless embedded."""
    train, test = (load_source(recipe.dataset, split) for split in SPLITS)
    return PointClouds(train, recipe.points, recipe.seed, recipe.augment), PointClouds(test, recipe.points)


def load_source(name: str, split: str) -> Source:
    """The clouds of data set `name` (a key of `SOURCES`), split train or test.

    Raises:
        UserError: CO2_DATA names no folder, or the data is not in it; says what runs without it.
    """
    root = os.environ.get("CO2_DATA", "")
    if not root and name not in EMBEDDED:
        raise UserError(f"data set {name} not found: set CO2_DATA to its folder, or train {STAND_IN}")
    return SOURCES[name](Path(root), split)


class PointClouds(Dataset[Tensor]):
    """Clouds of a fixed number of points, centred and scaled into the unit sphere, by (index, epoch).

    Each epoch takes another random subset of every cloud's points; evaluation uses epoch 0. `augment` stretches each
    axis by a factor in [2/3, 3/2] and moves it by up to 0.2, the augmentation of Point-MAE's pre-training; the result
    may leave the unit sphere.

    Raises:
        UserError: on access, for a cloud with too few points, not finite, or of the wrong shape; names the file.
    """

    def __init__(self, source: Source, points: int, seed: int = 0, augment: bool = False):
        self.source, self.points, self.seed, self.augment = source, points, seed, augment

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        """float32 [points, 3], in random order."""
        index, epoch = key
        cloud = _checked(self.source.load(index), self.points, self.source.name(index))
        rng = np.random.default_rng((self.seed, epoch, index))
        x = normalise(cloud)[rng.choice(len(cloud), self.points, replace=False)]
        if self.augment:
            x = x * rng.uniform(2 / 3, 3 / 2, 3) + rng.uniform(-0.2, 0.2, 3)
        return torch.from_numpy(x.astype(np.float32))

    def train_batches(
        self, recipe: PointCloudRecipe, rank: int, world_size: int, start: int, total: int
    ) -> Iterator[Tensor]:
        """This worker's batches from step `start` to `total`: float32 [batch_size / world_size, points, 3]."""
        plan = worker_batches(
            len(self), recipe.batch_size, seed=self.seed, rank=rank, world_size=world_size, start=start, total=total
        )
        keyed = ([(i, epoch) for i in index.tolist()] for epoch, _, index in plan)
        return load_batches(self, keyed, recipe.loader_workers)

    def test_batches(
        self, recipe: PointCloudRecipe, rank: int, world_size: int, batch_size: int = 32
    ) -> Iterator[Tensor]:
        """This worker's share of the set, in batches."""
        share = eval_share(len(self), rank=rank, world_size=world_size)
        keyed = ([(i, 0) for i in share[at : at + batch_size]] for at in range(0, len(share), batch_size))
        return load_batches(self, keyed, recipe.loader_workers)


def normalise(cloud: np.ndarray) -> np.ndarray:
    """Moves the mean of float [n, 3] to the origin and the farthest point to distance 1, as Point-MAE does."""
    x = cloud - cloud.mean(axis=0)
    return x / np.linalg.norm(x, axis=1).max()


def _load_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}): copy it again or remove it") from error


def _checked(cloud: np.ndarray, points: int, name: str) -> np.ndarray:
    if cloud.ndim != 2 or cloud.shape[1] != 3 or not np.issubdtype(cloud.dtype, np.floating):
        raise UserError(f"{name}: expected floating-point [n, 3], found {cloud.dtype} {list(cloud.shape)}")
    if len(cloud) < points:
        raise UserError(f"{name}: {len(cloud)} points, but the recipe wants {points}: lower its number of points")
    if bad := int((~np.isfinite(cloud)).any(axis=1).sum()):
        raise UserError(f"{name}: {bad} of {len(cloud)} points are NaN or infinite: remove or repair it")
    if (cloud == cloud[0]).all():
        raise UserError(f"{name}: all {len(cloud)} points coincide, which is no shape: remove or repair it")
    return cloud.astype(np.float64)  # so that normalising does not round twice


def _missing(root: Path, layout: str) -> UserError:
    return UserError(
        f"data set not found: looked in {root} for {layout}; set CO2_DATA to the folder that holds it, "
        f"or train {STAND_IN}"
    )
