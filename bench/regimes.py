"""What hiding is worth: measured losses and modeled seconds, by the ratio of an all-reduce to a local step.

    python -m bench.regimes [--tasks bytes] [--momentum] [--rows results/regimes.jsonl]

r is the seconds of a float32 all-reduce over the seconds of a local step. A run is a method with its tau and its delay,
over int4. Its loss does not depend on the link, so it counts at every r. The seconds of a step follow from r: see
`Run.step_seconds`. A loss counts as steps by the power law of Local-SGD, from runs of two lengths: see `seconds`.

The command trains what has no row yet: all runs on the tuning seed, then the best for each r on the reported seeds. It
prints a table. No time is measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.loss.__main__ import Plan, Rows, load_task, parse, run
from bench.report import TUNING_SEED, read_options, require, stoppable
from core.compression.formats import BLOCK, BLOCK_BYTES
from core.errors import UserError
from training.script import launch

WORKERS, STEPS, SHORT = 4, 480, 240
INT4 = BLOCK_BYTES["int4"] / (4 * BLOCK)  # of float32's bytes, with each block's scale
BACKWARD = 2 / 3  # of a local step: DDP hides its all-reduce under the backward pass
RATIOS = (10.0, 30.0, 100.0, 3.0, 1.0)  # in the order in which their runs are trained
RATES = {"bytes": 8e-3, "cifar": 0.025, "gpt2": 4e-3}  # what the tuning of results/search.jsonl chose most often
RESULTS = Path("results")


@dataclass(frozen=True)
class Run:
    """A method with its settings.

    Attributes:
        asked: The method, as on the command line of bench.loss.
        tau: Local steps per round.
        delay: Local steps from the start of an all-reduce to its merge. A worker waits there if it has not arrived. 0
            is blocking.
    """

    asked: str
    tau: int
    delay: int = 0

    def step_seconds(self, r: float) -> float:
        """Modeled seconds of a step, in local steps."""
        under = BACKWARD if self.asked.startswith("ddp") else self.delay
        return 1 + max(0.0, INT4 * r - under) / self.tau

    def plan(self, task: str, seed: int, steps: int = STEPS) -> Plan:
        split = "tuning" if seed == TUNING_SEED else "test"
        of, batch = parse(self.asked)[0], load_task(task).batch
        return Plan(task, of, RATES[task], WORKERS, batch, steps, self.tau, "iid", seed, split)


def hidden(tau: int, delay: int, beta: float = 0.0) -> Run:
    return Run(f"co2:merge=keep_local,gap=none,beta={beta:g},delay={delay},compression=int4", tau, delay)


LOCAL, DILOCO = "local:compression=int4", "diloco:beta=0.5,compression=int4"
REFERENCE = Run("local", 24)  # gives the target and the power law
BLOCKING = (Run("ddp:compression=int4", 1), *(Run(LOCAL, tau) for tau in (6, 24, 12, 48, 96)))
HIDDEN = tuple(
    hidden(*places)
    for places in ((6, 1), (24, 1), (6, 2), (12, 4), (12, 2), (24, 4), (48, 12), (2, 2), (2, 1), (24, 12), (96, 12))
)
MOMENTUM = (
    *(Run(DILOCO, tau) for tau in (24, 12, 48, 6)),
    *(hidden(*places, 0.3) for places in ((6, 1), (24, 1), (12, 4), (6, 2), (12, 2), (24, 4), (48, 12))),
)


@dataclass(frozen=True)
class Options:
    """Which tasks to map, and on which seeds to report."""

    tasks: tuple[str, ...] = ("bytes",)
    """bytes, cifar and gpt2, with data in CO2_DATA."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to report."""
    momentum: bool = False
    """Also try outer momentum, for blocking and hidden methods."""
    eval_every: int = 48
    """Steps between two points of a trajectory. 0 stores none."""
    rows: Path = RESULTS / "regimes.jsonl"

    def check(self) -> None:
        require(self, once="tasks seeds", tasks=RATES)
        if TUNING_SEED in self.seeds:
            raise UserError(f"seeds={TUNING_SEED}: it is the tuning seed; report other seeds")


Loss = Callable[[Run, int, int], float | None]  # (run, seed, steps) -> its loss, None if it is not known


def seconds(loss: Loss, found: Run, r: float, seed: int) -> float:
    """Modeled seconds, in local steps, until a run has the loss that REFERENCE has after STEPS.

    A run whose loss is x times as great needs x^(1/p) times as many steps, p being the power with which REFERENCE's
    loss falls from SHORT to STEPS.
    """
    short, target, own = loss(REFERENCE, seed, SHORT), loss(REFERENCE, seed, STEPS), loss(found, seed, STEPS)
    if own is None or short is None or target is None:
        return math.inf
    power = math.log(short / target) / math.log(STEPS / SHORT)
    return STEPS * (own / target) ** (1 / power) * found.step_seconds(r)


def best(loss: Loss, runs: Sequence[Run], r: float) -> Run:
    """The run with the fewest seconds on the tuning seed."""
    return min(runs, key=lambda found: seconds(loss, found, r, TUNING_SEED))


def search(o: Options, rows: Sequence[Rows]) -> None:
    """Trains everything that has no row. New rows go to the first of `rows`."""
    for task in o.tasks:

        def loss(found: Run, seed: int, steps: int = STEPS, task: str = task) -> float | None:
            plan = found.plan(task, seed, steps)
            row = next((row for some in rows if (row := some.find(plan))), None)
            if row is None:
                row = rows[0].add_run(plan, run(load_task(task), plan, eval_every=o.eval_every))
                what = f"{task}, {found}, {steps} steps, seed {seed}: loss {row['loss']} ({row['seconds']:.0f} s)"
                print(what, flush=True)
            return row["loss"]

        kinds = BLOCKING + (MOMENTUM[:4] if o.momentum else ()), HIDDEN + (MOMENTUM[4:] if o.momentum else ())
        for r in RATIOS:
            chosen = [best(loss, runs, r) for runs in kinds]
            print(f"{task}, r {r:g}: {chosen}", flush=True)
            for seed in o.seeds:
                for found in chosen:
                    seconds(loss, found, r, seed)


def main() -> None:
    o = read_options(Options, "bench.regimes")
    torch.set_num_threads(1)
    older = [Rows(RESULTS / name) for name in ("controls.jsonl", "search.jsonl", "large.jsonl")]
    with stoppable(f"the runs that ended are in {o.rows}"):
        search(o, [Rows(o.rows), *older])


if __name__ == "__main__":
    launch(main)
