"""The train script as its users start it, on a handful of analytic surfaces."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core.methods import METHODS
from core.testing import run_distributed
from pointcloud import data
from pointcloud import train as script
from pointcloud.data import Surfaces
from pointcloud.mae import MaskedAutoencoderConfig
from pointcloud.model import AutoencoderConfig
from pointcloud.recipes import PointCloudRecipe, surfaces_small
from training.run import Run

ROOT = Path(__file__).parents[2]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def tiny(**changes) -> PointCloudRecipe:
    """surfaces_small cut down to a few seconds."""
    recipe = replace(surfaces_small(), device="cpu", points=64, batch_size=8, emd_points=32, log_every=6)
    recipe = replace(
        recipe,
        autoencoder=AutoencoderConfig("mlp", encoder_widths=(16,), latent=16, mlp_widths=(16,)),
        mae=MaskedAutoencoderConfig(groups=8, group_size=8, dim=24, depth=1, decoder_depth=1, heads=2),
        optim=replace(recipe.optim, lr=3e-3, warmup_steps=6),
        co2=replace(recipe.co2, tau=2),
    )
    return replace(recipe, **changes)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_in_process(
    rank: int, world_size: int, folder: str, jobs: dict[str, dict], pictures: bool = False
) -> dict[str, list[float]]:
    """Runs the train loop for several recipes in one process group; their logged training losses."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    Surfaces.COUNTS = {"train": 96, "test": 9}
    if not pictures:  # they take longer than the training
        script.save_picture = lambda *_: None
    for name, changes in jobs.items():
        recipe = tiny(out=Path(folder, changes.get("name", name)), **changes)
        with Run(recipe) as job:
            script.train(job, recipe, *data.load(recipe))
    names = {changes.get("name", name) for name, changes in jobs.items()}
    return {name: [r["train_loss"] for r in rows(Path(folder, name)) if "train_loss" in r] for name in names}


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_each_method_learns_on_two_workers(tmp_path: Path):
    jobs = {method: {"method": method, "epochs": 6} for method in METHODS}
    losses, _ = run_distributed(train_in_process, 2, str(tmp_path), jobs, timeout=240)
    for method in METHODS:
        assert losses[method][-1] < losses[method][0] / 2, method
        results = summary(tmp_path / method)
        assert results["test_chamfer"] == pytest.approx(results["test_loss"]) and 0 < results["test_emd"] < 1, method
        assert results["steps"] == 72 and results["bytes_sent"] > 0, method


def test_the_masked_autoencoder_learns_on_two_workers_and_leaves_pictures(tmp_path: Path):
    jobs = {"mae": {"model": "mae", "epochs": 6, "eval_every": 4, "points": 128}}
    losses, _ = run_distributed(train_in_process, 2, str(tmp_path), jobs, True, timeout=240)
    assert losses["mae"][-1] < 0.8 * losses["mae"][0]
    folder = tmp_path / "mae"
    picture = matplotlib.image.imread(folder / "reconstructions.png")
    assert picture.shape[:2] == (700, 1360)  # input, visible and reconstruction of six clouds
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    assert [image.step for image in events.Images("reconstructions")] == [48, 72]
    assert {"train_loss", "lr", "test_chamfer", "test_emd", "round/gap_mean"} <= set(events.Tags()["scalars"])


def test_equal_seeds_give_equal_runs_and_others_do_not(tmp_path: Path):
    jobs = {name: {"epochs": 1, "seed": seed} for name, seed in (("a", 0), ("b", 0), ("c", 1))}
    jobs |= {f"{name} mae": job | {"model": "mae"} for name, job in jobs.items()}
    losses, _ = run_distributed(train_in_process, 2, str(tmp_path), jobs, timeout=240)
    for model in ("", " mae"):
        assert losses["a" + model] == losses["b" + model] != losses["c" + model]
        a, b = (summary(tmp_path / (name + model)) for name in "ab")
        assert a["test_chamfer"] == b["test_chamfer"] and a["test_emd"] == b["test_emd"]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    """With ddp, whose finish() changes no parameter, and a rate that does not depend on the run's length."""
    optim = replace(tiny().optim, schedule="constant")
    steady = {"method": "ddp", "model": "mae", "optim": optim}  # mae: its masks are random
    jobs = {
        "whole": steady | {"epochs": 2},
        "first half": steady | {"epochs": 1, "name": "halves"},
        "second half": steady | {"epochs": 2, "resume": True, "name": "halves"},
    }
    losses, _ = run_distributed(train_in_process, 2, str(tmp_path), jobs, timeout=240)
    assert losses["halves"] == losses["whole"] and len(losses["whole"]) == 4


def start(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    return subprocess.run(
        [*command, "pointcloud.train", *arguments], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240
    )


def test_a_missing_data_set_is_one_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ENV, "CO2_DATA", str(tmp_path))
    done = start("shapenet_folding", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and f"looked in {tmp_path} for ShapeNetCore.v2.PC15k/" in said[0], done.stderr
    assert "surfaces_small" in said[0] and "pointcloud/data.py" not in done.stderr, "no traceback of ours"


def test_torchrun_trains_the_embedded_recipe(tmp_path: Path):
    done = start(
        "surfaces_small", "--epochs", "1", "--points", "64", "--batch_size", "2048", "--out", str(tmp_path / "run")
    )
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "run")["steps"] == 2
    assert (tmp_path / "run" / "reconstructions.png").stat().st_size > 10_000
