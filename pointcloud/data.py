"""Training items of fixed size, made of whole clouds of `pointcloud.sources`, by their keys (seed, epoch, index)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from core import UserError
from pointcloud.recipes import PointCloudRecipe
from pointcloud.sources import SPLITS, Source, load_source
from training.data.samples import Key, Keyed


def load(recipe: PointCloudRecipe) -> tuple[PointClouds, PointClouds]:
    """Returns (training set, test set) of the recipe, from the folder CO2_DATA unless they are embedded."""
    train, test = (load_source(recipe.dataset, split) for split in SPLITS)
    return PointClouds(train, recipe.points, recipe.augment), PointClouds(test, recipe.points)


class PointClouds(Keyed):
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
