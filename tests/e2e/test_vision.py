"""The train script as its users start it."""

import contextlib
import io
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from core.baselines.table import METHODS
from core.testing import run_distributed
from tests.runs import logged, rows, summary
from tests.scripts import fork_script, run_on_worker
from training.loop.run import Run
from vision import data
from vision.recipes import digits_small
from vision.train import train


def train_in_process(rank: int, world_size: int, folder: str, jobs: dict[str, dict]) -> dict[str, list[float]]:
    """Runs the train loop for several recipes in one process group; their logged training losses."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    optim = replace(digits_small().optim, warmup_steps=8)
    for name, changes in jobs.items():
        recipe = replace(digits_small(), device="cpu", log_every=4, out=Path(folder, name), optim=optim, **changes)
        with Run(recipe) as job:
            train(job, recipe, *data.load(recipe.dataset))
    return {name: logged(Path(folder, name)) for name in jobs}


def with_auto(rank: int, world_size: int, folder: str) -> str:
    """What the script says of a run that chooses tau, over a link that is too slow for any."""
    options = "--epochs 3 --co2.tau auto --co2.tau_max 8 --link_mbit 10 --co2.compression.format float32 --device cpu"
    with contextlib.redirect_stdout(out := io.StringIO()), contextlib.redirect_stderr(out):
        run_on_worker(rank, world_size, "vision.train", "digits_small", *options.split(), "--out", folder)
    return out.getvalue()


def check_learning(folder: Path, losses: dict[str, list[float]], methods: tuple[str, ...]) -> None:
    for method in methods:
        assert losses[method][-1] < losses[method][0] / 3, method
        end = summary(folder / method)
        events = EventAccumulator(str(folder / method)).Reload()
        assert {"lr", "train_loss", "test_top1", "round/gap_mean"} <= set(events.Tags()["scalars"])
        assert "test/images" in events.Tags()["images"], method
        assert 0.8 < end["test_top1"] <= end["test_top5"] and end["bytes_sent"] > 0, method


def test_two_workers_learn(tmp_path: Path):
    jobs = {"co2": {"method": "co2", "epochs": 4, "eval_every": 3}}
    losses = run_distributed(train_in_process, 2, str(tmp_path), jobs, timeout=300)[0]
    check_learning(tmp_path, losses, ("co2",))


@pytest.mark.slow
def test_each_method_learns_on_two_workers(tmp_path: Path):
    jobs = {method: {"method": method, "epochs": 6} for method in METHODS}
    check_learning(tmp_path, run_distributed(train_in_process, 2, str(tmp_path), jobs, timeout=240)[0], (*jobs,))


@pytest.mark.slow
def test_tau_is_chosen_by_the_times_of_the_link(tmp_path: Path):
    folder = tmp_path
    text = run_distributed(with_auto, 2, str(folder), timeout=300)[0]
    decisions, taus = logged(folder, "tau"), logged(folder, "round/tau")
    assert decisions and decisions[0].startswith("tau 2 -> ") and decisions[0] in text
    assert taus[0] == 2 < taus[-1] <= 8
    landed = [row for row in rows(folder) if row.get("round/allreduce_seconds")]
    for row in landed:
        whole = row["round/exposed_seconds"] + row["round/hidden_seconds"]
        assert whole >= row["round/allreduce_seconds"] * 0.99 and 0 < row["round/link_mbit"] < 10.3


def test_ctrl_c_in_one_process_saves_and_exits_with_130(tmp_path: Path):
    said, run, until = tmp_path / "said", tmp_path / "run", time.monotonic() + 120
    process = fork_script(said, "vision.train", "digits_small", "--device", "cpu", "--out", str(run))
    while len(rows(run)) < 3:
        assert process.is_alive() and time.monotonic() < until, said.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130 and "Traceback" not in said.read_text(), said.read_text()
    assert summary(run)["stopped_by_signal"] == signal.SIGINT and [*run.glob("checkpoints/step*/manifest.json")]
