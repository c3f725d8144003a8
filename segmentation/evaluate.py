"""Evaluates a segmentation model: `python -m segmentation.evaluate RUN`."""

from dataclasses import replace

from segmentation.data import EVAL_SPLITS, Scenes, build_dataset
from segmentation.recipes import SegmentationRecipe
from segmentation.train import evaluate, make_model
from training.start.script import launch
from training.weights.evaluate import evaluate_run


def open_task(recipe: SegmentationRecipe):
    """Returns the model, and its evaluation on all held-out splits."""
    sets = {split: Scenes(build_dataset(recipe.dataset, split)) for split in EVAL_SPLITS[recipe.dataset]}
    model = make_model(replace(recipe, pretrained=None))
    model.names = next(iter(sets.values())).classes  # pyright: ignore[reportAttributeAccessIssue]
    return model, lambda run: {k: v for split, of in sets.items() for k, v in evaluate(run, model, split, of).items()}


if __name__ == "__main__":
    launch(lambda: evaluate_run(SegmentationRecipe, open_task, "segmentation.evaluate"))
