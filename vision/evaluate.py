"""Evaluates an image classifier: `python -m vision.evaluate RUN`."""

from training.start.script import launch
from training.weights.evaluate import evaluate_run
from vision import data
from vision.recipes import VisionRecipe
from vision.train import describe, evaluate, make_model


def open_task(recipe: VisionRecipe):
    """Returns the model, and its evaluation on the test set."""
    test_set = data.load(recipe.dataset)[1]
    model = make_model(recipe, len(test_set.classes))
    describe(model, recipe, test_set)
    return model, lambda run: evaluate(run, recipe, model, test_set)


if __name__ == "__main__":
    launch(lambda: evaluate_run(VisionRecipe, open_task, "vision.evaluate"))
