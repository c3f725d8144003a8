"""The search's pictures and clouds: digits, CIFAR-10 for a ResNet and a ViT, segmentation of digits, surfaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.search.task import Batch, Inner, Split, Task, stacked_draw, without_batch_norm
from training.sampling import generator

# -- digits -----------------------------------------------------------------------------------------------------


def digits() -> Task:
    from sklearn.datasets import load_digits

    from bench.standin import build_model

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    labels = torch.from_numpy(data.target).long()
    number = torch.arange(len(labels)) % 5
    training = number > 1
    images = (images - images[training].mean()) / images[training].std()
    return Task(
        "digits",
        "scikit-learn's digits (three fifths for training, one for tuning, one for the test), the perceptron of "
        "bench.peers with 0.28 M parameters, SGD with momentum 0.9, cosine schedule, 16 samples per worker and step",
        lambda: build_model(256),
        F.cross_entropy,
        stacked_draw(images[training], labels[training]),
        {"test": (images[number == 0], labels[number == 0]), "tuning": (images[number == 1], labels[number == 1])},
        Inner("sgd", 0.025),
        batch=16,
    )


# -- CIFAR-10 ---------------------------------------------------------------------------------------------------

CIFAR_TRAINING, CIFAR_HELD_OUT = 10_000, 1_000


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with GroupNorm beside a shortcut; halves the resolution where stride is 2."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, after) for _ in range(2))
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(h)) + (x if self.shortcut is None else self.shortcut(x)))


class SmallResNet(nn.Module):
    """[n, 3, 16, 16] -> logits [n, 10]; 8, 16 and 32 channels, 0.02 M parameters."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(ResidualBlock(8, 8, 1), ResidualBlock(8, 16, 2), ResidualBlock(16, 32, 2))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


@functools.cache
def cifar_data() -> tuple[Batch, dict[Split, Batch]]:
    from vision.data import cifar10

    train, test = cifar10()

    def take(images: Tensor, normalise: Callable[[Tensor], Tensor]) -> Tensor:
        return F.avg_pool2d(normalise(images), 2)

    order = torch.randperm(len(train), generator=generator(0))
    chosen, tuning = order[:CIFAR_TRAINING], order[CIFAR_TRAINING : CIFAR_TRAINING + CIFAR_HELD_OUT]
    tested = torch.randperm(len(test), generator=generator(1))[:CIFAR_HELD_OUT]
    return (take(train.images[chosen], train.normalise), train.labels[chosen]), {
        "tuning": (take(train.images[tuning], train.normalise), train.labels[tuning]),
        "test": (take(test.images[tested], test.normalise), test.labels[tested]),
    }


def cifar() -> Task:
    return cifar_task("cifar", SmallResNet, "a ResNet with GroupNorm and 0.02 M parameters", Inner("sgd", 0.05))


def cifar_vit() -> Task:
    def build() -> nn.Module:
        from vision.model import VisionTransformer

        return VisionTransformer(16, 4, 3, 10, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2.0)

    return cifar_task("cifar_vit", build, "timm's ViT of 2 layers, 48 wide, 0.04 M parameters", Inner("adamw", 2e-3))


def cifar_task(name: str, build: Callable[[], nn.Module], model: str, inner: Inner) -> Task:
    training, held = cifar_data()
    optimizer = "SGD with momentum 0.9" if inner.name == "sgd" else "AdamW (weight decay 0.01)"
    return Task(
        name,
        f"CIFAR-10 at 16 x 16 pixels, {CIFAR_TRAINING} images for training, {CIFAR_HELD_OUT} of the training set for "
        f"tuning and {CIFAR_HELD_OUT} of the test set, no augmentation, {model}, {optimizer}, cosine schedule, "
        "8 samples per worker and step",
        build,
        F.cross_entropy,
        stacked_draw(*training),
        held,
        inner,
        batch=8,
    )


# -- segmentation -----------------------------------------------------------------------------------------------

