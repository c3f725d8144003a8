"""The train script as its users start it, on a handful of analytic surfaces."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.testing import run_distributed
from pointcloud import data
from pointcloud import train as script
from pointcloud.model import AutoencoderConfig, MaskedAutoencoderConfig
from pointcloud.recipes import PointCloudRecipe, surfaces_small
from pointcloud.sources import Surfaces
from tests.runs import logged, summary
from tests.scripts import run_on_worker
from training.loop.run import Run


def tiny(**changes) -> PointCloudRecipe:
    """surfaces_small cut down to a few seconds."""
    sizes = {"points": 64, "batch_size": 8}
    recipe = replace(surfaces_small(), device="cpu", log_every=6, checkpoint_every=4, **sizes)
    recipe = replace(
        recipe,
        autoencoder=AutoencoderConfig("mlp", encoder_widths=(16,), latent=16, mlp_widths=(16,)),
        mae=MaskedAutoencoderConfig(groups=8, group_size=8, dim=24, depth=1, decoder_depth=1, heads=2),
        optim=replace(recipe.optim, lr=3e-3, warmup_steps=6),
        co2=replace(recipe.co2, tau=2),
    )
    return replace(recipe, **changes)


EPOCHS = 4  # of 12 steps
JOBS = {"co2": {"method": "co2", "epochs": EPOCHS}}


def train_all(rank: int, world_size: int, folder: str, jobs: dict[str, dict]) -> dict[str, list[float]]:
    """The script with the embedded recipe on fewer clouds, then its loop for all jobs; their logged training losses."""
    Surfaces.COUNTS = {"train": 96, "test": 9}
    options = ["--epochs", "1", "--points", "64", "--batch_size", "48", "--out", f"{folder}/embedded"]
    run_on_worker(rank, world_size, "pointcloud.train", "surfaces_small", *options)
    save_picture = script.save_picture
    for name, changes in jobs.items():
        script.save_picture = save_picture if name == "mae" else lambda *_: None  # slower than the training
        recipe = tiny(out=Path(folder, name), **changes)
        with Run(recipe) as job:
            script.train(job, recipe, *data.load(recipe))
    return {name: logged(Path(folder, name)) for name in jobs}


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, list[float]]:
    """The training losses of all jobs, trained by one pair of workers."""
    return run_distributed(train_all, 2, str(folder), JOBS, timeout=240)[0]


def check_learning(folder: Path, losses: dict[str, list[float]], methods: tuple[str, ...]) -> None:
    for method in methods:
        assert losses[method][-1] < losses[method][0] / 2, method
        results = summary(folder / method)
        assert results["test_chamfer"] == pytest.approx(results["test_loss"]) and 0 < results["test_emd"] < 1, method
        assert results["steps"] == 12 * EPOCHS and results["bytes_sent"] > 0, method


def test_two_workers_learn(folder: Path, losses: dict[str, list[float]]):
    check_learning(folder, losses, ("co2",))


@pytest.mark.usefixtures("losses")
def test_the_script_trains_the_embedded_recipe(folder: Path):
    assert summary(folder / "embedded")["steps"] == 2
    assert (folder / "embedded" / "reconstructions.png").stat().st_size > 10_000
