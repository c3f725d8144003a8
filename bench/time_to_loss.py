"""Seconds of training to a fixed held-out loss, of every method on the emulated cluster.

python -m bench.time_to_loss [--tasks vision language cifar10] [--rates 40 200] [--seeds 0 1 2] [--methods ...]

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from bench import loss_table, report, trainings
from bench.cluster import Cluster, run_ranks
from bench.loss_table import METHODS, USUAL, Outcome, follow, options_of
from bench.report import Asked, require, require_company
from bench.trainings import Metrics
from training.script import launch

LOG_EVERY = 5  # steps; ddp's waiting is logged at these, a local method's at every round
Planned = tuple[int, float, str, str]  # seed, rate, task, method of a run


@dataclass(frozen=True)
class Task:
    """A recipe, what is changed in it for every method alike, and where it logs the held-out loss."""

    recipe: str
    loss: str
    """The key of the held-out loss in metrics.jsonl."""
    settings: tuple[str, ...]
    package: str
    """Whose train.py it is."""
    held_out: int = 1
    """Every so many-th image of the test set is evaluated."""


TASKS = {
    # an epoch, the time between two evaluations, is 22 steps
    "vision": Task("digits_small", "test_loss", ("--eval_every", "1"), "vision"),
    # 12 steps are two rounds of the recipe's tau: all methods are evaluated at the same steps; 240 in all, for time
    "language": Task(
        "gpt2_pydoc_small", "val_loss", ("--epoch_steps", "12", "--epochs", "20", "--eval_every", "1"), "language"
    ),
    # every 20 steps; the learning rate is the recipe's: of 0.0125 to 0.4 the best for ddp, seed 100
    "cifar10": Task(
        "cifar10_small",
        "test_loss",
        ("--batch_size", "64", "--optim.warmup_steps", "20", "--eval_every", "0.0256"),
        "vision",
        held_out=5,
    ),
}


@dataclass(frozen=True)
class TimeToLoss(Asked):
    """What to train, over which links, and to which loss."""

    tasks: tuple[str, ...] = ("vision", "language")
    """vision, language, and cifar10, which needs CO2_DATA."""
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
    cifar10_loss: float = 1.6
    """The target: test cross-entropy of cifar10_small, over a fifth of the test set."""
    limit_seconds: float = 60.0
    """Of training, after which a run is stopped."""
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces."""

    def check(self) -> None:
        require(self, once="tasks rates seeds methods", tasks=TASKS, methods=METHODS)
        require(self, positive="rates workers vision_loss language_loss cifar10_loss limit_seconds")
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

    def told(self, task: str) -> dict[str, Any]:
        """A task in the JSON."""
        command = shlex.join(self.command(self.rates[0], task, "METHOD", 0, "FOLDER"))
        return {
            "package": TASKS[task].package,
            "held_out": TASKS[task].held_out,
            "loss": TASKS[task].loss,
            "target": self.target(task),
            "command": command,
        }


def run_task(module: ModuleType, argv: list[str], log: Path, held_out: int) -> None:
    """One rank: the train script's main, evaluated on every so many-th image."""
    if held_out > 1:
        load: Any = module.data.load
        module.data.load = lambda name: thinned(*load(name), held_out)
    trainings.run_script(module, argv, log)


def thinned(train_set: Any, test_set: Any, every: int) -> tuple[Any, Any]:
    """The sets, the second with every so many-th of its images alone."""
    return train_set, replace(test_set, images=test_set.images[::every], labels=test_set.labels[::every])


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
        job = module, argv, folder / "log.txt", TASKS[task].held_out
        run_ranks(run_task, cluster, 1, o.workers, *job, timeout=patience, until=known)
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


def run_all(o: TimeToLoss, session: report.Session) -> None:
    """Trains everything."""
    session.result |= trainings.of_link(o.throttle) | {"tasks": {task: o.told(task) for task in o.tasks}}
    plan, modules = o.plan(), {task: importlib.import_module(f"{TASKS[task].package}.train") for task in o.tasks}

    started = time.monotonic()

    def runs(cluster: Cluster | None) -> Iterator[dict[str, Any]]:
        for done, (seed, rate, task, method) in enumerate(plan, start=1):
            if cluster:
                cluster.shape(rate, session.result["verified_mbit"])
            folder = session.folder / "runs" / f"{task}-{rate:g}mbit-{method}-seed{seed}"
            folder.mkdir(parents=True)
            began = time.monotonic()
            outcome = train(o, cluster, modules[task], (seed, rate, task, method), folder)
            left = (time.monotonic() - started) / done * (len(plan) - done) / 60
            what = f"{task} {rate:g} Mbit/s {method} seed {seed}: {outcome}"
            print(f"{done}/{len(plan)} {what} | left: about {left:.0f} min", flush=True)
            row = {"task": task, "rate_mbit": rate, "method": method, "seed": seed, **asdict(outcome)}
            yield row | {"wall_seconds": time.monotonic() - began}

    with trainings.network(o.throttle, o.workers, o.rates[0]) as cluster:
        session.take("runs", runs(cluster), None)


def main() -> None:
    report.run(TimeToLoss, loss_table.NAME, run_all, loss_table.markdown, forks=lambda o: not o.throttle)


if __name__ == "__main__":
    launch(main)
