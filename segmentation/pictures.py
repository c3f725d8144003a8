"""Pictures of images beside their masks, for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from segmentation.data import IGNORE


def side_by_side(image: Tensor, label: Tensor, prediction: Tensor, palette: Sequence[Sequence[int]]) -> Tensor:
    """Image, labels and prediction in one picture, uint8 [3, h, 3 w] RGB.

    image: uint8 [3, *, *] BGR, brought to the labels' size. label, prediction: integer class maps [h, w]. palette: an
    RGB colour a class. Pixels whose label is ignored are black in both masks.
    """
    colours = torch.zeros(IGNORE + 1, 3, dtype=torch.uint8)
    colours[: len(palette)] = torch.tensor(palette, dtype=torch.uint8)
    shown = torch.where(label == IGNORE, IGNORE, prediction)
    masks = [colours[m.long().cpu()].permute(2, 0, 1) for m in (label, shown)]
    resized = F.interpolate(image[None].float().cpu(), label.shape, mode="bilinear")[0].round().byte()
    return torch.cat([resized.flip(0), *masks], dim=2)
