"""Point-cloud models, pictures, Chamfer and earth mover's distance."""

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from torch import nn

from core import UserError
from pointcloud.losses import _CPU_TILE, chamfer_distance, earth_mover_distance
from pointcloud.model import (
    Autoencoder,
    AutoencoderConfig,
    MaskedAutoencoder,
    MaskedAutoencoderConfig,
    farthest_points,
    nearest_neighbours,
    patches,
)
from pointcloud.train import draw_clouds

EXACT = "donot_use_mm_for_euclid_dist"
SMALL_MAE = MaskedAutoencoderConfig(groups=8, group_size=16, dim=32, depth=2, heads=2, decoder_depth=1)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def clouds(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, n, 3, generator=torch.Generator().manual_seed(seed))


def test_neighbours_are_those_of_a_kdtree_and_farthest_points_by_hand():
    x, centres = clouds(2, 200), clouds(2, 9, seed=1)
    found = nearest_neighbours(x, centres, 5)
    for b in range(2):
        expected = cKDTree(x[b].numpy()).query(centres[b].numpy(), 5)[1]
        np.testing.assert_array_equal(found[b].numpy(), expected)
    x = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [10, 0, 0], [4, 0, 0], [9, 0, 0]]])
    assert farthest_points(x, 4).tolist() == [[0, 2, 3, 1]]


def test_patches_hold_points_of_the_cloud_nearest_first():
    x = clouds(2, 100)
    grouped, centres = patches(x, 6, 10)
    assert grouped.shape == (2, 6, 10, 3) and centres.shape == (2, 6, 3)
    assert torch.equal(grouped[:, :, 0], torch.zeros(2, 6, 3))  # a centre is its own nearest point
    distance = torch.cdist(grouped + centres[:, :, None], x[:, None], compute_mode=EXACT).amin(dim=3)
    assert distance.max() < 1e-6 and grouped.norm(dim=3).diff(dim=2).min() >= 0


def test_point_mae_size():
    """Point-MAE's published figure is 22.1 M for its fine-tuned classifier: this encoder and a ModelNet40 head."""
    model = MaskedAutoencoder(1024, MaskedAutoencoderConfig())
    block = 4 * 384 * 384 + 384 + 8 * 384 * 384 + 5 * 384 + 4 * 384  # attention without qkv bias, MLP, two norms
    embedding = 4 * 128 + 2 * 128 + 129 * 256 + 513 * 512 + 2 * 512 + 513 * 384
    position = 4 * 128 + 129 * 384
    encoder = embedding + position + 12 * block + 2 * 384
    assert count(model.embedding) + count(model.encoder_position) + count(model.encoder) == encoder
    assert count(model) == encoder + position + 4 * block + 2 * 384 + 384 + 385 * 96 == 29_006_432
    classifier = 2 * 384 + (2 * 384 * 256 + 256) + 512 + 257 * 256 + 512 + 257 * 40  # token and position, head
    assert round((encoder + classifier) / 1e6, 1) == 22.1


def test_masked_autoencoder_does_not_see_hidden_points():
    """Moving hidden points changes the target, not the prediction, as long as the centres stay."""
    model = MaskedAutoencoder(64, SMALL_MAE).eval()
    patch, centres = patches(clouds(2, 64), 8, 16)
    order = model._mask_order(2, torch.device("cpu"))
    shown, hidden = order[:, 4:], order[:, :4]

    def predict(p: torch.Tensor) -> torch.Tensor:
        pick = lambda t, i: torch.stack([row[j] for row, j in zip(t, i, strict=True)])  # noqa: E731
        return model._predict(pick(p, shown), pick(centres, shown), pick(centres, hidden))

    moved = patch.clone()
    for row, index in zip(moved, hidden, strict=True):
        row[index] += 1
    assert torch.equal(predict(patch), predict(moved)) and not torch.equal(predict(patch), predict(patch + 1))


def test_masks_are_random_in_training_and_fixed_in_evaluation():
    model, x = MaskedAutoencoder(64, SMALL_MAE), clouds(4, 64)
    torch.manual_seed(0)
    assert not torch.equal(model(x).target, model(x).target)
    model.eval()
    alone = torch.cat([model(cloud[None]).prediction for cloud in x])
    torch.testing.assert_close(model(x).prediction, alone)  # neither the batch nor the call matters


