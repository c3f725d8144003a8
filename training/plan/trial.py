"""Runs layouts here: the first, or the best for some steps, ranked by what was measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from core.errors import UserError
from training.plan.case import Case

WARM_UP = 0.4  # of a measured run's steps, which are left out


def command(c: Case, recipe: str, words: Sequence[str]) -> list[str]:
    """One process for each device, on this machine."""
    launch = [sys.executable, "-m", "training.launch", "--standalone", "--nproc-per-node", str(c.cluster.devices)]
    return [*launch, "-m", "language.train", recipe, *words]


def check_here(c: Case) -> None:
    """UserError: this machine has not the GPUs that a plan is for."""
    if c.cluster.device.gpu and (here := torch.cuda.device_count()) < c.cluster.devices:
        what = f"{c.cluster.devices} x {c.cluster.device.name}, this machine has {here} GPUs"
        raise UserError(f"the plan is for {what}: --sbatch says how to start it there")


def run(c: Case, recipe: str, words: Sequence[str]) -> None:
    """Until it ends; a run that fails ends this command with its status."""
    done = subprocess.run(command(c, recipe, words))
    if done.returncode:
        sys.exit(done.returncode)


def step_seconds(metrics: Path) -> float:
    """Of a step, from the lines of metrics.jsonl that training wrote, the first ones left out."""
    lines = [line for text in metrics.read_text().splitlines() if "train_loss" in (line := json.loads(text))]
    late = [line for line in lines if line["step"] >= WARM_UP * lines[-1]["step"]]
    if len(late) < 2:
        raise UserError(f"{metrics}: too few steps to time: give more --steps")
    return (late[-1]["seconds"] - late[0]["seconds"]) / (late[-1]["step"] - late[0]["step"])


def tried(c: Case, recipe: str, trials: Sequence[tuple[str, float, list[str]]], steps: int) -> Iterator[str]:
    """Lines with what was measured beside what was predicted, the fastest first. trials: name, predicted seconds,
    overrides."""
    found = []
    for name, predicted, words in trials:
        with tempfile.TemporaryDirectory() as folder:
            length = ["--epochs", "1", "--epoch_steps", str(steps), "--log_every", str(max(1, steps // 10))]
            log = Path(folder, "log")
            with log.open("w") as out:
                full = [*command(c, recipe, words), *length, "--out", f"{folder}/run"]
                done = subprocess.run(full, stdout=out, stderr=subprocess.STDOUT)
            if done.returncode:
                lines = log.read_text().strip().splitlines() or ["no output"]
                said = next((line for line in lines if "error: " in line), lines[-1])
                found.append((math.inf, predicted, f"{name}: not run: {textwrap.shorten(said, 200)}"))
                continue
            found.append((step_seconds(Path(folder, "run/metrics.jsonl")), predicted, name))
    yield f"{'':<4}{'layout':<40}{'measured':>12}{'predicted':>12}"
    for number, (seconds, predicted, name) in enumerate(sorted(found), 1):
        if seconds == math.inf:
            yield f"    {name}"
        else:
            yield f"{number:>2}  {name:<40}{seconds:>10.4g} s{predicted:>10.4g} s"
