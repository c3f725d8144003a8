"""Seconds of training to a fixed held-out loss, of every method on the emulated cluster.

python -m bench.time_to_loss [--tasks vision language] [--rates 40 200] [--seeds 0 1 2] [--methods ...] [--throttle]

Each run is a recipe's own train script on four workers, a node each; the ranks are forked from this process, which has
imported the script once. A run is followed through its metrics and killed at the first evaluation at or below the
target, or when it has trained for --limit_seconds. Writes time_to_loss.json and time_to_loss.md (bench/loss_table.py).
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # noqa: F401 (the first optimiser imports it: once here rather than in every forked worker)
import torch.distributed as dist
import tyro

from bench import loss_table, report
from bench.cluster import Cluster, require_namespaces, run_ranks
from bench.loss_table import METHODS, OF_CO2, Outcome, follow
from bench.options import require_each_once, require_no_crowd, require_positive
from bench.scaling import shape
from core.errors import UserError
from training.script import launch

POLL = 0.3  # seconds between two looks at a run's metrics
LOG_EVERY = 5  # steps; ddp's waiting is logged at these, a local method's at every round
Planned = tuple[int, float, str, str]  # seed, rate, task, method of a run
START = 4.0  # seconds that a run takes beside its training: guessed, for the first estimate only


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
    methods: tuple[str, ...] = METHODS
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
        for name, known in (("tasks", TASKS), ("methods", METHODS)):
            for value in getattr(self, name):
                if value not in known:
                    raise UserError(f"{name}: {value!r} does not exist; choose among {', '.join(known)}")
        require_positive(self, "rates", "workers", "vision_loss", "language_loss", "limit_seconds")
        require_no_crowd(self)
        if self.workers < 2:
            raise UserError(f"workers={self.workers}: a lone worker has no link; give 2 or more")

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
        named = ("co2", OF_CO2[method]) if method in OF_CO2 else (method, ["--no_recommended"])
        values = {"method": named[0], "seed": seed, "out": out, "device": "cpu", "checkpoint_every": 0}
        values |= {"log_every": LOG_EVERY, "timeout": 300} | ({"link_mbit": rate} if self.throttle else {})
        options = [text for key, value in values.items() for text in (f"--{key}", str(value))]
        return [TASKS[task].recipe, *TASKS[task].settings, *named[1], *options]


# -- one run ----------------------------------------------------------------------------------------------------


def worker(module: ModuleType, argv: list[str], log: Path) -> None:
    """One rank, in a forked process of its own: the train script's main, its output in a file."""
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
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


class Metrics:
    """The rows of a metrics.jsonl that is still being written."""

    def __init__(self, path: Path):
        self._path = path
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


class Done(Exception):
    """The run in progress need not go on."""


@contextlib.contextmanager
def every(seconds: float, look: Callable[[], bool]) -> Iterator[None]:
    """Calls look() while the body runs, and leaves the body once it returns True.

    By an alarm signal: a thread would be in the way of forking, and children inherit no timer.
    """

    def alarm(*_: Any) -> None:
        if look():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Done

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        with contextlib.suppress(Done):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for process in multiprocessing.active_children():  # none, unless Done came while run_ranks was cleaning up
            process.kill()
            process.join()


def train(o: TimeToLoss, cluster: Cluster | None, module: ModuleType, run: Planned, folder: Path) -> Outcome:
    """One run until its outcome is known."""
    seed, rate, task, method = run
    metrics = Metrics(folder / "metrics.jsonl")
    goal = (TASKS[task].loss, o.target(task), o.limit_seconds)
    argv = o.command(rate, task, method, seed, folder)
    patience = 2 * o.limit_seconds + 120  # wall-clock, with start and evaluations
    try:
        with every(POLL, lambda: follow(metrics.read(), *goal) is not None):
            run_ranks(worker, cluster, 1, o.workers, module, argv, folder / "log.txt", timeout=patience)
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


class Progress:
    """A line a run on stdout, with the time left at the pace so far, and what it is at the most."""

    def __init__(self, limit: float, count: int):
        self._limit, self._count, self._done = limit, count, 0
        self._started = time.monotonic()
        print(f"{count} runs; about {_clock(count * (START + limit / 3))}, {self._most()}", flush=True)

    def _most(self) -> str:
        return f"at most about {_clock((self._count - self._done) * (START + 1.2 * self._limit))}"

    def report(self, run: Planned, outcome: Outcome) -> None:
        seed, rate, task, method = run
        self._done += 1
        left = (time.monotonic() - self._started) / self._done * (self._count - self._done)
        print(
            f"{self._done}/{self._count} {task} {rate:g} Mbit/s {method} seed {seed}: {outcome} | "
            f"left: about {_clock(left)}, {self._most()}",
            flush=True,
        )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def run_all(o: TimeToLoss, folder: Path) -> None:
    """Trains everything; both files are written after each run, so that an interruption costs no more than one."""
    result, plan = header(o), o.plan()
    loss_table.write(folder, result)
    modules = {task: importlib.import_module(f"{task}.train") for task in o.tasks}
    with contextlib.ExitStack() as stack:
        cluster = None if o.throttle else stack.enter_context(Cluster(o.workers, o.rates[0]))
        progress = Progress(o.limit_seconds, len(plan))
        for run in plan:
            seed, rate, task, method = run
            if cluster:
                shape(cluster, rate, result["verified_mbit"])
            run_folder = folder / "runs" / f"{task}-{rate:g}mbit-{method}-seed{seed}"
            run_folder.mkdir(parents=True)
            began = time.monotonic()
            outcome = train(o, cluster, modules[task], run, run_folder)
            row = {"task": task, "rate_mbit": rate, "method": method, "seed": seed, **asdict(outcome)}
            result["runs"].append(row | {"wall_seconds": time.monotonic() - began})
            loss_table.write(folder, result)
            progress.report(run, outcome)


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
    o = tyro.cli(TimeToLoss, prog="python -m bench.time_to_loss", use_underscores=True)
    o.check()
    if not o.throttle:
        require_namespaces()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)  # before any work: the ranks are forked, and threads do not survive that
    folder = report.new_folder(loss_table.NAME, o.out)
    try:
        run_all(o, folder)
    except KeyboardInterrupt:
        print(f"stopped; the runs that ended are in {folder / loss_table.NAME}.json", file=sys.stderr)
        sys.exit(130)
    print("\n" + (folder / "time_to_loss.md").read_text())


if __name__ == "__main__":
    launch(main)
