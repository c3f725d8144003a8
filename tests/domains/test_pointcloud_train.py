"""The train script in one process on a handful of surfaces: recipes, knobs, resuming."""

import sys
from pathlib import Path
from typing import Any

import pytest

from pointcloud.sources import Surfaces
from pointcloud.train import main
from tests.runs import logged, summary
from training.run import Run

TINY = """
    --epochs 2 --batch_size 8 --points 64 --autoencoder.encoder_widths 16 --autoencoder.latent 16
    --autoencoder.mlp_widths 16 --optim.warmup_steps 0 --co2.tau 2 --log_every 1 --device cpu
    --mae.groups 8 --mae.group_size 8 --mae.dim 24 --mae.depth 1 --mae.heads 2 --emd_points 32
"""


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs surfaces_small with few, small clouds and no picture; returns (the training losses, the summary)."""
    monkeypatch.setattr(Surfaces, "COUNTS", {"train": 24, "test": 9})
    monkeypatch.setattr("pointcloud.train.save_picture", lambda *_: None)

    def run(*overrides: str, name: str = "run") -> tuple[list[float], dict]:
        out = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["train", "surfaces_small", *TINY.split(), *overrides, "--out", str(out)])
        main()
        return logged(out), summary(out)

    return run


@pytest.mark.parametrize("model", ["autoencoder", "mae"])
def test_a_run_resumed_after_a_crash_ends_as_if_uninterrupted(model: str, train, monkeypatch: pytest.MonkeyPatch):
    whole, end = train("--model", model, name="whole")
    assert len(whole) == 6  # 2 epochs of 24 / 8 steps

    def crash(run: Run, *_: Any) -> bool:
        assert run.step < 5, "crash"
        return False

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="crash"):
        patch.setattr(Run, "_granted", crash)
        train("--model", model, name="parts")
    resumed, again = train("--model", model, "--resume", name="parts")  # from step 4, within the second epoch
    assert again["steps"] == 6 and resumed[-2:] == whole[-2:] and again["test_chamfer"] == end["test_chamfer"]


def test_each_knob_changes_the_result_and_emd_points_only_the_emd(train):
    overrides = ["", "--augment", "--autoencoder.decoder folding", "--model mae", "--points 100"]
    chamfers = [train(*override.split(), name=str(i))[1]["test_chamfer"] for i, override in enumerate(overrides)]
    assert len(set(chamfers)) == len(overrides)
    _, few = train("--emd_points", "16", name="few")
    _, many = train("--emd_points", "64", name="many")
    assert few["test_emd"] > many["test_emd"] and few["test_chamfer"] == many["test_chamfer"]
