"""Who of an inner group holds which elements of a model: shards of it, copies, or stages of a pipeline."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import outer
from ..errors import UserError
from ..flat import Bucket, copy, is_dtensor, local_shard, views
from ..groups import (
    Pending,
    Stage,
    all_reduce,
    backend_for,
    broadcast,
    compare,
    gather_parts,
    host_group,
    leave_group,
    new_group,
    of_all,
    send_first,
)

PIECES = 16  # a sum over the workers goes in so many pieces, for the sake of its temporary
Holders = Mapping[Tensor, Sequence[int]]  # a parameter, as it is given -> the ranks that hold its elements held here
Key = TypeVar("Key", bound=Hashable)
Where = list[tuple[int, slice]]  # [(which flat tensor, where in it)]


class Through:
    """A send or a receive in the background. Over gloo it says that it is through to who waits for it alone: asked, it
    says so at once, and the thread waits there, not only from the next boundary on."""

    def __init__(self, work: Pending):
        self._work = work

    def is_completed(self) -> bool:
        return True

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._work.wait(*args, **kwargs)


class Placement:
    """How the ranks of an inner group share a model; what several of them hold counts once in its norms.

    params, buffers: plain tensors and DTensors. inner: the ranks, of which a group of their own is made; None: this
    worker alone, for whom nothing here sends anything. shards: plain tensors are this rank's own; else all ranks hold
    them. Or, of each parameter, the ranks that hold those of its elements that this one holds, itself among them:
    replicas of a stage, or two stages with a tied embedding, each in the same order. timeout, device, backend: see
    groups.new_group. UserError where a mean over workers would mix different shards.

    Methods take `trained`, those of params that require a gradient, in their order, as local tensors.
    Attributes: group, made of inner; size and rank, in it; of_shards, whether a rank's share is its part of the model.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        buffers: Sequence[Tensor],
        inner: dist.ProcessGroup | None,
        shards: bool | Holders,
        *,
        timeout: float,
        device: torch.device,
        backend: str | None,
    ):
        self.group = new_group(inner, timeout, device, backend, hidden=True) if inner is not None else None
        self._timeout, self._device = timeout, device
        stages = shards is not False
        self.of_shards = stages or any(is_dtensor(p) for p in params)
        if self.of_shards and self.group is None:
            what = "shards=True needs" if stages else "DTensors as parameters need"
            raise UserError(f"{what} mesh=: without it different shards would be averaged")
        ranks = dist.get_process_group_ranks(self.group) if self.group is not None else [0]
        copies = {id(t): copies_of(t, ranks, shards) for t in [*params, *buffers]}
        if not stages and any(copies[id(b)] < len(ranks) for b in buffers):
            raise UserError("a DTensor among the buffers is sharded, its mean would mix shards: leave it out of them")
        self.size, self.rank = len(ranks), dist.get_rank(self.group) if self.group is not None else 0
        self._shared = [local_shard(t) for t in [*params, *buffers] if copies[id(t)] == self.size]
        self._copies = [copies[id(p)] for p in params if p.requires_grad]
        self._in_shares: dict[int, Where] = {}
        self._of_all: Where = []  # what all ranks hold, and take as the first one has it
        self._of_some: dict[tuple[int, ...], Where] = {}  # what those ranks hold, of whom this is one
        told = shards if isinstance(shards, Mapping) else {}
        sets = [tuple(sorted(told.get(p, ()))) for p in params]
        self._sets = [s if 1 < len(s) < self.size else () for s in sets]
        self._given = [local_shard(p).detach() for p in params]
        self._trained = [s for p, s in zip(params, self._sets, strict=True) if p.requires_grad]

    def agree(self, settings: tuple[Any, ...]) -> None:
        """That the inner group has the same settings, and what all its ranks hold as its first one does."""
        if self.group is None:
            return
        compare(settings, [], self.group)
        try:
            compare((), self._shared, self.group)
            broadcast(self._shared, self.group, self._device)
        except UserError as error:
            remedy = "if each holds a part of its own, as a pipeline stage, give shards=True"
            raise UserError(f"{error}; {remedy}") from None
        self._begin_alike()

    @torch.no_grad()
    def _begin_alike(self) -> None:
        """What some of the ranks hold they take as the first of them has it."""
        held = {s: [t for t, of in zip(self._given, self._sets, strict=True) if of == s] for s in {*self._sets} - {()}}
        assert self.group is not None
        shapes = of_all({s: [tuple(t.shape) for t in tensors] for s, tensors in held.items()}, self.group)
        for rank, theirs in zip(dist.get_process_group_ranks(self.group), shapes, strict=True):
            for s in held.keys() & theirs.keys():
                if theirs[s] != (mine := [tuple(t.shape) for t in held[s]]):
                    raise UserError(
                        f"shards: ranks {[*s]} are said to hold the same, but rank {rank} has shapes {theirs[s]}, rank "
                        f"{dist.get_rank()} {mine}: give the parameters that they share in one order on all"
                    )
        flats = {s: torch.cat([t.to(self._device).reshape(-1) for t in tensors]) for s, tensors in held.items()}
        for works, _ in self._from_first(flats):
            for work in works:
                work.wait()
        for s, flat in flats.items():
            for t, value in zip(held[s], views(flat, held[s]), strict=True):
                t.copy_(value)

    def _from_first(self, flats: Mapping[tuple[int, ...], Tensor]) -> Iterator[Stage]:
        """The first of each set of ranks sends its tensor to the others of it. Over the inner group: a group of some of
        its ranks would have to be made by all at once, for torch counts them in their names."""
        me, ops, sent = dist.get_rank(), list[dist.P2POp](), 0
        for s in sorted(flats):
            peers = s[1:] if me == s[0] else s[:1]
            ops += [dist.P2POp(dist.isend if me == s[0] else dist.irecv, flats[s], peer, self.group) for peer in peers]
            sent += flats[s].nbytes * (len(s) - 1) if me == s[0] else 0
        if ops:
            yield [Through(work) for work in dist.batch_isend_irecv(ops)], sent

    def check(self, trained: Sequence[Tensor]) -> str:
        """UserError if parameters that all ranks of the inner group should hold alike have come to differ. Returns why
        they could not be compared, as where a rank is gone; "" where they are alike."""
        shared = [p.detach() for p, n in zip(trained, self._copies, strict=True) if n == self.size and p.numel()]
        if self.group is None or not shared:
            return ""
        total = outer.norm(shared).double().cpu()
        spread = torch.stack([total, -total])
        try:
            dist.all_reduce(spread, dist.ReduceOp.MAX, group=host_group(self.group))
        except RuntimeError as error:
            return str(error)
        highest, lowest = spread[0].item(), -spread[1].item()
        if highest - lowest > 1e-6 * abs(highest):
            what = "unsharded parameters" if self.of_shards else "parameters"
            raise UserError(
                f"the {what} of one node's workers differ (norms from {lowest:.9g} to {highest:.9g}): they have to "
                "synchronise gradients every step, as in DistributedDataParallel over mesh.get_group(1); else give no "
                "mesh, or, to pipeline stages, shards=True"
            )
        return ""

    def count(self, trained: Sequence[Tensor]) -> int:
        """How many elements the whole model trains."""
        if not self.of_shards:
            return sum(p.numel() for p in trained)
        held = sum(p.numel() / n for p, n in zip(trained, self._copies, strict=True))
        box = torch.tensor(held, dtype=torch.float64)
        dist.all_reduce(box, group=host_group(self.group))
        return round(box.item())

    def locate(self, trained: Sequence[Tensor], buckets: Sequence[Bucket], shares: Sequence[Tensor]) -> None:
        """Notes where the elements lie that several ranks hold. shares: views of the buckets' flat tensors."""
        if not self.of_shards or self.group is None:  # shares hold each element once
            return
        copies = {id(p): n for p, n in zip(trained, self._copies, strict=True)}
        self._in_shares = _places(buckets, shares, copies)
        self._in_shares.pop(1, None)
        flats = [b.flat for b in buckets]
        self._of_all = _places(buckets, flats, copies).get(self.size, [])
        sets = _places(buckets, flats, {id(p): s for p, s in zip(trained, self._trained, strict=True)})
        self._of_some = {s: places for s, places in sets.items() if s}

    @property
    def parts(self) -> int:
        """Into how many shares a payload is cut."""
        return 1 if self.of_shards else self.size

    def part(self, payload: Tensor) -> Tensor:
        """This rank's share of it."""
        return payload.view(self.parts, -1)[self.rank] if self.parts > 1 else payload

    def sum(self, tensors: Sequence[Tensor]) -> Iterator[Stage]:
        """Over the ranks, in place."""
        if self.group is not None:
            yield all_reduce(tensors, self.group)

    def gather(self, buckets: Sequence[Bucket]) -> Iterator[Stage]:
        """Every rank gets the others' shares of the payloads; of shards what several hold, as the first of them has it.

        The order in which a sum is taken depends on where its terms lie, and shards need not be equally long.
        """
        if self.group is None:
            return
        if not self.of_shards:
            for bucket in buckets:
                yield gather_parts(bucket.flat[: bucket.padded], self.group)
            return
        for i in sorted({i for i, _ in self._of_all}):
            copies = [buckets[i].flat[place] for j, place in self._of_all if j == i]
            packed = torch.cat(copies)
            yield send_first([packed], self.group)
            copy(copies, views(packed, copies))
        for i, bucket in enumerate(buckets):
            held = {s: [bucket.flat[place] for j, place in places if j == i] for s, places in self._of_some.items()}
            flats = {s: torch.cat(copies) for s, copies in held.items() if copies}
            yield from self._from_first(flats)
            for s, flat in flats.items():
                copy(held[s], views(flat, held[s]))

    def close(self) -> None:
        """Leaves the inner group."""
        if self.group is not None:
            leave_group(self.group, self._timeout, hidden=True)
            self.group = None

    def surplus(self, shares: Sequence[Tensor]) -> Tensor | float:
        """What to take off the sum of the squares in `shares`, laid out as in `locate`, before it is summed over the
        inner group: all but 1 / n of what n ranks hold; 0-d, float64."""
        total: Tensor | float = 0.0
        for n, places in self._in_shares.items():
            total += (1 - 1 / n) * outer.norm([shares[i][place] for i, place in places]).double().square()
        return total


