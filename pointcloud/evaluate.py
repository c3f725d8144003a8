"""Evaluates a point-cloud autoencoder: `python -m pointcloud.evaluate RUN`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from pointcloud import data
from pointcloud.data import PointClouds
from pointcloud.recipes import PointCloudRecipe
from pointcloud.train import evaluate, make_model
from training.evaluate import EvaluateOptions, Evaluation, Results, evaluate_run
from training.script import launch


@dataclass(frozen=True)
class PointCloudOptions(EvaluateOptions):
    """Prints the metrics of a run's newest checkpoint, on all its held-out data, as at the end of the run."""

    features: bool = False
    """Instead, train classifiers of ModelNet10's shapes on the encoder's features, and print their test accuracy."""


def open_task(recipe: PointCloudRecipe):
    """Returns the model, and its evaluation on the test set, or of its features."""
    model = make_model(recipe)

    def evaluation(run: Any) -> Results:
        if not run.given.features:
            return evaluate(run, recipe, model, data.load(recipe)[1])
        return classify(*encode(run, recipe, model, "train"), *encode(run, recipe, model, "test"))

    return model, evaluation


@torch.no_grad()
def encode(run: Evaluation, recipe: PointCloudRecipe, model: Any, split: str) -> tuple[np.ndarray, list[str]]:
    """Returns the features [n, dim] and classes of ModelNet10's split. Every worker encodes all clouds."""
    source = data.load_source("modelnet10", split)
    batches = PointClouds(source, min(recipe.points, len(source.load(0)))).test_batches(recipe, 0, 1)
    model.eval()
    features = torch.cat([model.features(points.to(run.device)).cpu() for points in batches])
    return features.numpy(), [source.label(i) for i in range(len(source))]


def classify(x: np.ndarray, classes: list[str], x_test: np.ndarray, classes_test: list[str]) -> Results:
    """Returns the test accuracy of a linear SVM and of the nearest neighbor by Euclidean distance.

    Both are scikit-learn's, on features [n, dim] that are scaled to average 0 and standard deviation 1.
    """
    kinds = {"linear": LinearSVC(dual="auto", random_state=0), "neighbor": KNeighborsClassifier(1)}
    return {
        f"modelnet10_{name}_top1": make_pipeline(StandardScaler(), kind).fit(x, classes).score(x_test, classes_test)
        for name, kind in kinds.items()
    }


if __name__ == "__main__":
    launch(lambda: evaluate_run(PointCloudRecipe, open_task, "pointcloud.evaluate", PointCloudOptions))
