"""How far local steps and hidden means fall behind as models grow: python -m bench.search.sizes [--rows FILE]

Of rows of bench.search with equal steps and tau: a table, and a picture beside the rows, FILE with .png at its end.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench import report
from bench.report import read_options, require
from bench.search.engine import load_task
from bench.search.rows import Rows, against, finite, test_runs
from core.errors import UserError
from training.script import launch

METHODS = {
    "ddp": "ddp",
    "local": "local (blocking)",
    "co2:merge=keep,gap=none,beta=0,delay=1,wire=int4": "co2, merge keep, int4, merged after 1 step",
}
Runs = dict[str, dict[str, list[dict[str, Any]]]]  # task -> method -> runs on the test split, by seed


@dataclass(frozen=True)
class Sizes:
    """Which rows."""

    rows: Path = Path("results/large.jsonl")
    steps: int = 240
    tau: int = 24

    def check(self) -> None:
        require(self, ones="steps tau")


def found(rows: Rows, o: Sizes) -> Runs:
    """With the learning rates that were chosen, or given, last."""
    runs: Runs = {}
    for (group, _, asked), choice in rows.choices.items():
        if (group.steps, group.tau) == (o.steps, o.tau) and asked in METHODS and (of := test_runs(rows, choice)):
            runs.setdefault(group.task, {})[asked] = of
    if not runs:
        raise UserError(f"rows={o.rows}: none of {o.steps} steps and tau {o.tau}; run bench.search with --rows first")
    return runs


def parameters(task: str) -> float:
    """Millions."""
    return sum(p.numel() for p in load_task(task).build().parameters()) / 1e6


def table(runs: Runs, millions: dict[str, float]) -> str:
    """A line for each size."""
    titles = ("M parameters", *METHODS.values(), "local, of ddp", "co2, of local")
    lines = []
    for task in sorted(runs, key=millions.__getitem__):
        ddp, local, ours = (runs[task].get(name, []) for name in METHODS)
        losses = [report.of_seeds([run["loss"] for run in of], ".4f") if of else "not run" for of in (ddp, local, ours)]
        lines.append((f"{millions[task]:.3g}", *losses, against(local, ddp), against(ours, local)))
    return report.table(titles, lines)


def picture(runs: Runs, millions: dict[str, float], file: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    for (asked, words), marker in zip(METHODS.items(), "osx", strict=True):
        losses = {millions[task]: of for task in runs if (of := finite(runs[task].get(asked, []), "loss"))}
        sizes = sorted(losses)
        deviations = [statistics.stdev(losses[size]) if len(losses[size]) > 1 else 0.0 for size in sizes]
        means = [statistics.fmean(losses[size]) for size in sizes]
        axes.errorbar(sizes, means, deviations, marker=marker, label=words, capsize=3)
    axes.set(xscale="log", xlabel="parameters, millions", ylabel="held-out loss, nats")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    o = read_options(Sizes, "bench.search.sizes", description=__doc__)
    runs = found(Rows(o.rows), o)
    millions = {task: parameters(task) for task in runs}
    picture(runs, millions, o.rows.with_suffix(".png"))
    print(table(runs, millions))


if __name__ == "__main__":
    launch(main)
