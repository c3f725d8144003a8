"""Weak scaling on an emulated cluster: samples/s and exposed communication of every method, by workers and link rate.

python -m bench.scaling [--workers 1 2 4 8 16] [--rates 50 200 1000] [--repeats 3] [--throttle] [--out FOLDER]

Each worker is a node: a network namespace of its own, with links shaped to each rate. With --throttle all workers share
the loopback device, and software holds collectives back. The model's computation is a stand-in (bench/standin.py).
Each group of workers and rate builds every method once and measures the methods in an order that is shuffled for each
repeat. Writes scaling.json.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bench import report
from bench.cluster import run_ranks
from bench.report import Asked, Summary, network, of_link, require, require_no_crowd
from bench.standin import BYTES, LAYERS, LEARNING_RATE, PARAMS, Pacer, StandIn, Trainer, digits
from core import CO2Config
from core.baselines.table import METHODS, make_method
from core.comm import ring_bytes
from core.errors import UserError
from core.local_update import LocalUpdateMethod
from core.testing.link import ThrottledLink
from training.start.script import launch

RECOMMENDED = "co2_recommended"  # co2 with the settings of CO2Config.recommended
TIMEOUT = 120.0  # seconds until a missing worker is an error
TAU_MAX = 192  # of tau="auto": what the paper searched up to
LIMIT = 3600.0  # seconds for one group of workers and rate
SETTLED = 5  # rounds without a change after which tau="auto" counts as settled: the window of its medians


@dataclass(frozen=True)
class Setting:
    """A method and its tau."""

    method: str
    tau: int | Literal["auto"]

    @classmethod
    def parse(cls, text: str) -> Setting:
        method, _, tau = text.partition(":")
        if method not in (*METHODS, RECOMMENDED):
            known = ", ".join((*METHODS, RECOMMENDED))
            raise UserError(f"methods: {text!r}: choose ddp or METHOD:TAU with one of {known}")
        if method == "ddp" and not tau:
            return cls(method, 1)
        autos = ("co2", RECOMMENDED, "overlap_local")
        if method == "ddp" or not (tau.isdecimal() and int(tau) > 0 or tau == "auto" and method in autos):
            raise UserError(
                f"methods: {text!r}: ddp has no tau; the others need one, such as co2:12 (co2:auto works too)"
            )
        return cls(method, "auto" if tau == "auto" else int(tau))

    @property
    def settles(self) -> bool:
        """Whether tau or the compression is chosen during training."""
        return self.tau == "auto" or self.method == RECOMMENDED


def wire_seconds(workers: int, rate: float | None) -> float:
    """Seconds of a ring all-reduce of the stand-in's parameters, in theory."""
    return ring_bytes(BYTES, workers) * 8e-6 / rate if rate else 0.0


def round_seconds(setting: Setting, tau: int, step: float, compression: float) -> float:
    """Seconds of a round in theory: computing and communication one after the other, or at the same time.

    For ddp this is the maximum.
    """
    side_by_side = setting.method in ("co2", RECOMMENDED, "overlap_local")
    return max(tau * step, compression) if side_by_side else tau * step + compression


def rounds_to_measure(seconds: float, round_seconds: float) -> int:
    return max(2, math.ceil(seconds / round_seconds))


# slowmo and co2 at the same two tau: over the slowest link co2 hides everything at 48 and a part at 12.
# local and overlap_local only at 12, where most differ: local takes as long as slowmo, overlap_local as long as co2.
DEFAULT = ("ddp", "local:12", "overlap_local:12", "slowmo:12", "slowmo:48", "co2:3", "co2:12", "co2:48", "co2:auto")


