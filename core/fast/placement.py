"""Who of an inner group holds which elements of a model: shards of it, copies, or stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import outer
from ..errors import UserError
from ..flat import Bucket, local_shard
from ..groups import agree


class Placement:
    """How the ranks of an inner group share a model; what several of them hold counts once in its norms.

    params, buffers: plain tensors and DTensors. group: the inner group; None: this worker alone. shards: plain tensors
    are this rank's own; else all ranks hold them. UserError where a mean over workers would mix different shards.

    Methods take `trained`, those of params that require a gradient, in their order, as local tensors.
    """

    def __init__(
        self, params: Sequence[Tensor], buffers: Sequence[Tensor], group: dist.ProcessGroup | None, shards: bool
    ):
        self.of_shards = shards or any(isinstance(p, DTensor) for p in params)
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
        self._repeated: dict[int, list[tuple[int, slice]]] = {}

    def agree(self, settings: tuple[Any, ...], group: dist.ProcessGroup, device: torch.device) -> None:
        """groups.agree over the inner group, with what all its ranks hold."""
        agree(settings, [], group, device)
        try:
            agree((), self._shared, group, device)
        except UserError as error:
            remedy = "if each holds a part of its own, as a pipeline stage, give shards=True"
            raise UserError(f"{error}; {remedy}") from None

    def check(self, trained: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
        """UserError if parameters that all ranks of the inner group should hold alike have come to differ."""
        shared = [p.detach() for p, n in zip(trained, self._copies, strict=True) if n == self.size and p.numel()]
        if not shared:
            return
        total = outer.norm(shared).double().to(device)
        spread = torch.stack([total, -total])
        dist.all_reduce(spread, dist.ReduceOp.MAX, group=group)
        highest, lowest = spread[0].item(), -spread[1].item()
        if highest - lowest > 1e-6 * abs(highest):
            what = "unsharded parameters" if self.of_shards else "parameters"
            raise UserError(
                f"the {what} of one node's workers differ (norms from {lowest:.9g} to {highest:.9g}): they have to "
                "synchronise gradients every step, as in DistributedDataParallel over mesh['shard']; else give no "
                "mesh, or, to pipeline stages, shards=True"
            )

    def count(self, trained: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> int:
        """How many elements the whole model trains."""
        held = sum(p.numel() / n for p, n in zip(trained, self._copies, strict=True))
        box = torch.tensor(held, dtype=torch.float64, device=device)
        dist.all_reduce(box, group=group)
        return round(box.item())

    def locate(self, trained: Sequence[Tensor], buckets: Sequence[Bucket], shares: Sequence[Tensor]) -> None:
        """Notes where elements that several ranks hold lie in the shares, views of the buckets' flat tensors."""
        copies = {id(p): n for p, n in zip(trained, self._copies, strict=True)}
        for i, (bucket, share) in enumerate(zip(buckets, shares, strict=True)):
            end, first = 0, int(share.storage_offset())
            for n, together in groupby(bucket.params, lambda p: copies[id(p)]):
                start, end = end, end + sum(p.numel() for p in together)
                place = slice(max(start - first, 0), min(end - first, len(share)))
                if n > 1 and place.start < place.stop:
                    self._repeated.setdefault(n, []).append((i, place))

    def surplus(self, shares: Sequence[Tensor]) -> Tensor | float:
        """What to take off the sum of the squares in `shares`, laid out as in `locate`, before it is summed over the
        inner group: all but 1 / n of what n ranks hold; 0-d, float64."""
        total: Tensor | float = 0.0
        for n, places in self._repeated.items():
            total += (1 - 1 / n) * outer.norm([shares[i][place] for i, place in places]).double().square()
        return total


def copies_of(t: Tensor, ranks: Sequence[int], shards: bool) -> int:
    """How many of `ranks`, an inner group, hold those elements of `t` that this rank holds, itself included.

    A plain tensor: all of them, or with `shards` this one alone. A DTensor: as its placements say. UserError where they
    are partial sums, or reach beyond the group.
    """
    if not isinstance(t, DTensor):
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
