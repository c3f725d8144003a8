"""Trainings that a measurement starts: their ranks, what they log, their learning rates.

For bench.time_to_loss, bench.slow_links, bench.zeroth and other commands that measure over slow links.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from bench.cluster import Cluster, run_ranks

FAST = 10_000.0  # Mbit/s: a link that does not slow, over which learning rates are chosen
TUNING_SEED = 100  # of the runs that choose them: no figure is of it
AUTO = ("--recommended", "--co2.tau", "auto", "--co2.tau_max", "24")


def network(throttle: bool, workers: int, rate_mbit: float) -> contextlib.AbstractContextManager[Cluster | None]:
    """A node for each worker; None where the train script itself throttles the link in software."""
    return contextlib.nullcontext() if throttle else Cluster(workers, rate_mbit)


def of_link(throttle: bool) -> dict[str, Any]:
    """What the JSON of a measurement says of it; verified_mbit: rate -> what a transfer between two nodes measured."""
    return {"link": "throttled in software" if throttle else "namespaces + tbf", "verified_mbit": {}}


def flags(values: Mapping[str, Any]) -> list[str]:
    """As on a command line."""
    return [text for key, value in values.items() for text in (f"--{key}", str(value))]


# -- one rank, in a forked process of its own -----------------------------------------------------------------------


def write_to(log: Path) -> None:
    """What this rank prints, libraries included, goes to the file."""
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def run_script(module: ModuleType, argv: list[str], log: Path) -> None:
    """The train script's main."""
    write_to(log)
    sys.argv = [module.__name__, *argv]
    evaluate: Any = module.evaluate
    module.evaluate = together(evaluate)  # pyright: ignore[reportAttributeAccessIssue]
    module.main()


def together(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """All workers go on from an evaluation at one moment.

    Rank 0, whose clock is read, also writes samples for TensorBoard; workers of a local method would meanwhile compute
    ahead while that clock stands still.
    """

    def evaluate_and_wait(run: Any, *args: Any) -> Any:
        results = evaluate(run, *args)
        with run.paused():
            dist.barrier()
        return results

    return evaluate_and_wait


# -- a run ----------------------------------------------------------------------------------------------------------


class Metrics:
    """The rows of a metrics.jsonl that may still be written."""

    def __init__(self, folder: Path):
        self._path = folder / "metrics.jsonl"
        self._at = 0
        self.rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All rows so far; a line that is not complete is left for the next time."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                complete, end, _ = file.read().rpartition(b"\n")
            self._at += len(complete + end)
            self.rows += [json.loads(line) for line in complete.splitlines()]
        return self.rows


def train(
    rank: Callable[..., Any], cluster: Cluster | None, workers: int, folder: Path, *args: Any, timeout: float
) -> dict[str, Any]:
    """A run of rank(*args, log) on so many workers to its end, in a new folder.

    Returns what it left: `ranks`, what each rank returned; `summary` and `rows`, of summary.json and metrics.jsonl. Or
    `failed`: why there is nothing.
    """
    folder.mkdir(parents=True)
    try:
        ranks = run_ranks(rank, cluster, 1, workers, *args, folder / "log.txt", timeout=timeout)
    except (RuntimeError, TimeoutError) as error:
        return {"failed": str(error).strip().splitlines()[-1]}
    summary = json.loads((folder / "summary.json").read_text())
    return {"ranks": ranks, "summary": summary, "rows": Metrics(folder).read()}


def best_lr(tuning: Iterable[Mapping[str, Any]], method: str, loss: str = "loss") -> float | None:
    """The learning rate of the method's run that ended with the least loss; None where none ended with a number.

    loss: under which name the runs have it.
    """
    ended = {row["lr"]: row[loss] for row in tuning if row["method"] == method and row.get(loss) is not None}
    finite = [lr for lr in ended if math.isfinite(ended[lr])]
    return min(finite, key=lambda lr: ended[lr], default=None)
