"""segmentation.train as its users start it, and its loop under every method."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core import CO2Config
from core.methods import METHODS
from core.testing import run_distributed
from segmentation.data import build_dataset
from segmentation.recipes import digits_small
from segmentation.train import train
from tests.scripts import Mistakes
from training.run import Run


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_in_process(rank: int, world_size: int, folder: str, jobs: dict[str, dict]) -> dict[str, list[float]]:
    """Runs the loop for several recipes in one process group on 48 scenes, three steps an epoch; training losses."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    train_set = build_dataset("digits", "train").get_subset(48)
    eval_sets = {"val": build_dataset("digits", "val").get_subset(10)}
    optim = replace(digits_small().optim, lr=5e-3, warmup_steps=0)
    for name, changes in jobs.items():
        recipe = replace(
            digits_small(),
            **{"device": "cpu", "batch_size": 16, "epochs": 5, "log_every": 3, "eval_every": 2, "optim": optim}
            | {"co2": CO2Config(tau=3), "out": Path(folder, name.removesuffix(" again"))}
            | changes,
        )
        with Run(recipe) as run:
            train(run, recipe, train_set, eval_sets)
    return {
        name: [r["train_loss"] for r in rows(Path(folder, name)) if "train_loss" in r]
        for name in jobs
        if Path(folder, name).exists()
    }


@pytest.mark.parametrize(
    "methods", [pytest.param(("ddp", "co2"), id="two"), pytest.param(METHODS, id="all", marks=pytest.mark.slow)]
)
def test_each_method_learns_on_two_workers_and_equal_seeds_give_equal_runs(
    methods: tuple[str, ...], tmp_path: Path
) -> None:
    jobs: dict[str, dict] = {method: {"method": method} for method in methods}
    short = {"method": "co2", "epochs": 2}
    jobs |= {"a": short, "b": short, "c": short | {"seed": 1}}
    losses, _ = run_distributed(train_in_process, 2, str(tmp_path), jobs, timeout=600)
    for method in methods:
        assert losses[method][-1] < 0.9 * losses[method][0], method
        summary = json.loads((tmp_path / method / "summary.json").read_text())
        assert 0 < summary["val_mIoU"] <= summary["val_mAcc"] < summary["val_aAcc"] < 100, method
    assert losses["a"] == losses["b"] != losses["c"]


def test_a_run_folder_holds_per_class_results_and_pictures_and_resumes(tmp_path: Path) -> None:
    """One worker, stopped after two of four epochs and resumed, ends as the run that was not interrupted."""
    jobs = {
        "whole": {"epochs": 4},
        "halves": {"epochs": 2},
        "halves again": {"epochs": 4, "resume": True, "extend": True},
    }
    run_distributed(train_in_process, 1, str(tmp_path), jobs, timeout=300)
    whole, halves = (rows(tmp_path / name) for name in ("whole", "halves"))
    assert [r["step"] for r in whole if "train_loss" in r] == [r["step"] for r in halves if "train_loss" in r]
    last = next(r for r in reversed(whole) if "val_mIoU" in r)
    assert "val_IoU/background" in last
    events = EventAccumulator(str(tmp_path / "whole")).Reload()
    assert "val/image_label_prediction_0" in events.Tags()["images"]
    assert {"train_loss", "lr", "val_mIoU", "val_mAcc", "val_aAcc"} <= set(events.Tags()["scalars"])
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["recipe"]["backbone"] == "resnet_mini"


def test_mistakes_are_one_line(tmp_path: Path, mistake: Mistakes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*options: str) -> str:
        text = mistake("segmentation.train", *options)
        assert text.count("error:") == 1 and "Traceback" not in text
        return text

    out = ("--device", "cpu", "--out", str(tmp_path / "run"))
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    text = fails("ade20k_resnet50", *out)
    assert f"no ADE20K in {tmp_path}/ade/ADEChallengeData2016: expected images/training" in text
    assert "digits_small" in text
    text = fails("digits_small", *out, "--batch_size", "1")
    assert "batch_size=1 (global) over 1 workers: BatchNorm needs two samples a worker; give 2 or more" in text
    assert "did you mean digits_small" in fails("digits_smal", *out)
