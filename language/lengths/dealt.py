"""Training on whole documents, dealt over the rounds of a run: `--balance` of language.train and language.finetune."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from core.errors import UserError
from core.groups import new_group, of_all
from core.methods import Method
from core.rounds import Rounds
from core.sharded.mesh import local_world_size
from language.lengths.packed import Document, Packed, Rows, attend_to_documents, pack, pack_share
from language.lengths.plan import Island, plan
from language.lengths.rounds import Order, by_tokens, cost, crossing_of, cut, deal, into_parts
from language.metrics import token_loss
from language.recipe import TextRecipe
from training.run import Run
from training.workers import least_seconds, rank, world_size

TOKENS, PARTS = 2048, 8  # of a row that is timed, as one document and as so many; fewer where there are fewer positions
REPEATS, SENT = 3, 12  # of a row, and of a message, of which the first ones wait for connections
MESSAGES = 3  # of a hop and layer: keys and values in both passes, and their gradients


@dataclass(frozen=True)
class Rings:
    """The workers among whom this one's documents are split."""

    group: dist.ProcessGroup
    island: Island

    @classmethod
    def of(
        cls, recipe: TextRecipe, model: nn.Module, mesh: DeviceMesh, longest: int, autocast: AbstractContextManager[Any]
    ) -> Rings:
        """The workers of a node of the mesh, each of whom must call it. longest: tokens of a document, at most."""
        device = next(model.parameters()).device
        group = new_group(mesh.get_group("shard"), recipe.timeout, device)
        assert group is not None
        size, here = mesh.size(1), local_world_size()
        nodes = size // here if 1 < here < size and size % here == 0 else 1
        given = recipe.rings.costs
        with autocast:
            costs = given or measured(model, group, size // nodes, min(TOKENS, longest))
        room = recipe.rings.room or float("inf")
        island = Island(nodes, size // nodes, *costs[:2], costs[2:4], costs[4:] or costs[2:4], room)  # pyright: ignore
        return cls(group, island)

    def split(self, documents: Sequence[Document]) -> Packed:
        """This worker's part of a row. Where a row has more tokens than there is room for, all have as many."""
        ends = torch.tensor([0, *(len(ids) for ids, _ in documents)]).cumsum(0)
        room = max(self.island.room, int(ends[-1]) / self.island.size)
        return pack_share(documents, plan(ends, replace(self.island, room=room)), self.group)

    def __str__(self) -> str:
        i = self.island
        nodes = f" on {i.nodes} machines" if i.nodes > 1 else ""
        costs = " ".join(f"{cost:.3g}" for cost in (i.attention, i.linear, *i.inside, *i.across))
        return f"islands of {i.size} workers{nodes}; --rings.costs {costs}"


# -- what a layer costs ---------------------------------------------------------------------------------------------


def measured(model: nn.Module, group: dist.ProcessGroup, devices: int, tokens: int) -> tuple[float, ...]:
    """The costs of an Island whose nodes have so many devices, the same on all its ranks: each time is that of the
    slowest. Seconds of a layer, both passes. tokens: of the row that is timed."""
    parts = max(1, min(PARTS, tokens // 2))
    tokens -= tokens % parts
    config: Any = model.config
    device = next(model.parameters()).device
    size = 2 if torch.is_autocast_enabled(device.type) else next(model.parameters()).element_size()
    nbytes = 2 * config.hidden_size * (2 * size + max(size, 4))  # of a token: keys, values, their gradients
    rows = [row_of(lengths).to(device) for lengths in ([tokens], [tokens // parts] * parts)]
    times = [least_seconds(lambda row=row: trained_on(model, row), device, REPEATS) for row in rows]  # pyright: ignore
    one, many = slowest(times, group)
    inside, across = (hop_of(group, ring, nbytes, tokens, device) for ring in (devices, dist.get_world_size(group)))
    layers = config.num_hidden_layers
    attention = max(0.0, one - many) / (layers * tokens**2 * (1 - 1 / parts)) if parts > 1 else 0.0
    linear = max(0.0, many / layers - attention * tokens**2 / parts) / tokens
    return attention, linear, *inside, *across


def hop_of(
    group: dist.ProcessGroup, devices: int, nbytes: int, tokens: int, device: torch.device
) -> tuple[float, float]:
    """Seconds of a hop in all, and of one for each token of so many bytes, in rings of so many ranks."""
    sends = [exchange(group, devices, n, device) for n in (MESSAGES, MESSAGES + tokens * nbytes)]
    few, much = slowest([least_seconds(send, device, SENT) for send in sends], group)
    return MESSAGES * few, max(0.0, much - few) / tokens


def row_of(lengths: Sequence[int]) -> Packed:
    """Documents of so many tokens, all of them the same one."""
    return pack([(torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.int64)) for n in lengths])


def trained_on(model: nn.Module, row: Packed) -> None:
    """A step's two passes, which leave nothing behind."""
    logits = model(row.ids, position_ids=row.positions, documents=row.boundaries).logits
    token_loss(logits, row.targets).backward()
    model.zero_grad(set_to_none=True)


def exchange(group: dist.ProcessGroup, devices: int, nbytes: int, device: torch.device) -> Callable[[], None]:
    """Sends so many bytes to the next of each `devices` ranks of the group, and receives as many."""
    node, place = divmod(dist.get_rank(group), devices)
    following, before = (node * devices + (place + step) % devices for step in (1, -1))
    ours, theirs = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))

    def send() -> None:
        if devices == 1:
            return
        how: dict[str, Any] = {"group": group}
        sends = dist.P2POp(dist.isend, ours, group_peer=following, **how)
        works = dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, theirs, group_peer=before, **how)])
        while works:
            works.pop().wait()

    return send


def slowest(seconds: Sequence[float], group: dist.ProcessGroup) -> list[float]:
    """Each the largest that a rank of the group has."""
    return [max(of) for of in zip(*of_all(list(seconds), group), strict=True)]


def check_room(tokens: float, room: int | None, workers: int) -> None:
    """UserError where the tokens of a row, on average, or of a document are more than an island's devices hold."""
    if room is not None and tokens > room * workers:
        raise UserError(
            f"a row of {tokens:,.0f} tokens, but {workers} workers of rings.room={room} hold {room * workers}: give a "
            "larger --accumulate, a smaller --batch_size or --context, or more workers a node"
        )


# -- documents over rounds --------------------------------------------------------------------------------------------


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
    """The documents of a token file, without empty ones; those longer than `context` are cut into pieces of it. Each
    token but a document's first is predicted once. end: the id that ends a document."""

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
