"""The image classification runs. Batch sizes are global: all workers together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from core.co2 import CO2Config
from core.optim import OptimConfig
from core.recipe import Recipe


@dataclass(frozen=True)
class VisionRecipe(Recipe):
    """A classifier and its data."""

    model: str = "resnet_small"
    """resnet_small, vit_small, or any model of timm."""
    dataset: Literal["digits", "cifar10"] = "digits"
    """digits comes with scikit-learn; cifar10 is read from the folder CO2_DATA."""
    augment: bool = False
    """Random crops and flips."""
    label_smoothing: float = 0.0


def digits_resnet() -> VisionRecipe:
    """A small ResNet on scikit-learn's digits."""
    return VisionRecipe(
        epochs=20,
        batch_size=64,
        optim=OptimConfig("sgd", lr=0.05, momentum=0.9, weight_decay=5e-4, warmup_steps=22),
        co2=CO2Config(tau=6),
        eval_every=2,
    )


def digits_vit() -> VisionRecipe:
    """A small ViT on scikit-learn's digits."""
    adamw = OptimConfig("adamw", lr=2e-3, weight_decay=0.05, warmup_steps=44)
    return replace(digits_resnet(), model="vit_small", epochs=40, optim=adamw)


def cifar10_resnet() -> VisionRecipe:
    """A small ResNet on CIFAR-10."""
    return VisionRecipe(
        dataset="cifar10",
        augment=True,
        epochs=10,
        batch_size=256,
        optim=OptimConfig("sgd", lr=0.2, momentum=0.9, nesterov=True, weight_decay=5e-4, warmup_steps=195),
        co2=CO2Config(tau=12),
    )


def cifar10_vit() -> VisionRecipe:
    """A small ViT on CIFAR-10."""
    adamw = OptimConfig("adamw", lr=1e-3, weight_decay=0.05, warmup_steps=390, clip_grad_norm=1.0)
    return replace(cifar10_resnet(), model="vit_small", epochs=20, optim=adamw, label_smoothing=0.1)


RECIPES = {f.__name__: f() for f in (digits_resnet, digits_vit, cifar10_resnet, cifar10_vit)}
