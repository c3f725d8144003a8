"""Batches of segmentation data: which samples, how augmented, is the same whatever loads them."""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.dataset import pseudo_collate
from mmengine.structures import PixelData
from mmseg.datasets import BaseSegDataset
from torch.utils.data import Dataset

from segmentation.recipes import SegmentationRecipe
from training.sampling import eval_share, load_batches, worker_batches

cv2.setNumThreads(0)  # loader processes are the parallelism: each would start a thread for every core

# `inputs`, uint8 [3, h, w] BGR, and `data_samples`, mmseg's SegDataSample: a list each, with one entry for every image;
# on the way to the device `labels`, uint8 [1, h, w], too
Batch = dict[str, list[Any]]
CPU = torch.device("cpu")


def pack(items: list[dict[str, Any]]) -> Batch:
    """A batch as it crosses to the device: labels as bytes, an eighth of mmseg's, and where torch can pin them."""
    batch = pseudo_collate(items)
    batch["labels"] = [sample.gt_sem_seg.data.to(torch.uint8) for sample in batch["data_samples"]]
    for sample in batch["data_samples"]:
        del sample.gt_sem_seg
    return batch


def unpack(batch: Batch, device: torch.device) -> Batch:
    """On the device, labels in mmseg's place, int64; nobody waits for the copies."""
    for sample, label in zip(batch["data_samples"], batch.pop("labels"), strict=True):
        sample.gt_sem_seg = PixelData(data=label.to(device, non_blocking=True).long())
    return batch | {"inputs": [image.to(device, non_blocking=True) for image in batch["inputs"]]}


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
    dataset: BaseSegDataset,
    recipe: SegmentationRecipe,
    rank: int,
    world_size: int,
    start: int,
    total: int,
    device: torch.device = CPU,
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
    augmented = SeededAugmentation(dataset, recipe.seed)
    for batch in load_batches(augmented, places, recipe.loader_workers, collate=pack):
        yield unpack(batch, device)


def eval_batches(
    dataset: BaseSegDataset,
    recipe: SegmentationRecipe,
    rank: int,
    world_size: int,
    batch_size: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """This worker's share of the data set, every image once, in batches of at most batch_size."""
    share = list(eval_share(len(dataset), rank=rank, world_size=world_size))
    batches = (share[i : i + batch_size] for i in range(0, len(share), batch_size))
    for batch in load_batches(dataset, batches, recipe.loader_workers, collate=pack):
        yield unpack(batch, device)
