"""What one worker of bench.scaling does: builds every method over the stand-in, and measures them in turns."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bench.standin import BYTES, LAYERS, LEARNING_RATE, Pacer, StandIn, Trainer
from core import CO2Config
from core.errors import UserError
from core.groups import ring_bytes
from core.methods import METHODS, make_method
from core.rounds import Rounds
from core.testing.link import ThrottledLink

RECOMMENDED = "co2_recommended"  # co2 with the settings of CO2Config.recommended
TIMEOUT = 120.0  # seconds until a missing worker is an error
TAU_MAX = 192  # of tau="auto": what the paper searched up to
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
        """Whether tau, or the wire, is chosen while training."""
        return self.tau == "auto" or self.method == RECOMMENDED

    def __str__(self) -> str:
        return self.method if self.method == "ddp" else f"{self.method} tau {self.tau}"


def wire_seconds(workers: int, rate: float | None) -> float:
    """A ring all-reduce of the stand-in's parameters, in theory."""
    return ring_bytes(BYTES, workers) * 8e-6 / rate if rate else 0.0


def round_seconds(setting: Setting, tau: int, step: float, wire: float) -> float:
    """A round, in theory: computing and communication one after the other, or side by side (ddp: at the most)."""
    side_by_side = setting.method in ("co2", RECOMMENDED, "overlap_local")
    return max(tau * step, wire) if side_by_side else tau * step + wire


def rounds_to_measure(seconds: float, round_seconds: float) -> int:
    """Equal on all workers, for it comes from theory alone."""
    return max(2, math.ceil(seconds / round_seconds))


@dataclass
class Job:
    """What the workers of one group are told."""

    settings: list[Setting]
    workers: int
    rate: float | None
    """Of the link, Mbit/s; None for a lone worker."""
    data: tuple[Tensor, Tensor]
    repeats: int = 1
    seconds: float = 3.0
    step_seconds: float = 0.04
    batch: int = 8
    seed: int = 0
    throttle: bool = False
    report: Callable[[Setting, list[dict[str, Any]]], None] = lambda setting, cells: None
    """Called on rank 0 after each measurement, with all so far."""


def work(job: Job) -> dict[str, Any]:
    """One worker of a group, in a process of its own: its measurements, and the sizes of ddp's buckets."""
    torch.set_num_threads(1)
    if job.workers > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    result = measure_all(job)
    if job.workers > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result


def measure_all(job: Job) -> dict[str, Any]:
    """Builds every method, then measures each `repeats` times. All workers shuffle alike."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    trainers = {setting: build(job, setting, rank) for setting in job.settings}
    order, shuffle = list(trainers), random.Random(f"{job.seed} {job.workers} {job.rate}")
    cells: list[dict[str, Any]] = []
    for repeat in range(job.repeats):
        shuffle.shuffle(order)
        for setting in order:
            cells.append(measure(job, setting, trainers[setting], repeat))
            if rank == 0:
                job.report(setting, cells)
    buckets = next((ddp_buckets(t.model) for s, t in trainers.items() if s.method == "ddp"), None)
    for trainer in trainers.values():
        if isinstance(trainer.method, Rounds) and trainer.method.flight.in_flight:
            trainer.method.flight.wait()  # finish() would take two more all-reduces; the models are thrown away
        trainer.method.close()
    return {"cells": cells, "ddp_buckets": buckets}


def build(job: Job, setting: Setting, rank: int) -> Trainer:
    """The method around a model of its own. Every worker starts from rank 0's parameters, with data of its own."""
    pacer = Pacer(job.step_seconds, LAYERS)
    torch.manual_seed(job.seed)
    link = ThrottledLink(job.rate) if job.throttle and job.rate else None
    recommended = setting.method == RECOMMENDED
    config = CO2Config.recommended(job.workers) if recommended else CO2Config()
    config = replace(config, tau=setting.tau, tau_max=TAU_MAX)
    name = "co2" if recommended else setting.method
    model, method = make_method(name, StandIn(pacer), co2=config, lr=lambda: LEARNING_RATE, timeout=TIMEOUT, link=link)
    return Trainer(model, method, pacer, job.data, job.batch, seed=job.seed * 1_000_003 + rank)


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
    planned = rounds_to_measure(job.seconds, period)
    start, cpu, tau = time.perf_counter(), time.process_time(), method.tau
    rounds = [run_round(trainer) for _ in range(planned)]
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    if isinstance(method, Rounds):
        method.flight.settle()
    steps = [each for r in rounds for each in r.compute]
    exposed = sum(r.wait for r in rounds)
    return {
        "method": setting.method,
        "tau_setting": setting.tau,
        "tau": tau,
        "workers": job.workers,
        "rate_mbit": job.rate,
        "repeat": repeat,
        "compute": "stand-in",
        "steps": len(steps),
        "seconds": seconds,
        "samples_per_second": job.workers * job.batch * len(steps) / seconds,
        "step_seconds": statistics.median(steps),
        "step_spread": statistics.pstdev(steps),
        "mean_step_seconds": statistics.fmean(steps),
        "rounds": len(rounds),
        "exposed_seconds": exposed,
        "exposed_share": exposed / seconds,
        "allreduce_seconds": statistics.fmean(r.allreduce for r in rounds),
        "boundary_seconds": statistics.fmean(r.boundary for r in rounds),
        "bytes_sent_per_worker": sum(r.sent for r in rounds),
        "cpu_seconds": cpu,
    }


@dataclass(frozen=True)
class Round:
    """The steps of one round, and what its boundary cost. Seconds, bytes."""

    compute: list[float]
    wait: float
    boundary: float
    allreduce: float
    sent: float


def run_round(trainer: Trainer) -> Round:
    steps = [trainer.step()]
    while not steps[-1].closed:
        steps.append(trainer.step())
    stats, last = trainer.method.stats, steps[-1]
    compute = [step.compute for step in steps]
    return Round(compute, last.wait, last.boundary, float(stats.allreduce_seconds), float(stats.bytes_sent))


def settle(trainer: Trainer) -> None:
    """Runs rounds until tau="auto" has not changed for SETTLED of them, after as many to calibrate; 30 at the most."""
    taus = []
    while len(taus) < 2 * SETTLED or (len(set(taus[-SETTLED:])) > 1 and len(taus) < 30):
        run_round(trainer)
        taus.append(trainer.method.tau)


def ddp_buckets(model: Any) -> list[int] | None:
    """Bytes of the buckets that torch's DistributedDataParallel has made; None for a lone worker."""
    if not hasattr(model, "_get_ddp_logging_data"):
        return None
    data = model._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(size) for size in str(sizes).split(",")]
