"""Exports a point-cloud autoencoder: `python -m pointcloud.export RUN OUT`."""

import torch
from torch import Tensor, nn

from pointcloud.recipes import PointCloudRecipe
from pointcloud.train import make_model
from training.export import Exporter, export_run
from training.script import launch


class Cloud(nn.Module):
    """Maps clouds [B, n, 3] to their reconstructions."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, points: Tensor) -> Tensor:
        return self.model(points).cloud


def example(recipe: PointCloudRecipe, model: nn.Module) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Cloud(model), (torch.rand(2, recipe.points, 3),)


TASK = Exporter(PointCloudRecipe, lambda recipe, _: make_model(recipe), example)

if __name__ == "__main__":
    launch(lambda: export_run(TASK, "pointcloud.export"))
