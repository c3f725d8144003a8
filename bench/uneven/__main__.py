"""SSP, ddp, local and CO2 where workers are unlike: samples/s, and the loss at equal seconds.

python -m bench.uneven [--task digits] [--workers 4] [--tau 24] [--seconds 480] [--allreduce 1 5]
python -m bench.uneven --report

Seconds are simulated, in units of an undisturbed worker's local step: bench/simulator/events.py says when each worker
begins which step and when what it sends is there; the training follows that order, all workers in one process. So the
same command gives the same figures on any machine, busy or not. Learning rates are tuned alike: each way's on the
tuning seed and split, for each link, where all workers are alike. Each run is a line of --rows, and one that is there
is not run again.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.report import read_options, require, require_company
from bench.search.__main__ import parse
from bench.search.engine import TASKS, Plan, load_task
from bench.search.methods import Settings
from bench.search.rows import Lines
from bench.simulator.network import Cluster, allreduce_seconds, fastest
from bench.trainings import TUNING_SEED
from bench.uneven.train import COUNTED, SCENARIOS, Way, run, ways, work_of
from core.errors import UserError
from training.config import commit
from training.script import launch

ALIKE = "even"
CROWDS = (1, 2, 4, 8, 16, 64, 1000)
STALLED = {  # what the page says of stalls: in words -> how the names of the ways begin
    "the recommended merge (keep)": "co2, keep, ",
    "the paper's rule": "co2, tau ",
    "SSP with s = 8 and long clocks": "ssp, s = 8, clocks of ",
}
CPU_SSP = Settings("ddp", (("wire", "float32"),))  # stands in Plan.settings where a way has none


@dataclass(frozen=True)
class Uneven:
    """What to train, on which links, among which workers."""

    task: str = "digits"
    """One of bench.search's tasks."""
    workers: int = 4
    tau: int = 24
    """Local steps of a round, and of SSP's long clocks."""
    seconds: float = 480.0
    """Of training, in local steps of an undisturbed worker."""
    allreduce: tuple[float, ...] = (1.0, 5.0)
    """How many local steps an all-reduce of the parameters takes."""
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    """Among even, half and stalls."""
    lr_factors: tuple[float, ...] = (1.0, 2.0, 0.5)
    """Of the task's learning rate, tried by each way."""
    seeds: tuple[int, ...] = (0, 1, 2)
    rows: Path = Path("results/uneven.jsonl")
    report: bool = False
    """Make the tables from the rows that are there; run nothing."""

    def check(self) -> None:
        require(self, once="allreduce scenarios lr_factors seeds", ones="tau", scenarios=SCENARIOS)
        require(self, positive="seconds allreduce lr_factors")
        require_company(self)
        if self.task not in TASKS:
            raise UserError(f"task: {self.task!r} does not exist; choose among {', '.join(TASKS)}")
        if TUNING_SEED in self.seeds:
            raise UserError(f"seeds={TUNING_SEED}: it is the tuning seed; report other seeds")
        for allreduce in self.allreduce:
            ways(self.tau, allreduce)


# -- the runs ---------------------------------------------------------------------------------------------------

Key = dict[str, Any]


class Rows(Lines):
    """The runs of a file, by what they depend on."""

    def __init__(self, path: Path):
        super().__init__(path, lambda row: bool(row["key"]))
        self.commit = commit()
        self.found = {json.dumps(row["key"], sort_keys=True): row for row in self.read}

    def get(self, key: Key) -> dict[str, Any] | None:
        return self.found.get(json.dumps(key, sort_keys=True))

    def add(self, key: Key, result: dict[str, Any]) -> dict[str, Any]:
        row = {"key": key, "commit": self.commit, "date": time.strftime("%Y-%m-%d %H:%M:%S")} | result
        self.append(row)
        self.found[json.dumps(key, sort_keys=True)] = row
        return row


