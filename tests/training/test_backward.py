"""Micro-batches and recomputed activations give the gradient of the whole batch, in every task."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from core import UserError
from language.recipes import gpt2_pydoc_small, roberta_pydoc_small, transnormer_pydoc_small
from language.train import backward as language_backward
from language.train import make_model as language_model
from pointcloud.recipes import modelnet10_mae_small, surfaces_small
from pointcloud.train import backward as pointcloud_backward
from pointcloud.train import make_model as pointcloud_model
from segmentation.recipes import digits_swin
from segmentation.train import backward as segmentation_backward
from segmentation.train import make_model as segmentation_model
from training.recipe import Recipe
from training.run import Run
from vision.recipes import digits_small, digits_vit
from vision.train import backward as vision_backward
from vision.train import make_model as vision_model

Pass = Callable[[Run, Any, nn.Module], Any]
N = 5  # samples, which two micro-batches do not share evenly


def language(run: Run, recipe: Any, model: nn.Module) -> Any:
    tokens = torch.randint(4, recipe.vocab_size, (N, recipe.context), generator=torch.Generator().manual_seed(0))
    targets = tokens.masked_fill(torch.rand(N, recipe.context, generator=torch.Generator().manual_seed(0)) > 0.4, -100)
    return {"train_loss": language_backward(run, recipe, model, (tokens, targets))}


def vision(run: Run, recipe: Any, model: nn.Module) -> Any:
    return vision_backward(run, recipe, model, torch.randn(N, 1, 8, 8), torch.arange(N))


def pointcloud(run: Run, recipe: Any, model: nn.Module) -> Any:
    return pointcloud_backward(run, recipe, model, torch.randn(N, recipe.points, 3))


def segmentation(run: Run, recipe: Any, model: nn.Module) -> Any:
    label = SegDataSample(gt_sem_seg=PixelData(data=torch.randint(11, (1, 48, 48))))
    return segmentation_backward(run, recipe, model, model, torch.randn(N, 3, 48, 48), [label] * N)


TASKS: dict[str, tuple[Recipe, Callable[[Any], nn.Module], Pass]] = {
    "gpt2": (gpt2_pydoc_small(), lambda r: language_model(r, pad=1), language),
    "transnormer": (transnormer_pydoc_small(), lambda r: language_model(r, pad=1), language),
    "roberta": (roberta_pydoc_small(), lambda r: language_model(r, pad=1), language),
    "vision": (digits_vit(), vision_model, vision),
    "segmentation": (digits_swin(), segmentation_model, segmentation),
    "mae": (modelnet10_mae_small(), pointcloud_model, pointcloud),
    "autoencoder": (surfaces_small(), pointcloud_model, pointcloud),
}


def step(task: str, dropout: bool, **changes: Any) -> tuple[Any, list[Tensor]]:
    """What a step returns, and its gradient. Without dropout there is no BatchNorm over a micro-batch either."""
    recipe, make, backward = TASKS[task]
    recipe = replace(recipe, device="cpu", **changes)
    if dropout and hasattr(recipe, "dropout"):
        recipe = replace(recipe, dropout=0.1)
    torch.manual_seed(0)
    model = make(recipe).train()
    for m in model.modules():
        if not dropout and isinstance(m, nn.modules.batchnorm._BatchNorm | nn.Dropout | nn.Dropout2d):
            m.eval()
    torch.manual_seed(1)
    scalars = backward(Run(recipe), recipe, model)
    return scalars, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("task", [task for task in TASKS if task != "mae"])
def test_micro_batches_give_the_gradient_of_the_batch(task: str):
    whole, expected = step(task, False)
    for accumulate in (2, 3):
        parts, found = step(task, False, accumulate=accumulate)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "autoencoder"])
def test_recomputing_gives_the_same_gradient(task: str):
    (kept, expected), (recomputed, found) = step(task, True), step(task, True, recompute=True)
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_recomputing_what_has_no_blocks_is_refused():
    with pytest.raises(UserError, match="recompute with model=autoencoder"):
        replace(surfaces_small(), recompute=True)
    assert vision_model(replace(digits_small(), recompute=True)).grad_checkpointing
