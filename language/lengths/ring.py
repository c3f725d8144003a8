"""Ring attention inside an island: exact causal attention over documents that are split over ranks.

    shares = Shares(documents, rings)              # once a step; every rank passes all documents in the same order
    ids = all_ids[shares.indices]                  # this rank's tokens; its positions are shares.positions
    out = ring_attention(q, k, v, shares)          # in every layer: [tokens, heads, width] of this rank's tokens

A document on a ring of G ranks is cut into 2 G chunks. The rank at place p holds chunks p and 2 G - 1 - p, so all ranks
have equal work ("zigzag", after Zhu's ring-flash-attention). Keys and values travel around the ring during computation
(Liu et al., arXiv 2310.01889). Every hop is one call of a flash kernel. Outputs are merged by their log-sum-exp, and
gradients are summed. torch's context_parallel needs a GPU, and splits all sequences over all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

aten = torch.ops.aten


@dataclass(frozen=True)
class Piece:
    """One document's two chunks on this rank.

    Attributes:
        number: The document's number.
        length: Its tokens.
        ring: The ranks that hold it.
        place: This rank's place on the ring.
        rows: Where the chunks are among this rank's tokens.
    """

    number: int
    length: int
    ring: tuple[int, ...]
    place: int
    rows: slice

    @property
    def next(self) -> int:
        return self.ring[(self.place + 1) % len(self.ring)]

    @property
    def previous(self) -> int:
        return self.ring[self.place - 1]

    def chunks(self, hop: int) -> tuple[range, range]:
        """Positions in the document of the keys that are here after `hop` hops. Either chunk may be empty."""
        return chunks(self.length, len(self.ring), (self.place - hop) % len(self.ring))

    def room(self, like: Tensor, hop: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized [2, tokens, heads, width] for the keys and values of a hop, or their gradients."""
        return like.new_empty(2, sum(map(len, self.chunks(hop))), *like.shape[1:], dtype=dtype)

    def block(self, hop: int) -> tuple[slice, slice]:
        """Rows of this rank, and keys of the visitor, that this hop multiplies.

        At hop 0 attention is causal, later all rows attend to all keys of the block. All rows see the first chunk of an
        earlier place. The rows of the second chunk see both chunks of a later place.
        """
        if hop == 0:
            return self.rows, slice(None)
        if hop <= self.place:
            return self.rows, slice(0, len(self.chunks(hop)[0]))
        return slice(self.rows.start + len(self.chunks(0)[0]), self.rows.stop), slice(None)


