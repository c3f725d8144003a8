"""ImageNet-1K from class folders, with timm's transforms, mixup and cutmix."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import UnidentifiedImageError
from timm.data import Mixup, create_transform
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from core import UserError
from training.sampling import eval_share, load_batches, mix, worker_batches
from vision.index import IndexedFolder
from vision.model import image_size
from vision.recipes import VisionRecipe


def imagenet() -> tuple[ImageNet, ImageNet]:
    """(train, val) from CO2_DATA/imagenet/{train,val}/CLASS/*.JPEG; any class folders of images will do."""
    root = Path(os.environ.get("CO2_DATA", ""), "imagenet")
    missing = [split for split in ("train", "val") if not (root / split).is_dir()]
    if missing:
        raise UserError(
            f"ImageNet not found: no folder {root / missing[0]} (layout: CO2_DATA/imagenet/{{train,val}}/CLASS/*.JPEG)"
            "; set CO2_DATA to the folder that holds imagenet, or train digits_small, which needs no data"
        )
    train, val = ImageNet(root / "train"), ImageNet(root / "val")
    if differing := sorted(set(train.classes) ^ set(val.classes)):
        some = ", ".join(f"{name} (only in {'train' if name in train.classes else 'val'})" for name in differing[:4])
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise UserError(f"{root}: train and val need the same class folders, but differ in {some}{more}")
    return train, val


class ImageNet:
    """Labelled images in class folders; decoded and augmented by DataLoader workers."""

    def __init__(self, folder: Path):
        try:
            self.samples = IndexedFolder(str(folder))
        except FileNotFoundError as error:
            raise UserError(f"{folder}: {str(error).splitlines()[0]}; every class is a folder with images") from None
        self.classes = tuple(self.samples.classes)

    def __len__(self) -> int:
        return len(self.samples)

    def train_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, start: int, total: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's batches from step `start` to `total`: float32 [b, 3, s, s], int64 [b] or, mixed, [b, classes].

        Each sample's augmentation is seeded by (seed, epoch, index, number of the copy) alone: loader workers do not
        change it.
        """
        n, seed = len(self), recipe.seed
        recipe.check_share(world_size)
        of = dict(seed=seed, rank=rank, world_size=world_size, start=start, total=total, repeats=recipe.repeats)
        plan, ahead = itertools.tee(worker_batches(n, recipe.batch_size, **of))
        keyed = ([(i % n, mix(seed, epoch, i)) for i in index.tolist()] for epoch, _, index in ahead)
        mixup = self._mixup(recipe)
        batches = load_batches(Seeded(self.samples, train_transform(recipe)), keyed, recipe.loader_workers)
        for (epoch, number, _), (images, labels) in zip(plan, batches, strict=True):
            if mixup is not None:
                np.random.seed(mix(seed, epoch, number, rank) % 2**32)  # timm draws from numpy
                images, labels = mixup(images, labels)
            yield images, labels

    def test_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, batch_size: int = 128
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's share of the set, centre crops."""
        share = eval_share(len(self), rank=rank, world_size=world_size)
        keyed = ([(i, 0) for i in share[at : at + batch_size]] for at in range(0, len(share), batch_size))
        transform = create_transform(image_size(recipe.model), crop_pct=0.875, interpolation="bicubic")
        return load_batches(Seeded(self.samples, transform), keyed, recipe.loader_workers)

    def _mixup(self, recipe: VisionRecipe) -> Mixup | None:
        if not recipe.mixup and not recipe.cutmix:
            return None
        return Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, num_classes=len(self.classes))


class Seeded(Dataset[tuple[Tensor, int]]):
    """Images by (index, seed): the transform's random numbers come from the seed."""

    def __init__(self, samples: ImageFolder, transform: Any):
        self.samples, self.transform = samples, transform

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        index, seed = key
        path, label = self.samples.samples[index]
        try:
            image = self.samples.loader(path)
        except (UnidentifiedImageError, OSError):
            raise UserError(f"{path}: not a readable image; fetch it again or remove it") from None
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):  # without loader workers the model's own random state is at stake
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            pixels = self.transform(image)
        random.setstate(states[0])
        np.random.set_state(states[1])
        return pixels, label


def train_transform(recipe: VisionRecipe) -> Any:
    """timm's training transform: random resized crop, flip, and what the recipe asks for."""
    return create_transform(
        image_size(recipe.model),
        is_training=True,
        color_jitter=recipe.color_jitter,
        auto_augment=recipe.auto_augment,
        re_prob=recipe.random_erasing,
        re_mode="pixel",
        interpolation="bicubic",
    )
