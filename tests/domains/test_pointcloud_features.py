"""Classifiers on the features of point clouds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pointcloud.evaluate import classify
from pointcloud.model import Autoencoder, AutoencoderConfig, MaskedAutoencoder, MaskedAutoencoderConfig
from tests.scripts import run_script

NAMES = "modelnet10_linear_top1", "modelnet10_neighbor_top1"


def test_accuracy_by_hand():
    """Classes a at 0 and 2, b at 8 and 10 divide at 5, so 1 and 6 are right, and 4 and -5 are wrong."""
    x, classes = np.array([[0.0], [2.0], [8.0], [10.0]]), ["a", "a", "b", "b"]
    found = classify(x, classes, np.array([[1.0], [4.0], [6.0], [-5.0]]), ["a", "b", "b", "b"])
    assert tuple(found) == NAMES and set(found.values()) == {0.5}


def test_the_neighbor_sees_what_a_line_does_not():
    """Four corners of a square, whose diagonals are the classes: at most three are on their side of a line."""
    x, classes = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]), ["a", "b", "b", "a"]
    linear, neighbor = classify(x, classes, x * 0.8 + 0.1, classes).values()
    assert linear <= 0.75 and neighbor == 1


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (Autoencoder(64, AutoencoderConfig("mlp", encoder_widths=(8,), latent=5, mlp_widths=(8,))), 5),
        (MaskedAutoencoder(64, MaskedAutoencoderConfig(groups=8, group_size=8, dim=24, depth=1, heads=2)), 48),
    ],
)
def test_features_do_not_depend_on_other_clouds_or_masks(model: torch.nn.Module, size: int):
    clouds = torch.rand(3, 64, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = model.eval().features(clouds)
        assert features.shape == (3, size)
        torch.testing.assert_close(features[1:2], model.features(clouds[1:2]))


def test_the_command_classifies_modelnet10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two classes of flat clouds, each in its own plane."""
    rng = np.random.default_rng(0)
    arrays = {"cls": np.array(["flat", "upright"])}
    for split, count in (("train", 16), ("test", 8)):
        arrays[f"y_{split}"] = labels = np.arange(count) % 2
        clouds = rng.uniform(-1, 1, (count, 64, 3))
        clouds[labels == 0, :, 0] *= 0.05
        clouds[labels == 1, :, 1] *= 0.05
        arrays[f"x_{split}"] = clouds.astype(np.float16)
    np.savez(tmp_path / "modelnet10_1024_fp16.npz", **arrays)
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    run, out = str(tmp_path / "run"), tmp_path / "features.json"
    settings = ["--epochs", "1", "--points", "64", "--emd_points", "16", "--batch_size", "8", "--device", "cpu"]
    run_script("pointcloud.train", "modelnet10_small", *settings, "--out", run)
    run_script("pointcloud.evaluate", run, "--features", "--device", "cpu", "--out", str(out))
    assert json.loads(out.read_text()) == dict.fromkeys(NAMES, 1.0)
