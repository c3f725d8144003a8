"""Training on whole documents, assigned to workers: `--balance` of language.train and language.finetune.

Several documents share a row. There is no attention between them, their positions restart, and the loss gives every
target the same weight. After `attend_to_documents(model)`, call
`model(row.ids, position_ids=row.positions, documents=row.boundaries)`. transformers would build a dense mask as large
as the square of the row. Here the work is the sum of the documents' squares. With balance rings, documents are split
over the ranks of an island (`pack_share`).
"""

from __future__ import annotations

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from core.baselines.table import Method
from core.errors import UserError
from core.groups import local_world_size, new_group
from core.local_update import LocalUpdateMethod
from language.data import IGNORE
from language.lengths.plan import Island, plan
from language.lengths.ring import Shares, chunks, ring_attention, wait_all
from language.lengths.rounds import Order, cost, cut, deal, into_parts
from language.metrics import token_loss
from language.recipe import TextRecipe
from training.loop.run import Run
from training.optim import evaluating
from training.start.errors import explained
from training.start.workers import largest_of_workers, least_seconds, rank, world_size

NAME = "documents"  # under which the attention is registered with transformers
Document = tuple[Tensor, Tensor]  # inputs and targets, int64 [tokens] each; IGNORE where nothing is predicted


@dataclass(frozen=True)
class Packed:
    """One row of documents.

    Attributes:
        ids, positions, targets: int64 [1, tokens].
        boundaries: The start of each document in the row, and the row's end, int64 [documents + 1] on the host. With
            split documents, this rank's Shares.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    boundaries: Tensor | Shares

    def to(self, device: torch.device) -> Packed:
        """Copies the row to a device. Its boundaries stay on the host."""
        moved = (t.to(device, non_blocking=True) for t in (self.ids, self.positions, self.targets))
        return Packed(*moved, self.boundaries)


@dataclass(frozen=True)
class Rows:
    """A worker's rows of an optimizer step.

    Attributes:
        parts: One row for each micro-batch.
        predicted: Targets per worker and step, averaged over the round. Every worker divides its sum of losses by this
            number, so that all targets have the same weight.
        island: The ranks over which rows are split. None if rows are whole.
    """

    parts: list[Packed]
    predicted: float
    island: dist.ProcessGroup | None = None

    def mean_loss(self, mine: Tensor) -> Tensor:
        """Averages a 0-d value over the island's ranks."""
        if self.island is not None:
            dist.all_reduce(mine, group=self.island)
            mine /= dist.get_world_size(self.island)
        return mine


FILLER: Document = torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE)  # one token that predicts nothing


def pack(documents: Sequence[Document]) -> Packed:
    """Joins whole documents to a row.

    Without documents the row is one token of filler, because every worker must run a backward pass.
    """
    documents = documents or [FILLER]
    return Packed(
        ids=torch.cat([ids for ids, _ in documents])[None],
        positions=torch.cat([torch.arange(len(ids)) for ids, _ in documents])[None],
        targets=torch.cat([targets for _, targets in documents])[None],
        boundaries=_ends(documents),
    )


def pack_share(
    documents: Sequence[Document], rings: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None
) -> Packed:
    """This rank's part of a row whose documents are split over rings of ranks of the island (None means all).

    Returns:
        The part, or a filler of one token if this rank holds nothing.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    held = [0] * ranks
    for (ids, _), ring in zip(documents, rings, strict=True):
        for place, holder in enumerate(ring):
            held[holder] += sum(map(len, chunks(len(ids), len(ring), place)))
    idle = [holder for holder in range(ranks) if not held[holder]]
    documents, rings = [*documents, *(FILLER for _ in idle)], [*rings, *((holder,) for holder in idle)]
    shares = Shares(_ends(documents), rings, group)
    ids, targets = (torch.cat(whole)[shares.indices][None] for whole in zip(*documents, strict=True))
    return Packed(ids, shares.positions[None], targets, shares)


def _ends(documents: Sequence[Document]) -> Tensor:
    """The start of each document in a row, and the row's end, int64 [documents + 1]."""
    lengths = [len(ids) for ids, _ in documents]
    if not all(lengths):
        raise UserError(f"document {lengths.index(0)} of a row is empty: leave it out")
    return torch.tensor([0, *lengths]).cumsum(0)


# -- attention ------------------------------------------------------------------------------------------------------


