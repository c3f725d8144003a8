"""Images that a core decodes and augments a second, by this project's loader and by torchvision's plain pipeline.

python -m bench.loader [--images 64] [--passes 8] [--repeats 3] [--out FOLDER]

Both load generated JPEGs of ImageNet's size from class folders in one process of a DataLoader: a random crop of 224
pixels, bicubic, and a flip. torchvision's random numbers depend on the process, ours on (seed, epoch, index). The two
take turns.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import training.prepared  # noqa: F401

# isort: split
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from bench import report
from bench.report import Asked, Summary, require
from training.data import load_batches
from training.script import launch
from vision.data import Augmented, ImageNet, train_transform
from vision.recipes import RECIPES

SIZE = 500, 375  # pixels, the most frequent size in ImageNet
BATCH = 64


@dataclass(frozen=True)
class Bench(Asked):
    """Images a CPU second of the two loaders."""

    images: int = 64
    """Different images."""
    passes: int = 8
    """Passes over the images in each measurement."""
    repeats: int = 3
    """Measurements of each loader."""

    def check(self) -> None:
        require(self, ones="images passes repeats")


def main() -> None:
    report.run(Bench, "loader", measure_all, TABLES, packages=("torch", "torchvision", "timm"))


def measure_all(bench: Bench, session: report.Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), bench.images)
        loaders = {"torchvision": torchvisions, "ours": ours}
        session.take(
            "rows",
            (
                {"loader": name, "images": bench.images * bench.passes, **timed(load, Path(folder), bench)}
                for _ in range(bench.repeats)
                for name, load in loaders.items()
            ),
        )


def write_images(folder: Path, count: int) -> None:
    """Writes JPEGs of about 100 kB: smooth shapes with noise."""
    rng = np.random.default_rng(0)
    (folder / "class").mkdir()
    for number in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
            SIZE, Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse) + rng.normal(0, 12, (*SIZE[::-1], 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / "class" / f"{number:04d}.jpg", quality=90)


def timed(load: Callable[[Path, Bench], Iterator[Any]], folder: Path, bench: Bench) -> dict[str, float]:
    """Returns the CPU seconds of the loading process."""
    before = getrusage(RUSAGE_CHILDREN)
    seen = sum(len(images) for images, _ in load(folder, bench))
    after = getrusage(RUSAGE_CHILDREN)
    assert seen == bench.images * bench.passes
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_seconds": seconds, "images_per_cpu_second": seen / seconds}


def ours(folder: Path, bench: Bench) -> Iterator[Any]:
    """Yields the batches of the recipe imagenet_resnet50, before they go to the device."""
    augmented = Augmented(ImageNet(folder).samples, train_transform(RECIPES["imagenet_resnet50"]))
    keys = [(0, epoch, index) for epoch in range(bench.passes) for index in range(bench.images)]
    yield from load_batches(augmented, iter(keys[at : at + BATCH] for at in range(0, len(keys), BATCH)), 1)


def torchvisions(folder: Path, bench: Bench) -> Iterator[Any]:
    """Yields the same kind of batches from torchvision's ImageFolder."""
    crop = transforms.RandomResizedCrop(224, interpolation=transforms.InterpolationMode.BICUBIC)
    steps = [crop, transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    samples = ImageFolder(str(folder), transforms.Compose(steps))
    order = [index for _ in range(bench.passes) for index in range(bench.images)]
    yield from DataLoader(samples, batch_size=BATCH, sampler=order, num_workers=1, generator=torch.Generator())


TABLES = {"rows": Summary("loader", {"cpu_seconds": ".4g", "images_per_cpu_second": ".4g"})}

if __name__ == "__main__":
    launch(main)
