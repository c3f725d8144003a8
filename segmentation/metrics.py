"""mIoU, mAcc and aAcc by the functions of mmseg's IoUMetric, with areas summed over all workers, and pictures."""

from __future__ import annotations

import segmentation.registries  # noqa: F401

# isort: split

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from mmseg.evaluation import IoUMetric
from torch import Tensor

from segmentation.data import IGNORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def areas_of(prediction: Tensor, label: Tensor, classes: int) -> Tensor:
    """Returns the pixels of each class in intersection, union, prediction and label, float64 [4, classes].

    Prediction and label are integer class maps [h, w]. Label 255 is ignored. Sums of areas are exact. mmseg's own
    evaluate() gathers a record for each image through files instead.
    """
    return torch.stack(IoUMetric.intersect_and_union(prediction, label, classes, IGNORE)).double()


def metrics_of(areas: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """Returns mIoU, mAcc, aAcc and IoU/CLASS in percent, from areas [4, classes] of all images.

    The averages leave out classes that appear in neither predictions nor labels. Such a class has no IoU/CLASS entry.
    """
    values = IoUMetric.total_area_to_metrics(*areas.cpu(), ["mIoU"])
    iou, acc = (torch.as_tensor(values[key]) for key in ("IoU", "Acc"))
    result = {
        "mIoU": 100 * iou.nanmean().item(),
        "mAcc": 100 * acc.nanmean().item(),
        "aAcc": 100 * float(values["aAcc"]),
    }
    per_class = zip(classes, iou.tolist(), strict=True)
    return result | {f"IoU/{name}": 100 * value for name, value in per_class if not math.isnan(value)}


PANELS = ("image", "true classes", "predicted classes")


def side_by_side(
    image: Tensor, label: Tensor, prediction: Tensor, classes: Sequence[str], palette: Sequence[Sequence[int]]
) -> Figure:
    """Draws image, labels and prediction side by side, over a legend of their classes. Ignored pixels are black.

    The image is uint8 [3, H, W] BGR, of any size. Label and prediction are integer class maps [h, w]. The palette has
    an RGB color for each class.
    """
    from matplotlib.figure import Figure  # imported here, because it is slow
    from matplotlib.patches import Patch

    colours = torch.zeros(IGNORE + 1, 3, dtype=torch.uint8)
    colours[: len(palette)] = torch.tensor(palette, dtype=torch.uint8)
    masks = [m.long().cpu() for m in (label, torch.where(label == IGNORE, IGNORE, prediction))]
    resized = F.interpolate(image[None].float().cpu(), label.shape, mode="bilinear")[0].round().byte()
    seen = [c for c in torch.cat([m.flatten() for m in masks]).unique().tolist() if c != IGNORE]
    legend = 0.3 * (1 + len(seen) // 6)  # inches; a layout engine that finds the place would be slower than drawing
    high = 9 / 3 * label.shape[0] / label.shape[1] + 0.3 + legend
    figure = Figure(figsize=(9, high), dpi=100)
    figure.subplots_adjust(0.01, legend / high, 0.99, 1 - 0.3 / high, 0.02)
    pictures = [resized.flip(0).permute(1, 2, 0), *(colours[m] for m in masks)]
    for i, (name, picture) in enumerate(zip(PANELS, pictures, strict=True)):
        axes = figure.add_subplot(1, len(PANELS), i + 1)
        axes.imshow(picture.numpy(), interpolation="nearest")
        axes.set_title(name, fontsize=9)
        axes.axis("off")
    patches = [Patch(color=(colours[c] / 255).tolist(), label=classes[c]) for c in seen]
    figure.legend(handles=patches, loc="lower center", ncols=6, fontsize=8)
    return figure
