"""Whole documents assigned over a round of CO2. No document is split and nothing is sent.

Attention costs the square of a document's length, and the rest costs its length, so workers with equal tokens may have
different work. CO2's workers synchronize every tau steps, so only the work of a round must be even. Every worker
computes the same assignment, a pure function of seed, step, steps and workers. A checkpoint stores none of it.
"""

import numpy as np
import torch

from core.errors import UserError
from training.data.samples import generator

Lengths = np.ndarray  # int64 [documents], tokens


def cut(lengths: Lengths, longest: int) -> tuple[Lengths, np.ndarray, np.ndarray]:
    """Cuts longer documents into pieces of `longest` tokens and a rest.

    Returns:
        The length of each piece, the number of its document, and where it begins there, int64 [pieces].
    """
    pieces = -(-lengths // longest)
    document = np.repeat(np.arange(len(lengths)), pieces)
    start = longest * (np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    return np.minimum(longest, lengths[document] - start), document, start


# -- the documents of a round -----------------------------------------------------------------------------------------


CANDIDATES = 32  # documents of a worker that are tried in an exchange
PARTNERS = 4  # workers that are tried
TOLERANCE = 0.004  # share of a worker's load within which exchanges stop


def cost(lengths: np.ndarray, crossing: float) -> np.ndarray:
    """The work of documents, s^2 + crossing s, in arbitrary units, float64 [n].

    At the length `crossing` attention costs as much as the rest.
    """
    return lengths.astype(np.float64) * (lengths + crossing)


class Order:
    """The order of documents, and the documents of each round.

    An epoch is one shuffle. A document belongs to the step in which it ends. An epoch drops an incomplete last step.

    Args:
        sizes: Each document's share of a step's size, int64 [n].
        step_size: The size of a step over all workers.
        full: Whether a document has the maximal length, bool [n]. Such documents come in groups of one per worker,
            because five of them cannot be even over four workers. An epoch drops an incomplete last group.
        seed: The seed of the shuffle.
        workers: The number of workers.
    """

    def __init__(self, sizes: np.ndarray, step_size: int, full: np.ndarray, *, seed: int, workers: int):
        self.sizes, self.step_size, self.full = sizes, step_size, full
        self.seed, self.workers = seed, workers
        self.steps = int(sizes.sum()) // step_size
        if not self.steps:
            raise UserError(f"{len(sizes)} documents do not fill a step: give more, or a smaller --batch_size")
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, start: int, steps: int) -> np.ndarray:
        """The documents of `steps` steps from `start`, counted over all epochs, int64 [m]."""
        found = []
        end = start + steps
        while start < end:
            epoch, first = divmod(start, self.steps)
            last = min(self.steps, first + end - start)
            documents, places = self._epoch(epoch)
            among = np.searchsorted(places, [first * self.step_size, last * self.step_size], side="right")
            found.append(documents[slice(*among)])
            start += last - first
        return np.concatenate(found)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's documents in order, and where each ends."""
        if epoch not in self._epochs:
            shuffled = torch.randperm(len(self.sizes), generator=generator(self.seed, epoch)).numpy()
            places = np.cumsum(self.sizes[shuffled])
            whole = np.flatnonzero(self.full[shuffled])
            late = np.arange(len(whole)) // self.workers * self.workers + self.workers - 1  # the last of each group
            held = np.append(places[whole], np.iinfo(np.int64).max)  # the last group may stay incomplete
            places[whole] = held[np.minimum(late, len(whole))]
            order = np.argsort(places, kind="stable")
            kept = {e: known for e, known in self._epochs.items() if e == epoch - 1}
            self._epochs = kept | {epoch: (shuffled[order], places[order])}
        return self._epochs[epoch]


# -- their workers ----------------------------------------------------------------------------------------------------


def deal(shares: np.ndarray, workers: int) -> np.ndarray:
    """Assigns documents so that all workers get equal sums of every column of `shares`, float64 [n, k].

    The columns are such as tokens and costs. The next largest documents go to one worker each, the largest to the
    worker with the smallest load. Then workers exchange documents as long as that helps.

    Returns:
        The worker of each document, int64 [n].
    """
    if not len(shares):
        return np.empty(0, dtype=np.int64)
    sums = shares.sum(axis=0)
    loads = shares * (workers / np.where(sums > 0, sums, 1))  # a worker's even share of each column is 1
    size = loads.sum(axis=1)
    order = np.argsort(-size, kind="stable")  # ties by number, so every machine gets the same order
    owner = np.empty(len(shares), dtype=np.int64)
    have = np.zeros((workers, shares.shape[1]))
    for at in range(0, len(order), workers):
        some = order[at : at + workers]
        least = np.argsort(have.sum(axis=1), kind="stable")[: len(some)]
        owner[some] = least
        have[least] += loads[some]
    _exchange(owner, loads, have)
    return owner


def _exchange(owner: np.ndarray, loads: np.ndarray, have: np.ndarray) -> None:
    """Lets the worker farthest from its share swap or give a document, while the sum of squared misses falls."""
    for _ in range(20 * len(have)):
        miss = have - 1
        if (np.abs(miss) <= TOLERANCE).all():
            return
        worst = int(np.argmax((miss**2).sum(axis=1)))
        mine = _candidates(owner, worst, loads)
        best, swap = -1e-12, None
        for other in np.argsort(-((miss - miss[worst]) ** 2).sum(axis=1), kind="stable")[:PARTNERS]:
            if other == worst:
                continue
            theirs = _candidates(owner, other, loads)
            given = _of(loads, mine)[:, None] - _of(loads, theirs)[None]
            change = 2 * (given * (given + miss[other] - miss[worst])).sum(axis=2)
            i, j = np.unravel_index(np.argmin(change), change.shape)
            if change[i, j] < best:
                best, swap = change[i, j], (other, mine[i], theirs[j], given[i, j])
        if swap is None:
            return
        other, leaves, comes, given = swap
        have[worst] -= given
        have[other] += given
        if leaves >= 0:
            owner[leaves] = other
        if comes >= 0:
            owner[comes] = worst


def _candidates(owner: np.ndarray, worker: int, loads: np.ndarray) -> np.ndarray:
    """Some documents of a worker, spread over their sizes, and -1, which means none."""
    mine = np.flatnonzero(owner == worker)
    if len(mine) > CANDIDATES:
        mine = mine[np.argsort(loads[mine].sum(axis=1), kind="stable")]
        mine = mine[np.linspace(0, len(mine) - 1, CANDIDATES).astype(int)]
    return np.append(mine, -1)


def _of(loads: np.ndarray, documents: np.ndarray) -> np.ndarray:
    return np.where((documents >= 0)[:, None], loads[documents], 0)


def by_tokens(lengths: np.ndarray, workers: int) -> np.ndarray:
    """The worker of each document, int64 [n]: in order, each goes to the worker with the fewest tokens so far."""
    owner, have = np.empty(len(lengths), dtype=np.int64), [0] * workers
    for i, length in enumerate(lengths.tolist()):
        owner[i] = worker = have.index(min(have))
        have[worker] += length
    return owner


def into_parts(lengths: np.ndarray, parts: int) -> np.ndarray:
    """Splits a worker's documents over steps, or over the micro-batches of a step.

    The longest documents come first, and each goes to the part with the fewest tokens.

    Returns:
        The part of each document, int64 [n].
    """
    longest_first = np.argsort(-lengths, kind="stable")
    part = np.empty(len(lengths), dtype=np.int64)
    part[longest_first] = by_tokens(lengths[longest_first], parts)
    return part
