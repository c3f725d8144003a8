"""What loading costs: images, tokens and clouds a second per core, as they were loaded before and as they are now.

python -m bench.loaders [--repeats 5] [--out FOLDER]

Each way loads the same batches, in turns with the others of its kind. CPU time is counted, of the loop that takes the
batches and of the one loading process, so that what else runs on the machine matters little. The images are
scikit-learn's two photographs (640 x 427), saved over and over as JPEGs in class folders and in shards; the text is
Python's documentation; the clouds are analytic surfaces of 15,000 points, as many as ShapeNet's have. All lie in the
page cache: no disk is measured.
"""

from __future__ import annotations

import io
import os
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench import report
from bench.report import Spread, read_options, require_one_or_more
from training.sampling import load_batches
from training.script import launch

BATCH = 64  # images, clouds and windows
FILES = 128  # images and clouds
Loads = Callable[[], Iterable[Any]]  # begins to load


@dataclass(frozen=True)
class Bench:
    """Loading before and after."""

    repeats: int = 5
    out: Path | None = None
    """Where loaders.json and loaders.md go; runs/loaders-DATE by default."""

    def check(self) -> None:
        require_one_or_more(self, "repeats")


@dataclass(frozen=True)
class Way:
    """One way to load. what, how: in words. unit: what is counted. items: of them in a batch. batches: to load."""

    what: str
    how: str
    unit: str
    items: int
    batches: int
    loads: Loads


def main() -> None:
    bench = read_options(Bench, "bench.loaders")
    torch.set_num_threads(1)
    out = report.new_folder("loaders", bench.out)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CO2_CACHE"] = os.path.join(folder, "cache")
        groups = [images(Path(folder)), mixing(), tokens(), clouds(Path(folder))]
        rows = [row for group in groups for row in measure(group, bench)]
    header = report.header("bench.loaders", bench, ("torch", "torchvision", "timm", "numpy"))
    result = header | {"rows": rows, "load_average": os.getloadavg()}
    text = f"{table(rows)}\n\n{NOTE.format(repeats=bench.repeats)} {report.source(result)}.\n"
    report.conclude(out, "loaders", result, text)


def measure(ways: list[Way], bench: Bench) -> list[dict[str, Any]]:
    """A row for each way: units a second of CPU time, and the loop's own CPU time for each batch, in each repeat."""
    rows = [{"what": w.what, "how": w.how, "unit": w.unit, "a_second": [], "loop_seconds": []} for w in ways]
    for _ in range(bench.repeats):
        for way, row in zip(ways, rows, strict=True):  # in turns: the machine's other work meets all alike
            loop, loading = cpu_seconds(way.loads())
            row["a_second"].append(way.batches * way.items / (loop + loading))
            row["loop_seconds"].append(loop / way.batches)
    return rows


def cpu_seconds(batches: Iterable[Any]) -> tuple[float, float]:
    """What taking all batches costs: this process, and the loading processes, which end with it."""

    def spent() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    own, others = time.process_time(), spent()
    for _ in batches:
        pass
    return time.process_time() - own, spent() - others


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
        return Way("images, ResNet-50", how, "images", BATCH, 4, lambda: load_batches(data, keys(4), 1))

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
        loads = lambda: train_batches(corpus.train, objective, recipe, 0, 1, 0, 300)  # noqa: E731
        return Way(what, how, "tokens", BATCH * objective.context, 300, loads)

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
        return Way("clouds, 2,048 of 15,000 points", how, "clouds", BATCH, 10, lambda: load_batches(data, keys(10), 1))

    return [way("a file each (before)", files), way("packed, mapped", pack.Packed(folder, "shapenet", "train"))]


def keys(batches: int) -> Iterator[list[tuple[int, int, int]]]:
    """(seed, epoch, number of a file) of each item of each batch."""
    return ([(0, i, i % FILES) for i in range(at, at + BATCH)] for at in range(0, batches * BATCH, BATCH))


def mixing() -> list[Way]:
    """What Mixup took of the loop's own process, before it went to the device."""
    from vision.imagenet import Mixup

    mixup, batch = Mixup(0.8, 1.0, num_classes=1000), (torch.rand(BATCH, 3, 224, 224), torch.arange(BATCH))
    loads = lambda: (mixup(*batch) for _ in range(8))  # noqa: E731
    return [Way("Mixup, CutMix of float32 images", "in the loop (before)", "images", BATCH, 8, loads)]


# -- the report -------------------------------------------------------------------------------------------------

NOTE = (
    f"Medians (least to greatest) over {{repeats}} repeats, batches of {BATCH}, CPU time. Copies to a GPU, which uint8 "
    "makes four times smaller, and normalising, erasing and mixing there: not run."
)
TITLES = ("what", "how", "a second of a core", "the loop's own ms a batch")


def table(rows: list[dict[str, Any]]) -> str:
    """One row a way."""

    def cells(row: dict[str, Any]) -> list[str]:
        rate = f"{Spread.of(row['a_second']).show(',.0f')} {row['unit']}"
        return [row["what"], row["how"], rate, Spread.of([1000 * s for s in row["loop_seconds"]]).show(",.1f")]

    return report.table(TITLES, map(cells, rows))


if __name__ == "__main__":
    launch(main)
