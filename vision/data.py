"""The data sets: scikit-learn's digits, which need no download, and CIFAR-10, both in memory; ImageNet from files."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from core import UserError
from training.sampling import eval_share, generator, worker_batches
from training.workers import to_device, upload
from vision.imagenet import ImageNet, imagenet
from vision.recipes import VisionRecipe
from vision.transforms import CPU, crop_and_flip, normalise


@dataclass(frozen=True)
class Images:
    """A labelled image set. images: uint8 [n, c, h, w]; labels: int64 [n]; mean, std: a float a channel, of 0..1."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 [b, c, h, w] -> float32, zero mean and unit variance over the training set."""
        return normalise(images, self.mean, self.std)

    def on_device(
        self, images: Tensor, labels: Tensor, recipe: VisionRecipe, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """uint8 images to the device, and normalised there."""
        images = to_device(upload(images, device), device, recipe.channels_last)
        return self.normalise(images), upload(labels, device)

    def train_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, start: int, total: int, device: torch.device = CPU
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's batches from step `start` to `total`, on the device: float32 [b, c, h, w] and int64 [b].

        Samples and augmentation depend on (seed, epoch, rank, world_size) and the batch's number in its epoch alone.
        """
        for epoch, number, index in worker_batches(
            len(self), recipe.batch_size, seed=recipe.seed, rank=rank, world_size=world_size, start=start, total=total
        ):
            images = self.images[index]
            if recipe.augment:
                images = crop_and_flip(images, generator(recipe.seed, epoch, number, rank))
            yield self.on_device(images, self.labels[index], recipe, device)

    def test_batches(
        self, recipe: VisionRecipe, rank: int, world_size: int, device: torch.device = CPU, batch_size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """This worker's share of the set, in batches on the device, without augmentation."""
        index = torch.tensor(eval_share(len(self), rank=rank, world_size=world_size))
        for part in index.split(batch_size):
            yield self.on_device(self.images[part], self.labels[part], recipe, device)


@dataclass(frozen=True)
class Shape:
    """What a model must know of a data set."""

    num_classes: int
    in_chans: int
    image_size: int


SHAPES = {"digits": Shape(10, 1, 8), "cifar10": Shape(10, 3, 32), "imagenet": Shape(1000, 3, 224)}


def load(name: str) -> tuple[Images, Images] | tuple[ImageNet, ImageNet]:
    """(training set, test set) of a name in SHAPES."""
    return {"digits": digits, "cifar10": cifar10, "imagenet": imagenet}[name]()


def digits() -> tuple[Images, Images]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; every fifth is for testing."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy((data.images * (255 / 16)).round().astype(np.uint8))[:, None]
    labels = torch.from_numpy(data.target).long()
    test = torch.arange(len(labels)) % 5 == 0
    pixels = images[~test].float() / 255
    shared = dict(classes=tuple("0123456789"), mean=(pixels.mean().item(),), std=(pixels.std().item(),))
    return Images(images[~test], labels[~test], **shared), Images(images[test], labels[test], **shared)


def cifar10() -> tuple[Images, Images]:
    """CIFAR-10 from CO2_DATA/cifar10_jpeg.tar.xz (JPEGs, split/class/file), decoded once into a cache folder."""
    data = os.environ.get("CO2_DATA", "")
    archive = Path(data, "cifar10_jpeg.tar.xz")
    if not data or not archive.is_file():
        raise UserError(
            f"CIFAR-10 not found: looked for cifar10_jpeg.tar.xz (JPEGs in split/class/file) in CO2_DATA={data!r}; "
            "set CO2_DATA to the folder that holds it, or train digits_small, which needs no data"
        )
    cache = Path(os.environ.get("CO2_CACHE") or Path.home() / ".cache" / "co2")
    path = cache / f"cifar10-{archive.stat().st_size}.npz"
    if not path.exists():
        _decode(archive, path)
    arrays = np.load(path, allow_pickle=False)
    classes = tuple(arrays["classes"].tolist())
    # the channel statistics in common use for CIFAR-10
    shared = dict(classes=classes, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    train, test = (
        Images(torch.from_numpy(arrays[f"{s}_x"]), torch.from_numpy(arrays[f"{s}_y"]), **shared)
        for s in ("train", "test")
    )
    return train, test


def _decode(archive: Path, path: Path) -> None:
    """Decodes all JPEGs of the archive into one .npz; renamed into place, so that ranks may race."""
    from PIL import Image, UnidentifiedImageError

    items: dict[str, list[tuple[str, str, np.ndarray]]] = {"train": [], "test": []}
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if not member.isfile():
                    continue
                split, label, _ = member.name.split("/")[-3:]
                file = tar.extractfile(member)
                assert file is not None
                try:
                    pixels = np.asarray(Image.open(io.BytesIO(file.read())).convert("RGB"))
                except (UnidentifiedImageError, OSError):
                    raise UserError(
                        f"{archive}: {member.name} is not a readable image; fetch the archive again"
                    ) from None
                items[split].append((label, member.name, pixels))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{archive}: cannot be read as a tar archive ({error}); fetch it again") from None
    classes = sorted({label for label, _, _ in items["train"]})
    arrays: dict[str, np.ndarray] = {"classes": np.array(classes)}
    for split, found in items.items():
        found.sort(key=lambda item: item[1])
        arrays[f"{split}_x"] = np.stack([pixels.transpose(2, 0, 1) for _, _, pixels in found])
        arrays[f"{split}_y"] = np.array([classes.index(label) for label, _, _ in found], dtype=np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    np.savez(partial, **arrays)
    partial.rename(path)
