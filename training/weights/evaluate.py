"""Evaluates a checkpoint: `python -m TASK.evaluate RUN`, or with torchrun on several devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
import tyro
from torch import nn

from core.checkpoint.runs import finished
from training.folder.run_folder import table
from training.folder.settings import settings
from training.loop.progress import Progress
from training.recipe import Recipe
from training.start.errors import explained
from training.start.script import parse_options
from training.start.workers import join, pick_device, rank, tune, world_size
from training.weights.read import load_weights, read_config, read_recipe

R = TypeVar("R", bound=Recipe)
Results = dict[str, float]
# returns the model of a recipe, and its evaluation as at the end of a run
Open = Callable[[R], tuple[nn.Module, Callable[[Any], Results]]]


@dataclass(frozen=True)
class EvaluateOptions:
    """Prints the metrics of a run's newest checkpoint, on all its held-out data, as at the end of the run."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    weights: Path | None = None
    """Evaluate these weights instead: another run folder, or a local file of timm, mmseg or transformers."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to evaluate on."""
    out: Path | None = None
    """Write the exact numbers to this JSON file too."""


class Evaluation(Progress):
    """The part of training.loop.run.Run that evaluations need, for a model that is not being trained."""

    draws = False  # pyright: ignore

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def log_evaluation(self, results: Results) -> None:
        """Does nothing, because the command prints the results."""


def evaluate_run(kind: type[R], open_task: Open[R], prog: str) -> None:
    """Runs the command `prog` of the task with these recipes."""
    given = parse_options(EvaluateOptions, prog=prog)
    recipe = read_recipe(given.run, kind)
    if given.out and rank() == 0:
        _check_file(given.out)
    workers = read_config(given.run)["world_size"]  # each worker's batches keep their size
    share = max(1, recipe.batch_size // workers)
    recipe = dataclasses.replace(recipe, batch_size=share * world_size(), device=given.device, link_mbit=None)
    device = pick_device(recipe.device)
    tune(device, tf32=recipe.tf32)
    made = join(device, recipe.timeout, settings(recipe))
    model, evaluate = open_task(recipe)
    load_weights(model, given.weights or given.run, "weights" if given.weights else "run")
    model.to(device).eval()
    results = evaluate(Evaluation(recipe, device))
    if rank() == 0:
        of = given.weights or f"{given.run}, {finished(given.run / 'checkpoints')[0]}"
        print(f"{recipe.name} {recipe.method}: {of}\n{table(results)}", flush=True)
        if given.out:
            given.out.write_text(json.dumps(results, indent=2) + "\n")
    if made:
        dist.destroy_process_group()


def _check_file(out: Path) -> None:
    """Makes the folder of `out`, and refuses a file that cannot be written, before the evaluation takes its time."""
    with explained(f"out={out}: cannot be written", "give another file"):
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = not out.exists()
        out.open("a").close()
        if fresh:
            out.unlink()
