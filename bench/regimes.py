"""Seconds that hiding is worth: measured losses and modeled seconds, by the ratio of an all-reduce to a local step.

    python -m bench.regimes [--tasks bytes] [--fragments] [--codec 0.53] [--rows results/regimes.jsonl]

r is the seconds of a float32 all-reduce over the seconds of a local step. A run is a method with its tau, its delay and
its fragments, over int4. Its loss does not depend on the link, so it counts at every r. The seconds of a step follow
from r: see `Link.step_seconds`. A run has three lengths, each with its own schedule, and between two of them the loss
follows a power law of the steps. So its loss at any number of seconds is known. Only a run that waits needs shorter
ones.

The command trains what has no row yet: all runs on the tuning seed, then the best for each r on the reported seeds. It
prints a table. No time is measured.
"""

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bench.loss.__main__ import Plan, Rows, load_task, parse, run
from bench.report import TUNING_SEED, read_options, require, require_device, stoppable, table
from core.compression.formats import BLOCK, BLOCK_BYTES
from core.errors import UserError
from training.start.script import launch

WORKERS, BATCH = 4, 8
STEPS, SHORT, SHORTEST = 2000, 1000, 500
INT4 = BLOCK_BYTES["int4"] / (4 * BLOCK)  # of float32's bytes, with each block's scale
BACKWARD = 2 / 3  # of a local step: an ideal DDP hides its all-reduce under the backward pass
RATIOS = (10.0, 30.0, 100.0, 1000.0, 3.0, 1.0)
RATES = {"bytes": 8e-3, "cifar": 0.025, "gpt2": 4e-3}  # what the tuning of results/search.jsonl chose most often
RESULTS = Path(__file__).parents[1] / "results"
OTHERS = ("h100.jsonl", "h200.jsonl")  # files that have some of the runs


@dataclass(frozen=True)
class Run:
    """A method with its settings.

    Attributes:
        asked: The method, as on the command line of bench.loss.
        tau: Local steps per round.
        delay: Local steps from the start of an all-reduce to its use. A worker waits there if it has not arrived. 0 is
            blocking.
        fragments: Parts of the payload that are sent in turn.
    """

    asked: str
    tau: int
    delay: float = 0
    fragments: int = 1

    def plan(self, task: str, seed: int, steps: int = STEPS) -> Plan:
        split, of = "tuning" if seed == TUNING_SEED else "test", parse(self.asked)[0]
        return Plan(task, of, RATES[task], WORKERS, BATCH, steps, self.tau, seed, split)

    def __str__(self) -> str:
        name = self.asked.partition(":")[0]
        if name == "ddp":
            return "DDP"
        late = f", {self.delay} step{'s' * (self.delay > 1)} late" if self.delay else ""
        return f"tau {self.tau}" + f", {self.fragments} fragments" * (self.fragments > 1) + late


@dataclass(frozen=True)
class Link:
    """A link, as seen by a step.

    Attributes:
        r: Seconds of a float32 all-reduce over the seconds of a local step.
        codec: Seconds of encoding and decoding over the seconds of the int4 transfer.
        slowdown: How much longer a local step takes during an all-reduce, as a share of the step.
        latency: Seconds that an all-reduce takes besides its transfer, over the seconds of a local step.
    """

    r: float
    codec: float = 0.0
    slowdown: float = 0.0
    latency: float = 0.0

    def step_seconds(self, run: Run) -> float:
        """Modeled seconds of a step, in local steps.

        A round's all-reduces take a = 0.13 r (1 + codec) + F latency. F fragments take a / F each, one after the other,
        and hide behind F delay local steps of the round.
        """
        a = INT4 * self.r * (1 + self.codec) + run.fragments * self.latency
        return 1 + (a - min(run.fragments * run.delay, a / (1 + self.slowdown))) / run.tau


def hidden(tau: int, delay: int) -> Run:
    return Run(f"co2:merge=keep_local,gap=none,beta=0,delay={delay},compression=int4", tau, delay)


def in_turn(tau: int, delay: int, fragments: int) -> Run:
    return Run(f"fragments:fragments={fragments},delay={delay},compression=int4", tau, delay, fragments)


