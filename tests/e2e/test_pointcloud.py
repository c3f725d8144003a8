"""The train script as its users start it, on a handful of analytic surfaces."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.testing import run_distributed
from pointcloud import data
from pointcloud import train as script
from pointcloud.model import AutoencoderConfig
from pointcloud.recipes import surfaces_small
from pointcloud.sources import Surfaces
from tests.runs import logged, summary
from tests.scripts import run_on_worker
from training.loop.run import Run

EPOCHS = 4  # of 12 steps


def train_both(rank: int, world_size: int, folder: str) -> None:
    """The script with the embedded recipe on fewer clouds, then its loop with one cut down to a few seconds."""
    Surfaces.COUNTS = {"train": 96, "test": 9}
    options = ["--epochs", "1", "--points", "64", "--batch_size", "48", "--out", f"{folder}/embedded"]
    run_on_worker(rank, world_size, "pointcloud.train", "surfaces_small", *options)
    script.save_picture = lambda *_: None  # slower than the training
    recipe = replace(surfaces_small(), device="cpu", log_every=6, checkpoint_every=4, points=64, batch_size=8)
    recipe = replace(
        recipe,
        autoencoder=AutoencoderConfig("mlp", encoder_widths=(16,), latent=16, mlp_widths=(16,)),
        optim=replace(recipe.optim, lr=3e-3, warmup_steps=6),
        co2=replace(recipe.co2, tau=2),
        **{"method": "co2", "epochs": EPOCHS, "out": Path(folder, "co2")},
    )
    with Run(recipe) as job:
        script.train(job, recipe, *data.load(recipe))


def test_two_workers_learn_and_the_script_trains_the_embedded_recipe(tmp_path: Path):
    run_distributed(train_both, 2, str(tmp_path), timeout=240)
    losses, end = logged(tmp_path / "co2"), summary(tmp_path / "co2")
    assert losses[-1] < losses[0] / 2
    assert end["test_chamfer"] == pytest.approx(end["test_loss"]) and 0 < end["test_emd"] < 1
    assert end["steps"] == 12 * EPOCHS and end["bytes_sent"] > 0
    assert summary(tmp_path / "embedded")["steps"] == 2
    assert (tmp_path / "embedded" / "reconstructions.png").stat().st_size > 10_000
