"""Seconds of training to a fixed held-out loss, of every method on the emulated cluster.

python -m bench.time_to_loss [--tasks vision language] [--rates 40 200] [--seeds 0 1 2] [--methods ...] [--throttle]

Each run is a recipe's own train script on four workers, a node each; the ranks are forked from this process, which has
imported the script once. A run is followed through its metrics and killed at the first evaluation at or below the
target, or when it has trained for --limit_seconds. Writes time_to_loss.json and time_to_loss.md (bench/loss_table.py).
"""

from __future__ import annotations

import importlib
import itertools
import random
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import loss_table, report, trainings
from bench.cluster import Cluster, prepare_to_fork, run_ranks
from bench.loss_table import METHODS, USUAL, Outcome, follow, options_of
from bench.report import read_options, require_company, require_each_once, require_known, require_positive
from bench.trainings import Metrics
from training.script import launch

LOG_EVERY = 5  # steps; ddp's waiting is logged at these, a local method's at every round
Planned = tuple[int, float, str, str]  # seed, rate, task, method of a run
START = 4.0  # seconds that a run takes beside its training: guessed, for the estimate only


@dataclass(frozen=True)
class Task:
    """A recipe, what is changed in it for every method alike, and where it logs the held-out loss."""

    recipe: str
    loss: str
    """The key of the held-out loss in metrics.jsonl."""
    settings: tuple[str, ...]


TASKS = {
    # an epoch, the time between two evaluations, is 22 steps
    "vision": Task("digits_small", "test_loss", ("--eval_every", "1")),
    # 12 steps are two rounds of the recipe's tau: all methods are evaluated at the same steps; 240 in all, for time
    "language": Task("gpt2_pydoc_small", "val_loss", ("--epoch_steps", "12", "--epochs", "20", "--eval_every", "1")),
}


@dataclass(frozen=True)
class TimeToLoss:
    """What to train, over which links, and to which loss."""

    tasks: tuple[str, ...] = tuple(TASKS)
    rates: tuple[float, ...] = (40.0, 200.0)
    """Link rates, Mbit/s."""
    seeds: tuple[int, ...] = (0, 1, 2)
    methods: tuple[str, ...] = USUAL
    """NAME or, over a narrow format, NAME:wire=int4 or int8; those over int8 where they are named."""
    workers: int = 4
    """Workers, each on a node of its own."""
    vision_loss: float = 0.25
    """The target: test cross-entropy of digits_small."""
    language_loss: float = 5.7
    """The target: held-out nats per token of gpt2_pydoc_small."""
    limit_seconds: float = 60.0
    """Of training, after which a run is stopped."""
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces."""
    out: Path | None = None
    """Where to write; runs/time_to_loss-DATE by default."""

    def check(self) -> None:
        """A UserError names the first option that cannot be."""
        require_each_once(self, "tasks", "rates", "seeds", "methods")
        require_known(self, "tasks", TASKS)
        require_known(self, "methods", METHODS)
        require_positive(self, "rates", "workers", "vision_loss", "language_loss", "limit_seconds")
        require_company(self)

    def target(self, task: str) -> float:
        return getattr(self, f"{task}_loss")

    def plan(self) -> list[Planned]:
        """Every run in order: shuffled within seed and rate, always alike.

        So whatever else the machine does in the meantime falls on all methods alike.
        """
        runs = []
        for seed, rate in itertools.product(self.seeds, self.rates):
            group = [(seed, rate, task, method) for task in self.tasks for method in self.methods]
            random.Random(f"{seed} {rate}").shuffle(group)
            runs += group
        return runs

    def command(self, rate: float, task: str, method: str, seed: int, out: Path | str) -> list[str]:
        """The train script's command line, without the program."""
        values = {"seed": seed, "out": out, "device": "cpu", "checkpoint_every": 0}
        values |= {"log_every": LOG_EVERY, "timeout": 300} | ({"link_mbit": rate} if self.throttle else {})
        return [TASKS[task].recipe, *TASKS[task].settings, *options_of(method), *trainings.flags(values)]


# -- one run ----------------------------------------------------------------------------------------------------


def train(o: TimeToLoss, cluster: Cluster | None, module: ModuleType, run: Planned, folder: Path) -> Outcome:
    """One run until its outcome is known."""
    seed, rate, task, method = run
    metrics = Metrics(folder)
    goal = (TASKS[task].loss, o.target(task), o.limit_seconds)
    argv = o.command(rate, task, method, seed, folder)
    patience = 2 * o.limit_seconds + 120  # wall-clock, with start and evaluations
    try:
        known = lambda: follow(metrics.read(), *goal) is not None  # noqa: E731
        job = module, argv, folder / "log.txt"
        run_ranks(trainings.run_script, cluster, 1, o.workers, *job, timeout=patience, until=known)
        ended, reason = "not reached", ""
    except TimeoutError:
        ended, reason = "out of time", ""
    except RuntimeError as error:  # one of the ranks has failed
        lines = str(error).strip().splitlines()
        ended, reason = "failed", f"{lines[0]} {lines[-1]}"
    outcome = follow(metrics.read(), *goal, ended=ended, reason=reason)
    assert outcome is not None
    return outcome


# -- all of them ------------------------------------------------------------------------------------------------


def run_all(o: TimeToLoss, folder: Path) -> None:
    """Trains everything; both files are written after each run, so that an interruption costs no more than one."""
    result, plan = header(o), o.plan()
    loss_table.write(folder, result)
    modules = {task: importlib.import_module(f"{task}.train") for task in o.tasks}
    started = time.monotonic()
    print(f"{len(plan)} runs, at most about {clock(len(plan) * (START + 1.2 * o.limit_seconds))}", flush=True)
    with trainings.network(o.throttle, o.workers, o.rates[0]) as cluster:
        for done, run in enumerate(plan, start=1):
            seed, rate, task, method = run
            if cluster:
                cluster.shape(rate, result["verified_mbit"])
            run_folder = folder / "runs" / f"{task}-{rate:g}mbit-{method}-seed{seed}"
            run_folder.mkdir(parents=True)
            began = time.monotonic()
            outcome = train(o, cluster, modules[task], run, run_folder)
            row = {"task": task, "rate_mbit": rate, "method": method, "seed": seed, **asdict(outcome)}
            result["runs"].append(row | {"wall_seconds": time.monotonic() - began})
            loss_table.write(folder, result)
            left = clock((time.monotonic() - started) / done * (len(plan) - done))
            what = f"{task} {rate:g} Mbit/s {method} seed {seed}: {outcome}"
            print(f"{done}/{len(plan)} {what} | left: about {left}", flush=True)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def header(o: TimeToLoss) -> dict[str, Any]:
    """time_to_loss.json without its runs."""
    return report.header("bench.time_to_loss", o) | {
        "link": "throttled in software" if o.throttle else "namespaces + tbf",
        "verified_mbit": {},  # rate -> what a transfer between two nodes measured
        "tasks": {
            task: {
                "loss": TASKS[task].loss,
                "target": o.target(task),
                "command": shlex.join(o.command(o.rates[0], task, "METHOD", 0, "FOLDER")),
            }
            for task in o.tasks
        },
        "runs": [],
    }


def main() -> None:
    o = read_options(TimeToLoss, "bench.time_to_loss")
    prepare_to_fork(namespaces=not o.throttle)
    folder = report.new_folder(loss_table.NAME, o.out)
    with report.stoppable(f"the runs that ended are in {folder / loss_table.NAME}.json"):
        run_all(o, folder)
    print("\n" + (folder / f"{loss_table.NAME}.md").read_text())


if __name__ == "__main__":
    launch(main)
