"""Evaluates a point-cloud autoencoder: `python -m pointcloud.evaluate RUN`."""

from torch import nn

from pointcloud import data
from pointcloud.recipes import PointCloudRecipe
from pointcloud.train import evaluate, make_model
from training.evaluate import Evaluation, Results, evaluate_run
from training.script import launch


def open_task(recipe: PointCloudRecipe):
    """Returns the model, and its evaluation on the test set."""
    test_set = data.load(recipe)[1]

    def measure(run: Evaluation, model: nn.Module) -> Results:
        return evaluate(run, recipe, model, test_set)

    return make_model(recipe), measure


if __name__ == "__main__":
    launch(lambda: evaluate_run(PointCloudRecipe, open_task, "pointcloud.evaluate") and None)
