"""ImageNet-1K from class folders or tar shards, with timm's transforms, erasing, Mixup and CutMix.

Loading processes decode, crop and recolour; images cross to the device as uint8, a quarter of float32's bytes, and are
normalised, erased and mixed there. timm's create_loader does so, too, but draws samples and random numbers by the state
of each process, and skips images that it cannot read; here both follow from (seed, epoch, index) alone, and it stops.
Repeated augmentation is training.sampling's: timm's RepeatAugSampler deals in the same way, but knows no seed, and
gives all copies of an image one index, by which they would be augmented alike.
"""

from __future__ import annotations

import training.prepared  # noqa: F401

# isort: split
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils.data import Dataset

from core import UserError
from training.data import Key, data_root, eval_keys, missing, train_keys
from training.sampling import load_batches, mix, seeded
from vision.index import IndexedFolder
from vision.model import image_size
from vision.recipes import VisionRecipe
from vision.shards import Shards, tars
from vision.transforms import CPU, on_device

Samples = IndexedFolder | Shards
STATISTICS = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def imagenet() -> tuple[ImageNet, ImageNet]:
    """(train, val) from CO2_DATA/imagenet/{train,val}, class folders of images or tar shards."""
    root = data_root() / "imagenet"
    if absent := [split for split in ("train", "val") if not (root / split).is_dir()]:
        layout = f"{absent[0]}/CLASS/*.JPEG, or {absent[0]}/*.tar, shards as WebDataset has them"
        raise missing("ImageNet", root, layout, "digits_small", holds="imagenet")
    train, val = ImageNet(root / "train"), ImageNet(root / "val")
    if differing := sorted(set(train.classes) ^ set(val.classes)):
        some = ", ".join(f"{name} (only in {'train' if name in train.classes else 'val'})" for name in differing[:4])
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise UserError(f"{root}: train and val need the same classes, but differ in {some}{more}")
    return train, val


class ImageNet:
    """Labelled images in class folders or tar shards; decoded and augmented by DataLoader workers."""

    def __init__(self, folder: Path):
        try:
            self.samples: Samples = Shards(folder) if tars(folder) else IndexedFolder(str(folder))
        except FileNotFoundError as error:
            raise UserError(f"{folder}: {str(error).splitlines()[0]}; every class is a folder with images") from None
        self.classes = tuple(self.samples.classes)

    def __len__(self) -> int:
        return len(self.samples)

    def train_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, start: int, total: int, device: torch.device = CPU
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's batches from step `start` to `total`, on the device: float32 [b, 3, s, s], int64 [b] or, mixed,
        [b, classes].

        An image's crop and colours are seeded by (seed, epoch, index, number of the copy) alone: loader workers do not
        change them. What is erased, and how a batch is mixed, by (seed, epoch, number of the batch, rank).
        """
        plan, ahead = itertools.tee(train_keys(recipe, len(self), rank, world_size, start, total, recipe.repeats))
        mixup, erasing = self._mixup(recipe), erasing_of(recipe, device)
        augmented = Augmented(self.samples, train_transform(recipe))
        batches = load_batches(augmented, (keys for _, keys in ahead), recipe.loader_workers)
        for (batch, _), (images, labels) in zip(plan, batches, strict=True):
            images, labels = on_device(images, labels, device, recipe.channels_last, *STATISTICS)
            with seeded(mix(*batch), device):
                images = erasing(images)
                if mixup:
                    images, labels = mixup(images, labels)
            yield images, labels

    def test_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, device: torch.device = CPU, batch_size: int = 128
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's share of the set, centre crops, on the device."""
        keys = eval_keys(len(self), batch_size, rank, world_size)
        size = image_size(recipe.model)
        transform = create_transform(size, crop_pct=0.875, interpolation="bicubic", use_prefetcher=True)
        for images, labels in load_batches(Augmented(self.samples, transform), keys, recipe.loader_workers):
            yield on_device(images, labels, device, recipe.channels_last, *STATISTICS)

    def _mixup(self, recipe: VisionRecipe) -> Mixup | None:
        if not recipe.mixup and not recipe.cutmix:
            return None
        return Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, num_classes=len(self.classes))


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images, uint8 [3, s, s], and classes by their keys, from which the transform's random numbers follow."""

    def __init__(self, samples: Samples, transform: Any):
        self.samples, self.transform = samples, transform

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        index = key[-1] % len(self.samples)  # that of a copy is larger
        try:
            image, label = self.samples.read(index)
        except UserError:
            raise
        except Exception:  # Pillow's formats raise nearly any
            raise UserError(f"{self.samples.name(index)}: not a readable image; fetch it again or remove it") from None
        with seeded(mix(*key)):
            return self.transform(image), label


def train_transform(recipe: VisionRecipe) -> Any:
    """timm's training transform up to what comes after normalising: random resized crop, flip, what the recipe says."""
    return create_transform(
        image_size(recipe.model),
        is_training=True,
        color_jitter=recipe.color_jitter,
        auto_augment=recipe.auto_augment,
        interpolation="bicubic",
        use_prefetcher=True,
    )


def erasing_of(recipe: VisionRecipe, device: torch.device) -> RandomErasing:
    """timm's random erasing of normalised images, with a random value for each pixel, on the device."""
    return RandomErasing(recipe.random_erasing, mode="pixel", device=str(device))
