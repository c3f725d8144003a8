"""Training items of fixed size, made of whole clouds of `pointcloud.sources`, by their keys (seed, epoch, index)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from core import UserError
from pointcloud.recipes import PointCloudRecipe
from pointcloud.sources import SPLITS, Source, load_source
from training.data.samples import Key, eval_keys, load_batches, train_keys


def load(recipe: PointCloudRecipe) -> tuple[PointClouds, PointClouds]:
    """Returns (training set, test set) of the recipe, from the folder CO2_DATA unless they are embedded."""
    train, test = (load_source(recipe.dataset, split) for split in SPLITS)
    return PointClouds(train, recipe.points, recipe.augment), PointClouds(test, recipe.points)


class PointClouds(Dataset[Tensor]):
    """Clouds of a fixed number of points, centered and scaled into the unit sphere, by their keys.

    Each epoch uses another random subset of every cloud's points. A UserError names a cloud that cannot be used.

    Args:
        source: The clouds.
        points: Number of points per cloud.
        augment: Whether to stretch each axis by a factor in [2/3, 3/2] and move it by up to 0.2, as in Point-MAE's
            pre-training.
    """

    def __init__(self, source: Source, points: int, augment: bool = False):
        self.source, self.points, self.augment = source, points, augment

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Tensor:
        """Returns a cloud, float32 [points, 3], in random order."""
        index = key[-1]
        cloud = _checked(self.source.load(index), self.points, self.source.name(index))
        rng = np.random.default_rng(key)
        x = normalise(cloud)[rng.choice(len(cloud), self.points, replace=False)]
        if self.augment:
            x = x * rng.uniform(2 / 3, 3 / 2, 3) + rng.uniform(-0.2, 0.2, 3)
        return torch.from_numpy(x.astype(np.float32))

    def train_batches(
        self, recipe: PointCloudRecipe, rank: int, world_size: int, start: int, total: int
    ) -> Iterator[Tensor]:
        """Yields this worker's batches from step `start` to `total`, float32 [batch_size / world_size, points, 3]."""
        keys = (keys for _, keys in train_keys(recipe, len(self), rank, world_size, start, total))
        return load_batches(self, keys, recipe.loader_workers)

    def test_batches(
        self, recipe: PointCloudRecipe, rank: int, world_size: int, batch_size: int = 32
    ) -> Iterator[Tensor]:
        """Yields this worker's share of the set, in batches."""
        keys = eval_keys(len(self), batch_size, rank, world_size)
        return load_batches(self, keys, recipe.loader_workers, keeper=self)


def normalise(cloud: np.ndarray) -> np.ndarray:
    """Moves the center of float [n, 3] to the origin and the farthest point to distance 1, as Point-MAE does."""
    x = cloud - cloud.mean(axis=0)
    return x / np.linalg.norm(x, axis=1).max()


def _checked(cloud: np.ndarray, points: int, name: str) -> np.ndarray:
    if cloud.ndim != 2 or cloud.shape[1] != 3 or not np.issubdtype(cloud.dtype, np.floating):
        raise UserError(f"{name}: expected floating-point [n, 3], found {cloud.dtype} {list(cloud.shape)}")
    if len(cloud) < points:
        raise UserError(f"{name}: {len(cloud)} points, but the recipe needs {points}: lower its number of points")
    if bad := int((~np.isfinite(cloud)).any(axis=1).sum()):
        raise UserError(f"{name}: {bad} of {len(cloud)} points are NaN or infinite: remove or repair it")
    if (cloud == cloud[0]).all():
        raise UserError(f"{name}: all {len(cloud)} points coincide, which is no shape: remove or repair it")
    return cloud.astype(np.float64)  # so that normalization does not round twice
