"""Trivial baselines of the stand-ins in results/tables, from their data: python -m results.baselines [TASK ...]

Each baseline ignores the input, or repeats it. A model has learned something if it is better. The command needs
CO2_DATA, and writes results/tables/baselines.json.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core import UserError
from results.collect import load_recipe
from results.paper import SHORT
from training.data import generator
from training.folder import commit

STORE = Path(__file__).parent / "tables/baselines.json"
RECIPES = {
    "language": ("gpt2_pydoc_small", "roberta_pydoc_small"),
    "pointcloud": ("surfaces_small", "modelnet10_mae_small"),
    "vision": ("digits_small",),
    "segmentation": ("camvid_small",),
}
"""One recipe for each data set and metric. Recipes that differ only in their model share its baselines."""

MARGIN = 0.1  # of the baseline; chosen before most of the runs


def main(tasks: Sequence[str]) -> None:
    """Computes the baselines of the tasks, or of all, and stores each row as soon as it is known."""
    ran = commit()
    for task in tasks or RECIPES:
        if task not in RECIPES:
            raise UserError(f"{task}: not a task; give some of {', '.join(RECIPES)}, or none for all")
        for name in RECIPES[task]:
            for metric, what, value in BASELINES[task](name):
                row = {"task": task, "recipe": name, "metric": metric, "baseline": what, "value": value}
                row |= {"command": f"python -m results.baselines {task}", "commit": ran}
                print(row, flush=True)
                others = [r for r in load() if (r["recipe"], r["metric"], r["baseline"]) != (name, metric, what)]
                STORE.write_text("[\n" + ",\n".join(json.dumps(r) for r in [*others, row]) + "\n]\n")


def load() -> list[dict[str, Any]]:
    """The stored rows."""
    return json.loads(STORE.read_text()) if STORE.exists() else []


def of(recipe: str, metric: str) -> dict[str, float]:
    """The stored baselines of a stand-in, by name, the simplest first.

    Args:
        recipe: The recipe's name. The part before its last word names its data and objective.
        metric: The key in summary.json.
    """
    same = [row for row in load() if row["metric"] == metric and same_data(row["recipe"], recipe)]
    return {row["baseline"]: row["value"] for row in same}


def same_data(one: str, other: str) -> bool:
    """Whether two small recipes share data and objective: the first words of their names."""
    masked = "mae" in one.split("_")
    return masked == ("mae" in other.split("_")) and key_of(one) == key_of(other)


def key_of(recipe: str) -> str:
    """The data of a small recipe's name, with the kind of objective of a text model."""
    family, _, rest = recipe.partition("_")
    if family in ("gpt2", "transnormer", "roberta"):
        return ("masked " if family == "roberta" else "") + rest.partition("_")[0]
    return family


def beats(values: Sequence[float], metric: str, baseline: float) -> bool:
    """Whether the values are better than the baseline by MARGIN or more on average."""
    mean = sum(values) / len(values)
    if metric in ("test_top1", "val_mIoU"):
        return mean >= (1 + MARGIN) * baseline
    return mean <= (1 - MARGIN) * baseline


# -- one function for each task ---------------------------------------------------------------------------------------

Found = Iterator[tuple[str, str, float]]  # metric, baseline, value


def vision(name: str) -> Found:
    from vision import data

    train, test = data.load(load_recipe("vision", name).dataset)
    yield "test_top1", "majority", majority_class(train.labels, test.labels)


def majority_class(train: Tensor, test: Tensor) -> float:
    """Share of the test labels that equal the most frequent training label, for int64 [n] each."""
    return (test == train.bincount().argmax()).double().mean().item()


def segmentation(name: str) -> Found:
    from segmentation.data import NUM_CLASSES, build_dataset

    dataset = load_recipe("segmentation", name).dataset
    train, val = (build_dataset(dataset, split).masks for split in ("train", "val"))
    yield "val_mIoU", "position", position_prior(train, val, NUM_CLASSES[dataset])


def position_prior(train: np.ndarray, val: np.ndarray, classes: int) -> float:
    """mIoU in percent if each pixel gets the most frequent class of its position in the training masks.

    Args:
        train: uint8 [n, h, w], with 255 for ignored pixels.
        val: As train.
        classes: Number of classes.
    """
    from segmentation.metrics import SegmentationMetric

    prior = torch.from_numpy(np.stack([(train == c).sum(axis=0) for c in range(classes)]).argmax(axis=0))
    metric = SegmentationMetric([str(c) for c in range(classes)])
    for mask in val:
        metric.update(prior, torch.from_numpy(mask.astype(np.int64)))
    return metric.compute()["mIoU"]