def attend_to_documents(model: nn.Module) -> None:
    """Prepares a causal language model of transformers for calls with `documents`.

    Raises:
        UserError: If the model has its own kind of attention, or would mix the documents of a row.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UserError(f"{name} has no attention that could be told of documents: leave --balance out")
    if kinds := set(getattr(config, "layer_types", None) or []) - {"full_attention"}:
        raise UserError(f"{name} has layers of {', '.join(sorted(kinds))}: leave --balance out")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)  # pyright: ignore[reportCallIssue]
    if config._attn_implementation != NAME:  # the model has warned
        raise UserError(f"{name} computes its attention in a way of its own: leave --balance out")
    with evaluating(model):
        _check_apart(model)


@torch.no_grad()
def _check_apart(model: nn.Module) -> None:
    """Raises UserError if a document's logits depend on the documents before it in the row.

    The row is whole, also if documents are split later, because the rings' kernels need 16 bits on a GPU.
    """
    device = next(model.parameters()).device
    documents = [(torch.arange(begin, end), torch.full((end - begin,), IGNORE)) for begin, end in ((4, 6), (1, 4))]
    row = pack(documents).to(device)
    with explained(f"{type(model).__name__} takes no documents", "leave --balance out"):
        found = model(row.ids, position_ids=row.positions, documents=row.boundaries).logits[0, 2:].float()
    alone = model(documents[1][0][None].to(device)).logits[0].float()
    tolerance = 1e-4 if device.type == "cpu" else 1e-2  # TF32 rounds
    if (found - alone).abs().max() > tolerance * alone.abs().max():
        raise UserError(f"{type(model).__name__} mixes the documents of a row: leave --balance out")


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    documents: Tensor | Shares | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, with torch's kernels. With `documents`, each document separately.

    Args:
        query, key, value: [1, heads, tokens, d].

    Returns:
        [1, tokens, heads, d], and None in place of the attention weights.
    """
    if dropout:
        raise UserError(f"attention to documents has no dropout, the model's is {dropout}: set it to 0")
    reach = documents.longest if isinstance(documents, Shares) else query.shape[2]
    if sliding_window is not None and reach > sliding_window:
        raise UserError(f"attention to documents knows no window, the model's is {sliding_window}: leave --balance out")
    if documents is None:
        return sdpa_attention_forward(module, query, key, value, mask, **rest)
    if mask is not None:
        raise UserError("attention_mask goes with padded rows, documents with packed ones: leave one of them out")
    if isinstance(documents, Shares):
        return _around_rings(query, key, value, documents, **rest), None
    lengths = documents.diff().tolist()
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *part, None, **rest)[0] for part in parts], dim=1), None


def _around_rings(
    query: Tensor, key: Tensor, value: Tensor, shares: Shares, scaling: float | None = None, **_: Any
) -> Tensor:
    """Converts transformers' layout for ring_attention: [1, heads, tokens, width] -> [1, tokens, heads, width]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    usual = query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling / usual - 1) > 1e-9:
        query = query * (scaling / usual)
    return ring_attention(*(x[0].transpose(0, 1) for x in (query, key, value)), shares)[None]


def _mask(*, attention_mask: Tensor | None = None, **rest: Any) -> Tensor | None:
    """A mask only for padded rows. Documents and causal rows need none."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **rest)


TOKENS, PARTS = 2048, 8  # tokens of the row that is timed, and its documents; fewer if the model has fewer positions
REPEATS, SENT = 3, 12  # timings of a row, and of a message, whose first ones wait for connections
MESSAGES = 3  # per hop and layer: keys and values in both passes, and their gradients


