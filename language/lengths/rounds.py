"""Whole documents dealt over a round of CO2: workers meet every tau steps, so nothing is split and nothing is sent.

Attention costs the square of a document's length, the rest its length, so that workers with equal tokens may have
unequal work. Every worker computes the same deal, a pure function of seed, step, steps and workers: a checkpoint needs
nothing of it.
"""

import re
from collections.abc import Callable

import numpy as np
import torch

from core.errors import UserError
from training.data import generator

Lengths = np.ndarray  # int64 [documents], tokens
CHARACTERS_A_TOKEN = 4.3  # of English prose under a vocabulary of 30,000; it only scales lengths
HEADING = r"\n\s*(?:CHAPTER|Chapter|BOOK|ACT|LETTER)\b[^\n]*\n"
PARAGRAPH = r"\n\s*\n"


def log_normal(n: int, rng: np.random.Generator, median: float = 500, sigma: float = 1.1) -> np.ndarray:
    """Web text: of mean 900, one document in 300 above 10,000."""
    return rng.lognormal(np.log(median), sigma, n)


def github_like(n: int, rng: np.random.Generator) -> np.ndarray:
    """Source files and joined repositories: a log-normal body, and 6 % from a Pareto tail of index 1.2 above 8,000."""
    tail = 8000 * (1 + rng.pareto(1.2, n))
    return np.where(rng.random(n) < 0.06, tail, log_normal(n, rng, 700, 1.3))


def prolong_like(n: int, rng: np.random.Generator) -> np.ndarray:
    """The idea of ProLong (arXiv 2410.02660), long documents among short ones: some 60 % of the tokens are in documents
    of 65,536, the rest is web text."""
    return np.where(rng.random(n) < 0.02, 65536, log_normal(n, rng))


def uniform(n: int, rng: np.random.Generator) -> np.ndarray:
    """900 to 1,100: nothing to gain."""
    return rng.uniform(900, 1100, n)


LAWS: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    law.__name__: law for law in (log_normal, github_like, prolong_like, uniform)
}


def draw(law: str, n: int, seed: int) -> Lengths:
    """n lengths of a law, 1 or more."""
    return np.maximum(LAWS[law](n, np.random.default_rng(seed)), 1).astype(np.int64)


def of_text(text: str, boundary: str) -> Lengths:
    """Of the parts of a text, from one match of the pattern to the next, in its order; empty ones are left out."""
    characters = np.array([len(part.strip()) for part in re.split(boundary, text)])
    return np.ceil(characters[characters > 0] / CHARACTERS_A_TOKEN).astype(np.int64)


def cut(lengths: Lengths, longest: int) -> Lengths:
    """The lengths of the pieces, where what is longer than `longest` is cut into pieces of it and a rest."""
    whole, rest = np.divmod(lengths, longest)
    pieces = np.full(int(whole.sum() + (rest > 0).sum()), longest)
    last = np.cumsum(whole + (rest > 0)) - 1
    pieces[last[rest > 0]] = rest[rest > 0]
    return pieces


# -- which documents a round holds ------------------------------------------------------------------------------------


CANDIDATES = 32  # documents of a worker that are tried in an exchange
PARTNERS = 4  # workers that are tried
TOLERANCE = 0.004  # of a worker's share, within which nothing is exchanged any more


def crossing_of(width: int) -> float:
    """The length at which a causal document's attention costs as much as the rest of a transformer. A layer multiplies
    12 width^2 times a token in its matrices, and width x length times in attention, half masked."""
    return 12.0 * width


def cost(lengths: np.ndarray, crossing: float) -> np.ndarray:
    """The work of documents of int64 [n] lengths: s^2 + crossing s, float64 [n], in units of their own."""
    if not crossing > 0:
        raise UserError(f"crossing={crossing}: give the tokens at which attention costs as the rest, above 0")
    return lengths.astype(np.float64) * (lengths + crossing)