LOCAL = "local:compression=int4"
DDP = Run("ddp:compression=int4", 1, BACKWARD)
BLOCKING = tuple(Run(LOCAL, tau) for tau in (6, 24, 12, 48, 96, 2, 192, 384, 4, 768))
NEAR = ((2, 1), (2, 2), (6, 1), (6, 2), (12, 2), (12, 4), (24, 1), (24, 4), (24, 12), (48, 12), (96, 12))
FAR = ((96, 48), (192, 96), (192, 129), (384, 129))
HIDDEN = tuple(hidden(*places) for places in NEAR + FAR)
CUT = ((2, 1, 2), (6, 1, 4), (12, 1, 8), (24, 2, 8), (48, 2, 8), (144, 18, 8), (192, 17, 8), (384, 17, 8))
FRAGMENTS = tuple(in_turn(*places) for places in CUT)


@dataclass(frozen=True)
class Options:
    """The tasks to map, and the seeds to report."""

    tasks: tuple[str, ...] = ("bytes",)
    """bytes, cifar and gpt2, with data in CO2_DATA."""
    ratios: tuple[float, ...] = RATIOS
    """The values of r, in the order in which their runs are trained."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to report."""
    fragments: bool = False
    """Hide all-reduces in fragments, in place of whole payloads."""
    codec: float = 0.0
    """Seconds of encoding and decoding over the seconds of the int4 transfer; 0.53 on an H200 at 400 Gbit/s."""
    slowdown: float = 0.0
    """How much longer a local step takes during an all-reduce: 0.5 for half as long again."""
    latency: float = 0.0
    """Seconds that an all-reduce takes besides its transfer, over the seconds of a local step."""
    rows: Path = RESULTS / "regimes.jsonl"
    device: Literal["cpu", "cuda"] = "cpu"
    """Holds all workers of a run. Rows count whatever their device."""

    def check(self) -> None:
        require(self, once="tasks seeds ratios", positive="ratios", zeros="codec slowdown latency", tasks=RATES)
        require_device(self)
        if TUNING_SEED in self.seeds:
            raise UserError(f"seeds={TUNING_SEED}: it is the tuning seed; report other seeds")
        if len(self.seeds) < 3:
            raise UserError(f"seeds={' '.join(map(str, self.seeds))}: an interval needs 3 or more")


Loss = Callable[[Run, int, int], float | None]
"""(run, seed, steps) -> its loss, None if it has diverged."""


class Missing(LookupError):
    """A run that has no row."""


@dataclass(frozen=True)
class Curve:
    """The loss of a run by its steps: a power law up to SHORT and another one from there, which go on beyond the ends.

    Attributes:
        shortest: Returns the loss after SHORTEST steps, None if it has diverged. Runs that need it call it.
        short: The loss after SHORT steps.
        long: The loss after STEPS.
    """

    shortest: Callable[[], float | None]
    short: float
    long: float

    def piece(self, early: bool) -> tuple[int, float, float]:
        """The steps and the loss at the end of one of the two pieces, and its power. Each doubles the steps."""
        if not early:
            return STEPS, self.long, math.log2(self.short / self.long)
        begun = self.shortest()
        return SHORT, self.short, math.inf if begun is None else math.log2(begun / self.short)

    def loss(self, steps: float) -> float:
        end, loss, power = self.piece(early=steps < SHORT)
        return loss * (steps / end) ** -power

    def steps(self, loss: float) -> float:
        end, ended, power = self.piece(early=loss > self.short)
        return end * (loss / ended) ** (-1 / power)


def curve(loss: Loss, found: Run, seed: int) -> Curve | None:
    """None if a run has diverged."""
    short, long = loss(found, seed, SHORT), loss(found, seed, STEPS)
    if short is None or long is None:
        return None
    return Curve(lambda: loss(found, seed, SHORTEST), short, long)


def at_seconds(loss: Loss, found: Run, link: Link, seed: int) -> float:
    """The loss of a run that may last as long as STEPS local steps without communication. A run that waits for nothing
    makes all of them, and needs no shorter runs."""
    if (seconds := link.step_seconds(found)) == 1:
        long = loss(found, seed, STEPS)
        return math.inf if long is None else long
    known = curve(loss, found, seed)
    return known.loss(STEPS / seconds) if known else math.inf


def choose(loss: Loss, link: Link, runs: Sequence[Run]) -> Run:
    """The run with the lowest loss at equal seconds on the tuning seed."""
    return min(runs, key=lambda found: at_seconds(loss, found, link, TUNING_SEED))


