"""Who of an inner group holds which elements of a model: shards of it, copies, or stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import outer
from ..errors import UserError
from ..flat import Bucket, copy, is_dtensor, local_shard, views
from ..groups import Stage, agree, host_group

Places = dict[int, list[tuple[int, slice]]]  # how many ranks hold some elements -> [(which flat tensor, where in it)]


class Placement:
    """How the ranks of an inner group share a model; what several of them hold counts once in its norms.

    params, buffers: plain tensors and DTensors. group: the inner group; None: this worker alone. shards: plain tensors
    are this rank's own; else all ranks hold them. UserError where a mean over workers would mix different shards.

    Methods take `trained`, those of params that require a gradient, in their order, as local tensors.
    """

    def __init__(
        self, params: Sequence[Tensor], buffers: Sequence[Tensor], group: dist.ProcessGroup | None, shards: bool
    ):
        self.of_shards = shards or any(is_dtensor(p) for p in params)
        if self.of_shards and group is None:
            what = "shards=True needs" if shards else "DTensors as parameters need"
            raise UserError(f"{what} mesh=: without it different shards would be averaged")
        ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        copies = {id(t): copies_of(t, ranks, shards) for t in [*params, *buffers]}
        if not shards and any(copies[id(b)] < len(ranks) for b in buffers):
            raise UserError("a DTensor among the buffers is sharded, its mean would mix shards: leave it out of them")
        self.size = len(ranks)
        self._shared = [local_shard(t) for t in [*params, *buffers] if copies[id(t)] == self.size]
        self._copies = [copies[id(p)] for p in params if p.requires_grad]
        self._in_shares: Places = {}
        self._in_flats: Places = {}

    def agree(self, settings: tuple[Any, ...], group: dist.ProcessGroup, device: torch.device) -> None:
        """groups.agree over the inner group, with what all its ranks hold."""
        agree(settings, [], group, device)
        try:
            agree((), self._shared, group, device)
        except UserError as error:
            remedy = "if each holds a part of its own, as a pipeline stage, give shards=True"
            raise UserError(f"{error}; {remedy}") from None

    def check(self, trained: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """UserError if parameters that all ranks of the inner group should hold alike have come to differ."""
        shared = [p.detach() for p, n in zip(trained, self._copies, strict=True) if n == self.size and p.numel()]
        if not shared:
            return
        total = outer.norm(shared).double().cpu()
        spread = torch.stack([total, -total])
        dist.all_reduce(spread, dist.ReduceOp.MAX, group=host_group(group))
        highest, lowest = spread[0].item(), -spread[1].item()
        if highest - lowest > 1e-6 * abs(highest):
            what = "unsharded parameters" if self.of_shards else "parameters"
            raise UserError(
                f"the {what} of one node's workers differ (norms from {lowest:.9g} to {highest:.9g}): they have to "
                "synchronise gradients every step, as in DistributedDataParallel over mesh.get_group(1); else give no "
                "mesh, or, to pipeline stages, shards=True"
            )

    def count(self, trained: Sequence[Tensor], group: dist.ProcessGroup) -> int:
        """How many elements the whole model trains."""
        held = sum(p.numel() / n for p, n in zip(trained, self._copies, strict=True))
        box = torch.tensor(held, dtype=torch.float64)
        dist.all_reduce(box, group=host_group(group))
        return round(box.item())

    def locate(self, trained: Sequence[Tensor], buckets: Sequence[Bucket], shares: Sequence[Tensor]) -> None:
        """Notes where the elements lie that several ranks hold. shares: views of the buckets' flat tensors."""
        copies = {id(p): n for p, n in zip(trained, self._copies, strict=True)}
        self._in_shares = _places(buckets, shares, copies)
        self._in_flats = _places(buckets, [b.flat for b in buckets], copies)

    def surplus(self, shares: Sequence[Tensor]) -> Tensor | float:
        """What to take off the sum of the squares in `shares`, laid out as in `locate`, before it is summed over the
        inner group: all but 1 / n of what n ranks hold; 0-d, float64."""
        total: Tensor | float = 0.0
        for n, places in self._in_shares.items():
            total += (1 - 1 / n) * outer.norm([shares[i][place] for i, place in places]).double().square()
        return total

    def level(self, flats: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[Stage]:
        """Gives what all ranks of the inner group hold the first one's values. flats: the buckets', whole.

        The order in which a sum is taken depends on where its terms lie, and shards need not be equally long.
        """
        places = self._in_flats.get(self.size, [])
        for i in sorted({i for i, _ in places}):
            copies = [flats[i][place] for j, place in places if j == i]
            packed = torch.cat(copies)
            work = dist.broadcast(packed, group_src=0, group=group, async_op=True)
            assert work is not None
            yield [work], packed.numel() * packed.element_size() * (self.size - 1) // self.size
            copy(copies, views(packed, copies))


def _places(buckets: Sequence[Bucket], parts: Sequence[Tensor], copies: dict[int, int]) -> Places:
    """parts: a view of each bucket's flat tensor. copies: id of a parameter -> how many ranks hold it."""
    found: Places = {}
    for i, (bucket, part) in enumerate(zip(buckets, parts, strict=True)):
        end, first = 0, int(part.storage_offset())
        for n, together in groupby(bucket.params, lambda p: copies[id(p)]):
            start, end = end, end + sum(p.numel() for p in together)
            place = slice(max(start - first, 0), min(end - first, len(part)))
            if n > 1 and place.start < place.stop:
                found.setdefault(n, []).append((i, place))
    return found


def copies_of(t: Tensor, ranks: Sequence[int], shards: bool) -> int:
    """How many of `ranks`, an inner group, hold those elements of `t` that this rank holds, itself included.

    A plain tensor: all of them, or with `shards` this one alone. A DTensor: as its placements say. UserError where they
    are partial sums, or reach beyond the group.
    """
    if not is_dtensor(t):
        return 1 if shards else len(ranks)
    mesh = t.device_mesh
    holders = len(set(mesh.mesh.flatten().tolist()) & set(ranks)) if shards else len(ranks)
    for dim, placement in enumerate(t.placements):
        if placement.is_partial():
            raise UserError(f"a DTensor placed as {placement!r}: redistribute it to Replicate() or Shard(dim) first")
        if placement.is_replicate():
            continue
        over = dist.get_process_group_ranks(mesh.get_group(dim))
        if not set(over) <= set(ranks):
            raise UserError(
                f"a DTensor is sharded over ranks {over}, the inner group is {list(ranks)}: different shards would be "
                "averaged; give mesh=[replicate, shard] whose second dimension holds the whole model"
            )
        holders //= len(over)
    return holders
