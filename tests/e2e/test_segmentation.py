"""segmentation.train's loop as its users start it."""

import json
import os
from dataclasses import replace
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core import CO2Config
from core.testing import run_distributed
from segmentation import train as script
from segmentation.data import Scenes, build_dataset
from segmentation.recipes import digits_small
from tests.runs import logged, summary
from training.loop.run import Run


def train_in_process(rank: int, world_size: int, folder: str) -> None:
    """Runs the loop in a process group on 48 scenes, three steps an epoch."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    train_set = Scenes(build_dataset("digits", "train").get_subset(48))
    eval_sets = {"val": Scenes(build_dataset("digits", "val").get_subset(10))}
    script.PICTURES = 1  # slower than the training
    sizes = {"device": "cpu", "batch_size": 16, "epochs": 3, "log_every": 3, "eval_every": 2, "out": Path(folder)}
    optim = replace(digits_small().optim, lr=5e-3, warmup_steps=0)
    recipe = replace(digits_small(), **sizes, optim=optim, co2=CO2Config(tau=3), method="co2")
    with Run(recipe) as run:
        script.train(run, recipe, train_set, eval_sets)


def test_two_workers_learn_and_the_run_folder_holds_results_of_each_class_and_pictures(tmp_path: Path):
    run_distributed(train_in_process, 2, str(tmp_path), timeout=300)
    losses, end = logged(tmp_path), summary(tmp_path)
    assert losses[-1] < 0.9 * losses[0]
    assert 0 < end["val_mIoU"] <= end["val_mAcc"] < end["val_aAcc"] < 100
    assert logged(tmp_path, "val_IoU/background")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert "val/image_label_prediction_0" in events.Tags()["images"]
    assert {"train_loss", "lr", "val_mIoU", "val_mAcc", "val_aAcc"} <= set(events.Tags()["scalars"])
    assert json.loads((tmp_path / "config.json").read_text())["recipe"]["backbone"] == "resnet_mini"