@dataclass(frozen=True)
class Scaling(Asked):
    """What to measure."""

    workers: tuple[int, ...] = (1, 2, 4, 8, 16)
    rates: tuple[float, ...] = (50.0, 200.0, 1000.0)
    """Link rates, Mbit/s."""
    methods: tuple[str, ...] = DEFAULT
    """ddp, or METHOD:TAU; co2_recommended takes CO2Config.recommended. co2:auto, co2_recommended:auto and
    overlap_local:auto choose tau themselves."""
    repeats: int = 3
    seconds: float = 3.0
    """Duration of each measurement after a round of warm-up. It has at least two rounds."""
    step_ms: float = 40.0
    """A local step of the stand-in."""
    batch: int = 8
    """Samples per step and worker."""
    seed: int = 0
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces."""

    def check(self) -> None:
        require(self, once="workers rates methods", positive="workers rates repeats seconds step_ms batch")
        require_no_crowd(self)
        self.settings()

    def settings(self) -> list[Setting]:
        return [Setting.parse(text) for text in self.methods]

    def groups(self) -> list[tuple[int, float | None]]:
        """(workers, rate) of each fork of the workers. A single worker has no link."""
        return [(n, rate) for n in self.workers for rate in (self.rates if n > 1 else (None,))]


@dataclass(frozen=True)
class Job:
    """The task of one group of workers. rate: of the link in Mbit/s, or None for a single worker."""

    o: Scaling
    workers: int
    rate: float | None
    data: tuple[Tensor, Tensor]

    @property
    def step_seconds(self) -> float:
        return self.o.step_ms / 1e3


# -- one worker: builds every method over the stand-in, and measures them in turns ----------------------------------


def work(job: Job) -> list[dict[str, Any]]:
    """One worker of a group, in a process of its own. Returns its measurements."""
    torch.set_num_threads(1)
    if job.workers > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    result = measure_all(job)
    if job.workers > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result


def measure_all(job: Job) -> list[dict[str, Any]]:
    """Builds every method, then measures each `repeats` times. All workers shuffle alike."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    trainers = {setting: build(job, setting, rank) for setting in job.o.settings()}
    order, shuffle = list(trainers), random.Random(f"{job.o.seed} {job.workers} {job.rate}")
    cells: list[dict[str, Any]] = []
    for repeat in range(job.o.repeats):
        shuffle.shuffle(order)
        for setting in order:
            cells.append(measure(job, setting, trainers[setting], repeat))
    for trainer in trainers.values():
        if isinstance(trainer.method, LocalUpdateMethod) and trainer.method.allreduce.in_flight:
            trainer.method.allreduce.wait()  # finish() would take two more all-reduces; the models are thrown away
        trainer.method.close()
    return cells


def build(job: Job, setting: Setting, rank: int) -> Trainer:
    """The method around a model of its own. Every worker starts from rank 0's parameters, with data of its own."""
    pacer = Pacer(job.step_seconds, LAYERS)
    torch.manual_seed(job.o.seed)
    link = ThrottledLink(job.rate) if job.o.throttle and job.rate else None
    recommended = setting.method == RECOMMENDED
    config = CO2Config.recommended() if recommended else CO2Config()
    config = replace(config, tau=setting.tau, tau_max=TAU_MAX)
    name = "co2" if recommended else setting.method
    model, method = make_method(name, StandIn(pacer), co2=config, lr=lambda: LEARNING_RATE, timeout=TIMEOUT, link=link)
    return Trainer(model, method, pacer, job.data, job.o.batch, seed=job.o.seed * 1_000_003 + rank)


