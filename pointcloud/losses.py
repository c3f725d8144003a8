"""Distances between point clouds, each usable as a loss and as a metric.

Papers differ in their conventions. Ours, with p and q in the coordinates' own unit, are these:

- Chamfer is mean_i min_j |x_i - y_j|^2 + mean_j min_i |y_j - x_i|^2, the sum of both directions' squared distances
  (`ChamferDistanceL2` of Point-MAE, arXiv 2203.06604). Some papers halve it, take roots, or sum over the points.
- EMD is mean_i |x_i - y_phi(i)| with the bijection phi that minimizes it, with plain (not squared) distances.
"""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

# Elements of one tile of the distance matrix. On a CPU a tile stays in the cache; on an accelerator it has 256 MiB.
_CPU_TILE = 1 << 20
_ACCELERATOR_TILE = 1 << 26


@torch.no_grad()
def nearest(x: Tensor, y: Tensor) -> Tensor:
    """Returns the index of the point of y nearest to each point of x, int64 [B, n].

    It builds a tile of the n x m distance matrix at a time, as |x - y|^2 = |x|^2 - 2 x.y + |y|^2 without |x|^2.

    Args:
        x: float32 or float64 [B, n, 3].
        y: [B, m, 3], of the same dtype.
    """
    tile = _CPU_TILE if x.device.type == "cpu" else _ACCELERATOR_TILE
    # Far from the origin the expansion loses precision. Moving both clouds to the origin does not change distances.
    centre = y.mean(dim=1, keepdim=True)
    x, y = x - centre, y - centre
    norms, transposed = y.square().sum(dim=2)[:, None], y.mT
    rows = max(1, tile // (y.shape[0] * y.shape[1]))
    with torch.autocast(x.device.type, enabled=False):
        tiles = [torch.baddbmm(norms, part, transposed, alpha=-2).argmin(dim=2) for part in x.split(rows, dim=1)]
    return torch.cat(tiles, dim=1)


def chamfer_distance(x: Tensor, y: Tensor) -> Tensor:
    """Returns the squared Chamfer distance of each pair of clouds, [B] (convention: see the module).

    Distances and gradients come from coordinate differences in float32 or float64. Only the search for neighbors uses
    the expanded form.

    Args:
        x: [B, n, 3].
        y: [B, m, 3].
    """
    x, y = _at_least_float32(x), _at_least_float32(y)
    return _one_way(x, y) + _one_way(y, x)


def earth_mover_distance(x: Tensor, y: Tensor) -> Tensor:
    """Returns the exact earth mover's distance of each pair of clouds, [B] (convention: see the module).

    scipy's `linear_sum_assignment` matches small clouds on the CPU in O(n^3). Clouds with NaN or inf give NaN or inf.

    Args:
        x: [B, n, 3].
        y: [B, n, 3].

    Raises:
        ValueError: If the clouds differ in size.
    """
    if x.shape != y.shape:
        raise ValueError(f"EMD needs clouds of equal size, got {list(x.shape)} and {list(y.shape)}")
    x, y = _at_least_float32(x), _at_least_float32(y)
    matched = torch.take_along_dim(y, _matching(x, y)[..., None], dim=1)
    return torch.linalg.vector_norm(x - matched, dim=2).mean(dim=1)


def _one_way(x: Tensor, y: Tensor) -> Tensor:
    neighbour = torch.take_along_dim(y, nearest(x, y)[..., None], dim=1)
    return (x - neighbour).square().sum(dim=2).mean(dim=1)


@torch.no_grad()
def _matching(x: Tensor, y: Tensor) -> Tensor:
    costs = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").cpu()
    columns = [
        # rows come back sorted, so only the columns are needed
        torch.from_numpy(linear_sum_assignment(cost.numpy())[1]) if cost.isfinite().all() else torch.arange(len(cost))
        for cost in costs
    ]
    return torch.stack(columns).to(x.device)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
