"""The train script in one process on a handful of surfaces: recipes, knobs, resuming."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from pointcloud.sources import Surfaces
from pointcloud.train import main
from training.run import Run

TINY = """
    --epochs 2 --batch_size 8 --points 64 --autoencoder.encoder_widths 16 --autoencoder.latent 16
    --autoencoder.mlp_widths 16 --optim.warmup_steps 0 --co2.tau 2 --log_every 1 --device cpu
    --mae.groups 8 --mae.group_size 8 --mae.dim 24 --mae.depth 1 --mae.heads 2 --emd_points 32
"""


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs surfaces_small with few, small clouds and no picture; returns (metrics.jsonl's lines, the summary)."""
    monkeypatch.setattr(Surfaces, "COUNTS", {"train": 24, "test": 9})
    monkeypatch.setattr("pointcloud.train.save_picture", lambda *_: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def run(*overrides: str, name: str = "run") -> tuple[list[dict], dict]:
        out = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["train", "surfaces_small", *TINY.split(), *overrides, "--out", str(out)])
        main()
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return lines, json.loads((out / "summary.json").read_text())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def losses(lines: list[dict]) -> list[float]:
    return [line["train_loss"] for line in lines if "train_loss" in line]


@pytest.mark.parametrize("model", ["autoencoder", "mae"])
def test_a_run_resumed_after_a_crash_ends_as_if_uninterrupted(model: str, train, monkeypatch: pytest.MonkeyPatch):
    whole, _ = train("--model", model, name="whole")
    assert len(losses(whole)) == 6  # 2 epochs of 24 / 8 steps

    def crash(run: Run, *_: Any) -> bool:
        assert run.step < 5, "crash"
        return False

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="crash"):
        patch.setattr(Run, "_granted", crash)
        train("--model", model, name="parts")
    resumed, summary = train("--model", model, "--resume", name="parts")  # from step 4, within the second epoch
    assert summary["steps"] == 6
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    assert resumed[-1]["test_chamfer"] == whole[-1]["test_chamfer"]


def test_each_knob_changes_the_result(train):
    overrides = ["", "--augment", "--autoencoder.decoder folding", "--model mae", "--points 100"]
    chamfers = [train(*override.split(), name=str(i))[1]["test_chamfer"] for i, override in enumerate(overrides)]
    assert len(set(chamfers)) == len(overrides)


def test_emd_points_changes_only_the_emd(train):
    _, few = train("--emd_points", "16", name="few")
    _, many = train("--emd_points", "64", name="many")
    assert few["test_emd"] > many["test_emd"] and few["test_chamfer"] == many["test_chamfer"]
