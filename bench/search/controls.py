"""What of the gain is compression, what is hiding, what is the merge rule, and what the outer step adds: one table.

python -m bench.search.controls [--tasks digits bytes cifar] [--taus 24 6] [--wires float32 int4 int8]
python -m bench.search.controls --report

Two axes: when the workers' means are taken and merged, and over which format they cross, with error feedback where it
is narrow. And the outer momentum with 4, 16 and 64 workers, on one cheap task. All methods see as many samples and have
as much tuning: the task's learning rate times FACTORS, of which the best on the tuning seed and the tuning split is
trained on the reported seeds and evaluated on the test split. Runs are bench.search's, a line each in --rows; the same
command goes on where it was stopped. The tables are in the .md beside it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.report import read_options, require
from bench.search.__main__ import Search, conclude
from bench.search.rows import Group, Rows, about, test_runs
from bench.trainings import TUNING_SEED
from training.script import launch

FACTORS = {"digits": (0.25, 0.5, 1.0), "bytes": (1.0, 0.5), "cifar": (0.5, 1.0)}  # of the task's learning rate
KEEP = "co2:merge=keep,gap=none,beta="
WHEN = {  # how a method's name begins -> when its means are taken and merged
    "ddp:": "every step, of gradients (ddp)",
    "local:": "every tau steps, blocking (local)",
    f"{KEEP}0,delay=1,": "every tau, hidden, merged after a step (keep)",
    f"{KEEP}0,": "every tau, hidden, merged a round late (keep)",
}
WIRES = ("float32", "int4", "int8")
PAPER = ("co2:beta=0,wire=float32", "co2:beta=0.5,wire=float32")  # merge outer, a round late, the elementwise gap
MOMENTUM = f"{KEEP}0.3,delay=1,wire=int4"
FRESH, LATE = f"{KEEP}0,delay=1,wire=", f"{KEEP}0,wire="
MOMENTA = {beta: f"{KEEP}{beta},delay=1,wire=int4" for beta in ("0", "0.3", "0.5")}
MANY: dict[str, Any] = {"tasks": ("digits",), "workers": (4, 16, 64), "batch": 2, "tau": 24}  # of their search
SHARED = ("steps", "seeds", "rows")  # options that every search takes
Losses = dict[int, float | None]  # seed -> held-out loss, None where the run diverged
STEPS = {  # what changes -> from which method to which
    "local steps, without compression or hiding": ("ddp:wire=float32", "local:wire=float32"),
    "compression of blocking means to int8": ("local:wire=float32", "local:wire=int8"),
    "compression of blocking means to int4": ("local:wire=float32", "local:wire=int4"),
    "compression of gradients to int4 (ddp)": ("ddp:wire=float32", "ddp:wire=int4"),
    "hiding for one step, in float32": ("local:wire=float32", FRESH + "float32"),
    "hiding for one step, over int4": ("local:wire=int4", FRESH + "int4"),
    "both: int4 and hiding for one step": ("local:wire=float32", FRESH + "int4"),
    "hiding for a whole round, in float32": ("local:wire=float32", LATE + "float32"),
    "hiding for a whole round, over int4": ("local:wire=int4", LATE + "int4"),
    "merge rule, a round late: keep in place of outer with the gap": (PAPER[0], LATE + "float32"),
    "outer momentum 0.5 of the paper's rule": PAPER,
    "outer momentum 0.3, keep, int4, after one step": (FRESH + "int4", MOMENTUM),
}


@dataclass(frozen=True)
class Controls:
    """What to train."""

    tasks: tuple[str, ...] = tuple(FACTORS)
    taus: tuple[int, ...] = (24, 6)
    """Local steps of a round."""
    wires: tuple[str, ...] = WIRES
    steps: int = 480
    """Local steps of every worker, of which there are four."""
    seeds: tuple[int, ...] = (0, 1, 2)
    rows: Path = Path("results/controls.jsonl")
    report: bool = False
    """Make the tables from the rows that are there; run nothing."""

    def check(self) -> None:
        require(self, once="tasks taus wires seeds", positive="taus", ones="steps", tasks=FACTORS, wires=WIRES)
        for o in self.searches():
            o.check()

    def searches(self) -> list[Search]:
        """One for each task and tau, then that of the momenta."""
        grid = [f"{start}wire={wire}" for wire in self.wires for start in WHEN]
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name in SHARED}
        two_axes = [
            Search(tasks=(task,), methods=(*grid, *PAPER, MOMENTUM), tau=tau, lr_factors=FACTORS[task], **given)
            for tau in self.taus
            for task in self.tasks
        ]
        return [*two_axes, Search(methods=(*MOMENTA.values(),), lr_factors=FACTORS["digits"], **MANY, **given)]


# -- the tables -------------------------------------------------------------------------------------------------


class Found:
    """What the file of rows has of a search. runs: (workers, method) -> the runs on the test split with the settings
    that the tuning chose, by seed."""

    def __init__(self, rows: Rows, o: Search):
        self.o, self.runs = o, dict[tuple[int, str], dict[int, dict[str, Any]]]()
        for (group, tuning, asked), choice in rows.choices.items():
            if group.batch == MANY["batch"] != o.batch:  # the momenta's; the others take the task's own
                continue
            batch = o.batch or group.batch
            if (group, tuning) == (Group(o.tasks[0], group.workers, batch, o.steps, o.tau, o.shards), o.tuning):
                runs = test_runs(rows, choice)
                self.runs[group.workers, asked] = {run["seed"]: run for run in runs if run["seed"] in o.seeds}

    def losses(self, method: str, workers: int = 4) -> Losses:
        return {seed: run["loss"] for seed, run in self.runs.get((workers, method), {}).items()}

    def cell(self, method: str, workers: int = 4) -> str:
        return report.of_seeds(list(self.losses(method, workers).values()), ".4f", len(self.o.seeds))


def markdown(rows: Rows, searches: list[Search]) -> str:
    """A table of the two axes for each task and tau; what each step between two methods changes; the momenta."""
    *grid, momenta = (Found(rows, o) for o in searches)
    parts = [*map(section, grid), changes(grid), of_momenta(momenta), report.bullets(notes([*grid, momenta]))]
    return "\n\n".join(parts) + "\n"


def section(found: Found) -> str:
    lines = [(words, *(found.cell(f"{start}wire={wire}") for wire in WIRES)) for start, words in WHEN.items()]
    lines += [
        ("a round late, the paper's rule, outer momentum 0", found.cell(PAPER[0]), "", ""),
        ("the same, outer momentum 0.5", found.cell(PAPER[1]), "", ""),
        ("merged after a step (keep), outer momentum 0.3", "", found.cell(MOMENTUM), ""),
    ]
    return f"### {found.o.tasks[0]}, tau {found.o.tau}\n\n{report.table(('means', *WIRES), lines)}"


def changes(grid: list[Found]) -> str:
    """A line for each of STEPS, a column for each task and tau."""
    titles = ["what changes", *(f"{found.o.tasks[0]}, tau {found.o.tau}" for found in grid)]
    lines = [(what, *(change(*map(found.losses, pair)) for found in grid)) for what, pair in STEPS.items()]
    return f"### What each step changes\n\n{report.table(titles, lines)}"


def change(before: Losses, after: Losses) -> str:
    """How much greater the loss is, in percent, over the seeds that both have."""
    pairs = [(loss, after[seed]) for seed, loss in before.items() if seed in after]
    ratios = [100 * (b / a - 1) for a, b in pairs if a is not None and b is not None]
    if not ratios:
        return "diverged" if pairs else "not run"
    sd = statistics.stdev(ratios) if len(ratios) > 1 else None
    return f"{report.plus_minus(statistics.fmean(ratios), sd, 'z.1f')} %"


def of_momenta(found: Found) -> str:
    workers = found.o.workers
    lines = [(beta, *(found.cell(method, n) for n in workers)) for beta, method in MOMENTA.items()]
    table = report.table(("outer momentum", *(f"{n} workers" for n in workers)), lines)
    title = f"{found.o.tasks[0]}, tau {found.o.tau}, {found.o.batch} samples a step, keep over int4 after a step"
    return f"### The outer momentum: {title}\n\n{table}"


def notes(found: list[Found]) -> list[str]:
    o = found[0].o
    tasks = dict.fromkeys(f.o.tasks[0] for f in found)
    commits = {run["commit"] or "unknown" for f in found for runs in f.runs.values() for run in runs.values()}
    return [
        f"Held-out loss on the test split after {o.steps} steps of each worker, of which there are 4 where no number "
        f"is said: mean ± standard deviation over seeds {', '.join(map(str, o.seeds))}. Narrow formats have error "
        "feedback.",
        "What each step changes: how much greater the loss is, mean ± standard deviation of the seeds' own changes.",
        *(f"{task}: {about(task)}; each method tuned over {factors(task)} times the learning rate." for task in tasks),
        "All workers in one process, in float32; no time is measured. Hidden: local steps run while a mean is on its "
        "way. How long a link takes for it is left out, so that the columns differ in rounding alone.",
        f"Command: `python -m bench.search.controls`; tuning seed {TUNING_SEED}; commits of the runs: "
        f"{', '.join(sorted(commits)) or 'none'}.",
        *([f"{report.UNRECORDED}."] if any(commit.endswith("-dirty") for commit in commits) else []),
    ]


def factors(task: str) -> str:
    return ", ".join(f"{factor:g}" for factor in FACTORS[task])


def main() -> None:
    o = read_options(Controls, "bench.search.controls")
    torch.set_num_threads(1)
    conclude(o, searches := o.searches(), lambda rows: markdown(rows, searches))


if __name__ == "__main__":
    launch(main)