class Order:
    """In which order documents come, and which a round holds.

    sizes: int64 [n], each document's part of a step, which takes `step_size` over all workers. An epoch is one shuffle;
    a document belongs to the step in which it ends. An epoch leaves out an incomplete last step.

    full: bool [n], documents of the maximal length. They come in groups of one for each worker, because no deal evens
    out five of them over four workers. An epoch leaves out an incomplete last group.
    """

    def __init__(self, sizes: np.ndarray, step_size: int, full: np.ndarray, *, seed: int, workers: int):
        self.sizes, self.step_size, self.full = sizes, step_size, full
        self.seed, self.workers = seed, workers
        self.steps = int(sizes.sum()) // step_size
        if not self.steps:
            raise UserError(f"{len(sizes)} documents do not fill a step: give more, or a smaller --batch_size")
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def of(self, start: int, steps: int) -> np.ndarray:
        """The documents of so many steps from `start` on, counted over all epochs: int64 [m]."""
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
        """The epoch's documents in their order, and where each ends."""
        if epoch not in self._epochs:
            shuffled = torch.randperm(len(self.sizes), generator=generator(self.seed, epoch)).numpy()
            places = np.cumsum(self.sizes[shuffled])
            whole = np.flatnonzero(self.full[shuffled])
            late = np.arange(len(whole)) // self.workers * self.workers + self.workers - 1  # the last of each group
            held = np.append(places[whole], np.iinfo(np.int64).max)  # the last group may not become whole
            places[whole] = held[np.minimum(late, len(whole))]
            order = np.argsort(places, kind="stable")
            kept = {e: known for e, known in self._epochs.items() if e == epoch - 1}
            self._epochs = kept | {epoch: (shuffled[order], places[order])}
        return self._epochs[epoch]


# -- to whom they go --------------------------------------------------------------------------------------------------


def deal(shares: np.ndarray, workers: int) -> np.ndarray:
    """The worker of each document, int64 [n], so that all get equal sums of every column. shares: float64 [n, k], such
    as tokens and costs. The next largest documents go to one worker each, the largest to the worker that has least;
    then workers exchange documents while that helps."""
    if not len(shares):
        return np.empty(0, dtype=np.int64)
    sums = shares.sum(axis=0)
    loads = shares * (workers / np.where(sums > 0, sums, 1))  # of each column a worker's share is 1
    size = loads.sum(axis=1)
    order = np.argsort(-size, kind="stable")  # ties by number: the same on every machine
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
    """The worker that is farthest off swaps or gives a document, while the sum of squared misses falls."""
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
    """Documents of a worker, spread over their sizes where there are many, and -1, which stands for none."""
    mine = np.flatnonzero(owner == worker)
    if len(mine) > CANDIDATES:
        mine = mine[np.argsort(loads[mine].sum(axis=1), kind="stable")]
        mine = mine[np.linspace(0, len(mine) - 1, CANDIDATES).astype(int)]
    return np.append(mine, -1)


def _of(loads: np.ndarray, documents: np.ndarray) -> np.ndarray:
    return np.where((documents >= 0)[:, None], loads[documents], 0)


def by_tokens(lengths: np.ndarray, workers: int) -> np.ndarray:
    """As they come, each to the worker that has fewest tokens so far: a loader with a budget of tokens. int64 [n]."""
    owner, have = np.empty(len(lengths), dtype=np.int64), [0] * workers
    for i, length in enumerate(lengths.tolist()):
        owner[i] = worker = have.index(min(have))
        have[worker] += length
    return owner


def into_parts(lengths: np.ndarray, parts: int) -> np.ndarray:
    """The part, a step or a micro-batch of one, of each of a worker's documents, int64 [n]: longest first, each to the
    part with fewest tokens."""
    part, have = np.empty(len(lengths), dtype=np.int64), [0] * parts
    for i in np.argsort(-lengths, kind="stable").tolist():
        part[i] = emptiest = have.index(min(have))
        have[emptiest] += int(lengths[i])
    return part
