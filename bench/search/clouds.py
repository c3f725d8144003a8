"""The search's point clouds: the autoencoder of pointcloud on its analytic surfaces."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from bench.search.inner import Inner
from bench.search.task import Batch, Task, stacked_draw, without_batch_norm

POINTS = 128


def surfaces() -> Task:
    from pointcloud.losses import chamfer_distance
    from pointcloud.model import Autoencoder, AutoencoderConfig, Reconstruction

    def build() -> nn.Module:
        return without_batch_norm(Autoencoder(POINTS, AutoencoderConfig("mlp", (16, 32), 32, mlp_widths=(64, 128))))

    def loss(output: Reconstruction, clouds: Tensor) -> Tensor:
        return chamfer_distance(output.prediction, clouds).mean()

    clouds, kinds = sample(0, 1024)
    tuning, test = (sample(stream, 256)[0] for stream in (1, 2))
    return Task(
        "surfaces",
        f"analytic surfaces of random proportions, {POINTS} points each (1,024 for training, 256 for tuning, 256 for "
        "the test), pointcloud's autoencoder with GroupNorm and 0.06 M parameters, AdamW (weight decay 0.01), cosine "
        "schedule, 4 clouds per worker and step; the loss is the squared Chamfer distance in the unit sphere",
        build,
        loss,
        stacked_draw(clouds, clouds, kinds),
        {"tuning": (tuning, tuning), "test": (test, test)},
        Inner("adamw", 4e-3),
        batch=4,
    )


def sample(stream: int, n: int) -> Batch:
    """Clouds float32 [n, POINTS, 3] in the unit sphere, and the numbers of their kinds, int64 [n]."""
    from pointcloud.data import normalise
    from pointcloud.surfaces import KINDS, random_surface

    drawn = [random_surface(np.random.default_rng((stream, i)), POINTS) for i in range(n)]
    clouds = np.stack([normalise(points) for _, points in drawn]).astype(np.float32)
    return torch.from_numpy(clouds), torch.tensor([list(KINDS).index(kind) for kind, _ in drawn])