def key_of(o: Uneven, allreduce: float, scenario: str, way: Way, factor: float, seed: int) -> Key:
    same = {"task": o.task, "workers": o.workers, "tau": o.tau, "seconds": o.seconds}
    return same | {"allreduce": allreduce, "scenario": scenario, "way": way.name, "factor": factor, "seed": seed}


def ensure(o: Uneven, rows: Rows, key: Key, way: Way) -> dict[str, Any] | None:
    """The row of a run, which is made now where there is none; None with --report."""
    if (found := rows.get(key)) is not None or o.report:
        return found
    task, began = load_task(o.task), time.monotonic()
    clock = way.run(work_of(key["scenario"], o.workers, key["allreduce"]), o.seconds, key["seed"])
    settings = parse(way.settings)[0] if way.settings else CPU_SSP
    split = "tuning" if key["seed"] == TUNING_SEED else "test"
    steps = clock.rounds * way.tau
    plan = Plan(
        *(o.task, settings, task.inner.lr * key["factor"], o.workers, task.batch, steps, way.tau),
        *("iid", key["seed"], split),
    )
    loss = run(task, plan, way, clock, o.seconds)
    row = rows.add(key, {"loss": loss, "steps": clock.samples / o.workers})
    told = "diverged" if loss is None else f"{loss:.4f}"
    print(f"{key}: loss {told} ({time.monotonic() - began:.1f} s)", flush=True)
    return row


def chosen(o: Uneven, rows: Rows, allreduce: float, way: Way) -> float | None:
    """The learning rate's factor with the least loss where all workers are alike; None where a run is missing. A
    single factor is not tuned."""
    if len(o.lr_factors) == 1:
        return o.lr_factors[0]
    losses = {}
    for factor in o.lr_factors:
        row = ensure(o, rows, key_of(o, allreduce, ALIKE, way, factor, TUNING_SEED), way)
        if row is None:
            return None
        losses[factor] = math.inf if row["loss"] is None else row["loss"]
    return min(losses, key=lambda factor: losses[factor])


# -- the page ---------------------------------------------------------------------------------------------------


def section(o: Uneven, rows: Rows, allreduce: float) -> str:
    """A link's table: for each way its speed and its loss in each scenario."""
    lines = []
    for way in ways(o.tau, allreduce):
        factor = chosen(o, rows, allreduce, way)
        cells: list[str] = [way.name, "" if factor is None else f"{factor:g}"]
        for scenario in o.scenarios:
            keys = [key_of(o, allreduce, scenario, way, factor or 0.0, seed) for seed in o.seeds]
            runs = [None if factor is None else ensure(o, rows, key, way) for key in keys]
            losses = [row["loss"] for row in runs if row is not None]
            steps = [row["steps"] for row in runs if row is not None]
            cells.append(f"{way.speed(work_of(scenario, o.workers, allreduce)):.0%}")
            cells.append(f"{statistics.fmean(steps):.0f}" if steps else "")
            cells.append(report.of_seeds(losses, ".3f", len(runs)))
        lines.append(cells)
    titles = [part for name in o.scenarios for part in (f"{name}: speed", "steps", "loss")]
    title = f"## An all-reduce takes {allreduce:g} local steps"
    return f"{title}\n\n{report.table(['way', 'lr', *titles], lines)}"


def merits(o: Uneven, allreduce: float) -> str:
    """Who is faster where steps stall, of few workers and of the most, of which the all-reduce takes longer."""
    told = []
    for words, begins in STALLED.items():
        spans = []
        for n in (o.workers, CROWDS[-1]):
            takes = allreduce * _ring(n) / _ring(o.workers)
            work = work_of("stalls", n, takes)
            speeds = [100 * way.speed(work) for way in ways(o.tau, takes) if way.name.startswith(begins)]
            spans.append(" to ".join(dict.fromkeys((f"{min(speeds):.0f}", f"{max(speeds):.0f}"))))
        told.append(f"{words} {' and '.join(f'{span} %' for span in spans)}")
    return f"Speed where steps stall, with {o.workers} workers and, predicted, with {CROWDS[-1]:,}: {', '.join(told)}."


