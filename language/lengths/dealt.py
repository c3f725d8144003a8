"""Training on whole documents, dealt over the rounds of a run: `--balance` of language.train and language.finetune."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from core.errors import UserError
from core.methods import Method
from core.rounds import Rounds
from language.lengths.laws import cut
from language.lengths.packed import Document, Packed, Rows, attend_to_documents, pack
from language.lengths.rings import Rings, check_room
from language.lengths.rounds import Order, by_tokens, cost, crossing_of, deal, into_parts
from language.recipe import TextRecipe
from training.run import Run
from training.workers import rank, world_size

SCANNED = 1 << 26  # tokens of a file that are looked through at a time


class Documents(Protocol):
    """What is dealt. int64 [documents]: lengths, tokens that the model reads; targets, tokens that count in the loss;
    sizes, parts of a step. A sample of the batch size takes sample_size of a step."""

    lengths: np.ndarray
    targets: np.ndarray
    sizes: np.ndarray
    sample_size: int
    about: str

    def read(self, number: int) -> Document: ...


class TextDocuments:
    """The documents of a token file, without empty ones; those longer than `context` are cut into pieces of it.

    Each token but a document's first is predicted once. end: the id that ends a document.
    """

    def __init__(self, tokens: np.ndarray, end: int, context: int):
        parts = range(0, len(tokens), SCANNED)
        ends = np.concatenate([at + 1 + np.flatnonzero(tokens[at : at + SCANNED] == end) for at in parts])
        if not len(ends) or ends[-1] < len(tokens):
            ends = np.append(ends, len(tokens))
        begins = np.concatenate([[0], ends[:-1]])
        inputs = ends - begins - 1
        begins, inputs = begins[inputs > 0], inputs[inputs > 0]
        if not len(inputs):
            raise UserError(f"{len(ends)} documents, all of them empty: give text")
        self.tokens, self.lengths, self.sample_size = tokens, cut(inputs, context), context
        pieces = -(-inputs // context)
        number = np.arange(len(self.lengths)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.starts = np.repeat(begins, pieces) + context * number
        self.targets = self.sizes = self.lengths
        longer, empty = int((pieces > 1).sum()), len(ends) - len(inputs)
        self.about = f"{len(inputs):,} documents, of which {longer:,} are longer than {context:,} tokens and are cut"
        self.about += f"; {empty:,} empty ones left out" if empty else ""

    def read(self, number: int) -> Document:
        at, length = self.starts[number], self.lengths[number]
        found = torch.from_numpy(self.tokens[at : at + length + 1].astype(np.int64))
        return found[:-1], found[1:]


@dataclass(frozen=True)
class Dealt:
    """A task's documents, and how they are dealt."""

    documents: Documents
    balance: str
    crossing: float
    rings: Rings | None = None

    @classmethod
    def of(cls, recipe: TextRecipe, model: nn.Module, documents: Documents, run: Run | None = None) -> Dealt:
        """Makes the model attend to documents. run: with balance rings its nodes are islands."""
        workers, n = recipe.data_workers(world_size()), len(documents.lengths)
        if n < workers:
            raise UserError(f"{n} documents over {workers} workers: give as many, or --balance none")
        mesh = run.mesh if run is not None and recipe.balance == "rings" else None
        attend_to_documents(model, split=mesh is not None)
        rings = None
        if run is not None and mesh is not None:
            tokens = recipe.batch_size * documents.lengths.sum() / documents.sizes.sum() * documents.sample_size
            longest = int(documents.lengths.max())
            check_room(max(tokens / workers / recipe.accumulate, longest), recipe.rings.room, mesh.size(1))
            rings = Rings.of(recipe, model, mesh, longest, run.autocast())
        config: Any = model.config
        width = getattr(config, "hidden_size", None) or config.width
        dealt = cls(documents, recipe.balance, recipe.crossing or crossing_of(width), rings)
        if rank() == 0:
            tqdm.write(str(dealt), file=sys.stderr)
        return dealt

    @property
    def samples(self) -> int:
        """Of an epoch, as the batch size counts them."""
        return int(self.documents.sizes.sum()) // self.documents.sample_size

    def __str__(self) -> str:
        crossing = f"; attention costs as the rest at {self.crossing:,.0f}" if self.balance != "tokens" else ""
        rings = f"; {self.rings}" if self.rings else ""
        return f"balance {self.balance}: {self.documents.about}{crossing}{rings}"

    def following(self, method: Method) -> Callable[..., Iterator[Rows]]:
        """What Run.batches takes: each round of the method is dealt when its first batch is asked for."""

        def batches(recipe: TextRecipe, place: int, workers: int, start: int, total: int) -> Iterator[Rows]:
            share = self.island_size
            return self.steps(recipe, place // share, workers // share, start, total, lambda: steps_ahead(method))

        return batches

    @property
    def island_size(self) -> int:
        """Among how many workers a row is split."""
        return self.rings.island.size if self.rings else 1

    def steps(
        self, recipe: TextRecipe, rank: int, workers: int, start: int, total: int, ahead: Callable[[], int]
    ) -> Iterator[Rows]:
        """The steps of this worker, or island, from `start` to `total`. ahead: returns a deal's number of steps."""
        d = self.documents
        full = (d.lengths == d.lengths.max()) & (self.balance != "tokens")
        order = Order(d.sizes, recipe.batch_size * d.sample_size, full, seed=recipe.seed, workers=workers)
        while start < total:
            steps = min(ahead(), total - start)
            yield from self._round(order.of(start, steps), steps, recipe.accumulate, rank, workers)
            start += steps

    def owners(self, numbers: np.ndarray, workers: int) -> np.ndarray:
        """The worker of each of a round's documents, int64 [n]."""
        lengths, targets = self.documents.lengths[numbers], self.documents.targets[numbers]
        if self.balance == "tokens":
            return by_tokens(lengths, workers)
        return deal(np.stack([targets, cost(lengths, self.crossing)], axis=1), workers)

    def _round(self, numbers: np.ndarray, steps: int, rows: int, rank: int, workers: int) -> Iterator[Rows]:
        mine = numbers[self.owners(numbers, workers) == rank]
        lengths, group = self.documents.lengths, self.rings.group if self.rings else None
        predicted = max(float(self.documents.targets[numbers].sum()) / (steps * workers), 1.0) / self.island_size
        of_step = into_parts(lengths[mine], steps)
        for step in range(steps):
            some = mine[of_step == step]
            of_row = into_parts(lengths[some], rows)  # another number of rows leaves a step its documents
            yield Rows([self._row(some[of_row == row]) for row in range(rows)], predicted, group)

    def _row(self, numbers: np.ndarray) -> Packed:
        documents = [self.documents.read(number) for number in numbers.tolist()]
        return self.rings.split(documents) if self.rings else pack(documents)


def steps_ahead(method: Method) -> int:
    """The optimizer steps until all workers next meet."""
    return method.tau if isinstance(method, Rounds) else 1