@dataclass(frozen=True)
class Cell:
    """The seconds that hiding is worth over one link.

    Attributes:
        faster: Seconds of the best blocking run until it has the best hidden run's loss, over the seconds of STEPS
            local steps, in which the hidden run has it: the geometric mean of the seeds, the lowest and the highest.
        than_ddp: The same with DDP in place of the blocking run. It hides its all-reduce under the backward pass.
    """

    task: str
    link: Link
    blocking: Run
    hidden: Run
    faster: tuple[float, float, float]
    than_ddp: tuple[float, float, float]


def cell(loss: Loss, task: str, link: Link, seeds: Iterable[int], runs: Sequence[Run] = HIDDEN) -> Cell:
    """Compares the best blocking run with the best of `runs`. The tuning seed chooses, and the other seeds compare."""
    blocking, hidden = choose(loss, link, BLOCKING), choose(loss, link, runs)
    ended = {seed: at_seconds(loss, hidden, link, seed) for seed in seeds}

    def seconds(found: Run) -> dict[int, float]:
        curves = {seed: known for seed in ended if (known := curve(loss, found, seed))}
        return {seed: known.steps(ended[seed]) * link.step_seconds(found) for seed, known in curves.items()}

    every = ([took / STEPS for took in seconds(other).values()] for other in (blocking, DDP))
    faster, ideal = ((statistics.geometric_mean(some), min(some), max(some)) for some in every)
    return Cell(task, link, blocking, hidden, faster, ideal)


def of_rows(task: str, rows: Sequence[Rows]) -> Loss:
    """The losses that have rows: an average of a plan's rows, because a GPU repeats no run. None if one diverged."""

    def loss(found: Run, seed: int, steps: int) -> float | None:
        plan = found.plan(task, seed, steps)
        losses = [row["loss"] for some in rows for row in some.all_of(plan)]
        if not losses:
            raise Missing(f"{task}, {found}, {steps} steps, seed {seed}: has no row")
        return None if None in losses else statistics.fmean(losses)

    return loss


@functools.cache
def read(path: Path = RESULTS / "regimes.jsonl") -> list[Rows]:
    return [Rows(path), *(Rows(RESULTS / name) for name in OTHERS)]


@functools.cache
def cells(runs: Sequence[Run] = HIDDEN, links: Sequence[Link] = tuple(map(Link, sorted(RATIOS)))) -> list[Cell]:
    """The cells whose runs all have rows, by task and link."""
    found, rows = [], read()
    for task, link in itertools.product(RATES, links):
        with contextlib.suppress(Missing):
            found.append(cell(of_rows(task, rows), task, link, Options.seeds, runs))
    return found


def search(o: Options, rows: Sequence[Rows]) -> Iterator[Cell]:
    """Trains everything that has no row. New rows go to the first of `rows`."""
    for task in o.tasks:
        known = of_rows(task, rows)

        def loss(found: Run, seed: int, steps: int, task: str = task, known: Loss = known) -> float | None:
            try:
                return known(found, seed, steps)
            except Missing:
                plan = found.plan(task, seed, steps)
                row = rows[0].add_run(plan, run(load_task(task), plan, o.device))
                what = f"{task}, {found}, {steps} steps, seed {seed}: loss {row['loss']} ({row['seconds']:.0f} s)"
                print(what, flush=True)
                return row["loss"]

        links = (Link(r, o.codec, o.slowdown, o.latency) for r in o.ratios)
        yield from (cell(loss, task, link, o.seeds, FRAGMENTS if o.fragments else HIDDEN) for link in links)


TITLES = ("task, r", "best blocking", "best hidden", "against blocking", "against DDP that overlaps")


def line(found: Cell) -> tuple[str, ...]:
    """A line of the table."""
    ratios = (f"{ratio:.2f} ({low:.2f}–{high:.2f})" for ratio, low, high in (found.faster, found.than_ddp))
    return f"{found.task}, {found.link.r:g}", str(found.blocking), str(found.hidden), *ratios


def main() -> None:
    o = read_options(Options, "bench.regimes")
    torch.set_num_threads(1)
    if o.device == "cuda":
        torch.set_float32_matmul_precision("high")
    with stoppable(f"the runs that ended are in {o.rows}"):
        found = sorted(search(o, read(o.rows)), key=lambda each: (o.tasks.index(each.task), each.link.r))
    print("\n" + table(TITLES, map(line, found)))


if __name__ == "__main__":
    launch(main)
