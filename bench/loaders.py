"""What loading costs: images, tokens and clouds a second per core, as they were loaded before and as they are now.

python -m bench.loaders [--seconds 4] [--repeats 5] [--out FOLDER]

Each way loads for some seconds, in turns with the others of its kind, in one process that does nothing else: images and
clouds in a loading process (the loader's own core), tokens in the loop's. The images are scikit-learn's two photographs
(640 x 427), saved over and over as JPEGs in class folders and in shards; the text is Python's documentation; the clouds
are analytic surfaces of 15,000 points, as many as ShapeNet's have. All lie in the page cache: no disk is measured.
"""

from __future__ import annotations

import io
import itertools
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image

from bench import report
from bench.options import require_one_or_more, require_positive
from bench.report import Spread
from training.recipe import launch
from training.sampling import load_batches

BATCH = 64  # images, clouds and windows
FILES = 128  # images and clouds
STEP = 0.05  # seconds of sleep that stand for a GPU's computing
Loads = Callable[[], Iterable[Any]]  # begins to load: batches without an end


@dataclass(frozen=True)
class Bench:
    """Loading before and after."""

    seconds: float = 4.0
    """For which each way loads, in each of the repeats."""
    repeats: int = 5
    out: Path | None = None
    """Where loaders.json and loaders.md go; runs/loaders-DATE by default."""


@dataclass(frozen=True)
class Way:
    """One way to load. what, how: in words. unit: what is counted. items: of them in a batch."""

    what: str
    how: str
    unit: str
    items: int
    loads: Loads


def main() -> None:
    bench = tyro.cli(Bench, prog="python -m bench.loaders", use_underscores=True)
    require_positive(bench, "seconds")
    require_one_or_more(bench, "repeats")
    torch.set_num_threads(1)
    out = report.new_folder("loaders", bench.out)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CO2_CACHE"] = os.path.join(folder, "cache")
        groups = [images(Path(folder)), tokens(), clouds(Path(folder))]
        rows = [row for group in groups for row in measure(group, bench)] + [mixing(bench)]
    header = report.header("bench.loaders", bench, ("torch", "torchvision", "timm", "numpy"))
    result = header | {"rows": rows, "load_average": os.getloadavg()}
    text = f"{table(rows)}\n\n{NOTE} {report.source(result)}.\n"
    report.save(out, "loaders", result, text)
    print(f"{text}\nwritten to {out}/loaders.md and loaders.json")


def measure(ways: list[Way], bench: Bench) -> list[dict[str, Any]]:
    """A row for each way: units a second in each repeat and, where the loop is imitated, its wait for each batch."""
    rates: dict[int, list[float]] = {i: [] for i in range(len(ways))}
    waits: dict[int, list[float]] = {i: [] for i in range(len(ways))}
    for _ in range(bench.repeats):
        for i, way in enumerate(ways):  # in turns: the machine's other work meets all alike
            rates[i].append(way.items / seconds_a_batch(way.loads, bench.seconds))
            waits[i].append(seconds_a_batch(way.loads, bench.seconds, STEP) - STEP)
    return [
        {"what": w.what, "how": w.how, "unit": w.unit, "a_second": rates[i], "wait_seconds": waits[i], "step": STEP}
        for i, w in enumerate(ways)
    ]


def seconds_a_batch(loads: Loads, seconds: float, step: float = 0.0) -> float:
    """Of the loop, which sleeps for `step` with each batch, as one that waits for a GPU does."""
    with closing(iter(loads())) as batches:
        next(batches)  # the loading processes have started
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            next(batches)
            time.sleep(step)
            count += 1
        return (time.perf_counter() - begin) / count


# -- the ways ---------------------------------------------------------------------------------------------------


def images(folder: Path) -> list[Way]:
    """ResNet-50's: crop, flip; by a loading process."""
    from vision.imagenet import Augmented, ImageNet, create_transform, train_transform
    from vision.recipes import imagenet_resnet50

    write_images(folder / "folders", folder / "shards")
    folders, shards = ImageNet(folder / "folders").samples, ImageNet(folder / "shards").samples
    recipe = imagenet_resnet50()
    before = create_transform(224, is_training=True, color_jitter=0.0, interpolation="bicubic")
    now = train_transform(recipe)

    def way(how: str, samples: Any, transform: Any) -> Way:
        data = Augmented(samples, transform)
        return Way("images, ResNet-50", how, "images", BATCH, lambda: load_batches(data, keys(), 1))

    return [
        way("float32, class folders (before)", folders, before),
        way("uint8, class folders", folders, now),
        way("uint8, tar shards", shards, now),
    ]