def _places(buckets: Sequence[Bucket], parts: Sequence[Tensor], keys: dict[int, Key]) -> dict[Key, Where]:
    """Where the elements of parameters with one key lie. parts: a view of each bucket's flat tensor. keys: id of a
    parameter -> how many ranks, or which, hold it."""
    found: dict[Key, Where] = {}
    for i, (bucket, part) in enumerate(zip(buckets, parts, strict=True)):
        end, first = 0, int(part.storage_offset())
        for key, together in groupby(bucket.params, lambda p: keys[id(p)]):
            start, end = end, end + sum(p.numel() for p in together)
            place = slice(max(start - first, 0), min(end - first, len(part)))
            if place.start < place.stop:
                found.setdefault(key, []).append((i, place))
    return found


def copies_of(t: Tensor, ranks: Sequence[int], shards: bool | Holders) -> int:
    """How many of `ranks`, an inner group, hold those elements of `t` that this rank holds, itself included.

    As `shards` says, where it tells of each. A plain tensor: all of them, or with `shards` this one alone. A DTensor:
    as its placements say. UserError where they are partial sums, or reach beyond the group.
    """
    if isinstance(shards, Mapping) and t in shards:
        return _told(shards[t], ranks)
    shards = shards is not False
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


def _told(holders: Sequence[int], ranks: Sequence[int]) -> int:
    """How many they are. UserError where they are not of the group, or this rank is not among them."""
    if dist.get_rank() not in holders or not {*holders} <= {*ranks}:
        raise UserError(
            f"shards: ranks {[*holders]} are said to hold a parameter of rank {dist.get_rank()}, whose inner group is "
            f"{[*ranks]}: give ranks of that group, the rank itself among them"
        )
    return len({*holders})


def sum_parts(flat: Tensor, group: dist.ProcessGroup) -> Iterator[Stage]:
    """Reduce-scatter in place: part `rank` of `flat` becomes its sum over the workers; the rest is left undefined.

    NCCL has it. gloo's own is an all-reduce inside, so there every worker sends each part to its owner, who adds them.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = flat.view(n, -1)
    sent = round((n - 1) / n * flat.numel() * flat.element_size())
    if backend_for(group, flat.device) == "nccl":
        work = dist.reduce_scatter_tensor(parts[rank], flat, group=group, async_op=True)
        assert work is not None
        yield [work], sent
        return
    for columns in parts.split(max(1, -(-parts.shape[1] // PIECES)), dim=1):
        theirs = torch.empty_like(mine := columns.contiguous())
        work = dist.all_to_all_single(theirs, mine, group=group, async_op=True)
        assert work is not None
        yield [work], round((n - 1) / n * mine.numel() * mine.element_size())
        columns[rank].copy_(theirs.sum(0))
