"""The ranks inside a node: meshes, their groups, and what a node's ranks share of one model and its outer state."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import outer
from .buckets import Bucket, copy, is_dtensor, local_shard, views
from .comm import Stage, Through, all_gather, send_first, set_timeout, sum_flats
from .errors import UserError
from .groups import (
    Holders,
    broadcast,
    compare,
    copies_of,
    host_group,
    leave_group,
    local_world_size,
    new_group,
    of_all,
)


def node_mesh(device_type: str, per_node: int | None = None, timeout: float | None = None) -> DeviceMesh:
    """Returns a mesh [nodes, workers per node] with dimensions "replicate" and "shard". Every worker must call it.

    Args:
        device_type: cuda or cpu.
        per_node: Workers that synchronize in every step, of consecutive ranks. None means all workers of a node.
        timeout: Seconds until a missing worker is an error. None means torch's default, half an hour.

    Raises:
        UserError: If nodes have different numbers of workers.
    """
    if not isinstance(device_type, str) or not (per_node is None or isinstance(per_node, int)):
        raise UserError(
            f"node_mesh({device_type!r}, {per_node!r}): give cuda or cpu, then the number of ranks of a node"
        )
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("node_mesh('cuda'): this torch finds no CUDA device; give cpu")
    n, world = per_node or local_world_size(), dist.get_world_size()
    if n < 1 or world % n:
        raise UserError(f"{n} workers per node do not divide {world} workers: start equally many on each node")
    mesh = init_device_mesh(device_type, (world // n, n), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in mesh.get_all_groups():
            set_timeout(group, timeout)
    return mesh


Key = TypeVar("Key", bound=Hashable)
Where = list[tuple[int, slice]]  # [(index of a flat tensor, slice of it)]


class Held(NamedTuple):
    """The elements of some flat tensors that several ranks of a node hold."""

    numel: float  # elements here, where an element on n ranks counts 1 / n
    copies: dict[int, Where]  # by number of holders: where their elements are in what this rank owns
    on_all: Where  # held by all ranks, which get the first rank's values
    on_some: dict[tuple[int, ...], Where]  # the same for subsets of ranks that include this rank


class Node:
    """The ranks inside a node, and how they hold one model. Its norms count elements on several ranks once.

    Methods get `trained`: the local tensors of params that require a gradient, in the same order.

    Args:
        params: The model's parameters, plain tensors and DTensors.
        buffers: Buffers that are averaged.
        inner: The inner group, whose ranks get a group of their own. None means that this worker holds the whole model.
        shards: False: all ranks hold the plain tensors. True: each rank holds its own plain tensors, as in a pipeline.
            A mapping gives for each parameter the ranks that hold the same elements as this rank, itself included, in
            one order on all ranks. Examples are replicas of a pipeline stage, and two stages with tied embeddings.
        timeout: Seconds until a missing rank is an error.
        device: Device of the flat tensors.
        backend: gloo or nccl. None means the backend of `inner`.

    Attributes:
        group: The inner group.
        size: Number of ranks in it.
        rank: This rank's index in it.
        separate: Whether plain tensors are this rank's own part of the model.
        of_shards: Whether a rank's share of the outer state belongs to its own part of the model.
        parts: Number of shares of a payload in the inner group. This rank's is number `row`.

    Raises:
        UserError: If averages over the workers would mix different shards.
    """

    def __init__(
        self,
        params: Sequence[Tensor] = (),
        buffers: Sequence[Tensor] = (),
        inner: dist.ProcessGroup | None = None,
        shards: bool | Holders = False,
        *,
        timeout: float = 600.0,
        device: torch.device | None = None,
        backend: str | None = None,
    ):
        device = device or torch.device("cpu")
        self.group = new_group(inner, timeout, device, backend, overlap=True) if inner is not None else None
        self._timeout, self._device = timeout, device
        self.separate = separate = shards is not False
        self.of_shards = separate or any(is_dtensor(p) for p in params)
        if self.of_shards and self.group is None:
            what = "shards=True needs" if separate else "DTensors as parameters need"
            raise UserError(f"{what} mesh=: without it different shards would be averaged")
        ranks = dist.get_process_group_ranks(self.group) if self.group is not None else [0]
        copies = {id(t): copies_of(t, ranks, shards) for t in [*params, *buffers]}
        if not separate and any(copies[id(b)] < len(ranks) for b in buffers):
            raise UserError("a DTensor among the buffers is sharded, and its average would mix shards: leave it out")
        self.size, self.rank = len(ranks), dist.get_rank(self.group) if self.group is not None else 0
        self.parts, self.row = (1, 0) if self.of_shards else (self.size, self.rank)
        self._shared = [local_shard(t) for t in [*params, *buffers] if copies[id(t)] == self.size]
        self._copies = [copies[id(p)] for p in params if p.requires_grad]
        holders = shards if isinstance(shards, Mapping) else {}
        # per parameter, the set of ranks that share it; () if only this rank or all ranks hold it
        sets = [tuple(sorted(holders.get(p, ()))) for p in params]
        self._sets = [s if 1 < len(s) < self.size else () for s in sets]
        self._local = [local_shard(p).detach() for p in params]
        self._trained_sets = [s for p, s in zip(params, self._sets, strict=True) if p.requires_grad]

    @torch.no_grad()
    def agree(self, settings: tuple[Any, ...]) -> None:
        """Gives all ranks that hold the same tensors the first rank's values. Settings must be equal on all ranks.

        Raises:
            UserError: If settings or shapes differ in the inner group.
        """
        if self.group is None:
            return
        compare(settings, [], self.group)
        try:
            compare((), self._shared, self.group)
            broadcast(self._shared, self.group, self._device)
        except UserError as error:
            remedy = "if each rank holds a different part, as a pipeline stage, give shards=True"
            raise UserError(f"{error}; {remedy}") from None
        shared = {
            ranks: [t for t, holders in zip(self._local, self._sets, strict=True) if holders == ranks]
            for ranks in {*self._sets} - {()}
        }
        # before anything is sent, so that a mistake is an error and not a hang
        mine = {str([*ranks]): [[*t.shape] for t in tensors] for ranks, tensors in shared.items()}
        shapes = of_all(mine, self.group)
        for rank, theirs in zip(dist.get_process_group_ranks(self.group), shapes, strict=True):
            for ranks in mine.keys() & theirs.keys():
                if theirs[ranks] != (own := mine[ranks]):
                    raise UserError(
                        f"shards: ranks {ranks} should hold the same, but rank {rank} has shapes {theirs[ranks]}, "
                        f"rank {dist.get_rank()} {own}: give the parameters that they share in one order on all"
                    )
        for works, _ in self._from_first(shared):
            for work in works:
                work.wait()

    def _from_first(self, shared: Mapping[tuple[int, ...], Sequence[Tensor]]) -> Iterator[Stage]:
        """Sends the first rank's tensors to the other ranks, in each set of ranks.

        It uses point-to-point operations over the inner group. A group per set would have to be made by all ranks at
        once, because torch numbers groups in their names.
        """
        flats = {
            ranks: torch.cat([t.to(self._device).reshape(-1) for t in tensors])
            for ranks, tensors in shared.items()
            if tensors
        }
        me, ops, sent = dist.get_rank(), list[dist.P2POp](), 0
        for ranks in sorted(flats):
            peers = ranks[1:] if me == ranks[0] else ranks[:1]  # the first rank sends to all others of its set
            ops += [
                dist.P2POp(dist.isend if me == ranks[0] else dist.irecv, flats[ranks], peer, self.group)
                for peer in peers
            ]
            sent += flats[ranks].nbytes * (len(ranks) - 1) if me == ranks[0] else 0
        if ops:
            yield [Through(work) for work in dist.batch_isend_irecv(ops)], sent
        for ranks, flat in flats.items():
            copy(shared[ranks], views(flat, shared[ranks]))

    def check(self, trained: Sequence[Tensor]) -> str:
        """Raises UserError if parameters that all ranks of the inner group hold have become different, by their norm.

        Returns why they could not be compared, such as a missing rank, or "" if they are equal.
        """
        shared = [p.detach() for p, n in zip(trained, self._copies, strict=True) if n == self.size and p.numel()]
        if self.group is None or not shared:
            return ""
        total = outer.norm(shared).double().cpu()
        spread = torch.stack([total, -total])  # one MAX gives both ends
        try:
            dist.all_reduce(spread, dist.ReduceOp.MAX, group=host_group(self.group))
        except RuntimeError as error:
            return str(error)
        highest, lowest = spread[0].item(), -spread[1].item()
        if highest - lowest > 1e-6 * abs(highest):
            what = "unsharded parameters" if self.of_shards else "parameters"
            raise UserError(
                f"the {what} of one node's workers differ (norms from {lowest:.9g} to {highest:.9g}): they must "
                "synchronize gradients in every step, as DistributedDataParallel over mesh.get_group(1); or give "
                "no mesh, or shards=True for pipeline stages"
            )
        return ""

    def count(self, numels: Sequence[float]) -> list[int]:
        """Returns the sums of numbers of elements over the inner group."""
        box = torch.tensor(numels, dtype=torch.float64, device="cpu")
        if self.group is not None:
            dist.all_reduce(box, group=host_group(self.group))
        return [round(n) for n in box.tolist()]

    def locate(
        self, trained: Sequence[Tensor], buckets: Sequence[Bucket], flats: Sequence[Tensor], owned: Sequence[Tensor]
    ) -> Held:
        """Finds elements that several ranks hold in `flats`, views of the shares, and in what this rank owns of them.

        Each element of DDP's payload is in one share only.
        """
        copies = {id(t): n if self.of_shards else 1 for t, n in zip(trained, self._copies, strict=True)}
        found = _places(buckets, flats, copies)
        numel = sum((place.stop - place.start) / n for n, places in found.items() for _, place in places)
        several = {n: places for n, places in _places(buckets, owned, copies).items() if n > 1}
        sets = _places(buckets, flats, {id(p): s for p, s in zip(trained, self._trained_sets, strict=True)})
        return Held(numel, several, found.get(self.size, []), {s: places for s, places in sets.items() if s})

    def shares(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Returns each payload as the shares of all ranks, [parts, n], with padding."""
        return [b.flat[: b.padded].view(self.parts, -1) for b in buckets]

    def own_shares(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Returns this rank's share of each payload, 1-d, with its padding."""
        return [shares[self.row] for shares in self.shares(buckets)]

    def sum(self, tensors: Sequence[Tensor]) -> Iterator[Stage]:
        """Sums tensors over the inner group, in place."""
        if self.group is not None:
            yield sum_flats(tensors, self.group)

    def gather(self, shares: Sequence[Tensor], flats: Sequence[Tensor], held: Held) -> Iterator[Stage]:
        """Collects slices of the payload on every rank of the inner group.

        If ranks hold different parts of the model, a rank only gets what several ranks hold, from the first of them.
        Their own sums may differ in the last bit, because the order of a sum depends on the position of its terms.
        `shares` are the slices of all ranks' shares, [parts, n] each, and `flats` this rank's rows.
        """
        if self.group is None:
            return
        if not self.of_shards:
            for rows in (rows for rows in shares if rows.numel()):
                to = rows if rows.is_contiguous() else rows.new_empty(rows.shape)
                yield all_gather(to, rows[self.rank].clone(), self.group)
                if to is not rows:
                    rows.copy_(to)
            return
        for i in sorted({i for i, _ in held.on_all}):
            copies = [flats[i][place] for j, place in held.on_all if j == i]
            packed = torch.cat(copies)
            yield send_first([packed], self.group)  # the first rank's sums replace this rank's
            copy(copies, views(packed, copies))
        for i, flat in enumerate(flats):
            shared = {ranks: [flat[place] for j, place in places if j == i] for ranks, places in held.on_some.items()}
            yield from self._from_first(shared)

    def close(self) -> None:
        """Leaves the inner group."""
        if self.group is not None:
            leave_group(self.group, self._timeout, overlap=True)
            self.group = None

    def surplus(self, shares: Sequence[Tensor], held: Held) -> Tensor | float:
        """Returns what to subtract from the sum of squares of `shares` before the inner group sums it, 0-d float64.

        Elements that n ranks hold then count 1 / n on each of them. `shares` are laid out as what this rank owns.
        """
        total: Tensor | float = 0.0
        for n, places in held.copies.items():
            total += (1 - 1 / n) * outer.norm([shares[i][place] for i, place in places]).double().square()
        return total


def _places(buckets: Sequence[Bucket], parts: Sequence[Tensor], keys: dict[int, Key]) -> dict[Key, Where]:
    """Returns where elements are in `parts`, views of the buckets' flat tensors, by key.

    `keys` maps a parameter's id to how many ranks, or which ranks, hold it.
    """
    found: dict[Key, Where] = {}
    for i, (bucket, part) in enumerate(zip(buckets, parts, strict=True)):
        end, first = 0, int(part.storage_offset())
        for key, together in groupby(bucket.params, lambda p: keys[id(p)]):
            start, end = end, end + sum(p.numel() for p in together)
            place = slice(max(start - first, 0), min(end - first, len(part)))
            if place.start < place.stop:
                found.setdefault(key, []).append((i, place))
    return found
