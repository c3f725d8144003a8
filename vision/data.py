"""The data sets: scikit-learn's digits, which need no download, and CIFAR-10, both in memory, and ImageNet from files.

ImageNet's loading processes decode, crop and recolor images. Images go to the device as uint8, and are normalized,
erased and mixed there.

We do not use timm's create_loader or RepeatAugSampler. The loader draws samples by each process's random state, and
skips images that it cannot read. The sampler augments all copies of an image equally. Here the data depends only on
(seed, epoch, index).
"""

from __future__ import annotations

import training.prepared  # noqa: F401

# isort: split

import functools
import io
import itertools
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, Mixup, create_transform, resolve_data_config
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torch.utils.data import Dataset

from core import UserError
from training.data.files import cached, data_root, missing, read_arrays
from training.data.images import read_rgb
from training.data.samples import Key, eval_keys, generator, load_batches, mix, seeded, train_keys
from training.start.errors import explained
from training.start.workers import to_device, upload
from vision.index import Samples, in_folders, in_shards, tars
from vision.model import image_size, weights_config
from vision.recipes import VisionRecipe

CPU = torch.device("cpu")


def on_device(
    images: Tensor, labels: Tensor, device: torch.device, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Copies uint8 images and their labels to the device, and normalizes the images there."""
    return normalise(to_device(images, device), mean, std), labels.to(device, non_blocking=True)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Normalizes uint8 [b, c, h, w] to float32, with each channel's mean and standard deviation on the scale 0..1."""
    mean_of, std_of = _statistics(mean, std, images.device)
    return (images.float() / 255).sub_(mean_of).div_(std_of)


@functools.cache  # a copy to the device for each batch would wait for all work that is queued there
def _statistics(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(mean, device=device).view(-1, 1, 1), torch.tensor(std, device=device).view(-1, 1, 1)


def crop_and_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """Crops and flips images of any dtype at random.

    Each image is padded by an eighth of its size, mirrored at its edges, and cropped. Half of the images are flipped.
    """
    n, _, h, w = images.shape
    pad = h // 8
    dy, dx = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=rng)
    rows, columns = mirrored(dy - pad + torch.arange(h), h), mirrored(dx - pad + torch.arange(w), w)
    flip = torch.rand(n, 1, generator=rng) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    picked = torch.arange(n)[:, None, None]
    return images.permute(0, 2, 3, 1)[picked, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def mirrored(places: Tensor, size: int) -> Tensor:
    """Returns places beyond [0, size) mirrored at the first and the last place, which are not repeated."""
    return (size - 1) - ((size - 1) - places.abs()).abs()


# -- ImageNet ---------------------------------------------------------------------------------------------------------


STATISTICS = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def data_config(recipe: VisionRecipe) -> dict[str, Any]:
    """Returns input_size, mean, std, crop_pct, crop_mode and interpolation of ImageNet's images, as timm names them."""
    own = weights_config(recipe.model) if recipe.timm_data else None
    if own is not None:
        return resolve_data_config(pretrained_cfg=own.to_dict())
    size, statistics = image_size(recipe.model), dict(zip(("mean", "std"), STATISTICS, strict=True))
    cropped = {"crop_pct": 0.875, "crop_mode": "center", "interpolation": "bicubic"}
    return statistics | {"input_size": (3, size, size)} | cropped


def imagenet() -> tuple[ImageNet, ImageNet]:
    """Returns (train, val) from CO2_DATA/imagenet/{train,val}, each with class folders of images or tar shards."""
    root = data_root() / "imagenet"
    if absent := [split for split in ("train", "val") if not (root / split).is_dir()]:
        layout = f"{absent[0]}/CLASS/*.JPEG, or {absent[0]}/*.tar, shards as WebDataset has them"
        raise missing("ImageNet", root, layout, "digits_small", holds="imagenet")
    train, val = ImageNet(root / "train"), ImageNet(root / "val")
    if differing := sorted(set(train.classes) ^ set(val.classes)):
        some = ", ".join(f"{name} (only in {'train' if name in train.classes else 'val'})" for name in differing[:4])
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        raise UserError(f"{root}: train and val need the same classes, but differ in {some}{more}")
    val.number_as(train.classes)
    return train, val


class ImageNet:
    """Labeled images in class folders or tar shards. DataLoader workers decode and augment them."""

    def __init__(self, folder: Path):
        self.samples = in_shards(folder) if tars(folder) else in_folders(folder)
        self.classes = self.samples.classes

    def number_as(self, classes: tuple[str, ...]) -> None:
        """Gives the classes the places of their names in `classes`. Folders are sorted as text, shards by number."""
        if classes != self.classes:
            place = {name: i for i, name in enumerate(classes)}
            to = [place[name] for name in self.classes]
            self.samples.samples = [(*image, to[label]) for *image, label in self.samples.samples]
            self.classes = classes

    def __len__(self) -> int:
        return len(self.samples)

    def train_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, start: int, total: int, device: torch.device = CPU
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this worker's batches from step `start` to `total`, on the device.

        Images are float32 [b, 3, s, s]. Labels are int64 [b], or [b, classes] if they are mixed. An image's crop and
        colors depend only on (seed, epoch, index, number of the copy), not on the loader workers. Erasing and mixing
        depend on (seed, epoch, number of the batch, rank).
        """
        plan, ahead = itertools.tee(train_keys(recipe, len(self), rank, world_size, start, total, recipe.repeats))
        mixup, erasing = self._mixup(recipe), RandomErasing(recipe.random_erasing, mode="pixel", device=str(device))
        augmented, c = Augmented(self.samples, train_transform(recipe)), data_config(recipe)
        batches = load_batches(augmented, (keys for _, keys in ahead), recipe.loader_workers)
        for (batch, _), (images, labels) in zip(plan, batches, strict=True):
            images, labels = on_device(images, labels, device, c["mean"], c["std"])
            with seeded(mix(*batch), device):
                images = erasing(images)
                if mixup:
                    images, labels = mixup(images, labels)
            yield images, labels

    def test_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, device: torch.device = CPU, batch_size: int = 128
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this worker's share of the set on the device, cropped as data_config says."""
        keys = eval_keys(len(self), batch_size, rank, world_size)
        c = data_config(recipe)
        how = {name: c[name] for name in ("crop_pct", "crop_mode", "interpolation", "mean")}  # a border has the mean
        transform = create_transform(c["input_size"], **how, use_prefetcher=True)
        batches = load_batches(Augmented(self.samples, transform), keys, recipe.loader_workers, keeper=self)
        for images, labels in batches:
            yield on_device(images, labels, device, c["mean"], c["std"])

    def _mixup(self, recipe: VisionRecipe) -> Mixup | None:
        if not recipe.mixup and not recipe.cutmix:
            return None
        return Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.label_smoothing, num_classes=len(self.classes))


class Augmented(Dataset[tuple[Tensor, int]]):
    """Images, uint8 [3, s, s], and classes by their keys. The transform's random numbers follow from the key."""

    def __init__(self, samples: Samples, transform: Any):
        self.samples, self.transform = samples, transform

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        index = key[-1] % len(self.samples)  # the index of a copy is larger
        with explained(f"{self.samples.name(index)}: not a readable image", "fetch it again or remove it"):
            image, label = self.samples.read(index)
        with seeded(mix(*key)):
            return self.transform(image), label


def train_transform(recipe: VisionRecipe) -> Any:
    """Returns timm's training transform up to normalization: random resized crop, flip, and the recipe's options."""
    c = data_config(recipe)
    with explained(f"auto_augment={recipe.auto_augment!r}", "give a policy of timm, such as rand-m9-mstd0.5-inc1"):
        return create_transform(
            c["input_size"],
            is_training=True,
            color_jitter=recipe.color_jitter,
            auto_augment=recipe.auto_augment,
            interpolation=c["interpolation"],
            mean=c["mean"],  # RandAugment fills with it
            use_prefetcher=True,
        )


# -- images in memory -------------------------------------------------------------------------------------------------


LARGEST_JPEG = 1 << 20  # bytes; CIFAR-10's files have about two thousand
ARRAYS = "arrays.npz"  # file in the cache


@dataclass(frozen=True)
class Images:
    """A labeled image set.

    Attributes:
        images: uint8 [n, c, h, w].
        labels: int64 [n].
        classes: Names of the classes.
        mean: Mean of each channel, on the scale 0..1.
        std: Standard deviation of each channel, on the same scale.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalizes uint8 [b, c, h, w] to float32 with zero mean and unit variance over the training set."""
        return normalise(images, self.mean, self.std)

    def train_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, start: int, total: int, device: torch.device = CPU
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this worker's batches from step `start` to `total`, on the device: float32 [b, c, h, w], int64 [b].

        Samples and augmentation depend only on (seed, epoch, rank, world_size) and the batch's number in its epoch.
        """
        for batch, keys in train_keys(recipe, len(self), rank, world_size, start, total):
            images, labels = self._pick(keys)
            if recipe.augment:
                images = crop_and_flip(images, generator(*batch))
            yield self._on_device(images, labels, device)

    def test_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, device: torch.device = CPU, batch_size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this worker's share of the set, in batches on the device, without augmentation."""
        for keys in eval_keys(len(self), batch_size, rank, world_size):
            yield self._on_device(*self._pick(keys), device)

    def _pick(self, keys: list[Key]) -> tuple[Tensor, Tensor]:
        index = torch.tensor([i for *_, i in keys])
        return self.images[index], self.labels[index]

    def _on_device(self, images: Tensor, labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        return on_device(upload(images, device), upload(labels, device), device, self.mean, self.std)


@dataclass(frozen=True)
class Shape:
    """The properties of a data set that a model depends on."""

    num_classes: int
    in_chans: int
    image_size: int


SHAPES = {"digits": Shape(10, 1, 8), "cifar10": Shape(10, 3, 32), "imagenet": Shape(1000, 3, 224)}


def load(name: str) -> tuple[Images, Images] | tuple[ImageNet, ImageNet]:
    """Returns (training set, test set) of a name in SHAPES."""
    return {"digits": digits, "cifar10": cifar10, "imagenet": imagenet}[name]()


def digits() -> tuple[Images, Images]:
    """Returns scikit-learn's 1,797 digits of 8 x 8 pixels. Every fifth is in the test set."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy((data.images * (255 / 16)).round().astype(np.uint8))[:, None]
    labels = torch.from_numpy(data.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    pixels = images[~test].float() / 255
    shared = dict(classes=tuple("0123456789"), mean=(pixels.mean().item(),), std=(pixels.std().item(),))
    return Images(images[~test], labels[~test], **shared), Images(images[test], labels[test], **shared)


def cifar10() -> tuple[Images, Images]:
    """Returns CIFAR-10 from CO2_DATA/cifar10_jpeg.tar.xz (JPEGs in split/class/file), decoded once into the cache."""
    archive = data_root() / "cifar10_jpeg.tar.xz"
    if not archive.is_file():
        raise missing("CIFAR-10", archive.parent, f"{archive.name} (JPEGs in split/class/file)", "digits_small")
    key = f"cifar10-{archive.stat().st_size}-{archive.stat().st_mtime_ns}"
    folder = cached(key, lambda target: np.savez(target / ARRAYS, **_decode(archive)))
    names = "classes", "train_x", "train_y", "test_x", "test_y"
    classes, *arrays = read_arrays(folder / ARRAYS, *names, remedy=f"remove {folder}, it is made again")
    # the channel statistics that are commonly used for CIFAR-10
    shared = dict(classes=tuple(classes.tolist()), mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    train_x, train_y, test_x, test_y = map(torch.from_numpy, arrays)
    return Images(train_x, train_y, **shared), Images(test_x, test_y, **shared)


def _decode(archive: Path) -> dict[str, np.ndarray]:
    """Decodes all JPEGs of the archive. Returns classes, and for each split uint8 [n, 3, 32, 32] and int64 [n]."""
    items = {split: sorted(found) for split, found in _jpegs(archive).items()}
    for split, found in items.items():
        if not found:
            raise UserError(f"{archive}: holds no image {split}/CLASS/FILE; fetch it again")
    classes, others = (sorted({label for _, label, _ in items[split]}) for split in ("train", "test"))
    if unknown := next((label for label in others if label not in classes), None):
        raise UserError(f"{archive}: test has the class {unknown}, which train has not; fetch it again")
    arrays: dict[str, np.ndarray] = {"classes": np.array(classes)}
    for split, found in items.items():
        images = [_pixels(archive, name, content) for name, _, content in found]
        arrays[f"{split}_x"] = np.stack([pixels.transpose(2, 0, 1) for pixels in images])
        arrays[f"{split}_y"] = np.array([classes.index(label) for _, label, _ in found], dtype=np.int64)
    return arrays


def _jpegs(archive: Path) -> dict[str, list[tuple[str, str, bytes]]]:
    """Returns (name, class, content) of the files train/CLASS/FILE and test/CLASS/FILE in any folder, by split."""
    items: dict[str, list[tuple[str, str, bytes]]] = {"train": [], "test": []}
    with explained(f"{archive}: cannot be read as a tar archive", "fetch it again"), tarfile.open(archive) as tar:
        for member in tar:
            split, label, _ = ["", "", *member.name.split("/")][-3:]
            file = tar.extractfile(member) if member.isfile() and split in items else None
            if file is not None:
                items[split].append((member.name, label, file.read(LARGEST_JPEG)))
    return items


def _pixels(archive: Path, name: str, content: bytes) -> np.ndarray:
    """Returns the pixels of a JPEG, uint8 [32, 32, 3]."""
    with explained(f"{archive}: {name} is not a readable image", "fetch it again"):
        pixels = np.asarray(read_rgb(io.BytesIO(content), f"{archive}: {name}"))
    if pixels.shape != (32, 32, 3):
        size = " x ".join(map(str, pixels.shape[:2]))
        raise UserError(f"{archive}: {name} has {size} pixels, not 32 x 32; fetch it again")
    return pixels
