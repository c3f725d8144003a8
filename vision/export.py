"""Exports an image classifier for timm: `python -m vision.export RUN OUT`."""

import training.prepared  # noqa: F401

# isort: split
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timm.models import save_for_hf
from torch import nn

from core.errors import UserError
from training.start.script import launch
from training.weights.export import Exporter, export_run
from training.weights.read import Weights
from vision import data
from vision.data import SHAPES
from vision.model import SMALL, classifier_names, image_size
from vision.recipes import VisionRecipe
from vision.train import make_model


def build(recipe: VisionRecipe, weights: Callable[[nn.Module], Weights]) -> nn.Module:
    """Returns the model, with as many classes as the weights have."""
    like = make_model(recipe)
    found, heads = weights(like), reversed(classifier_names(like))
    return make_model(recipe, next(len(found[f"{name}.weight"]) for name in heads if f"{name}.weight" in found))


def example(recipe: VisionRecipe, model: nn.Module) -> Any:
    shape = SHAPES[recipe.dataset]
    size = image_size(recipe.model) if recipe.dataset == "imagenet" else shape.image_size
    return model, torch.zeros(2, shape.in_chans, size, size)


def folder(recipe: VisionRecipe, model: nn.Module, target: Path) -> None:
    """Writes a folder for timm.create_model("local-dir:FOLDER")."""
    if recipe.model in SMALL:
        raise UserError(f"{recipe.model} is no model of timm: give a name that ends in .safetensors, .pth or .pt2")
    shape = SHAPES[recipe.dataset]
    if recipe.dataset == "imagenet":
        images, args = data.data_config(recipe), {}
    else:
        of = data.load(recipe.dataset)[1]
        size = (shape.in_chans, shape.image_size, shape.image_size)
        images = {"input_size": size, "mean": of.mean, "std": of.std, "crop_pct": 1.0}
        args = {"in_chans": shape.in_chans}
    names = {"label_names": getattr(model, "names", None) or None}
    save_for_hf(model, target, names, model_args=args, data_config=images, safe_serialization=True)


TASK = Exporter(VisionRecipe, build, example, folder)

if __name__ == "__main__":
    launch(lambda: export_run(TASK, "vision.export"))
