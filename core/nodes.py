"""The ranks inside a node: meshes, their groups, and what a node's ranks share of one model and its outer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import outer
from .buckets import Bucket, BucketShare, copy, is_dtensor, local_shard, views
from .comm import OtherWork, Stage, gather_parts, run, send_first, set_timeout, sum_flats
from .errors import UserError
from .groups import Holders, Holding, broadcast, compare, holding_of, leave_group, local_world_size, new_group, of_all


def node_mesh(device_type: str, per_node: int | None = None, timeout: float | None = None) -> DeviceMesh:
    """Returns a mesh [nodes, workers per node] with dimensions "replicate" and "shard". Every worker must call it.

    Args:
        device_type: cuda or cpu.
        per_node: Workers that synchronize in every step, of consecutive ranks. None means all workers of a node.
        timeout: Seconds until a missing worker is an error. None means torch's default, half an hour.

    Raises:
        UserError: If nodes have different numbers of workers.
    """
    if device_type not in ("cuda", "cpu") or not (per_node is None or (isinstance(per_node, int) and per_node > 0)):
        raise UserError(
            f"node_mesh({device_type!r}, {per_node!r}): give cuda or cpu, then the number of ranks of a node"
        )
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("node_mesh('cuda'): this torch finds no CUDA device; give cpu")
    n, world = per_node or local_world_size(), dist.get_world_size()
    if world % n:
        raise UserError(f"{n} workers per node do not divide {world} workers: start equally many on each node")
    mesh = init_device_mesh(device_type, (world // n, n), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in mesh.get_all_groups():
            set_timeout(group, timeout)
    return mesh


Where = list[tuple[int, slice]]  # [(index of a flat tensor, slice of it)]


class Node:
    """The ranks inside a node, and how they hold one model. Its norms count elements on several ranks once.

    Args:
        params: The model's parameters, plain tensors and DTensors.
        buffers: Buffers that are averaged.
        inner: The inner group, whose ranks get a group of their own. None means that this worker holds the whole model.
        shards: False: all ranks hold the plain tensors. True: each rank holds its own plain tensors, as in a pipeline.
            A mapping gives for each parameter the ranks that hold the same elements as this rank, itself included, in
            one order on all ranks. Examples are replicas of a pipeline stage, and two stages with tied embeddings.
        votes: Whether the ranks vote on whether an average has arrived.
        timeout: Seconds until a missing rank is an error.
        device: Device of the flat tensors.
        backend: gloo or nccl. None means the backend of `inner`.

    Attributes:
        group: The inner group.
        voters: The group in which they vote. None if they do not.
        groups: All groups inside the node. A worker that leaves after an exception destroys them, so that no rank
            waits.
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
        votes: bool = False,
        timeout: float = 600.0,
        device: torch.device | None = None,
        backend: str | None = None,
    ):
        self._device, self._timeout = device or torch.device("cpu"), timeout
        self.group = new_group(inner, timeout, self._device, backend, overlap=True) if inner is not None else None
        self.separate = separate = shards is not False
        self.of_shards = separate or any(is_dtensor(p) for p in params)
        if self.of_shards and self.group is None:
            what = "shards=True needs" if separate else "DTensors as parameters need"
            raise UserError(f"{what} mesh=: without it different shards would be averaged")
        ranks = dist.get_process_group_ranks(self.group) if self.group is not None else [0]
        holdings = {id(t): holding_of(t, ranks, shards) for t in [*params, *buffers]}
        if not separate and any(holdings[id(b)][0] < len(ranks) for b in buffers):
            raise UserError("a DTensor among the buffers is sharded, and its average would mix shards: leave it out")
        self.size, self.rank = len(ranks), dist.get_rank(self.group) if self.group is not None else 0
        self.parts, self.row = (1, 0) if self.of_shards else (self.size, self.rank)
        self._holdings = [holdings[id(p)] for p in params if p.requires_grad]
        self._equal: dict[tuple[int, ...], list[Tensor]] = {}  # ranks -> the local tensors that are equal on them
        for t in [*params, *buffers]:
            if len(on := holdings[id(t)][1]) > 1:
                self._equal.setdefault(on, []).append(local_shard(t).detach())
        votes = votes and inner is not None
        self.voters = new_group(inner, timeout, torch.device("cpu"), "gloo", overlap=True) if votes else None
        self.groups = [group for group in (self.group, self.voters) if group is not None]

    @torch.no_grad()
    def agree(self, settings: tuple[Any, ...]) -> None:
        """Gives all ranks that hold the same tensors the first rank's values. Settings must be equal on all ranks.

        Raises:
            UserError: If settings or shapes differ in the inner group.
        """
        if self.group is None:
            return
        compare(settings, [], self.group)
        some = {ranks: tensors for ranks, tensors in sorted(self._equal.items()) if len(ranks) < self.size}
        shared = [t for ranks, tensors in self._equal.items() if ranks not in some for t in tensors]
        try:
            compare((), shared, self.group)
            broadcast(shared, self.group, self._device)
        except UserError as error:
            remedy = "if each rank holds a different part, as a pipeline stage, give shards=True"
            raise UserError(f"{error}; {remedy}") from None
        # before anything is sent, so that a mistake is an error and not a hang
        mine = {str([*ranks]): [[*t.shape] for t in tensors] for ranks, tensors in some.items()}
        shapes = of_all(mine, self.group)
        for rank, theirs in zip(dist.get_process_group_ranks(self.group), shapes, strict=True):
            for ranks in mine.keys() & theirs.keys():
                if theirs[ranks] != (own := mine[ranks]):
                    raise UserError(
                        f"shards: ranks {ranks} should hold the same, but rank {rank} has shapes {theirs[ranks]}, "
                        f"rank {dist.get_rank()} {own}: give the parameters that they share in one order on all"
                    )
        for ranks, tensors in some.items():
            run(self._from_first(ranks, tensors))

    def _from_first(self, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> Iterator[Stage]:
        """Sends the first one's values to the other `ranks`, which all call it.

        To some ranks of the node it uses point-to-point operations. A group per set of ranks would have to be made by
        all ranks at once, because torch numbers groups in their names.
        """
        assert self.group is not None
        flat = torch.cat([t.to(self._device).reshape(-1) for t in tensors])
        if len(ranks) == self.size:
            yield send_first([flat], self.group)
        else:
            sends = dist.get_rank() == ranks[0]
            act, peers = (dist.isend, ranks[1:]) if sends else (dist.irecv, ranks[:1])
            works = dist.batch_isend_irecv([dist.P2POp(act, flat, peer, self.group) for peer in peers])
            # gloo marks such work as complete only in a wait, which AsyncAllReduce would put off to the next boundary
            yield [OtherWork(lambda: True, work.wait) for work in works], flat.nbytes * len(peers) * sends
        copy(tensors, views(flat, tensors))

    def on_all_ranks(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors that all ranks of the inner group hold.

        Args:
            trained: The local tensors of `params` that require a gradient, in the same order.
        """
        return [p.detach() for p, (n, _) in zip(trained, self._holdings, strict=True) if n == self.size and p.numel()]

    def places(
        self, trained: Sequence[Tensor], buckets: Sequence[Bucket], flats: Sequence[Tensor]
    ) -> dict[Holding, Where]:
        """Returns where elements are in `flats`, a view of each bucket's flat tensor, by the ranks that hold them.

        `trained`: see on_all_ranks. Each element of DDP's payload is in one share only.
        """
        of_each = {id(t): h if self.of_shards else (1, ()) for t, h in zip(trained, self._holdings, strict=True)}
        found: dict[Holding, Where] = {}
        for i, (bucket, flat) in enumerate(zip(buckets, flats, strict=True)):
            end, first = 0, int(flat.storage_offset())
            for key, together in groupby(bucket.params, lambda p: of_each[id(p)]):
                start, end = end, end + sum(p.numel() for p in together)
                place = slice(max(start - first, 0), min(end - first, len(flat)))
                if place.start < place.stop:
                    found.setdefault(key, []).append((i, place))
        return found

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

    def gather(
        self, shares: Sequence[Tensor], flats: Sequence[Tensor], where: Mapping[Holding, Where]
    ) -> Iterator[Stage]:
        """Collects slices of the payload on every rank of the inner group.

        If ranks hold different parts of the model, a rank only gets what several ranks hold, from the first of them.
        Their own sums may differ in the last bit, because the order of a sum depends on the position of its terms.
        `shares` are slices of all ranks' shares, [parts, n] each, `flats` this rank's rows, and `where` their `places`.
        """
        if self.group is None:
            return
        for rows in (rows for rows in shares if rows.numel() and not self.of_shards):
            yield from gather_parts(rows, self.group)
        for (_, ranks), places in sorted(where.items(), reverse=True):  # in one order on all ranks
            for i in sorted({i for i, _ in places}) if len(ranks) > 1 else ():
                yield from self._from_first(ranks, [flats[i][place] for j, place in places if j == i])

    def close(self) -> None:
        """Leaves the groups, unless they are destroyed."""
        for group in self.groups:
            leave_group(group, self._timeout, overlap=True)
        self.forget()

    def forget(self) -> None:
        """Drops the groups. A destroyed group keeps its connections as long as something refers to it."""
        self.group = self.voters = None
        self.groups.clear()

    def surplus(self, flats: Sequence[Tensor], where: Mapping[Holding, Where]) -> Tensor | float:
        """Returns what to subtract from the sum of squares of `flats` before the inner group sums it, 0-d float64.

        Elements that n ranks hold then count 1 / n on each of them. `where` are the `places` of these flats.
        """
        total: Tensor | float = 0.0
        for n, places in ((n, places) for (n, _), places in where.items() if n > 1):
            total += (1 - 1 / n) * outer.norm([flats[i][place] for i, place in places]).double().square()
        return total


def sent_parts(
    node: Node,
    buckets: Sequence[Bucket],
    places: Sequence[slice] | None = None,
    scalars: int | None = None,
    *,
    owned: bool = False,
) -> list[BucketShare]:
    """Returns what a rank sends to the other nodes: its shares, or the slices `places` of them.

    A worker by itself is a node with one share, the whole. `scalars` and `owned`: see BucketShare.
    """
    shares = node.own_shares(buckets)
    at = zip(buckets, shares, places or [slice(0, len(g)) for g in shares], strict=True)
    return [BucketShare(b, g[place], node.row * len(g) + place.start, scalars, owned=owned) for b, g, place in at]
