"""Which samples a worker sees, a pure function of (seed, epoch, rank, world size), and how they are loaded."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import random
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from core.errors import UserError
from training.script import SIGNALS

_MASK = (1 << 64) - 1


def mix(*key: int) -> int:
    """A generator's seed: 63 bits that depend on all numbers of `key`, such as (seed, epoch)."""
    seed = 0
    for number in key:  # splitmix64, so that neighbouring keys give unrelated numbers
        seed = (seed + number + 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed & 0x7FFFFFFFFFFFFFFF


def per_worker(batch_size: int, world_size: int) -> int:
    """Samples per worker of a global batch; UserError when it does not divide."""
    if batch_size < 1 or batch_size % world_size:
        nearest = max(1, round(batch_size / world_size)) * world_size
        raise UserError(
            f"batch_size={batch_size} (global) over {world_size} workers: choose a positive multiple of {world_size}, "
            f"such as {nearest}"
        )
    return batch_size // world_size


def smallest_part(samples: int, parts: int) -> int:
    """Samples of the last of so many parts, cut as torch.chunk does: equal ones, and what is left."""
    size = -(-samples // parts)
    return samples % size or size


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Optimizer steps of n samples, without an incomplete last batch."""
    if n < batch_size:
        raise UserError(f"batch_size={batch_size} (global) exceeds the {n} training samples: choose a smaller one")
    return n // batch_size


def epoch_batches(
    n: int, batch_size: int, *, seed: int, epoch: int, rank: int, world_size: int, repeats: int = 1
) -> Tensor:
    """Sample indices of this worker, int64 [steps, batch_size / world_size], without an incomplete last batch.

    One shuffle of all n samples is cut into global batches, and each batch into world_size shares, so that any number
    of workers sees the same samples in the same order.

    repeats: above 1, repeated augmentation (Berman et al., arXiv 1902.05509) as in DeiT: an epoch has n / repeats
    samples, whose copies i, i + n, i + 2 n, ... go to different workers.
    """
    share, steps = per_worker(batch_size, world_size), steps_per_epoch(n, batch_size)
    order = torch.randperm(n, generator=generator(seed, epoch))
    if repeats > 1:
        copies = order[: -(-n // repeats), None] + n * torch.arange(repeats)
        return copies.flatten()[: steps * batch_size].view(steps, share, world_size)[:, :, rank]
    batches = order[: steps * batch_size].view(steps, world_size, share)
    return batches[:, rank]


def worker_batches(
    n: int, batch_size: int, *, seed: int, rank: int, world_size: int, start: int, total: int, repeats: int = 1
) -> Iterator[tuple[int, int, Tensor]]:
    """This worker's batches from optimiser step `start` to `total`, across epochs: (epoch, number in it, indices)."""
    of = dict(seed=seed, rank=rank, world_size=world_size, repeats=repeats)
    steps = steps_per_epoch(n, batch_size)
    batches = torch.empty(0)
    for step in range(start, total):
        epoch, number = divmod(step, steps)
        if step == start or number == 0:
            batches = epoch_batches(n, batch_size, epoch=epoch, **of)
        yield epoch, number, batches[number]


def eval_share(n: int, *, rank: int, world_size: int) -> range:
    """The samples that this worker evaluates: every one belongs to exactly one worker."""
    return range(rank, n, world_size)


def load_batches(
    dataset: Dataset[Any],
    keys: Iterator[list[Any]],
    workers: int,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Any]:
    """The batches whose items' keys are listed, in order, in pinned memory where there is a GPU.

    workers: processes that load them; 0: this one. A UserError of a loading process is raised in one line.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=keys,  # type: ignore[arg-type]  # an iterator will do
        num_workers=workers,
        collate_fn=collate,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals,
        generator=torch.Generator(),  # otherwise it would draw from the generator that the model's dropout uses
    )
    try:
        yield from loader
    except UserError as error:  # torch puts the process's traceback in front
        # whose frames, a circle, hold the loader: the garbage collector would end its processes, and wait 10 s for them
        traceback.clear_frames(error.__traceback__)
        raise UserError(str(error).strip().rpartition("UserError: ")[2]) from None


def _leave_signals(_: int) -> None:
    """A loading process outlives the signals to stop, which may come to all processes: it ends with its worker."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@atexit.register  # after multiprocessing, and so called before it would wait for those that leave out its SIGTERM
def _end_loading() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would take their end for a failure
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Inside, Python's, numpy's and torch's global generators start from the seed; afterwards they are as before."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def generator(*key: int) -> torch.Generator:
    """A random generator seeded by `mix(*key)`."""
    return torch.Generator().manual_seed(mix(*key))