def island_of(
    recipe: TextRecipe, model: nn.Module, mesh: DeviceMesh, longest: int, autocast: AbstractContextManager[Any]
) -> tuple[dist.ProcessGroup, Island]:
    """Measures the costs of an island of the mesh [islands, workers], unless the recipe gives them. A collective.

    attend_to_documents has prepared the model. A document has at most `longest` tokens.

    Returns:
        The workers over which documents are split, and their costs.
    """
    group = new_group(mesh.get_group("shard"), recipe.timeout, next(model.parameters()).device)
    assert group is not None
    size, here = mesh.size(1), local_world_size()
    nodes = size // here if 1 < here < size and size % here == 0 else 1
    with autocast:
        costs = recipe.rings.costs or measured(model, group, size // nodes, min(TOKENS, longest))
    return group, Island(nodes, size // nodes, *costs[:2], costs[2:4], costs[4:] or costs[2:4])  # pyright: ignore


# -- costs of a layer -----------------------------------------------------------------------------------------------


def measured(model: nn.Module, group: dist.ProcessGroup, devices: int, tokens: int) -> tuple[float, ...]:
    """Measures a layer with a row of so many tokens, on an island with so many devices per node.

    All ranks get the times of the slowest rank.

    Returns:
        The costs of an Island: seconds of a layer, forward and backward.
    """
    parts = max(1, min(PARTS, tokens // 2))
    tokens -= tokens % parts
    config: Any = model.config
    device = next(model.parameters()).device

    def train(row: Packed) -> None:
        logits = model(row.ids, position_ids=row.positions, documents=row.boundaries).logits
        token_loss(logits, row.targets).backward()
        model.zero_grad(set_to_none=True)

    ones = torch.ones(tokens, dtype=torch.int64)  # all tokens are equal
    rows = [pack([(ones[: tokens // n],) * 2] * n).to(device) for n in (1, parts)]
    times = [least_seconds(functools.partial(train, row), device, REPEATS) for row in rows]
    one, many = largest_of_workers(times, group)
    size = 2 if torch.is_autocast_enabled(device.type) else next(model.parameters()).element_size()
    nbytes = 2 * config.hidden_size * (2 * size + max(size, 4))  # per token: keys, values, their gradients
    inside, across = (hop_of(group, ring, nbytes, tokens, device) for ring in (devices, dist.get_world_size(group)))
    layers = config.num_hidden_layers
    attention = max(0.0, one - many) / (layers * tokens**2 * (1 - 1 / parts)) if parts > 1 else 0.0
    linear = max(0.0, many / layers - attention * tokens**2 / parts) / tokens
    return attention, linear, *inside, *across


def hop_of(
    group: dist.ProcessGroup, devices: int, nbytes: int, tokens: int, device: torch.device
) -> tuple[float, float]:
    """Times a hop in rings of `devices` consecutive ranks, in which each rank sends to the next one.

    Returns:
        The fixed seconds of a hop, and the seconds per token of `nbytes` bytes.
    """
    node, place = divmod(dist.get_rank(group), devices)
    following, before = (node * devices + (place + step) % devices for step in (1, -1))
    how: dict[str, Any] = {"group": group}

    def send(ours: Tensor, theirs: Tensor) -> None:
        sends = dist.P2POp(dist.isend, ours, group_peer=following, **how)
        wait_all(dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, theirs, group_peer=before, **how)]))

    sizes = (MESSAGES, MESSAGES + tokens * nbytes)
    pairs = ([torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2)] for n in sizes)
    times = [least_seconds(functools.partial(send, *pair), device, SENT) for pair in pairs]
    few, much = largest_of_workers(times, group)
    return MESSAGES * few, max(0.0, much - few) / tokens


# -- documents over rounds --------------------------------------------------------------------------------------------


SCANNED = 1 << 26  # tokens of a file that are scanned at a time


@dataclass(frozen=True)
class Documents:
    """The documents of a task.

    Attributes:
        lengths: Tokens that the model reads, int64 [documents].
        targets: Tokens that count in the loss, int64 [documents].
        sizes: Each document's share of a step's size, int64 [documents].
        sample_size: The size of one sample of the batch size.
        about: A line that describes them.
        read: Returns a document by its number.
    """

    lengths: np.ndarray
    targets: np.ndarray
    sizes: np.ndarray
    sample_size: int
    about: str
    read: Callable[[int], Document]


def text_documents(tokens: np.ndarray, end: int, context: int) -> Documents:
    """The documents of a token file, without empty ones. Longer ones are cut into pieces of `context` tokens.

    Each token except a document's first is predicted once. The id `end` ends a document.
    """
    parts = range(0, len(tokens), SCANNED)
    ends = np.concatenate([at + 1 + np.flatnonzero(tokens[at : at + SCANNED] == end) for at in parts])
    if not len(ends) or ends[-1] < len(tokens):
        ends = np.append(ends, len(tokens))
    begins = np.concatenate([[0], ends[:-1]])
    inputs = ends - begins - 1
    begins, inputs = begins[inputs > 0], inputs[inputs > 0]
    if not len(inputs):
        raise UserError(f"{len(ends)} documents, all of them empty: give text")
    lengths, document, start = cut(inputs, context)
    starts = begins[document] + start
    longer, empty = int((inputs > context).sum()), len(ends) - len(inputs)
    about = f"{len(inputs):,} documents, of which {longer:,} are longer than {context:,} tokens and are cut"
    about += f"; {empty:,} empty ones left out" if empty else ""

    def read(number: int) -> Document:
        at, length = starts[number], lengths[number]
        found = torch.from_numpy(tokens[at : at + length + 1].astype(np.int64))
        return found[:-1], found[1:]

    return Documents(lengths, lengths, lengths, context, about, read)


@dataclass(frozen=True)
class Dealt:
    """A task's documents, and how they are assigned to workers.

    Attributes:
        documents: The documents.
        crossing: The length at which attention costs as much as the rest of the model.
        group: With balance rings, the island's workers, over which documents are split.
        island: With balance rings, the island's costs.
    """

    documents: Documents
    crossing: float
    group: dist.ProcessGroup | None = None
    island: Island | None = None

    @classmethod
    def of(cls, recipe: TextRecipe, model: nn.Module, documents: Documents, run: Run | None = None) -> Dealt:
        """Prepares the model, which attends to documents from now on. With balance rings, the run's nodes are islands.

        Raises:
            UserError: If there are too few documents, or the model or the precision does not fit.
        """
        workers, n = recipe.data_workers(world_size()), len(documents.lengths)
        if n < workers:
            raise UserError(f"{n} documents over {workers} workers: give as many, or --balance none")
        split = run is not None and recipe.balance == "rings"
        if split and run.device.type == "cuda" and recipe.precision == "float32":  # the rings' kernels need 16 bits
            raise UserError("balance='rings' with precision='float32': on a GPU give --precision bfloat16 or float16")
        attend_to_documents(model)
        config: Any = model.config
        # per token a layer has 12 width^2 multiplications in its matrices, and width x length in attention, half masked
        dealt = cls(documents, 12.0 * config.hidden_size)
        if split and run.mesh is not None:
            group, island = island_of(recipe, model, run.mesh, int(documents.lengths.max()), run.autocast())
            dealt = replace(dealt, group=group, island=island)
        if rank() == 0:
            tqdm.write(str(dealt), file=sys.stderr)
        return dealt

    @property
    def samples(self) -> int:
        """Samples of an epoch, as the batch size counts them."""
        return int(self.documents.sizes.sum()) // self.documents.sample_size

    def __str__(self) -> str:
        told = f"whole documents: {self.documents.about}; attention costs as the rest at {self.crossing:,.0f}"
        if (i := self.island) is not None:
            nodes = f" on {i.nodes} machines" if i.nodes > 1 else ""
            costs = " ".join(f"{cost:.3g}" for cost in (i.attention, i.linear, *i.inside, *i.across))
            told += f"; islands of {i.size} workers{nodes}; --rings.costs {costs}"
        return told

    def following(self, method: Method) -> Callable[..., Iterator[Rows]]:
        """The batches for Run.batches. Each round is assigned when its first batch is requested."""

        def batches(recipe: TextRecipe, place: int, workers: int, start: int, total: int) -> Iterator[Rows]:
            share = self.island_size
            return self.steps(recipe, place // share, workers // share, start, total, lambda: steps_ahead(method))

        return batches

    @property
    def island_size(self) -> int:
        """The number of workers over which a row is split."""
        return self.island.size if self.island is not None else 1

    def steps(
        self, recipe: TextRecipe, rank: int, workers: int, start: int, total: int, ahead: Callable[[], int]
    ) -> Iterator[Rows]:
        """The rows of this worker, or island, for the steps from `start` to `total`.

        `ahead` returns the number of steps to assign at once.
        """
        d = self.documents
        full = d.lengths == d.lengths.max()
        order = Order(d.sizes, recipe.batch_size * d.sample_size, full, seed=recipe.seed, workers=workers)
        while start < total:
            steps = min(ahead(), total - start)
            yield from self._round(order.of(start, steps), steps, recipe.accumulate, rank, workers)
            start += steps

    def row(self, documents: Sequence[Document]) -> Packed:
        """A row of this worker, with balance rings its part of the island's row."""
        if self.island is None:
            return pack(documents)
        return pack_share(documents, plan(_ends(documents), self.island), self.group)

    def _round(self, numbers: np.ndarray, steps: int, rows: int, rank: int, workers: int) -> Iterator[Rows]:
        d, lengths = self.documents, self.documents.lengths
        loads = np.stack([d.targets[numbers], cost(lengths[numbers], self.crossing)], axis=1)
        mine = numbers[deal(loads, workers) == rank]
        predicted = max(float(d.targets[numbers].sum()) / (steps * workers), 1.0) / self.island_size
        of_step = into_parts(lengths[mine], steps)
        for step in range(steps):
            some = mine[of_step == step]
            of_row = into_parts(lengths[some], rows)  # the number of rows does not change a step's documents
            held = ([d.read(number) for number in some[of_row == row].tolist()] for row in range(rows))
            yield Rows([self.row(documents) for documents in held], predicted, self.group)


def steps_ahead(method: Method) -> int:
    """The optimizer steps until all workers next synchronize."""
    return method.tau if isinstance(method, LocalUpdateMethod) else 1