def pointcloud(name: str) -> Found:
    from pointcloud import data
    from pointcloud.model import patches

    recipe = load_recipe("pointcloud", name)
    points = SHORT["pointcloud"]["points"]
    train, test = (data.PointClouds(data.load_source(recipe.dataset, split), points) for split in data.SPLITS)
    known = torch.stack([train[(0, 0, i)] for i in range(0, len(train), 8)])  # every eighth is enough
    clouds = torch.stack([test[(0, 0, i)] for i in range(len(test))])
    if recipe.model != "mae":
        yield "test_chamfer", "fixed", fixed_points(known, clouds)
        return
    groups, size, masked = recipe.mae.groups, recipe.mae.group_size, recipe.mae.masked
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(0))  # as in the model's evaluations
    (seen, _), (patch, centers) = (patches(x, groups, size) for x in (known, clouds))
    yield "test_loss", "fixed", fixed_points(seen.flatten(0, 1), patch[:, order[:masked]].flatten(0, 1))
    visible = (patch + centers[:, :, None])[:, order[masked:]].flatten(1, 2)
    yield "test_chamfer", "visible", distance(visible, clouds)


def fixed_points(train: Tensor, test: Tensor) -> float:
    """Chamfer distance of the test clouds from one cloud of as many points, drawn from all training clouds.

    Args:
        train: float32 [n, points, 3].
        test: float32 [m, points, 3].
    """
    pool = train.flatten(0, 1)
    cloud = pool[torch.randperm(len(pool), generator=generator(0))[: test.shape[1]]]
    return distance(cloud.expand(len(test), -1, -1), test)


def distance(x: Tensor, y: Tensor) -> float:
    """Mean Chamfer distance of pairs of clouds, float32 [n, points, 3]."""
    from pointcloud.losses import chamfer_distance

    parts = zip(x.split(256), y.split(256), strict=True)
    return torch.cat([chamfer_distance(a, b) for a, b in parts]).double().mean().item()


def language(name: str) -> Found:
    from language.data import IGNORE, CausalObjective, MaskedObjective, held_out_batches, open_corpus

    recipe = load_recipe("language", name)
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    train = np.asarray(corpus.train, dtype=np.int64)
    masked, context = name.startswith("roberta"), SHORT["language"]["context"]
    objective = CausalObjective(context)
    if masked:
        objective = MaskedObjective(context, corpus.vocab_size, corpus.eot, corpus.mask, corpus.bos)
    batches = held_out_batches(corpus.val, objective, 64, rank=0, world_size=1)
    targets = torch.cat([targets[targets != IGNORE] for _, targets in batches]).numpy()
    yield "val_perplexity", "unigram", unigram_perplexity(train, targets, corpus.vocab_size)
    if not masked:  # a masked model may not see the token before
        text = np.asarray(corpus.val, dtype=np.int64)
        yield "val_perplexity", "bigram", bigram_perplexity(train, text, corpus.vocab_size)


def unigram_perplexity(train: np.ndarray, targets: np.ndarray, vocab_size: int) -> float:
    """Perplexity of targets under the frequencies of the training tokens, each counted once more than it occurs."""
    counts = np.bincount(train, minlength=vocab_size) + 1
    return math.exp(-np.log(counts / counts.sum())[targets].mean())


def bigram_perplexity(train: np.ndarray, text: np.ndarray, vocab_size: int) -> float:
    """Perplexity of all tokens of a text but its first, under the training bigrams with Witten-Bell smoothing.

    A token a with t different successors gets P(b|a) = (count(ab) + t P(b)) / (count(a) + t), with P(b) as in the
    unigram.
    """
    counts = np.bincount(train, minlength=vocab_size) + 1
    unigram = counts / counts.sum()
    pairs = Counter(zip(train[:-1].tolist(), train[1:].tolist(), strict=True))
    before = np.bincount(train[:-1], minlength=vocab_size)
    successors = np.bincount([a for a, _ in pairs], minlength=vocab_size)
    logs = []
    for a, b in zip(text[:-1].tolist(), text[1:].tolist(), strict=True):
        t = max(int(successors[a]), 1)
        logs.append(math.log((pairs[a, b] + t * unigram[b]) / (before[a] + t)))
    return math.exp(-sum(logs) / len(logs))


BASELINES = {"vision": vision, "segmentation": segmentation, "pointcloud": pointcloud, "language": language}

if __name__ == "__main__":
    main(sys.argv[1:])
