"""Evaluates a segmentation model: `python -m segmentation.evaluate RUN`."""

from dataclasses import replace

from torch import nn

from segmentation.data import EVAL_SPLITS, build_dataset
from segmentation.recipes import SegmentationRecipe
from segmentation.train import evaluate, make_model
from training.evaluate import Evaluation, Results, evaluate_run
from training.script import launch


def open_task(recipe: SegmentationRecipe):
    """Returns the model, and its evaluation on all held-out splits."""
    sets = {split: build_dataset(recipe.dataset, split) for split in EVAL_SPLITS[recipe.dataset]}

    def measure(run: Evaluation, model: nn.Module) -> Results:
        return {key: value for split, of in sets.items() for key, value in evaluate(run, model, split, of).items()}

    return make_model(replace(recipe, pretrained=None)), measure


if __name__ == "__main__":
    launch(lambda: evaluate_run(SegmentationRecipe, open_task, "segmentation.evaluate") and None)
