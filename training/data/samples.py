"""The samples that a worker sees, a pure function of (seed, epoch, rank, world size), and their loading."""

import contextlib
import functools
import multiprocessing.queues
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from core.checkpoint.stored import reason
from core.errors import UserError
from core.integrations.loading import begin_loading

Key = tuple[int, int, int]  # (seed, epoch, index) of a sample; its random numbers follow only from this key


def train_keys(
    recipe: Any, samples: int, rank: int, world_size: int, start: int, total: int, repeats: int = 1
) -> Iterator[tuple[tuple[int, ...], list[Key]]]:
    """Yields this worker's batches from step `start` to `total`, across epochs: (the batch's key, its samples' keys).

    A batch's key is (seed, epoch, number in the epoch, rank). The recipe has the seed and the global batch_size. With
    `repeats` (see epoch_batches), a copy's index is the sample's index plus a multiple of `samples`.
    """
    of = dict(seed=recipe.seed, rank=rank, world_size=world_size, repeats=repeats)
    steps, batches = steps_per_epoch(samples, recipe.batch_size), torch.empty(0)
    for step in range(start, total):
        epoch, number = divmod(step, steps)
        if step == start or number == 0:
            batches = epoch_batches(samples, recipe.batch_size, epoch=epoch, **of)
        yield (recipe.seed, epoch, number, rank), [(recipe.seed, epoch, i) for i in batches[number].tolist()]


def eval_keys(samples: int, batch_size: int, rank: int, world_size: int) -> Iterator[list[Key]]:
    """Yields the keys of this worker's share of a held-out set, (0, 0, index), in batches of at most batch_size."""
    share = eval_share(samples, rank=rank, world_size=world_size)
    return ([(0, 0, i) for i in share[at : at + batch_size]] for at in range(0, len(share), batch_size))


_MASK = (1 << 64) - 1


def mix(*key: int) -> int:
    """Returns a generator's seed, 63 bits that depend on all numbers of `key`, such as (seed, epoch)."""
    seed = 0
    for number in key:  # splitmix64, so that neighboring keys give unrelated numbers
        seed = (seed + number + 0x9E3779B97F4A7C15) & _MASK
        seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
        seed ^= seed >> 31
    return seed & 0x7FFFFFFFFFFFFFFF


def per_worker(batch_size: int, world_size: int) -> int:
    """Returns the samples per worker of a global batch. Raises UserError if the workers do not divide it."""
    if batch_size < 1 or batch_size % world_size:
        nearest = max(1, round(batch_size / world_size)) * world_size
        raise UserError(
            f"batch_size={batch_size} (global) over {world_size} workers: choose a positive multiple of {world_size}, "
            f"such as {nearest}"
        )
    return batch_size // world_size


def smallest_part(samples: int, parts: int) -> int:
    """Returns the samples of the last part, if samples are cut as torch.chunk does: equal parts, then the remainder."""
    size = -(-samples // parts)
    return samples % size or size


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Returns the optimizer steps of n samples, without an incomplete last batch."""
    if n < batch_size:
        raise UserError(f"batch_size={batch_size} (global) exceeds the {n} training samples: choose a smaller one")
    return n // batch_size


def epoch_batches(
    n: int, batch_size: int, *, seed: int, epoch: int, rank: int, world_size: int, repeats: int = 1
) -> Tensor:
    """Returns the sample indices of this worker, int64 [steps, batch_size / world_size].

    One shuffle of all n samples is cut into global batches, and each batch into world_size shares. So any number of
    workers sees the same samples in the same order. An incomplete last batch is left out.

    With `repeats` above 1 it is repeated augmentation (Berman et al., arXiv 1902.05509) as in DeiT. An epoch then has
    n / repeats samples, whose copies i, i + n, i + 2 n, ... go to different workers.
    """
    share, steps = per_worker(batch_size, world_size), steps_per_epoch(n, batch_size)
    order = torch.randperm(n, generator=generator(seed, epoch))
    if repeats > 1:
        copies = order[: -(-n // repeats), None] + n * torch.arange(repeats)
        return copies.flatten()[: steps * batch_size].view(steps, share, world_size)[:, :, rank]
    batches = order[: steps * batch_size].view(steps, world_size, share)
    return batches[:, rank]


def eval_share(n: int, *, rank: int, world_size: int) -> range:
    """Returns the samples that this worker evaluates. Every sample belongs to exactly one worker."""
    return range(rank, n, world_size)


def load_batches(
    dataset: Dataset[Any],
    keys: Iterator[list[Any]],
    workers: int,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    keeper: Any = None,
) -> Iterator[Any]:
    """Yields the batches with the listed keys, in order, in pinned memory if there is a GPU.

    The dataset returns a sample for a key. With 0 workers this process loads. The object `keeper` keeps the loading
    processes for its next call with the same keys, as evaluations do.

    Raises:
        UserError: In one line, if a loading process raises it.
    """
    kept = keeper is not None and workers > 0
    sampler: Any = [*keys] if kept else keys  # an iterator will do
    loader = vars(keeper).get("_loader") if kept else None
    if loader is None or loader.batch_sampler != sampler or loader.num_workers != workers:
        loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=functools.partial(begin_loading, _end_unless_handed_over),
            generator=torch.Generator(),  # else the loader would draw from the generator of the model's dropout
            persistent_workers=kept,
        )
    if kept:
        vars(keeper)["_loader"] = loader
    try:
        yield from loader
    except UserError as error:  # torch puts the process's traceback before the message
        # The frames refer to the loader in a cycle. The garbage collector would end its processes, and wait 10 s.
        traceback.clear_frames(error.__traceback__)
        raise UserError(str(error).strip().rpartition("UserError: ")[2]) from None


class Keyed(Dataset[Any]):
    """A data set whose items follow from their keys, so that loading processes change nothing.

    `collate` makes a batch of items. None means torch's default.
    """

    collate: Callable[[list[Any]], Any] | None = None

    def __len__(self) -> int:
        raise NotImplementedError

    def train_batches(self, recipe: Any, rank: int, world_size: int, start: int, total: int) -> Iterator[Any]:
        """Yields this worker's batches from step `start` to `total`."""
        keys = (keys for _, keys in train_keys(recipe, len(self), rank, world_size, start, total))
        return load_batches(self, keys, recipe.loader_workers, collate=self.collate)

    def test_batches(self, recipe: Any, rank: int, world_size: int, batch_size: int = 32) -> Iterator[Any]:
        """Yields this worker's share of the set, every item once, in batches of at most batch_size."""
        keys = eval_keys(len(self), batch_size, rank, world_size)
        return load_batches(self, keys, recipe.loader_workers, collate=self.collate, keeper=self)


def _end_unless_handed_over(_: int) -> None:
    """Makes a loading process end if it cannot hand over a batch. Its worker would wait for that batch forever."""

    def end(error: Exception, _: Any) -> None:
        print(f"a loading process ends: {reason(error)}", file=sys.stderr, flush=True)
        os._exit(1)

    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end)  # pyright: ignore


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seeds Python's, numpy's and torch's global generators inside the block, and restores them afterwards.

    A loading process restores nothing, because every sample seeds its generators anew.
    """
    if get_worker_info() is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would visit all kinds of devices
        yield
        return
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
    """Returns a random generator seeded by `mix(*key)`."""
    return torch.Generator().manual_seed(mix(*key))
