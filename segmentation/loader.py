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
from training.data import Key, eval_keys, train_keys
from training.sampling import load_batches

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
    """Items by their keys, from which the random transforms' numbers follow.

    mmcv's transforms draw from numpy's global generator, which is left as it was found.
    """

    def __init__(self, dataset: BaseSegDataset):
        self.dataset = dataset

    def __getitem__(self, key: Key) -> dict[str, Any]:
        state = np.random.get_state()
        np.random.seed(key)
        try:
            return self.dataset[key[-1]]
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
    keys = (keys for _, keys in train_keys(recipe, len(dataset), rank, world_size, start, total))
    yield from _loaded(dataset, keys, recipe, device)


def eval_batches(
    dataset: BaseSegDataset,
    recipe: SegmentationRecipe,
    rank: int,
    world_size: int,
    batch_size: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """This worker's share of the data set, every image once, in batches of at most batch_size."""
    yield from _loaded(dataset, eval_keys(len(dataset), batch_size, rank, world_size), recipe, device)


def _loaded(
    dataset: BaseSegDataset, keys: Iterator[list[Key]], recipe: SegmentationRecipe, device: torch.device
) -> Iterator[Batch]:
    for batch in load_batches(SeededAugmentation(dataset), keys, recipe.loader_workers, collate=pack):
        yield unpack(batch, device)