def measure(job: Job, setting: Setting, trainer: Trainer, repeat: int) -> dict[str, Any]:
    """This worker's figures of one method, once. Nothing of the method before is under way any more."""
    method = trainer.method
    if dist.is_initialized():
        dist.barrier()
    trainer.restart()
    if repeat == 0 and setting.settles:
        settle(trainer)
    for _ in range(2 if setting.method == "ddp" else 1):  # ddp makes its buckets anew after the first
        run_round(trainer)
    period = round_seconds(setting, method.tau, job.step_seconds, wire_seconds(job.workers, job.rate))
    planned = rounds_to_measure(job.o.seconds, period)
    start, cpu, tau = time.perf_counter(), time.process_time(), method.tau
    rounds = [run_round(trainer) for _ in range(planned)]
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    if isinstance(method, LocalUpdateMethod):
        method.allreduce.drain()
    steps = [each for r in rounds for each in r["compute"]]
    exposed = sum(r["exposed"] for r in rounds)
    return {
        "method": setting.method,
        "tau_setting": setting.tau,
        "tau": tau,
        **{"workers": job.workers, "rate_mbit": job.rate, "repeat": repeat, "compute": "stand-in"},
        "steps": len(steps),
        "seconds": seconds,
        "samples_per_second": job.workers * job.o.batch * len(steps) / seconds,
        "step_seconds": statistics.median(steps),
        "step_spread": statistics.pstdev(steps),
        "mean_step_seconds": statistics.fmean(steps),
        "rounds": len(rounds),
        "exposed_seconds": exposed,
        "exposed_share": exposed / seconds,
        "allreduce_seconds": statistics.fmean(r["allreduce"] for r in rounds),
        "boundary_seconds": statistics.fmean(r["boundary"] for r in rounds),
        "bytes_sent_per_worker": sum(r["sent"] for r in rounds),
        "cpu_seconds": cpu,
    }


def run_round(trainer: Trainer) -> dict[str, Any]:
    """One round. Returns its steps' seconds, and the seconds and bytes of its boundary."""
    steps = [trainer.step()]
    while not steps[-1].closed:
        steps.append(trainer.step())
    stats, last = trainer.method.stats, steps[-1]
    return {
        "compute": [step.compute for step in steps],
        "exposed": last.wait,
        "boundary": last.boundary,
        "allreduce": float(stats.allreduce_seconds),
        "sent": float(stats.bytes_sent),
    }


def settle(trainer: Trainer) -> None:
    """Runs rounds until tau="auto" has not changed for SETTLED of them, after as many to calibrate; 30 at the most."""
    taus = []
    while len(taus) < 2 * SETTLED or (len(set(taus[-SETTLED:])) > 1 and len(taus) < 30):
        run_round(trainer)
        taus.append(trainer.method.tau)


MEANS = ("seconds", "step_seconds", "step_spread", "exposed_seconds", "exposed_share", "samples_per_second")
MEANS += ("allreduce_seconds", "boundary_seconds")


def combine(per_rank: Sequence[list[dict[str, Any]]], step_ms: float) -> list[dict[str, Any]]:
    """One row per measurement, with averages over the workers.

    It is late if the slowest worker's steps are more than a tenth above their pace.
    """
    rows = []
    for cells in zip(*per_rank, strict=True):
        row = dict(cells[0])
        for name in MEANS:
            row[name] = statistics.fmean(c[name] for c in cells)
        busy = sum(c["cpu_seconds"] for c in cells) / row["seconds"]
        slowest = max(c["mean_step_seconds"] for c in cells)
        del row["cpu_seconds"], row["mean_step_seconds"]
        rows.append(row | {"cpu_cores_busy": busy, "late": slowest > 1.1 * step_ms / 1e3})
    return rows


def run(o: Scaling, session: report.Session) -> None:
    """Measures every group."""
    session.result |= of_link(o.throttle) | {
        "model": {"params": PARAMS, "bytes": BYTES, "layers": LAYERS},
        **{"step_ms": o.step_ms, "batch": o.batch, "seed": o.seed, "rows": []},
    }
    result, data = session.result, digits()
    most = max(o.workers)
    with network(o.throttle or most == 1, most, o.rates[0]) as cluster:
        for n, rate in o.groups():
            if cluster and rate:
                cluster.shape(rate, result["verified_mbit"])
            per_rank = run_ranks(work, cluster if rate else None, 1, n, Job(o, n, rate, data), timeout=LIMIT)
            session.take("rows", combine(per_rank, o.step_ms))


SHOWN = {"samples_per_second": ".0f", "exposed_share": ".1%", "tau": ".3g", "late": ".0%"}
TABLES = {"rows": Summary("rate_mbit workers method tau_setting", SHOWN)}


def main() -> None:
    forks = lambda o: not o.throttle and max(o.workers) > 1  # noqa: E731
    report.run(Scaling, "scaling", run, TABLES, forks=forks)


if __name__ == "__main__":
    launch(main)