def write_images(folders: Path, shards: Path) -> None:
    """Two classes of photographs as class folders, and the same in two shards."""
    from sklearn.datasets import load_sample_images

    for label, photo in enumerate(load_sample_images().images):
        box = io.BytesIO()
        Image.fromarray(photo).save(box, "JPEG", quality=90)
        (folders / f"class{label}").mkdir(parents=True)
        shards.mkdir(exist_ok=True)
        with tarfile.open(shards / f"{label}.tar", "w") as tar:
            for number in range(FILES // 2):
                (folders / f"class{label}" / f"{number:04}.jpg").write_bytes(box.getvalue())
                for suffix, content in (("jpg", box.getvalue()), ("cls", str(label).encode())):
                    info = tarfile.TarInfo(f"{number:04}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))


def tokens() -> list[Way]:
    """GPT-2's and RoBERTa's batches: by the loop itself, as it was, and by a loading process."""
    from language.corpora import open_corpus
    from language.data import CausalObjective, MaskedObjective, train_batches
    from language.recipes import gpt2_pydoc_small

    corpus = open_corpus("pydoc", 1024)
    assert corpus.mask is not None
    kinds = {
        "tokens, GPT-2, windows of 1,024": CausalObjective(1024),
        "tokens, RoBERTa, windows of 512": MaskedObjective(512, corpus.vocab_size, corpus.eot, corpus.mask),
    }

    def way(what: str, objective: Any, workers: int) -> Way:
        recipe = replace(gpt2_pydoc_small(), batch_size=BATCH, loader_workers=workers)
        how = "one loading process" if workers else "in the loop (before)"
        loads = lambda: train_batches(corpus.train, objective, recipe, 0, 1, 0, 10**6)  # noqa: E731
        return Way(what, how, "tokens", BATCH * objective.context, loads)

    return [way(what, objective, workers) for what, objective in kinds.items() for workers in (0, 1)]


def clouds(folder: Path) -> list[Way]:
    """ShapeNet's, 2,048 points of each: from a file for each cloud, and packed; by a loading process."""
    from pointcloud import pack
    from pointcloud.data import PointClouds
    from pointcloud.sources import ShapeNetPC15k
    from pointcloud.surfaces import random_surface

    model = folder / "ShapeNetCore.v2.PC15k" / "surfaces" / "train"
    model.mkdir(parents=True)
    for i in range(FILES):
        np.save(model / f"{i:04}.npy", random_surface(np.random.default_rng(i), 15_000)[1].astype(np.float32))
    files = ShapeNetPC15k(folder, "train")
    pack.pack(files, pack.packed_path(folder, "shapenet", "train"))

    def way(how: str, source: Any) -> Way:
        data = PointClouds(source, 2048)
        return Way("clouds, 2,048 of 15,000 points", how, "clouds", BATCH, lambda: load_batches(data, keys(), 1))

    return [way("a file each (before)", files), way("packed, mapped", pack.Packed(folder, "shapenet", "train"))]


def keys() -> Iterator[list[tuple[int, int]]]:
    """(number of a file, seed) of each item of each batch, without an end."""
    return ([(i % FILES, i) for i in range(at, at + BATCH)] for at in itertools.count(0, BATCH))


def mixing(bench: Bench) -> dict[str, Any]:
    """What Mixup took of the loop's own process for a batch, before it went to the device."""
    from vision.imagenet import Mixup

    mixup, batch = Mixup(0.8, 1.0, num_classes=1000), (torch.rand(BATCH, 3, 224, 224), torch.arange(BATCH))

    def loads() -> Iterator[Any]:
        while True:
            yield mixup(*batch)

    rates = [BATCH / seconds_a_batch(loads, bench.seconds) for _ in range(bench.repeats)]
    return {"what": "Mixup, CutMix of float32", "how": "in the loop (before)", "unit": "images", "a_second": rates}


# -- the report -------------------------------------------------------------------------------------------------

NOTE = (
    f"Medians (least to greatest). Wait: what a loop that sleeps {1000 * STEP:g} ms with each batch of {BATCH} waits "
    "for the next; sleeping leaves the core to others, as computing on a GPU does. Copies to a GPU, which uint8 makes "
    "four times smaller, normalising there, and Mixup there: not run."
)
TITLES = ("what", "how", "a second and core", "wait, ms a batch")


def table(rows: list[dict[str, Any]]) -> str:
    """One row a way."""

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield from (row["what"], row["how"], f"{Spread.of(row['a_second']).show(',.0f')} {row['unit']}")
        if waits := row.get("wait_seconds"):
            yield Spread.of([1000 * w for w in waits]).show(",.1f")

    return report.table(TITLES, [list(cells(row)) for row in rows])


if __name__ == "__main__":
    launch(main)
