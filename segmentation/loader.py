"""Batches of segmentation data: which samples, how augmented, is the same whatever loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from mmengine.dataset import pseudo_collate
from mmseg.datasets import BaseSegDataset
from torch.utils.data import DataLoader, Dataset

from core import UserError
from segmentation.recipes import SegmentationRecipe
from training.sampling import eval_share, worker_batches

Batch = dict[
    str, list[Any]
]  # `inputs` uint8 [3, h, w] BGR and `data_samples` (mmseg's SegDataSample), an entry an image


class SeededAugmentation(Dataset[dict[str, Any]]):
    """Items by (epoch, index), whose random transforms are a pure function of (seed, epoch, index).

    mmcv's transforms draw from numpy's global generator, which is left as it was found.
    """

    def __init__(self, dataset: BaseSegDataset, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Any]:
        epoch, index = place
        state = np.random.get_state()
        np.random.seed([self.seed, epoch, index])
        try:
            return self.dataset[index]
        finally:
            np.random.set_state(state)


def train_batches(
    dataset: BaseSegDataset, recipe: SegmentationRecipe, rank: int, world_size: int, start: int, total: int
) -> Iterator[Batch]:
    """This worker's batches from step `start` to `total`, functions of (seed, step, rank, world_size) alone."""
    batches = worker_batches(
        len(dataset),
        recipe.batch_size,
        seed=recipe.seed,
        rank=rank,
        world_size=world_size,
        start=start,
        total=total,
    )
    places = ([(epoch, i) for i in indices.tolist()] for epoch, _, indices in batches)
    return _load(SeededAugmentation(dataset, recipe.seed), places, recipe.loader_workers)


def eval_batches(
    dataset: BaseSegDataset, recipe: SegmentationRecipe, rank: int, world_size: int, batch_size: int
) -> Iterator[Batch]:
    """This worker's share of the data set, every image once, in batches of at most batch_size."""
    share = list(eval_share(len(dataset), rank=rank, world_size=world_size))
    batches = [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
    return _load(dataset, batches, recipe.loader_workers)


def _load(dataset: Any, batches: Iterable[list[Any]], workers: int) -> Iterator[Batch]:
    """The batches of items that `batches` lists; UserError of a loader process is raised as the line it was there."""
    loader = DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]  # an iterable will do
        num_workers=workers,
        collate_fn=pseudo_collate,
        generator=torch.Generator(),  # else it draws from the generator that the model's dropout uses
    )
    try:
        yield from loader
    except UserError as error:  # torch has put the process's traceback before it
        raise UserError(str(error).strip().rsplit("UserError: ")[-1]) from None
