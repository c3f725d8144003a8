"""What is done to whole batches of images, on whatever device they are."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from training.workers import to_device

CPU = torch.device("cpu")


def on_device(
    images: Tensor,
    labels: Tensor,
    device: torch.device,
    channels_last: bool,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """uint8 images to the device, and normalised there; the labels with them."""
    images = normalise(to_device(images, device, channels_last), mean, std)
    return images, labels.to(device, non_blocking=True)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [b, c, h, w] -> float32, less the mean and by the deviation of each channel, both of 0..1."""
    mean_of, std_of = _statistics(mean, std, images.device)
    return (images.float() / 255).sub_(mean_of).div_(std_of)


@functools.cache  # a copy to the device for each batch would wait for all that is queued there
def _statistics(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor(mean, device=device).view(-1, 1, 1), torch.tensor(std, device=device).view(-1, 1, 1)


def crop_and_flip(images: Tensor, rng: torch.Generator) -> Tensor:
    """A random crop of each image padded by an eighth of its size, mirrored at its edges, and a flip of every second
    one on average; any dtype."""
    n, _, h, w = images.shape
    pad = h // 8
    dy, dx = torch.randint(0, 2 * pad + 1, (2, n, 1), generator=rng)
    rows, columns = mirrored(dy - pad + torch.arange(h), h), mirrored(dx - pad + torch.arange(w), w)
    flip = torch.rand(n, 1, generator=rng) < 0.5
    columns = torch.where(flip, columns.flip(1), columns)
    picked = torch.arange(n)[:, None, None]
    return images.permute(0, 2, 3, 1)[picked, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def mirrored(places: Tensor, size: int) -> Tensor:
    """Places beyond [0, size) mirrored at the first and the last, which are not repeated."""
    return (size - 1) - ((size - 1) - places.abs()).abs()
