"""The file of a search, one JSON object a line, appended as soon as it is known; and its tables, from the file alone.

A run: what engine.Plan holds, and its result. A choice: which settings a method was given by its tuning, out of how
many.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.report import FORMAT, mean_sd
from bench.search.engine import Plan, Result, load_task
from bench.search.methods import KINDS, Settings
from bench.trainings import TUNING_SEED
from core.checkpoints.untrusted import parse_json
from core.errors import UserError
from training.config import commit, version

GONE = {"sync_steps": 0, "clip_by": "element", "policy": "penalty", "taylor": 0.5}  # options that nobody changed
TASKS_VERSION = 1  # raise it when a task or the engine changes, so that rows of before are not taken for today's


@dataclass(frozen=True)
class Group:
    """What the runs of one table have in common, beside the tuning that each method was given."""

    task: str
    workers: int
    batch: int
    steps: int
    tau: int
    shards: str


def describe(plan: Plan) -> dict[str, Any]:
    """A plan as in the file."""
    values = vars(plan) | {"method": plan.settings.name, "options": dict(plan.settings.options)}
    del values["settings"]
    return {"kind": "run", "format": FORMAT, "tasks_version": TASKS_VERSION} | values


def settings_of(row: dict[str, Any]) -> Settings:
    return Settings(row["method"], tuple(row["options"].items()))


class Lines:
    """A file of JSON objects, one a line. Several processes may append to one file; each sees its own rows and those
    that were there when it began. known: whether a row counts; KeyError or TypeError where it is none of this kind."""

    def __init__(self, path: Path, known: Callable[[Any], bool]):
        self.path = path
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise UserError(f"rows={path}: {error.strerror}; name a file") from None
        complete, end, half = data.rpartition(b"\n")
        self.half = len(half)  # bytes of a line at the end that a run which was killed has left incomplete
        self.read: list[dict[str, Any]] = []
        for number, line in enumerate((complete + end).splitlines(), start=1):
            try:
                self.read += [row] if known(row := parse_json(line)) else []
            except (ValueError, KeyError, TypeError):
                what = f"rows={path}: line {number} is no row of this command"
                raise UserError(f"{what}; mend or remove it, or name another file") from None

    def append(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            if self.half:
                file.truncate(file.tell() - self.half)
                self.half = 0
            file.write(json.dumps(row).encode() + b"\n")


class Rows(Lines):
    """The rows of a search, and those to come."""

    def __init__(self, path: Path):
        super().__init__(path, lambda row: (row["format"], row["tasks_version"]) == (FORMAT, TASKS_VERSION))
        self.source = {"commit": commit(), "torch": version("torch")}  # as it is when the code is read
        self.runs: dict[str, dict[str, Any]] = {}
        self.choices: dict[tuple[Group, str, str], dict[str, Any]] = {}
        for row in self.read:
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        given = {key: value for key, value in row["options"].items() if GONE.get(key) != value}
        row["options"] = KINDS[row["method"]].options | given  # an option that is newer had its usual value
        if row["kind"] == "run":
            self.runs[_key(row)] = row
        else:
            self.choices[_choice_key(row)] = row

    def find(self, plan: Plan) -> dict[str, Any] | None:
        return self.runs.get(_key(describe(plan)))

    def add_run(self, plan: Plan, result: Result) -> None:
        self.append(describe(plan) | asdict(result) | {"date": time.strftime("%Y-%m-%d %H:%M:%S")} | self.source)

    def add_choice(self, asked: str, tuning: str, plan: Plan, tried: int) -> None:
        """asked: the method as on the command line; tuning: what each method was given, in words; plan: with the
        settings and lr that came of it."""
        row = describe(plan) | {"kind": "choice", "asked": asked, "tuning": tuning, "tried": tried}
        row["tuning_seeds"] = [TUNING_SEED]
        del row["seed"], row["split"]
        if self.choices.get(_choice_key(row)) != row:
            self.append(row)

    def append(self, row: dict[str, Any]) -> None:
        super().append(row)
        self._add(json.loads(json.dumps(row)))


IDENTITY = ("task", "method", "options", "lr", "workers", "batch", "steps", "tau", "shards", "seed", "split")


def identity(row: dict[str, Any]) -> dict[str, Any]:
    """What a run's result depends on."""
    values = {name: row[name] for name in IDENTITY}
    return values if settings_of(row).has_rounds else values | {"tau": None}


def _key(row: dict[str, Any]) -> str:
    return json.dumps(identity(row), sort_keys=True)


def _choice_key(row: dict[str, Any]) -> tuple[Group, str, str]:
    return Group(*(row[name] for name in Group.__dataclass_fields__)), row["tuning"], row["asked"]


# -- the tables -------------------------------------------------------------------------------------------------

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
    loss = report.of_seeds([run["loss"] for run in runs], ".4f")
    if found and statistics.fmean(found) == best:
        loss = f"**{loss}**"
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
    changed = [f"{report.UNRECORDED}."] if "-dirty" in commits else []
    return [f"Task: {about(group.task)}.", f"Tuning seed {tuned}; commits {commits}.", *changed]


def about(task: str) -> str:
    try:
        return load_task(task).about
    except (UserError, KeyError):  # its data are not here
        return task
