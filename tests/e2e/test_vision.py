"""The train script as its users start it."""

import contextlib
import io
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from core.baselines.table import METHODS
from core.stats import RoundStats
from core.tau import TauTuner
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


def on_worker(rank: int, world_size: int, folder: Path, *options: str) -> str:
    """The script in a process that is there already; what it says."""
    out, given = io.StringIO(), ("--device", "cpu", "--out", str(folder), *options)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        run_on_worker(rank, world_size, "vision.train", "digits_small", *given)
    return out.getvalue()


def with_auto(rank: int, world_size: int, folder: str) -> str:
    """What the script says of a run that chooses tau, over a slow link, and is traced."""
    options = ("--epochs", "3", "--co2.tau", "auto", "--co2.tau_max", "8", "--link_mbit", "200", "--trace")
    options += ("--co2.compression.format", "float32")  # so that an all-reduce is traced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TauTuner, "write_times", tell_fixed_times(TauTuner.write_times))
        return on_worker(rank, world_size, Path(folder), *options)


def tell_fixed_times(tell: Callable[..., None]) -> Callable[..., None]:
    """What a worker tells whose steps take 10 ms and all-reduces 26: tau is to be 4, with fragments."""
    fixed = {"step_seconds": 0.01, "boundary_seconds": 0.0, "merge_seconds": 0.0, "exposed_seconds": 0.0}

    def told(tuner: TauTuner, stats: RoundStats, before: RoundStats, rank: int, places: Tensor) -> None:
        took = 0.026 if stats.allreduce_seconds else 0.0
        tell(tuner, replace(stats, **fixed, allreduce_seconds=took), replace(before, **fixed), rank, places)

    return told


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
def test_tau_is_chosen_and_the_trace_shows_the_all_reduce(tmp_path: Path):
    folder = tmp_path
    text = run_distributed(with_auto, 2, str(folder), timeout=300)[0]
    decisions, taus = logged(folder, "tau"), logged(folder, "round/tau")
    assert decisions and decisions[0].startswith("tau 2 -> ") and decisions[0] in text
    assert taus[0] == 2 and taus[-1] == 4
    landed = [row for row in rows(folder) if row.get("round/allreduce_seconds")]
    for row in landed:
        whole = row["round/exposed_seconds"] + row["round/hidden_seconds"]
        assert whole >= row["round/allreduce_seconds"] * 0.99 and 0 < row["round/link_mbit"] < 206
    names = [e.get("name") for e in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert "gloo:all_reduce" in names and "aten::convolution_backward" in names


def test_ctrl_c_in_one_process_saves_and_exits_with_130(tmp_path: Path):
    said, run, until = tmp_path / "said", tmp_path / "run", time.monotonic() + 120
    process = fork_script(said, "vision.train", "digits_small", "--device", "cpu", "--out", str(run))
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_text().count("\n") < 3:
        assert process.is_alive() and time.monotonic() < until, said.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130 and "Traceback" not in said.read_text(), said.read_text()
    assert summary(run)["stopped_by_signal"] == signal.SIGINT and [*run.glob("checkpoints/step*/manifest.json")]
