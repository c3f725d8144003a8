"""Evaluates a point-cloud autoencoder: `python -m pointcloud.evaluate RUN`."""

from pointcloud import data
from pointcloud.recipes import PointCloudRecipe
from pointcloud.train import evaluate, make_model
from training.start.script import launch
from training.weights.evaluate import evaluate_run


def open_task(recipe: PointCloudRecipe):
    """Returns the model, and its evaluation on the test set."""
    test_set, model = data.load(recipe)[1], make_model(recipe)
    return model, lambda run: evaluate(run, recipe, model, test_set)


if __name__ == "__main__":
    launch(lambda: evaluate_run(PointCloudRecipe, open_task, "pointcloud.evaluate"))
