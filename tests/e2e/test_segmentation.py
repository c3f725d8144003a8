"""segmentation.train as its users start it, and its loop under every method."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core import CO2Config
from core.testing import run_distributed
from segmentation import train as script
from segmentation.data import Scenes, build_dataset
from segmentation.recipes import digits_small
from tests.runs import logged, summary
from training.loop.run import Run


def train_in_process(rank: int, world_size: int, folder: str, jobs: dict[str, dict]) -> dict[str, list[float]]:
    """Runs the loop for several recipes in one process group on 48 scenes, three steps an epoch; training losses."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    train_set = Scenes(build_dataset("digits", "train").get_subset(48))
    eval_sets = {"val": Scenes(build_dataset("digits", "val").get_subset(10))}
    optim = replace(digits_small().optim, lr=5e-3, warmup_steps=0)
    for name, changes in jobs.items():
        script.PICTURES = int(name == "co2")  # slower than the training
        recipe = replace(
            digits_small(),
            **{"device": "cpu", "batch_size": 16, "epochs": 3, "log_every": 3, "eval_every": 2, "optim": optim}
            | {"co2": CO2Config(tau=3), "out": Path(folder, name)}
            | changes,
        )
        with Run(recipe) as run:
            script.train(run, recipe, train_set, eval_sets)
    return {name: logged(Path(folder, name)) for name in jobs}


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, list[float]]:
    """The training losses with CO2, of a pair of workers."""
    return run_distributed(train_in_process, 2, str(folder), {"co2": {"method": "co2"}}, timeout=300)[0]


def check_learning(folder: Path, losses: dict[str, list[float]], methods: tuple[str, ...]) -> None:
    for method in methods:
        assert losses[method][-1] < 0.9 * losses[method][0], method
        end = summary(folder / method)
        assert 0 < end["val_mIoU"] <= end["val_mAcc"] < end["val_aAcc"] < 100, method


def test_two_workers_learn(folder: Path, losses: dict[str, list[float]]):
    check_learning(folder, losses, ("co2",))


@pytest.mark.usefixtures("losses")
def test_a_run_folder_holds_per_class_results_and_pictures(folder: Path) -> None:
    assert logged(folder / "co2", "val_IoU/background")
    events = EventAccumulator(str(folder / "co2")).Reload()
    assert "val/image_label_prediction_0" in events.Tags()["images"]
    assert {"train_loss", "lr", "val_mIoU", "val_mAcc", "val_aAcc"} <= set(events.Tags()["scalars"])
    config = json.loads((folder / "co2" / "config.json").read_text())
    assert config["recipe"]["backbone"] == "resnet_mini"
