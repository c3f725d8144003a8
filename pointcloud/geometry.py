"""Farthest-point sampling and nearest-neighbour groups, batched, in plain torch."""

import torch
from torch import Tensor


@torch.no_grad()
def farthest_points(x: Tensor, count: int) -> Tensor:
    """Indices of points that cover each cloud evenly: each next one is farthest from all chosen before.

    Starts from point 0, as PointNet++'s kernel does; the loaders shuffle the points, so that one is random.

    Args:
        x: [B, n, 3].
        count: at most n.

    Returns:
        [B, count], int64, distinct unless points coincide.
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
    """Overlapping patches of a cloud around evenly spread centres, as in Point-MAE (arXiv 2203.06604).

    Args:
        x: [B, n, 3], with n at least `groups` and `size`.

    Returns:
        patches [B, groups, size, 3], each relative to its centre, and centres [B, groups, 3].
    """
    centres = torch.take_along_dim(x, farthest_points(x, groups)[..., None], dim=1)
    members = nearest_neighbours(x, centres, size).flatten(1)
    grouped = torch.take_along_dim(x, members[..., None], dim=1).unflatten(1, (groups, size))
    return grouped - centres[:, :, None], centres
