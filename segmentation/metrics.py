"""mIoU, mAcc and aAcc by the functions of mmseg's IoUMetric, their areas summed over all workers."""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split
import math
from collections.abc import Callable, Sequence

import torch
from mmseg.evaluation import IoUMetric
from torch import Tensor

from segmentation.data import IGNORE


class SegmentationMetric:
    """Collects one worker's predictions; compute() sums four areas a class over all workers by one all-reduce.

    mmseg's own evaluate() gathers a record for each image through files.
    """

    def __init__(self, classes: Sequence[str], device: torch.device | str = "cpu"):
        self.classes = tuple(classes)
        # the pixels of each class in the intersection, the union, the prediction and the label; float64 counts exactly
        self.areas = torch.zeros(4, len(self.classes), dtype=torch.float64, device=device)

    def update(self, prediction: Tensor, label: Tensor) -> None:
        """prediction, label: integer class maps [h, w]; label 255 is ignored."""
        areas = IoUMetric.intersect_and_union(prediction, label, len(self.classes), IGNORE)
        self.areas += torch.stack(areas).to(self.areas)

    def compute(self, over_workers: Callable[[Tensor], Tensor] = lambda areas: areas) -> dict[str, float]:
        """mIoU, mAcc, aAcc and IoU/CLASS in percent. over_workers: sums a tensor over the workers; all must call it.

        The means leave out classes that occur in neither predictions (IoU) nor labels; those have no IoU/CLASS entry.
        """
        areas = over_workers(self.areas.clone())
        values = IoUMetric.total_area_to_metrics(*areas.cpu(), ["mIoU"])
        iou, acc = (torch.as_tensor(values[key]) for key in ("IoU", "Acc"))
        result = {
            "mIoU": 100 * iou.nanmean().item(),
            "mAcc": 100 * acc.nanmean().item(),
            "aAcc": 100 * float(values["aAcc"]),
        }
        per_class = zip(self.classes, iou.tolist(), strict=True)
        return result | {f"IoU/{name}": 100 * value for name, value in per_class if not math.isnan(value)}
