"""What every worker of bench/peers runs: the same model, data, order and pace around each method; and two rows that no
package carries, which average gradients after every step, hidden one step or half of one late. Each of these stands
where the loop has its optimiser, and equals the rule of bench/search/methods.py."""

from __future__ import annotations

import copy
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.cluster import sent_bytes
from bench.memory import peak_bytes, reset_peak
from bench.peers.adapters import PEERS, Task, Trainer
from bench.standin import LR, MLP_LAYERS, Pacer, build_model, make_optimizer
from bench.trainings import split_wire, write_to
from core import CO2Config, WireConfig, flat, make_method
from core.methods import METHODS, DelayedConfig
from core.reducer import Reducer
from core.rounds import Rounds
from core.testing.link import Link, ThrottledLink, flight_over
from training.sampling import worker_batches
from vision.data import Images

# -- methods that average gradients late ------------------------------------------------------------------------------


class LateGradients(ABC):
    """An optimiser whose gradients are the workers' means, which cross the network while the next ones are computed.

    inner: the optimiser that takes the steps; its parameters are equal on all workers. steps: of the whole training,
    whose last gradients would never be used and so are not sent. timeout: see Flight. link: an emulated slow one.
    Attributes: rounds, means that have landed; sent, bytes that this worker has sent for them.
    """

    def __init__(self, inner: Optimizer, steps: int, *, timeout: float, link: Link | None):
        self.inner, self.left = inner, steps
        self.zero_grad = inner.zero_grad
        self.buckets = flat.make_buckets([p for group in inner.param_groups for p in group["params"]], [], 0)
        self.params = [p for bucket in self.buckets for p in bucket.params]
        self.flight = flight_over(link)(self.buckets[0].flat.device, timeout=timeout)
        self.reducer = Reducer([bucket.flat for bucket in self.buckets], self.flight.world_size)
        self.rounds = self.sent = 0

    @abstractmethod
    def step(self) -> None:
        """Follows every backward pass."""

    @torch.no_grad()
    def launch(self) -> None:
        """Sends this worker's gradients."""
        for bucket in self.buckets:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.params]
            flat.copy(bucket.payload_views, gradients)
        background = self.flight
        background.launch(self.reducer.stages(background.group, background.launched + 1))

    @torch.no_grad()
    def land(self) -> list[Tensor] | None:
        """The mean of what was sent last, a tensor a parameter; None: nothing was."""
        if not self.flight.in_flight:
            return None
        self.flight.wait()
        self.rounds, self.sent = self.rounds + 1, self.sent + self.flight.bytes_sent
        return [view * self.reducer.scale for bucket in self.buckets for view in bucket.payload_views]

    def apply(self, gradients: list[Tensor]) -> None:
        """A step of the inner optimiser with these."""
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient
        self.inner.step()


class DPU(LateGradients):
    """DDP one step late (delayed parameter update, ZeRO-Offload, arXiv 2101.06840): the mean of a step's gradients is
    applied after the next ones are computed. The first step moves nothing."""

    def step(self) -> None:
        late = self.land()
        self.left -= 1
        if self.left:
            self.launch()
        if late is not None:
            self.apply(late)


class ACCO(LateGradients):
    """ACCO (arXiv 2406.02613; the rule as in the authors' release, without its warm-up and its sharded optimiser).

    step() follows each half of a batch. While the mean of the second halves' gradients is on its way, the first halves'
    are computed at the parameters x; then it leads to an estimate e one step ahead of x, where the second halves' are
    computed while the first halves' mean is on its way; then both together move x and the optimiser's state, which the
    estimate does not change. In the first step there is no estimate.
    """

    def __init__(self, inner: Optimizer, steps: int, *, timeout: float, link: Link | None):
        super().__init__(inner, steps, timeout=timeout, link=link)
        self.second = False  # whether the second half comes next
        self.ahead: list[Tensor] | None = None

    def step(self) -> None:
        self._second_half() if self.second else self._first_half()
        self.second = not self.second

    def _first_half(self) -> None:
        self.ahead = self.land()
        self.launch()
        self.start = [p.detach().clone() for p in self.params], copy.deepcopy(self.inner.state_dict())
        if self.ahead is not None:
            self.apply(self.ahead)

    def _second_half(self) -> None:
        mean = self.land()
        assert mean is not None
        self.left -= 1
        if self.left:
            self.launch()
        params, state = self.start
        with torch.no_grad():
            flat.copy(self.params, params)
        self.inner.load_state_dict(state)
        if self.ahead is not None:
            mean = [(first + second) / 2 for first, second in zip(mean, self.ahead, strict=True)]
        self.apply(mean)