@pytest.mark.parametrize("decoder", ["folding", "mlp", "mae"])
def test_models_learn_one_batch(decoder: str):
    torch.manual_seed(0)
    if decoder == "mae":
        model: nn.Module = MaskedAutoencoder(64, SMALL_MAE)
    else:
        model = Autoencoder(64, AutoencoderConfig(decoder=decoder, latent=32, folding_width=64, mlp_widths=(64,)))
    x, optimizer = clouds(4, 64), torch.optim.AdamW(model.parameters(), 5e-3)
    losses = []
    for _ in range(35):
        out = model(x)
        losses.append(chamfer_distance(out.prediction, out.target).mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_bad_configurations_name_the_value():
    with pytest.raises(UserError, match="mae.mask_ratio=1.0: give a share between 0 and 1"):
        MaskedAutoencoderConfig(groups=8, mask_ratio=1.0)
    with pytest.raises(UserError, match="mask_ratio=0.1 hides 0 of 8"):
        MaskedAutoencoderConfig(groups=8, mask_ratio=0.1)
    with pytest.raises(UserError, match="dim=100 with heads=6"):
        MaskedAutoencoderConfig(dim=100)
    with pytest.raises(UserError, match="points=32.*64 groups"):
        MaskedAutoencoder(32, MaskedAutoencoderConfig())


def test_picture_shows_each_cloud_in_its_place():
    """Rows and columns hold ink where a cloud is, and none where it is empty."""
    ball = np.random.default_rng(0).normal(size=(300, 3)) / 4
    image = draw_clouds({"input": [ball, ball], "reconstruction": [ball, np.empty((0, 3))]})
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    top, bottom = np.array_split((image != 255).any(axis=2), 2)
    ink = [half.mean() for row in (top, bottom) for half in np.array_split(row, 2, axis=1)]
    assert min(ink[:3]) > 5 * ink[3] > 0  # the empty plot still has its title


# -- Chamfer and earth mover's distance: by hand, beside scipy, gradients and memory ----------------------------------


def uniform_clouds(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def kdtree_chamfer(x: np.ndarray, y: np.ndarray) -> float:
    return float((cKDTree(y).query(x)[0] ** 2).mean() + (cKDTree(x).query(y)[0] ** 2).mean())


def test_chamfer_by_hand_and_exactly_zero_of_a_cloud_with_itself():
    x = torch.tensor([[[0.0, 0, 0], [1, 0, 0]]])
    y = torch.tensor([[[0.0, 0, 0], [0, 2, 0], [4, 0, 0]]])
    # x -> y: 0 and 1, mean 1/2; y -> x: 0, 4 and 9, mean 13/3
    torch.testing.assert_close(chamfer_distance(x, y), torch.tensor([0.5 + 13 / 3]))
    x = uniform_clouds(4, 2, 1000) + 5
    shuffled = x[:, torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    assert chamfer_distance(x, shuffled).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["unit cube", "far from the origin"])
@pytest.mark.parametrize("tile", [_CPU_TILE, 1, 5000], ids=["default", "one row", "uneven"])
def test_chamfer_equals_kdtree(offset: float, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pointcloud.losses._CPU_TILE", tile)
    x, y = uniform_clouds(0, 3, 500) + offset, uniform_clouds(1, 3, 701) + offset
    expected = [kdtree_chamfer(a, b) for a, b in zip(x.double().numpy(), y.double().numpy(), strict=True)]
    np.testing.assert_allclose(chamfer_distance(x, y).numpy(), expected, rtol=2e-5)


def test_gradients_agree_with_finite_differences_and_that_of_emd_vanishes_at_coincidence():
    x, y = uniform_clouds(5, 2, 6, dtype=torch.float64), uniform_clouds(6, 2, 9, dtype=torch.float64)
    assert torch.autograd.gradcheck(chamfer_distance, (x.requires_grad_(), y.requires_grad_()))
    x, y = uniform_clouds(13, 2, 5, dtype=torch.float64), uniform_clouds(14, 2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(earth_mover_distance, (x.requires_grad_(), y.requires_grad_()))
    same = uniform_clouds(15, 1, 8).requires_grad_()
    earth_mover_distance(same, same.detach().flip(1)).sum().backward()
    assert torch.equal(same.grad, torch.zeros_like(same))


def test_chamfer_is_float32_under_autocast():
    x, y = uniform_clouds(7, 2, 128), uniform_clouds(8, 2, 128)
    with torch.autocast("cpu", torch.bfloat16):
        inside = chamfer_distance(x, y)
    assert torch.equal(inside, chamfer_distance(x, y)) and chamfer_distance(x.bfloat16(), y).dtype == torch.float32


def test_emd_is_the_best_of_all_bijections_refuses_unequal_sizes_and_reports_divergence_as_nan():
    x, y = uniform_clouds(11, 1, 6, dtype=torch.float64), uniform_clouds(12, 1, 6, dtype=torch.float64)
    costs = [(x[0] - y[0, list(order)]).norm(dim=1).mean().item() for order in itertools.permutations(range(6))]
    assert earth_mover_distance(x, y).item() == pytest.approx(min(costs), rel=1e-12)
    with pytest.raises(ValueError, match=r"equal size.*\[1, 4, 3\].*\[1, 5, 3\]"):
        earth_mover_distance(uniform_clouds(0, 1, 4), uniform_clouds(0, 1, 5))
    broken = uniform_clouds(0, 2, 4)
    broken[1, 2] = torch.nan
    distances = earth_mover_distance(broken, uniform_clouds(1, 2, 4))
    assert distances.isnan().tolist() == [False, True]
