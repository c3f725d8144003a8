"""Traces what every worker computes and what crosses the link, for DDP, Local-SGD and CO2.

python -m bench.timeline [--workers 4] [--rate 100] [--tau 8] [--step_ms 40] [--seconds 1.2] [--out FOLDER]

The workers are processes on this machine, connected by gloo. Software holds every all-reduce back until its bytes would
have crossed a link of the given rate. The model's computation is a stand-in (bench/standin.py). After a warm-up, each
method trains for the given seconds, and every worker records its spans. Writes timeline.json, from which `python -m
results.pictures` draws a picture.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import report
from bench.cluster import run_ranks
from bench.report import Asked, Summary, require, require_company
from bench.standin import LAYERS, LEARNING_RATE, Pacer, StandIn, digits
from core import CO2Config
from core.errors import UserError
from core.methods import make_method
from core.testing.link import ThrottledLink
from training.script import launch

TIMEOUT = 120.0  # seconds until a missing worker is an error
METHODS = ("ddp", "local", "co2", "co2_recommended")
WARMUP = 10  # rounds; CO2's recommended settings measure times in the first ones
Span = tuple[float, float]  # start and end, seconds


@dataclass(frozen=True)
class Timeline(Asked):
    """What to trace."""

    methods: tuple[str, ...] = METHODS
    """ddp, local, co2 (our reading of the paper's rule), co2_recommended."""
    workers: int = 4
    rate: float = 100.0
    """Link rate, Mbit/s."""
    tau: int = 8
    """Local steps per round, of every method but ddp."""
    step_ms: float = 40.0
    """A local step of the stand-in."""
    seconds: float = 1.2
    """How long each method is recorded."""

    def check(self) -> None:
        require(self, once="methods", positive="rate step_ms seconds", ones="tau", methods=METHODS)
        require_company(self)
        if self.seconds > 60:
            raise UserError(f"seconds={self.seconds}: give up to 60")


class TracedLink(ThrottledLink):
    """A throttled link that keeps when each all-reduce starts and when its bytes have crossed the link."""

    def __init__(self, mbit: float):
        super().__init__(mbit)
        self.spans: list[Span] = []

    def reserve(self, nbytes: float) -> float:
        start = time.perf_counter()
        end = super().reserve(nbytes)
        self.spans.append((start, end))
        return end


def work(o: Timeline, method: str, data: tuple[Tensor, Tensor]) -> dict[str, list[Span]]:
    """One worker, in a process of its own. Returns its spans of steps and of all-reduces."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    link, pacer = TracedLink(o.rate), Pacer(o.step_ms / 1e3, LAYERS)
    config = CO2Config.recommended(tau=o.tau) if method == "co2_recommended" else CO2Config.paper(tau=o.tau)
    model, made = make_method(
        "co2" if method == "co2_recommended" else method,
        StandIn(pacer),
        co2=config,
        lr=lambda: LEARNING_RATE,
        timeout=TIMEOUT,
        link=link,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    random = torch.Generator().manual_seed(dist.get_rank())

    def step() -> Span:
        """One local step. Returns its span, without waiting for an all-reduce."""
        picked = torch.randint(len(data[1]), (8,), generator=random)
        pacer.restart()
        start = pacer.passed_at
        nn.functional.cross_entropy(model(data[0][picked]), data[1][picked]).backward()
        optimizer.step()
        optimizer.zero_grad()
        # ddp waits between its last gradient and the end of the backward pass
        end = pacer.passed_at if method == "ddp" else time.perf_counter()
        made.step()
        return start, end

    dist.barrier()
    for _ in range(WARMUP * made.tau):
        step()
    began = time.perf_counter()
    steps = [step() for _ in range(o.tau * math.ceil(1e3 * o.seconds / o.step_ms / o.tau))]  # o.seconds or more
    made.finish()  # its all-reduces start after the recorded time
    dist.barrier()
    made.close()
    dist.destroy_process_group()
    return {"steps": within(steps, began, o.seconds), "allreduces": within(link.spans, began, o.seconds)}


def within(spans: Iterable[Span], began: float, seconds: float) -> list[Span]:
    """The spans that overlap the recorded time, in seconds from its start."""
    moved = ((round(start - began, 5), round(end - began, 5)) for start, end in spans)
    return [(start, end) for start, end in moved if end > 0 and start < seconds]


def rows(o: Timeline) -> Iterator[dict[str, Any]]:
    """One row per method and worker."""
    data = digits()
    for method in o.methods:
        per_rank: Sequence[dict[str, list[Span]]] = run_ranks(
            work, None, 1, o.workers, o, method, data, timeout=TIMEOUT + 60 * o.seconds
        )
        for rank, spans in enumerate(per_rank):
            ended = [end for _, end in spans["steps"] if end <= o.seconds]
            yield {"method": method, "rank": rank, "finished_steps": len(ended), **spans}


def run(o: Timeline, session: report.Session) -> None:
    """Traces every method."""
    session.result |= {"link": "throttled in software", "rows": []}
    session.take("rows", rows(o))


TABLES = {"rows": Summary("method", {"finished_steps": ".1f"})}


def main() -> None:
    report.run(Timeline, "timeline", run, TABLES, forks=lambda _: False)


if __name__ == "__main__":
    launch(main)