RECOMMENDED = "co2_recommended"  # co2 with CO2Config.recommended, its tau the row's
FREE = "co2_auto"  # the same with tau its own choice
AUTO = "auto"  # ddp over int4, and the same as that from where ddp waits
OWN_TAU = (FREE, AUTO)
DILOCO = "diloco"  # blocking, with Nesterov's outer momentum
LATE = {"dpu": (DPU, 1), "acco": (ACCO, 2)}  # and in how many parts a batch is cut
EVERY_STEP = ("ddp", *LATE)  # those that have no period, over any wire
REFERENCE = "none"  # the same steps without any communication
BATCH = 16  # samples per worker and step
EVERY = 6  # steps between two snapshots, beside those at the period's end
Split = Literal["tuning", "test"]


@dataclass(frozen=True)
class Job:
    """One run of one method. folder: where workers leave snapshots."""

    method: str
    steps: int
    tau: int
    workers: int
    width: int
    step_ms: float
    seed: int
    timeout: float
    link_mbit: float | None
    interface: str | None
    folder: Path
    logs: Path
    lr: float = LR
    held_out: Split = "test"


def worker(job: Job, train: Images, test: Images) -> dict[str, Any]:
    """One rank of one row, after run_ranks has placed it. What it, its package and their processes print goes to a
    file."""
    write_to(job.logs / f"{job.method}-{job.seed}-rank{os.environ['RANK']}.log")
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout))
    return run(job, train, test)


def run(job: Job, train: Images, test: Images) -> dict[str, Any]:
    """Trains, measures, and on rank 0 evaluates the snapshots afterwards."""
    rank = dist.get_rank()
    if job.method in PEERS:
        __import__(PEERS[job.method].module)  # its code is not the method's memory
    torch.manual_seed(job.seed)
    pacer = Pacer(job.step_ms / 1e3 / LATE.get(job.method, (None, 1))[1], MLP_LAYERS)
    model = build_model(job.width, pacer)
    warm_up(job.width)
    base = reset_peak()
    trainer = make_trainer(job, model)
    dist.barrier()
    before = sent_bytes(job.interface) if job.interface else 0
    seconds, times = train_loop(job, trainer, model, pacer, batches(job, train, rank))
    sent = sent_bytes(job.interface) - before if job.interface else trainer.sent()
    result = {"seconds": seconds, "times": times, "sent": sent, "rounds": trainer.rounds()}
    result["memory"] = peak_bytes() - base
    dist.barrier()  # all snapshots are written
    if rank == 0:
        held_out = half(test, job.held_out)
        result["losses"] = [mean_loss(job, step, held_out) for step in times]
    trainer.close()
    dist.barrier()
    return result


def make_trainer(job: Job, model: nn.Sequential) -> Trainer:
    """The method or peer of the job around the model."""
    if job.method in PEERS:
        task = Task(model, partial(make_optimizer, lr=job.lr), job.tau, BATCH, job.steps, job.timeout)
        return PEERS[job.method].start(task)
    optimizer = make_optimizer(model.parameters(), job.lr)
    if job.method == REFERENCE:
        return Trainer(model, optimizer, sent=lambda: 0)
    link = ThrottledLink(job.link_mbit) if job.link_mbit else None
    if job.method in LATE:
        kind, parts = LATE[job.method]
        late = kind(optimizer, job.steps, timeout=job.timeout, link=link)
        rounds, sent = lambda: late.rounds, lambda: late.sent
        return Trainer(model, late, close=late.flight.close, rounds=rounds, sent=sent, parts=parts)
    method_name, settings = settings_of(job)
    assert method_name in (*METHODS, AUTO)
    wrapped, method = make_method(method_name, model, **settings, lr=lambda: job.lr, timeout=job.timeout, link=link)
    total, steps = [0], itertools.count(1)

    def after_step() -> None:
        if method.step(last=next(steps) == job.steps):
            total[0] += method.stats.bytes_sent

    def finish() -> None:
        method.finish()
        if isinstance(method, Rounds):  # finish() may close several rounds: every one has sent the same
            total[0] = method.rounds * method.flight.bytes_sent

    return Trainer(
        wrapped, optimizer, after_step, finish, method.close, lambda: int(method.rounds), lambda: round(total[0])
    )


