"""Several documents in a row: no attention between them, positions restart, the loss counts every target alike.

After `attend_to_documents(model)` call `model(row.ids, position_ids=row.positions, documents=row.boundaries)`;
TransNormer takes the same call. Without `documents` the model is unchanged. transformers alone would build a dense
mask, of the row's length squared; here the work is the sum of the documents' squares. `pack_share` makes rows whose
documents are split over the ranks of an island.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from core.errors import UserError
from language.data import IGNORE
from language.lengths.ring import Shares, chunks, ring_attention
from language.transnormer import TransNormer

NAME = "documents"  # of the attention, among transformers'
Document = tuple[Tensor, Tensor]  # inputs and targets, int64 [tokens] each; IGNORE where nothing is predicted


@dataclass(frozen=True)
class Packed:
    """One row: ids, positions and targets are int64 [1, tokens].

    boundaries: where documents begin in the row, and its end, int64 [documents + 1] on the host; or a rank's Shares.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    boundaries: Tensor | Shares

    def to(self, device: torch.device) -> Packed:
        """The row on a device, its boundaries where they are."""
        moved = (t.to(device, non_blocking=True) for t in (self.ids, self.positions, self.targets))
        return Packed(*moved, self.boundaries)


@dataclass(frozen=True)
class Rows:
    """A worker's rows of an optimizer step, one for each micro-batch.

    predicted: targets of a worker and step, averaged over the round. Every worker divides its sum of losses by it, so
    that all targets weigh the same. island: the ranks over which rows are split, if they are.
    """

    parts: list[Packed]
    predicted: float
    island: dist.ProcessGroup | None = None

    def mean_loss(self, mine: Tensor) -> Tensor:
        """The mean over the island of what its ranks give, 0-d each."""
        if self.island is not None:
            dist.all_reduce(mine, group=self.island)
            mine /= dist.get_world_size(self.island)
        return mine


FILLER: Document = torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE)  # one token that predicts nothing


def pack(documents: Sequence[Document]) -> Packed:
    """Joins whole documents to a row; without any a filler of one token, because every worker needs a backward pass."""
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
    """What this rank holds of a row whose documents are split over the group, each over its ring; or a filler."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    held = [0] * ranks
    for (ids, _), ring in zip(documents, rings, strict=True):
        for place, rank in enumerate(ring):
            held[rank] += sum(map(len, chunks(len(ids), len(ring), place)))
    idle = [rank for rank in range(ranks) if not held[rank]]
    documents, rings = [*documents, *(FILLER for _ in idle)], [*rings, *((rank,) for rank in idle)]
    shares = Shares(_ends(documents), rings, group)
    ids, targets = (torch.cat(whole)[shares.indices][None] for whole in zip(*documents, strict=True))
    return Packed(ids, shares.positions[None], targets, shares)


def _ends(documents: Sequence[Document]) -> Tensor:
    """Where documents begin in a row, and its end."""
    lengths = [len(ids) for ids, _ in documents]
    if not all(lengths):
        raise UserError(f"document {lengths.index(0)} of a row is empty: leave it out")
    return torch.tensor([0, *lengths]).cumsum(0)


# -- attention ------------------------------------------------------------------------------------------------------


def attend_to_documents(model: nn.Module, *, split: bool = False) -> None:
    """From now on the model can be called with `documents`. split: also with documents that are split over ranks.
    UserError where it would not keep documents apart, or attends to them in another way."""
    if isinstance(model, TransNormer):
        return
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise UserError(f"{name} has no attention that could be told of documents: leave --balance out")
    if kinds := set(getattr(config, "layer_types", None) or []) - {"full_attention"}:
        raise UserError(f"{name} has layers of {', '.join(sorted(kinds))}: leave --balance out")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)  # pyright: ignore[reportCallIssue]
    if config._attn_implementation != NAME:  # it has said so in a warning
        raise UserError(f"{name} computes its attention in a way of its own: leave --balance out")
    training = model.training
    _check_apart(model.eval(), split)
    model.train(training)


@torch.no_grad()
def _check_apart(model: nn.Module, split: bool) -> None:
    """UserError where a document's logits depend on what stands before it in the row."""
    device = next(model.parameters()).device
    documents = [(torch.arange(begin, end), torch.full((end - begin,), IGNORE)) for begin, end in ((4, 6), (1, 4))]
    me = dist.get_rank() if dist.is_initialized() else 0
    row = (pack_share(documents, [(me,)] * 2) if split else pack(documents)).to(device)
    try:
        found = model(row.ids, position_ids=row.positions, documents=row.boundaries).logits[0, 2:].float()
    except (TypeError, ValueError) as error:
        raise UserError(f"{type(model).__name__} takes no documents ({error}): leave --balance out") from None
    alone = model(documents[1][0][None].to(device)).logits[0].float()
    if (found - alone).abs().max() > 1e-4 * alone.abs().max():
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
    """transformers' attention by torch's kernels, of each document by itself where there are documents: [1, heads,
    tokens, d] each -> [1, tokens, heads, d]."""
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
    """ring_attention as transformers calls an attention: [1, heads, tokens, width] -> [1, tokens, heads, width]."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    usual = query.shape[-1] ** -0.5
    if scaling is not None and abs(scaling / usual - 1) > 1e-9:
        query = query * (scaling / usual)
    return ring_attention(*(x[0].transpose(0, 1) for x in (query, key, value)), shares)[None]


def _mask(*, attention_mask: Tensor | None = None, **rest: Any) -> Tensor | None:
    """A mask for padded rows alone: documents, and causal rows, need none."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **rest)
