"""Chamfer and earth mover's distance: hand-computed cases, scipy as the reference, gradients and memory."""

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from torch.utils._python_dispatch import TorchDispatchMode

from pointcloud.losses import chamfer_distance, earth_mover_distance


def clouds(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kdtree_chamfer(x: np.ndarray, y: np.ndarray) -> float:
    return float((cKDTree(y).query(x)[0] ** 2).mean() + (cKDTree(x).query(y)[0] ** 2).mean())


def test_chamfer_by_hand_and_exactly_zero_of_a_cloud_with_itself():
    x = torch.tensor([[[0.0, 0, 0], [1, 0, 0]]])
    y = torch.tensor([[[0.0, 0, 0], [0, 2, 0], [4, 0, 0]]])
    # x -> y: 0 and 1, mean 1/2; y -> x: 0, 4 and 9, mean 13/3
    torch.testing.assert_close(chamfer_distance(x, y), torch.tensor([0.5 + 13 / 3]))
    x = clouds(4, 2, 1000) + 5
    shuffled = x[:, torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    assert chamfer_distance(x, shuffled).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["unit cube", "far from the origin"])
@pytest.mark.parametrize("tile", [None, 1, 5000], ids=["default", "one row", "uneven"])
def test_chamfer_equals_kdtree(offset: float, tile: int | None):
    x, y = clouds(0, 3, 500) + offset, clouds(1, 3, 701) + offset
    expected = [kdtree_chamfer(a, b) for a, b in zip(x.double().numpy(), y.double().numpy(), strict=True)]
    np.testing.assert_allclose(chamfer_distance(x, y, tile).numpy(), expected, rtol=2e-5)


def test_gradients_agree_with_finite_differences_and_that_of_emd_vanishes_at_coincidence():
    x, y = clouds(5, 2, 6, dtype=torch.float64), clouds(6, 2, 9, dtype=torch.float64)
    assert torch.autograd.gradcheck(chamfer_distance, (x.requires_grad_(), y.requires_grad_()))
    x, y = clouds(13, 2, 5, dtype=torch.float64), clouds(14, 2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(earth_mover_distance, (x.requires_grad_(), y.requires_grad_()))
    same = clouds(15, 1, 8).requires_grad_()
    earth_mover_distance(same, same.detach().flip(1)).sum().backward()
    assert torch.equal(same.grad, torch.zeros_like(same))


def test_chamfer_is_float32_under_autocast():
    x, y = clouds(7, 2, 128), clouds(8, 2, 128)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chamfer_distance(x, y)
    assert torch.equal(inside, chamfer_distance(x, y)) and chamfer_distance(x.bfloat16(), y).dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_chamfer_builds_no_n_by_m_tensor():
    x, y = clouds(9, 2, 2048).requires_grad_(), clouds(10, 2, 1500)
    with LargestTensor() as record:
        chamfer_distance(x, y, tile=100_000).sum().backward()
    assert 50_000 < record.elements <= 100_000  # n x m alone would be three million a cloud


def test_emd_is_the_best_of_all_bijections_refuses_unequal_sizes_and_reports_divergence_as_nan():
    x, y = clouds(11, 1, 6, dtype=torch.float64), clouds(12, 1, 6, dtype=torch.float64)
    costs = [(x[0] - y[0, list(order)]).norm(dim=1).mean().item() for order in itertools.permutations(range(6))]
    assert earth_mover_distance(x, y).item() == pytest.approx(min(costs), rel=1e-12)
    with pytest.raises(ValueError, match=r"equal size.*\[1, 4, 3\].*\[1, 5, 3\]"):
        earth_mover_distance(clouds(0, 1, 4), clouds(0, 1, 5))
    broken = clouds(0, 2, 4)
    broken[1, 2] = torch.nan
    distances = earth_mover_distance(broken, clouds(1, 2, 4))
    assert distances.isnan().tolist() == [False, True]