def settings_of(job: Job) -> tuple[str, dict[str, Any]]:
    """A row of ours as a method of core, and its settings."""
    name, format = split_wire(job.method)
    if name == "ddp":
        return name, {"ddp_wire": WireConfig(format)}  # pyright: ignore[reportArgumentType]
    config, delayed = diloco(job.tau) if name == DILOCO else (CO2Config(tau=job.tau), None)
    if format != "float32":
        config = replace(config, wire=WireConfig(format))  # pyright: ignore[reportArgumentType]
    if name in (RECOMMENDED, *OWN_TAU):
        config = CO2Config.recommended(job.workers, job.steps)
        config = config if name in OWN_TAU else replace(config, tau=job.tau)
    return {RECOMMENDED: "co2", FREE: "co2", DILOCO: "delayed"}.get(name, name), {"co2": config, "delayed": delayed}


def diloco(tau: int) -> tuple[CO2Config, DelayedConfig]:
    """DiLoCo (Douillard et al., 2023) as a case of method delayed, with the outer step of the row torchft_diloco."""
    config = CO2Config(tau=tau, outer_lr=0.7, outer_momentum=0.9, gap="none", clip=None, delay=0)
    return config, DelayedConfig(nesterov=True)


def batches(job: Job, train: Images, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's samples, float32 [BATCH, 1, 8, 8] and int64 [BATCH], in an order that only the seed decides."""
    size = BATCH * job.workers
    order = worker_batches(len(train), size, seed=job.seed, rank=rank, world_size=job.workers, start=0, total=job.steps)
    for _, _, index in order:
        yield train.normalise(train.images[index]), train.labels[index]


def train_loop(
    job: Job, trainer: Trainer, model: nn.Module, pacer: Pacer, data: Iterator[tuple[Tensor, Tensor]]
) -> tuple[float, dict[int, float]]:
    """The loop; returns its seconds and, for each snapshot, its step and when it was taken (the clock stands still).

    Forward and backward are stretched to the stand-in step time, so that workers do not fight for the cores; the
    optimiser and communication come on top.
    """
    rank = dist.get_rank()
    start, stopped = time.perf_counter(), 0.0
    times = {0: 0.0}
    snapshot(job, model, 0, rank)
    stopped += time.perf_counter() - start
    for step, (images, labels) in enumerate(data, start=1):
        for x, y in zip(images.chunk(trainer.parts), labels.chunk(trainer.parts), strict=True):
            pacer.restart()
            loss = F.cross_entropy(trainer.model(x), y)
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        trainer.after_step()
        if step == job.steps:
            trainer.finish()
        if step % EVERY == 0 or step % job.tau == 0 or step == job.steps:
            now = time.perf_counter()
            times[step] = now - start - stopped
            snapshot(job, model, step, rank)
            stopped += time.perf_counter() - now
    return times[job.steps], times


# -- snapshots ------------------------------------------------------------------------------------------------


def snapshot(job: Job, model: nn.Module, step: int, rank: int) -> None:
    """Writes the parameters to the job's folder, tensor by tensor, so that the peak of memory does not see it."""
    with open(job.folder / f"{step}.{rank}", "wb") as file:
        for p in model.parameters():
            p.detach().numpy().tofile(file)


def half(test: Images, split: Split) -> Images:
    """Every second held-out sample is for choosing settings, the others for the figures."""
    first = 0 if split == "tuning" else 1
    return replace(test, images=test.images[first::2], labels=test.labels[first::2])


@torch.no_grad()
def mean_loss(job: Job, step: int, test: Images) -> float:
    """Held-out cross-entropy of the mean of all workers' parameters at a snapshot."""
    paths = [job.folder / f"{step}.{rank}" for rank in range(job.workers)]
    mean = torch.from_numpy(np.mean([np.fromfile(path, dtype=np.float32) for path in paths], axis=0))
    model = build_model(job.width)
    torch.nn.utils.vector_to_parameters(mean, model.parameters())
    return F.cross_entropy(model(test.normalise(test.images)), test.labels).item()


# -- measures -------------------------------------------------------------------------------------------------


def warm_up(width: int) -> None:
    """One step of a throw-away model: torch loads much at the first, which is nobody's memory."""
    model = build_model(width)
    optimizer = make_optimizer(model.parameters())
    model(torch.zeros(BATCH, 64)).sum().backward()
    optimizer.step()
