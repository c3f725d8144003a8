"""Farthest-point sampling and nearest-neighbour groups, batched, in plain torch."""

import torch
from torch import Tensor


@torch.no_grad()
def farthest_points(x: Tensor, count: int) -> Tensor:
    """Indices of points that cover each cloud of x [B, n, 3] evenly, each next one farthest from all chosen before:
    [B, count], int64, distinct unless points coincide.

    Starts from point 0, as PointNet++'s kernel does; the loaders shuffle the points, so that one is random.
    """
    chosen = torch.zeros(x.shape[0], count, dtype=torch.long, device=x.device)
    to_chosen = torch.full(x.shape[:2], torch.inf, dtype=x.dtype, device=x.device)
    for i in range(1, count):
        latest = torch.take_along_dim(x, chosen[:, i - 1, None, None], dim=1)
        to_chosen = torch.minimum(to_chosen, (x - latest).square().sum(dim=2))
        chosen[:, i] = to_chosen.argmax(dim=1)
    return chosen


@torch.no_grad()
def nearest_neighbours(x: Tensor, centres: Tensor, count: int) -> Tensor:
    """Indices of the `count` points of x [B, n, 3] nearest to each of centres [B, g, 3]: [B, g, count], int64."""
    distances = torch.cdist(centres, x, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.topk(count, dim=2, largest=False).indices


def patches(x: Tensor, groups: int, size: int) -> tuple[Tensor, Tensor]:
    """Overlapping patches of each cloud of x [B, n, 3] around evenly spread centres, as in Point-MAE (arXiv
    2203.06604): [B, groups, size, 3], each relative to its centre, and the centres, [B, groups, 3]."""
    centres = torch.take_along_dim(x, farthest_points(x, groups)[..., None], dim=1)
    members = nearest_neighbours(x, centres, size).flatten(1)
    grouped = torch.take_along_dim(x, members[..., None], dim=1).unflatten(1, (groups, size))
    return grouped - centres[:, :, None], centres