def chunks(length: int, ranks: int, place: int) -> tuple[range, range]:
    """Positions of the two chunks of a document that the rank at a place of its ring holds."""
    cuts = 2 * ranks
    first, second = (range(i * length // cuts, (i + 1) * length // cuts) for i in (place, cuts - 1 - place))
    return first, second


class Shares:
    """The parts of a step's documents that this rank holds. Every rank passes the same arguments.

    Args:
        documents: Cumulative lengths, int64 [documents + 1], from 0.
        rings: For each document the ranks of the group that hold it, each once.
        group: The ranks. None: all ranks.

    Attributes:
        indices: Indices of this rank's tokens in the concatenated documents, int64 [tokens].
        positions: Their positions in their own documents, int64 [tokens].
        longest: Tokens of the longest document of which this rank holds a part.
    """

    def __init__(self, documents: Tensor, rings: Sequence[Sequence[int]], group: dist.ProcessGroup | None = None):
        self.group = group
        ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if dist.is_initialized() else (1, 0)
        ends = documents.tolist()
        assert len(rings) == len(ends) - 1 and all(ring and set(ring) <= set(range(ranks)) for ring in rings)
        self.pieces: list[Piece] = []
        indices: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        tokens = 0
        for number, ring in enumerate(rings):
            if rank in ring:
                length, place = ends[number + 1] - ends[number], tuple(ring).index(rank)
                held = chunks(length, len(ring), place)
                rows = slice(tokens, tokens := tokens + sum(map(len, held)))
                self.pieces.append(Piece(number, length, tuple(ring), place, rows))
                indices += [ends[number] + torch.arange(chunk.start, chunk.stop) for chunk in held]
        self.indices = torch.cat(indices)
        starts = documents.cpu()[torch.searchsorted(documents.cpu(), self.indices, right=True) - 1]
        self.positions = self.indices - starts
        self.hops = max((len(piece.ring) for piece in self.pieces), default=1)
        self.longest = max((piece.length for piece in self.pieces), default=0)

    def exchange(
        self, pieces: Sequence[Piece], outgoing: dict[int, Tensor], incoming: dict[int, Tensor], lane: int
    ) -> list[Any]:
        """Starts to send to the next rank and to receive from the previous rank.

        Messages between two ranks match, because every rank lists documents in the same order.

        Args:
            pieces: The documents to move.
            outgoing: From a document's number to the tensor to send.
            incoming: From a document's number to the tensor to receive.
            lane: 0 for keys and values, 1 for gradients, which overlap them.

        Returns:
            Work to wait for.
        """
        how: dict[str, Any] = dict(group=self.group, tag=lane)
        out = [(p.next, outgoing[p.number]) for p in pieces if outgoing[p.number].numel()]
        into = [(p.previous, incoming[p.number]) for p in pieces if incoming[p.number].numel()]
        ops = [dist.P2POp(dist.isend, t, group_peer=peer, **how) for peer, t in out]
        ops += [dist.P2POp(dist.irecv, t, group_peer=peer, **how) for peer, t in into]
        return dist.batch_isend_irecv(ops) if ops else []


def ring_attention(q: Tensor, k: Tensor, v: Tensor, shares: Shares) -> Tensor:
    """Causal attention inside each document. A collective of all ranks on rings, forward and backward.

    q, k, v and the result are [tokens, heads, width] of this rank's tokens.
    """
    assert len(q) == len(shares.indices), "take the tokens at shares.indices"
    return _RingAttention.apply(q, k, v, shares)  # type: ignore[no-any-return]


class _RingAttention(torch.autograd.Function):
    """One autograd node for all documents of a layer, so that backward also meets peers in the same order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shares: Shares) -> Tensor:
        exact = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_empty(q.shape, dtype=exact), q.new_empty(q.shape[:2], dtype=exact)
        here = {p.number: torch.stack([k[p.rows], v[p.rows]]) for p in shares.pieces}
        for hop in range(shares.hops):
            going_on = [p for p in shares.pieces if hop + 1 < len(p.ring)]
            coming = {p.number: p.room(k, hop + 1, k.dtype) for p in going_on}
            works = shares.exchange(going_on, here, coming, 0)
            for p in shares.pieces:
                if hop < len(p.ring):
                    _add_block(out, lse, q, here[p.number], p, hop)
            wait_all(works)
            here = coming
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.shares = shares
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of visiting keys follow the keys by one hop, and arrive home one hop after the last block.

        Gradients of a rank's own keys stay. Whole documents come last, during the gradients' last hop.
        """
        q, k, v, out, lse = ctx.saved_tensors
        shares: Shares = ctx.shares
        d = _Gradients(q, k, v, out, lse, grad)
        split = [p for p in shares.pieces if len(p.ring) > 1]
        here = {p.number: torch.stack([k[p.rows], v[p.rows]]) for p in split}
        arriving: dict[int, Tensor] = {}
        sent: list[Any] = []
        for hop in range(shares.hops + 1):
            active = [p for p in split if hop < len(p.ring)]
            going_on = [p for p in split if hop + 1 < len(p.ring)]
            coming = {p.number: p.room(k, hop + 1, k.dtype) for p in going_on}
            works = shares.exchange(going_on, here, coming, 0)
            grads = {p.number: d.block(here[p.number], p, hop) for p in active}
            if hop == shares.hops:
                for p in shares.pieces:
                    if len(p.ring) == 1:
                        d.own[:, p.rows] += d.block(torch.stack([k[p.rows], v[p.rows]]), p, 0)
            wait_all(sent)
            for p in split:
                if hop == 0 or hop == len(p.ring):
                    d.own[:, p.rows] += grads[p.number] if hop == 0 else arriving[p.number]
                elif p.number in arriving:
                    grads[p.number] += arriving[p.number]
            wait_all(works)
            travelling = [p for p in active if hop]
            arriving = {p.number: p.room(k, hop + 1, lse.dtype) for p in travelling}
            sent = shares.exchange(travelling, grads, arriving, 1)
            here = coming
        return d.q.to(q.dtype), d.own[0].to(k.dtype), d.own[1].to(v.dtype), None


class _Gradients:
    """Gradients of this rank's queries, keys and values, summed block by block."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor):
        self.saved = q, out, lse, grad
        self.q = torch.zeros_like(q, dtype=lse.dtype)
        self.own = k.new_zeros(2, *k.shape, dtype=lse.dtype)  # for keys and values

    def block(self, visitor: Tensor, p: Piece, hop: int) -> Tensor:
        """Adds to the queries' gradients. Returns the visitor's gradients, [2, tokens, heads, width]."""
        q, out, lse, grad = self.saved
        rows, keys = p.block(hop)
        result = torch.zeros_like(visitor, dtype=lse.dtype)
        k, v = visitor[:, keys]
        if q[rows].numel() and k.numel():
            gq, gk, gv = flash_backward(grad[rows], q[rows], k, v, out[rows], lse[rows], causal=hop == 0)
            self.q[rows] += gq
            result[0, keys], result[1, keys] = gk, gv
        return result


def _add_block(out: Tensor, lse: Tensor, q: Tensor, visitor: Tensor, p: Piece, hop: int) -> None:
    """Merges the attention of a block into (out, lse) in place, as one softmax over both sets of keys."""
    rows, keys = p.block(hop)
    k, v = visitor[:, keys]
    if not (q[rows].numel() and k.numel()):
        return
    block_out, block_lse = flash(q[rows], k, v, causal=hop == 0)
    if hop == 0:
        out[rows], lse[rows] = block_out, block_lse
        return
    both = torch.logaddexp(lse[rows], block_lse)
    old, new = ((x - both).exp().unsqueeze(-1) for x in (lse[rows], block_lse))
    out[rows] = out[rows] * old + new * block_out
    lse[rows] = both


def wait_all(works: list[Any]) -> None:
    """Waits and drops the works, because a second wait on a send or receive of gloo never returns."""
    while works:
        works.pop().wait()


# -- torch's flash kernels, [tokens, heads, width] -----------------------------------------------------------------


def flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention [tokens, heads, width], and its log-sum-exp [tokens, heads]. On a GPU only in 16 bits."""
    heads_first = [_heads_first(x) for x in (q, k, v)]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal)
    return _tokens_first(out), lse[0].transpose(0, 1)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. out and lse may come from more keys than these."""
    args = [_heads_first(x) for x in (grad, q, k, v, out)]
    lse = lse.transpose(0, 1).unsqueeze(0)
    if q.device.type == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, lse, 0.0, causal)
    else:
        shape = None, None, len(q), len(k)  # no packed lengths
        random = q.new_empty(2, dtype=torch.uint64), q.new_empty(0)  # not read, because there is no dropout
        grads = aten._scaled_dot_product_flash_attention_backward(*args, lse.contiguous(), *shape, 0.0, causal, *random)
    dq, dk, dv = (_tokens_first(g) for g in grads)
    return dq, dk, dv


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [tokens, heads, width] -> [1, heads, tokens, width]


def _tokens_first(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)
