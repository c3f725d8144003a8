"""The tables of a search, from its rows alone."""

from __future__ import annotations

import statistics
from typing import Any

from bench import report
from bench.report import mean_sd
from bench.search.rows import Group, Rows, identity, settings_of
from bench.search.tasks import load
from core.errors import UserError

TITLES = (
    "method",
    "chosen",
    "lr",
    "tried",
    "hidden steps",
    "bits a step",
    "held-out loss",
    "seeds",
    "against local",
    "against ddp",
    "before the end's drain",
)

NOTES = (
    "Held-out loss: on the test split, mean ± standard deviation over the seeds, of the model that all workers share "
    "once everything in flight is applied; last column: of the mean of the workers' models before that. Against local, "
    "ddp: over the seeds that both have.",
    "tried: configurations on the tuning seed and the tuning split, of which the best is in the row; 1: not tuned. The "
    "seeds reported and the test split had no part in it.",
    "hidden steps: how many local steps the communication may take without anybody waiting. bits a step: that the "
    "all-reduces of a parameter take, per local step of a worker.",
    "All workers in one process, in float32; time and communication are not measured.",
)


def markdown(rows: Rows) -> str:
    """A table for each group of runs, and what a reader needs to judge it."""
    groups: dict[tuple[Group, str], list[dict[str, Any]]] = {}
    for (group, tuning, _), choice in rows.choices.items():
        groups.setdefault((group, tuning), []).append(choice)
    parts = [section(rows, group, tuning, choices) for (group, tuning), choices in groups.items()]
    return "\n\n".join([report.bullets(NOTES), *parts]) + "\n"


def section(rows: Rows, group: Group, tuning: str, choices: list[dict[str, Any]]) -> str:
    losses = {choice["asked"]: test_runs(rows, choice) for choice in choices}
    most = max(map(len, losses.values()))
    means = [
        statistics.fmean(finite(runs, "loss")) for runs in losses.values() if len(finite(runs, "loss")) == most > 0
    ]
    best, others = min(means, default=None), [losses.get(name, []) for name in ("local", "ddp")]
    lines = [cells(choice, losses[choice["asked"]], best, others) for choice in choices]
    tau = f"tau {group.tau}, {group.shards} shards; {tuning}"
    title = f"### {group.task}: {group.workers} workers of {group.batch} samples a step, {group.steps} steps, {tau}"
    return f"{title}\n\n{report.table(TITLES, lines)}\n\n{report.bullets(notes(group, choices, losses))}"


def test_runs(rows: Rows, choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs on the test split with the settings that a method was given, in order of their seeds."""
    wanted = identity(choice | {"seed": None, "split": "test"})
    found = [row for row in rows.runs.values() if identity(row) | {"seed": None} == wanted]
    return sorted(found, key=lambda row: row["seed"])


def finite(runs: list[dict[str, Any]], name: str) -> list[float]:
    return [run[name] for run in runs if run[name] is not None]


def cells(
    choice: dict[str, Any], runs: list[dict[str, Any]], best: float | None, others: list[list[dict[str, Any]]]
) -> list[str]:
    """A line of the table. best: the least mean of the methods with most seeds; others: the runs of those to which it
    is compared."""
    asked = choice["asked"].replace("|", "\\|")  # else it would end the cell
    settings = settings_of(choice)
    first = [f"`{asked}`", f"`{settings}`", f"{choice['lr']:.3g}", str(choice["tried"])]
    first += [f"{settings.hidden_steps(choice['tau']):g}", f"{settings.bits_a_step(choice['tau']):.3g}"]
    if not runs:
        return [*first, "not run"]
    found = finite(runs, "loss")
    loss = mean_sd(found, ".4f") if found else ""
    if found and statistics.fmean(found) == best:
        loss = f"**{loss}**"
    if lost := len(runs) - len(found):
        loss = f"diverged in {lost} of {len(runs)}" + (f" (else {loss})" if loss else "")
    before = finite(runs, "loss_of_mean")
    seeds = ", ".join(str(run["seed"]) for run in runs)
    return [*first, loss, seeds, *(against(runs, other) for other in others), mean_sd(before, ".4f") if before else ""]


def against(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """How much greater the loss is than in the other runs, over the seeds that both have; empty without any."""
    theirs = {run["seed"]: run["loss"] for run in others}
    pairs = [(run["loss"], theirs.get(run["seed"])) for run in runs]
    both = [(ours, other) for ours, other in pairs if ours is not None and other is not None]
    if not both:
        return ""
    return f"{100 * (sum(ours for ours, _ in both) / sum(other for _, other in both) - 1):+.1f} %"


def notes(group: Group, choices: list[dict[str, Any]], losses: dict[str, list[dict[str, Any]]]) -> list[str]:
    runs = [run for found in losses.values() for run in found]
    tuned = ", ".join(map(str, sorted({seed for choice in choices for seed in choice["tuning_seeds"]})))
    commits = ", ".join(sorted({run["commit"] or "unknown" for run in runs}))
    return [f"Task: {about(group.task)}.", f"Tuning seed {tuned}; commits {commits}."]


def about(task: str) -> str:
    try:
        return load(task).about
    except (UserError, KeyError):  # its data are not here
        return task