def crowds(o: Uneven, scenario: str, allreduce: float) -> str:
    """The speed alone, for more workers; the all-reduce grows as the fastest algorithm has it."""
    takes = {n: _ring(n) for n in CROWDS}
    names = [way.name for way in ways(o.tau, allreduce)]
    columns = []
    for n in CROWDS:
        work = work_of(scenario, n, allreduce * takes[n] / _ring(o.workers))
        columns.append([f"{way.speed(work):.0%}" for way in ways(o.tau, work.allreduce)])
    return report.table(["way", *(f"{n:,}" for n in CROWDS)], zip(names, *columns, strict=True))


def _ring(workers: int) -> float:
    """Of an all-reduce by its bytes alone; a lone worker has none."""
    there = Cluster(workers)
    return allreduce_seconds(there, 1.0, fastest(there, 1.0))


def markdown(o: Uneven, rows: Rows) -> str:
    """The page."""
    sections = [section(o, rows, allreduce) for allreduce in o.allreduce]
    commits = ", ".join(sorted({row["commit"] or "unknown" for row in rows.found.values()})) or "none"
    about = ", ".join(f"{name}: {scenario.about}" for name, scenario in SCENARIOS.items() if name in o.scenarios)
    factors, seeds = (", ".join(f"{value:g}" for value in values) for values in (o.lr_factors, o.seeds))
    given = [word for word in sys.argv[1:] if word != "--report"]
    notes = [
        f"Scenarios: {about}. Everywhere a step's standard deviation is 5 % of its mean.",
        f"speed: local steps of all workers a second, of as many undisturbed workers that never wait; simulated over "
        f"{COUNTED} rounds or more, where slack of a few clocks no longer counts.",
        "steps: a worker's, on average, of the runs that have the loss.",
        f"loss: on the test split after the time of {o.seconds:g} local steps of an undisturbed worker, of the model "
        f"that all workers then share; mean ± standard deviation over seeds {seeds}. Whole rounds and clocks that end "
        "in time count, and CO2's last all-reduce is charged. The learning rate falls by a cosine to the end.",
        f"lr: of the task's, the best of {factors} on tuning seed {TUNING_SEED} and the tuning split where all workers "
        "are alike."
        if len(o.lr_factors) > 1
        else f"lr: {factors} times the task's; not tuned.",
        f"Task: {load_task(o.task).about}. Workers: {o.workers}. In float32; no compression anywhere.",
        "ssp: stale synchronous parallel (Ho et al., NeurIPS 2013), a parameter server shared out over the workers; s: "
        "how many clocks a worker may be ahead of the slowest. An update is divided by the number of workers.",
        "keep: merge keep, no gap, outer momentum 0, merged after as many local steps as the all-reduce takes. co2 "
        "else: the paper's rule with outer momentum 0.",
        *([merits(o, max(o.allreduce))] if "stalls" in o.scenarios else []),
        f"Command: `{shlex.join(['python', '-m', 'bench.uneven', *given])}`. Commits: {commits}.",
    ]
    crowd = [f"### {SCENARIOS[name].about}\n\n{crowds(o, name, max(o.allreduce))}" for name in o.scenarios]
    parts = [
        f"# Workers at unlike speeds: {o.task}",
        "[All results](index.md). Loss and speed at equal seconds; the seconds are simulated.",
        report.bullets(notes),
        *sections,
        "## More workers, speed alone (predicted by the model, not run)",
        f"- Columns: workers. An all-reduce of {o.workers} takes {max(o.allreduce):g} local steps, and grows by a "
        "ring's bytes. Of the workers, one is slow, or all stall.",
        *crowd,
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    o = read_options(Uneven, "bench.uneven")
    torch.set_num_threads(1)  # many small operations: more threads cost more than they bring
    rows = Rows(o.rows)
    with report.stoppable(f"the runs that ended are in {o.rows}"):
        text = markdown(o, rows)
    report.write(o.rows.with_suffix(".md"), text)
    print("\n" + text)


if __name__ == "__main__":
    launch(main)