SIDE = 32


class SmallUPerNet(nn.Module):
    """segmentation's UPerNet on its ResNet-18, 8 to 64 channels, with GroupNorm and without the auxiliary head.

    [n, 3, SIDE, SIDE] -> logits [n, 11, SIDE, SIDE].
    """

    def __init__(self):
        from segmentation.model import build_model, upernet

        super().__init__()
        config: dict[str, Any] = upernet("resnet_mini", 11, (SIDE, SIDE))
        config["backbone"] |= {"base_channels": 8, "stem_channels": 8}
        config["decode_head"] |= {"in_channels": [8, 16, 32, 64], "channels": 16, "dropout_ratio": 0}
        config["auxiliary_head"] = None
        self.net = without_batch_norm(build_model(config))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.net.decode_head(self.net.extract_feat(x))
        return F.interpolate(logits, SIDE, mode="bilinear")


def segmentation() -> Task:
    from segmentation.synthetic import digits_on_photos

    def scenes(split: str, n: int, seed: int) -> Batch:
        images, masks = digits_on_photos(split, n, SIDE, seed)
        return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 64 - 1.5, torch.from_numpy(masks).long()

    images, masks = scenes("train", 1024, 0)
    return Task(
        "segmentation",
        f"digits pasted on photographs, {SIDE} x {SIDE} pixels, 1,024 scenes for training; 128 other scenes of the "
        "same digits and photographs for tuning, 128 of other digits and parts of the photographs for the test; "
        "mmseg's UPerNet and ResNet-18 with GroupNorm, 8 to 64 channels, AdamW (weight decay 0.01), cosine schedule, "
        "4 scenes per worker and step; shards are sorted by the greatest digit of a scene",
        SmallUPerNet,
        F.cross_entropy,
        stacked_draw(images, masks, masks.flatten(1).amax(dim=1)),
        {"tuning": scenes("train", 128, 1), "test": scenes("val", 128, 0)},
        Inner("adamw", 4e-3, clip=1.0),
        batch=4,
    )


# -- clouds: the autoencoder of pointcloud on its analytic surfaces -------------------------------------------------

POINTS = 128


def surfaces() -> Task:
    from pointcloud.losses import chamfer_distance
    from pointcloud.model import Autoencoder, AutoencoderConfig, Reconstruction

    def build() -> nn.Module:
        return without_batch_norm(Autoencoder(POINTS, AutoencoderConfig("mlp", (16, 32), 32, mlp_widths=(64, 128))))

    def loss(output: Reconstruction, clouds: Tensor) -> Tensor:
        return chamfer_distance(output.prediction, clouds).mean()

    clouds, kinds = sample(0, 1024)
    tuning, test = (sample(stream, 256)[0] for stream in (1, 2))
    return Task(
        "surfaces",
        f"analytic surfaces of random proportions, {POINTS} points each (1,024 for training, 256 for tuning, 256 for "
        "the test), pointcloud's autoencoder with GroupNorm and 0.06 M parameters, AdamW (weight decay 0.01), cosine "
        "schedule, 4 clouds per worker and step; the loss is the squared Chamfer distance in the unit sphere",
        build,
        loss,
        stacked_draw(clouds, clouds, kinds),
        {"tuning": (tuning, tuning), "test": (test, test)},
        Inner("adamw", 4e-3),
        batch=4,
    )


def sample(stream: int, n: int) -> Batch:
    """Clouds float32 [n, POINTS, 3] in the unit sphere, and the numbers of their kinds, int64 [n]."""
    from pointcloud.data import normalise
    from pointcloud.surfaces import KINDS, random_surface

    drawn = [random_surface(np.random.default_rng((stream, i)), POINTS) for i in range(n)]
    clouds = np.stack([normalise(points) for _, points in drawn]).astype(np.float32)
    return torch.from_numpy(clouds), torch.tensor([list(KINDS).index(kind) for kind, _ in drawn])
