"""Exports a point-cloud autoencoder: `python -m pointcloud.export RUN OUT`."""

from typing import Any

import torch
from torch import nn

from pointcloud.recipes import PointCloudRecipe
from pointcloud.train import make_model
from training.start.script import launch
from training.weights.export import Exporter, export_run


def example(recipe: PointCloudRecipe, model: nn.Module) -> Any:
    return lambda points: model(points).cloud, torch.rand(2, recipe.points, 3)


TASK = Exporter(PointCloudRecipe, lambda recipe, _: make_model(recipe), example)

if __name__ == "__main__":
    launch(lambda: export_run(TASK, "pointcloud.export"))
