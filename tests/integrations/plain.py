"""The plain loop with which the libraries' trainers are compared, and the problem that all train."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from core import CO2, CO2Config, UserError
from core.hooks import Requests
from tests.problems import flat, wait_for

EXAMPLES, BATCH, EPOCHS, TAU = 48, 2, 3, 5  # with two workers an epoch has 12 batches: no whole number of rounds
PAPER = CO2Config(tau=TAU, outer_momentum=0.4)
FRAGMENTS = CO2Config(tau=6, merge="keep_local", delay=2, gap="none", outer_momentum=0.2, fragments=3)
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """6 inputs, 3 classes; with BatchNorm, so that forward passes leave traces, and a layer that is frozen."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.rest = nn.Sequential(nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.frozen(self.first(x)))


class Factor:
    """A schedule's factor: a NumPy scalar, and perhaps an object in its state."""

    def __init__(self, inner: Any = None):
        self.inner = inner

    def __call__(self, step: int) -> Any:
        return np.cos(step / 50)


class Inner:
    pass


INNER = f"{__name__}.Inner"


def examples() -> Batch:
    """Inputs float32 [EXAMPLES, 6], labels [EXAMPLES]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(EXAMPLES, 6, generator=generator), torch.randint(3, (EXAMPLES,), generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05, weight_decay=0.1)


def go_apart(folder: str, rank: int, step: int, waits: int = 2, passes: int = TAU - 1) -> None:
    """Called after each step: the second worker goes on from step `waits` when the first has taken `passes`. Fails
    where anything within a round makes the first wait for the second."""
    passed = Path(folder, f"passed{passes}")
    if rank == 0 and step == passes:
        passed.touch()
    if rank == 1 and step == waits:
        wait_for(passed, seconds=20)


def terminate_node() -> None:
    """SIGTERM from another process to this one and its loading processes, as Slurm ends all processes of a node."""
    loading = [process.pid for process in multiprocessing.active_children()]
    assert len(loading) == 2, "the loading processes are not there"
    subprocess.run(["kill", "-TERM", *map(str, (*loading, os.getpid()))], check=True)
    time.sleep(0.2)  # until they would have ended


@contextlib.contextmanager
def hears_sigterm() -> Iterator[list[int]]:
    """A loop's own handler, that only notes the signal."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def everything(model: nn.Module) -> Tensor:
    """All parameters and buffers, float64 [n]."""
    return flat([*model.parameters(), *model.buffers()])


def everything_in(written: Mapping[str, Tensor]) -> Tensor:
    """As everything(), of a file's state dict, whose keys may have a prefix."""
    model = Net(seed=1)
    model.load_state_dict({name.removeprefix("net."): value for name, value in written.items()})
    return everything(model)


def in_turn(rank: int, workers: int, epochs: int = EPOCHS) -> list[list[Batch]]:
    """A rank's batches of each epoch, where batch after batch goes to worker after worker."""
    x, y = examples()
    every = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, EXAMPLES, BATCH)]
    return [every[rank::workers]] * epochs


def shuffled(rank: int, workers: int, epochs: int = EPOCHS) -> list[list[Batch]]:
    """The same as torch's DistributedSampler gives them out."""
    data = TensorDataset(*examples())
    sampler = DistributedSampler(data, workers, rank)
    batches = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches.append([(x, y) for x, y in DataLoader(data, BATCH, sampler=sampler)])
    return batches


def train(epochs, config=PAPER, *, micro=1, clip=0.0, updates=10**9, meets=(), told=False, dtype=None, asks=()):
    """Everything after each update, behind the last one with finish(). epochs: the batches of each. micro: batches an
    update, fewer at an epoch's end. clip: the gradients' norm, 0 for no limit. updates: after which training stops.
    meets: updates behind which finish() is called, as before an evaluation; told: whether step() hears of it. dtype: of
    autocast, None for none. asks: what Requests go along: of more than two workers the order of an element's sum
    depends on how long the whole tensor is."""
    model = Net()
    optimizer = adam(model)
    co2 = CO2(model.parameters(), config, buffers=model.buffers(), hooks=[Requests(*asks)] if asks else [])
    trace: list[Tensor] = []
    parts = [[batches[i : i + micro] for i in range(0, len(batches), micro)] for batches in epochs]
    groups = [group for part in parts for group in part][:updates]
    for number, group in enumerate(groups, 1):
        for x, y in group:
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                logits = model(x)
            (nn.functional.cross_entropy(logits.float(), y) / len(group)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        last = number == len(groups)
        co2.step(last=last or (told and number in meets))
        if last or number in meets:
            co2.finish()
        trace.append(everything(model))
    co2.close()
    return trace


def assert_equal(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Bit for bit, and what is compared does train."""
    assert len(ours) == len(expected), (len(ours), len(expected))
    for step, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert torch.equal(a, b), f"step {step}: {(a - b).abs().max()} apart"
    assert len(ours) == 1 or not torch.equal(ours[0], ours[-1])


def tags(folder: Path) -> set[str]:
    """Of TensorBoard's scalars."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: set[str] = set()
    for file in folder.rglob("events*"):
        events = EventAccumulator(str(file))
        events.Reload()
        found |= set(events.Tags()["scalars"])
    return found


def said_of(mistakes: Sequence[dict[str, Any]], run: Callable[..., Any]) -> list[str]:
    """What a run says of each of these settings."""
    said = []
    for mistake in mistakes:
        with pytest.raises(UserError) as refusal:
            run(**mistake)
        said.append(str(refusal.value))
    return said


def assert_lines(said: Sequence[str], who: str, *parts: str) -> None:
    """One for each part, which is in it."""
    for line, part in zip(said, parts, strict=True):
        assert line.startswith(f"{who}: ") and part in line and "\n" not in line
