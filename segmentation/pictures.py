"""Pictures of images beside their masks, for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from segmentation.data import IGNORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = ("image", "true classes", "predicted classes")


def side_by_side(
    image: Tensor, label: Tensor, prediction: Tensor, classes: Sequence[str], palette: Sequence[Sequence[int]]
) -> Figure:
    """Image, labels and prediction side by side, over a legend of their classes; ignored pixels are black.

    image: uint8 [3, *, *] BGR. label, prediction: integer class maps [h, w]. palette: an RGB color a class.
    """
    from matplotlib.figure import Figure  # here, for it is slow to import
    from matplotlib.patches import Patch

    colours = torch.zeros(IGNORE + 1, 3, dtype=torch.uint8)
    colours[: len(palette)] = torch.tensor(palette, dtype=torch.uint8)
    masks = [m.long().cpu() for m in (label, torch.where(label == IGNORE, IGNORE, prediction))]
    resized = F.interpolate(image[None].float().cpu(), label.shape, mode="bilinear")[0].round().byte()
    seen = [c for c in torch.cat([m.flatten() for m in masks]).unique().tolist() if c != IGNORE]
    legend = 0.3 * (1 + len(seen) // 6)  # inches; a layout engine that finds the place takes longer than drawing
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
