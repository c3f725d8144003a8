"""Predicts the speed of each method if every worker has its own link: python -m training.plan methods --help

Every worker holds the whole model. A round is tau local steps of T seconds each, B seconds of work at the boundary, and
an all-reduce of A seconds:

    ddp                          T + max(A of the last bucket, A - the backward pass after the first bucket is full),
                                 as in training/plan/time.py
    local, slowmo, diloco        (tau T + B + A) / tau                      the loop waits for the all-reduce
    overlap_local, co2           (max(tau T, A) + B) / tau                  the all-reduce runs under the next round
    co2 recommended              the same, with tau, compression and fragments that core/tau.py chooses from T, A, B
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from core.config import CO2Config
from core.doctor.report import choose
from core.errors import UserError
from training.plan.case import BITS, FORMATS, GREATEST, SMALLEST, collective
from training.plan.time import last_bucket, under_backward
from training.start.script import parse_options

BLOCKING, HIDDEN, RECOMMENDED = ("local", "slowmo", "diloco"), ("overlap_local", "co2"), "co2 recommended"
METHODS = ("ddp", *BLOCKING, *HIDDEN, RECOMMENDED)
MOST_WORKERS = 10**6


@dataclass(frozen=True)
class Work:
    """Predicts how fast each method trains, from the time of a step. Each worker has its own link."""

    parameters: float
    """Number of the model's parameters."""
    step: float
    """Seconds of a local step without communication."""
    gbit: float
    """Rate of a worker's link in Gbit/s, in each direction."""
    workers: tuple[int, ...] = (2, 8, 64, 1024, 10_000)
    tau: int = 48
    """Local steps per round of the local methods. The recommended settings choose their own."""
    latency: float = 0.0
    """Seconds of a hop from one worker to the next."""
    boundary: float = 0.0
    """Seconds of work at a boundary, which the doctor measures."""

    def check(self) -> None:
        """Raises UserError for the first invalid option."""
        for name in ("parameters", "step", "gbit", "latency", "boundary"):
            value, zero = getattr(self, name), name in ("latency", "boundary")
            if not SMALLEST <= value <= GREATEST and not (zero and value == 0):
                kind = ", 0 or more" if zero else " above 0"
                raise UserError(f"{name}={value:g}: give a finite number{kind}, {SMALLEST:g} to {GREATEST:g}")
        if self.tau < 1:
            raise UserError(f"tau={self.tau}: give 1 or more")
        for workers in self.workers:
            if not 2 <= workers <= MOST_WORKERS:
                raise UserError(f"workers={workers}: give 2 to {MOST_WORKERS}")

    def allreduce(self, workers: int, compression: str = "float32", parameters: float | None = None) -> float:
        """Seconds of an all-reduce. With compression it is an all-to-all of one hop and an all-gather of n - 1 hops."""
        size = FORMATS[compression] * (self.parameters if parameters is None else parameters)
        seconds = size * BITS / (self.gbit * 1e9)
        if compression == "float32":
            return float(collective(seconds, workers, self.latency, trees=False))
        return 2 * (workers - 1) / workers * seconds + workers * self.latency


@dataclass(frozen=True)
class Speed:
    """A method's predicted speed.

    Attributes:
        fragments: Parts of the payload whose all-reduces follow each other in a round.
        step_seconds: Seconds per local step, communication included.
        allreduce_seconds: Seconds of an all-reduce.
        exposed_seconds: Seconds per round in which the loop waits.
        bytes_sent: Bytes that a worker sends per step.
    """

    tau: int
    fragments: int
    compression: str
    step_seconds: float
    allreduce_seconds: float
    exposed_seconds: float
    bytes_sent: float

    @property
    def steps_per_second(self) -> float:
        return 1 / self.step_seconds

    @property
    def exposed_share(self) -> float:
        """Share of the time in which the loop waits for communication, from 0 to 1."""
        return self.exposed_seconds / (self.tau * self.step_seconds)


def predict(method: str, work: Work, workers: int, tau: int = 48) -> Speed:
    """The speed of one of METHODS. ddp and the recommended settings do not read tau."""
    compression, boundary, fragments = "float32", work.boundary, 1
    if method == RECOMMENDED:
        seconds = {kind: work.allreduce(workers, kind) for kind in ("float32", "int4")}
        chosen = choose(CO2Config.recommended(), workers, work.step, seconds, boundary)
        tau, compression, fragments = chosen["tau"], chosen["compression"], chosen["fragments"]
    if method == "ddp":
        tau, boundary = 1, 0.0
    whole = work.allreduce(workers, compression)
    if method == "ddp":
        size = 4 * work.parameters
        last = work.allreduce(workers, parameters=float(last_bucket(size)) / 4)
        exposed = max(last, whole - float(under_backward(size)) * work.step)
    else:
        exposed = whole if method in BLOCKING else max(0.0, whole - tau * work.step)
    step = work.step + (boundary + exposed) / tau
    sent = 2 * (workers - 1) / workers * FORMATS[compression] * work.parameters / tau
    return Speed(tau, fragments, compression, step, whole, exposed, sent)


# -- the command ------------------------------------------------------------------------------------------------------


def table(work: Work) -> Iterator[str]:
    """The lines of the table, with every method at every number of workers."""
    titles = "workers", "method", "tau", "fragments", "compression", "steps/s", "exposed", "MB/step", "all-reduce"
    yield "{:>7}  {:<16}{:>4}{:>11}  {:<11}{:>9}{:>9}{:>10}{:>13}".format(*titles)
    for workers in work.workers:
        for method in METHODS:
            s = predict(method, work, workers, work.tau)
            speed = f"{s.steps_per_second:>9.4g}{s.exposed_share:>9.1%}{s.bytes_sent / 1e6:>10.4g}"
            chosen = f"{s.tau:>4}{s.fragments:>11}  {s.compression:<11}"
            yield f"{workers:>7,}  {method:<16}{chosen}{speed}{s.allreduce_seconds:>11.4g} s"


def main(argv: Sequence[str]) -> None:
    work = parse_options(Work, prog="python -m training.plan methods", args=argv, use_underscores=True)
    work.check()
    print("\n".join(table(work)))
