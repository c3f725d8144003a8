"""Distances between point clouds, each usable as a loss and as a metric.

Conventions differ between papers; ours, with p, q in the coordinates' own unit:

- Chamfer: mean_i min_j |x_i - y_j|^2 + mean_j min_i |y_j - x_i|^2, squared distances, the two directions added
  (`ChamferDistanceL2` of Point-MAE, arXiv 2203.06604). Some papers halve it, take roots, or sum over the points.
- EMD: mean_i |x_i - y_phi(i)| over the bijection phi that minimises it, plain (not squared) distances.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

# Elements of one tile of the distance matrix: on a CPU what stays in cache, on an accelerator 256 MiB of float32.
_CPU_TILE = 1 << 20
_ACCELERATOR_TILE = 1 << 26


@torch.no_grad()
def nearest(x: Tensor, y: Tensor, tile: int | None = None) -> Tensor:
    """Index of the point of y [B, m, 3] that is nearest to each point of x [B, n, 3], float32 or float64: int64 [B, n].
    Builds `tile` elements of the n x m distance matrix at a time: |x - y|^2 = |x|^2 - 2 x.y + |y|^2, without |x|^2."""
    if tile is None:
        tile = _CPU_TILE if x.device.type == "cpu" else _ACCELERATOR_TILE
    # The expansion cancels badly far from the origin; distances do not change when both clouds are moved there.
    centre = y.mean(dim=1, keepdim=True)
    x, y = x - centre, y - centre
    norms, transposed = y.square().sum(dim=2)[:, None], y.mT
    rows = max(1, tile // (y.shape[0] * y.shape[1]))
    with torch.autocast(x.device.type, enabled=False):
        tiles = [torch.baddbmm(norms, part, transposed, alpha=-2).argmin(dim=2) for part in x.split(rows, dim=1)]
    return torch.cat(tiles, dim=1)


def chamfer_distance(x: Tensor, y: Tensor, tile: int | None = None) -> Tensor:
    """Squared Chamfer distance of each pair of clouds, [B, n, 3] and [B, m, 3] (convention: see the module): [B].
    Distances and gradients come from coordinate differences in float32 or float64; only the search for neighbors uses
    the expanded form."""
    x, y = _at_least_float32(x), _at_least_float32(y)
    return _one_way(x, y, tile) + _one_way(y, x, tile)


def earth_mover_distance(x: Tensor, y: Tensor) -> Tensor:
    """Exact earth mover's distance of each pair of clouds, [B, n, 3] both (convention: see the module): [B]. scipy's
    `linear_sum_assignment` matches small clouds on the CPU in O(n^3). Clouds with NaN or inf give NaN or inf."""
    if x.shape != y.shape:
        raise ValueError(f"EMD needs clouds of equal size, got {list(x.shape)} and {list(y.shape)}")
    x, y = _at_least_float32(x), _at_least_float32(y)
    matched = torch.take_along_dim(y, _matching(x, y)[..., None], dim=1)
    return torch.linalg.vector_norm(x - matched, dim=2).mean(dim=1)


def _one_way(x: Tensor, y: Tensor, tile: int | None) -> Tensor:
    neighbour = torch.take_along_dim(y, nearest(x, y, tile)[..., None], dim=1)
    return (x - neighbour).square().sum(dim=2).mean(dim=1)


@torch.no_grad()
def _matching(x: Tensor, y: Tensor) -> Tensor:
    costs = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").cpu()
    columns = [
        # rows come back sorted, so the columns alone are the matching
        torch.from_numpy(linear_sum_assignment(cost.numpy())[1]) if cost.isfinite().all() else torch.arange(len(cost))
        for cost in costs
    ]
    return torch.stack(columns).to(x.device)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
