"""Nodes of workers as a mesh of two dimensions, its groups, and the settings that shared outer state supports."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import outer
from .buckets import Bucket, copy, is_dtensor, local_shard, views
from .comm import (
    Pending,
    Stage,
    backend_for,
    broadcast,
    compare,
    gather_parts,
    host_group,
    leave_group,
    new_group,
    of_all,
    send_first,
    set_timeout,
    sum_flats,
)
from .config import CO2Config
from .errors import UserError


def local_world_size(env: Mapping[str, str] = os.environ) -> int:
    """Returns the workers per node from torchrun or SLURM; 1 without either. UserError if nodes have unlike numbers."""
    if "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_WORLD_SIZE"])
    per_node = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")  # "8", "8(x16)" or "8(x2),4"
    first, *others = {int(part.partition("(")[0]) for part in per_node.split(",")}
    if others:
        raise UserError(f"SLURM_TASKS_PER_NODE={per_node}: start equally many on each node")
    return first


def node_mesh(device_type: str, per_node: int | None = None, timeout: float | None = None) -> DeviceMesh:
    """Returns a mesh [nodes, workers of a node] with dimensions "replicate" and "shard". Every worker must call it.

    Args:
        per_node: Workers that synchronize every step, consecutive ranks; None: those of a node.
        timeout: Seconds until a missing worker is an error; None for torch's half an hour.
    """
    n, world = per_node or local_world_size(), dist.get_world_size()
    if n < 1 or world % n:
        raise UserError(f"{n} workers per node do not divide {world} workers: start equally many on each node")
    mesh = init_device_mesh(device_type, (world // n, n), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in mesh.get_all_groups():
            set_timeout(group, timeout)
    return mesh


def check_shared(c: CO2Config, compression: str = "float32") -> None:
    """Raises UserError for settings that may diverge, or that need the whole outer state in one place."""
    c.check_stable()
    problems = []
    if c.merge != "restart" or not c.is_a_round_late:
        problems.append(
            f"merge={c.merge!r} with delay={c.delay!r} needs the outer state whole: shared, it knows merge restart "
            "with delay boundary (the paper)"
        )
    if c.nesterov:
        problems.append("nesterov=True needs the outer state whole: leave it out")
    if compression != "float32":
        problems.append(
            f"compression.format={compression!r} needs unshared outer state: set compression.format float32"
        )
    if problems:
        problems.append("or leave out shard, offload, per_node and zero")
        raise UserError("; ".join([*problems, "with a mesh, CO2Config.recommended(..., mesh=mesh) is accepted"]))


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises UserError for a mesh of other than two dimensions."""
    if not hasattr(mesh, "ndim"):
        raise UserError(f"mesh={mesh!r}: give a DeviceMesh, as torch's init_device_mesh or sharded.mesh.node_mesh does")
    if mesh.ndim == 2:
        return
    names, usual = mesh.mesh_dim_names or (), ("dp_replicate", "dp_shard")
    of = f" {', '.join(names)}" if names else ""
    remedy = f"give one of two, such as init_device_mesh(DEVICE, (NODES, WORKERS OF A NODE), mesh_dim_names={usual})"
    if len(names) > 1:
        across, inside = usual if {*usual} <= {*names} else names[:2]
        pair = "mesh[ACROSS, INSIDE], the names of the dimension across nodes and of the one inside a node"
        remedy = f'give two of a larger one, {pair}, such as mesh["{across}", "{inside}"]'
    raise UserError(f"a mesh of {mesh.ndim} dimension{'s' * (mesh.ndim != 1)}{of}: {remedy}")


def groups_of(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None, inner_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns the groups across nodes and inside one; None if there is none."""
    if mesh is not None:
        check_mesh(mesh)
        group, inner_group = mesh.get_group(0), mesh.get_group(1)
    if inner_group is not None and group is None:
        raise UserError("inner_group without group: give also the ranks across nodes, or both at once with mesh")
    check_names(inner_group)
    return group, inner_group


def check_names(group: dist.ProcessGroup | None) -> None:
    """Raises UserError if ranks of the group know unlike numbers of groups. torch names a group of some ranks after
    them and that number, so that they would wait for each other under unlike names."""
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return
    if backend_for(group, torch.device("cpu")) != "gloo":  # they cannot compare
        return
    known = of_all(len(dist.distributed_c10d._world.pg_names), group)
    if len({*known}) > 1:
        raise UserError(
            f"ranks {dist.get_process_group_ranks(group)} know {known} process groups, so that torch would name their "
            "next one unlike: make this before groups of some ranks alone, or as many groups for each rank"
        )


PIECES = 16  # a sum over the workers goes in so many pieces, so that its temporary is small
Holders = Mapping[Tensor, Sequence[int]]  # a parameter, as it is given -> the ranks that hold its elements held here
Key = TypeVar("Key", bound=Hashable)
Where = list[tuple[int, slice]]  # [(which flat tensor, where in it)]


class Through:
    """A send or a receive in the background. gloo marks it as completed only when somebody waits for it. So this class
    says at once that it is, and the thread waits there, not only from the next boundary on."""

    def __init__(self, work: Pending):
        self._work = work

    def is_completed(self) -> bool:
        return True

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        return self._work.wait(*args, **kwargs)


class Placement:
    """How the ranks of an inner group share a model; what several ranks hold counts once in its norms.

    Methods take `trained`, those of params that require a gradient, in their order, as local tensors. UserError if
    averages over workers would mix different shards.

    Args:
        params, buffers: Plain tensors and DTensors.
        inner: The ranks, for a group of their own; None: this worker is alone, and nothing here sends anything.
        shards: True: plain tensors are this rank's own; False: all ranks hold them. Or for each parameter the ranks
            that hold those of its elements that this rank holds, itself included, in one order on all: replicas of a
            stage, or two stages with a tied embedding.
        timeout, device, backend: See comm.new_group.

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
        self.group = new_group(inner, timeout, device, backend, overlap=True) if inner is not None else None
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
        self._of_all: Where = []  # what all ranks hold, and take from the first one
        self._of_some: dict[tuple[int, ...], Where] = {}  # what those ranks hold, this one among them
        given = shards if isinstance(shards, Mapping) else {}
        sets = [tuple(sorted(given.get(p, ()))) for p in params]
        self._sets = [s if 1 < len(s) < self.size else () for s in sets]
        self._given = [local_shard(p).detach() for p in params]
        self._trained = [s for p, s in zip(params, self._sets, strict=True) if p.requires_grad]

    @torch.no_grad()
    def agree(self, settings: tuple[Any, ...]) -> None:
        """Checks that the inner group has the same settings. Its first rank's values go to all ranks that hold them."""
        if self.group is None:
            return
        compare(settings, [], self.group)
        try:
            compare((), self._shared, self.group)
            broadcast(self._shared, self.group, self._device)
        except UserError as error:
            remedy = "if each holds a part of its own, as a pipeline stage, give shards=True"
            raise UserError(f"{error}; {remedy}") from None
        held = {s: [t for t, of in zip(self._given, self._sets, strict=True) if of == s] for s in {*self._sets} - {()}}
        shapes = of_all({s: [tuple(t.shape) for t in tensors] for s, tensors in held.items()}, self.group)
        for rank, theirs in zip(dist.get_process_group_ranks(self.group), shapes, strict=True):
            for s in held.keys() & theirs.keys():
                if theirs[s] != (mine := [tuple(t.shape) for t in held[s]]):
                    raise UserError(
                        f"shards: ranks {[*s]} are said to hold the same, but rank {rank} has shapes {theirs[s]}, rank "
                        f"{dist.get_rank()} {mine}: give the parameters that they share in one order on all"
                    )
        for works, _ in self._from_first(held):
            for work in works:
                work.wait()

    def _from_first(self, held: Mapping[tuple[int, ...], Sequence[Tensor]]) -> Iterator[Stage]:
        """The first of each set of ranks sends its tensors to the others of it, over the inner group: a group of some
        of its ranks would have to be made by all at once, because torch counts groups in their names."""
        flats = {
            s: torch.cat([t.to(self._device).reshape(-1) for t in tensors]) for s, tensors in held.items() if tensors
        }
        me, ops, sent = dist.get_rank(), list[dist.P2POp](), 0
        for s in sorted(flats):
            peers = s[1:] if me == s[0] else s[:1]
            ops += [dist.P2POp(dist.isend if me == s[0] else dist.irecv, flats[s], peer, self.group) for peer in peers]
            sent += flats[s].nbytes * (len(s) - 1) if me == s[0] else 0
        if ops:
            yield [Through(work) for work in dist.batch_isend_irecv(ops)], sent
        for s, flat in flats.items():
            copy(held[s], views(flat, held[s]))

    def check(self, trained: Sequence[Tensor]) -> str:
        """Raises UserError if parameters that all ranks of the inner group should hold have come to differ. Returns why
        they could not be compared, such as that a rank is gone; "" if they are equal."""
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
        """Returns how many elements the whole model trains."""
        if not self.of_shards:
            return sum(p.numel() for p in trained)
        held = sum(p.numel() / n for p, n in zip(trained, self._copies, strict=True))
        box = torch.tensor(held, dtype=torch.float64)
        dist.all_reduce(box, group=host_group(self.group))
        return round(box.item())

    def locate(self, trained: Sequence[Tensor], buckets: Sequence[Bucket], shares: Sequence[Tensor]) -> None:
        """Notes where elements lie that several ranks hold. shares: views of the buckets' flat tensors."""
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
        """How many shares a payload has."""
        return 1 if self.of_shards else self.size

    def part(self, payload: Tensor) -> Tensor:
        """Returns this rank's share of it."""
        return payload.view(self.parts, -1)[self.rank] if self.parts > 1 else payload

    def sum(self, tensors: Sequence[Tensor]) -> Iterator[Stage]:
        """Sums over the ranks, in place."""
        if self.group is not None:
            yield sum_flats(tensors, self.group)

    def gather(self, buckets: Sequence[Bucket]) -> Iterator[Stage]:
        """Every rank gets the others' shares of the payloads. Of shards, it gets what several ranks hold from the first
        of them: the order of a sum depends on where its terms lie, and shards need not be equally long."""
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
            yield from self._from_first(held)

    def close(self) -> None:
        """Leaves the inner group."""
        if self.group is not None:
            leave_group(self.group, self._timeout, overlap=True)
            self.group = None

    def surplus(self, shares: Sequence[Tensor]) -> Tensor | float:
        """Returns what to subtract from the sum of squares of `shares`, laid out as in `locate`, before the inner group
        sums it: all but 1 / n of what n ranks hold; 0-d, float64."""
        total: Tensor | float = 0.0
        for n, places in self._in_shares.items():
            total += (1 - 1 / n) * outer.norm([shares[i][place] for i, place in places]).double().square()
        return total


def _places(buckets: Sequence[Bucket], parts: Sequence[Tensor], keys: dict[int, Key]) -> dict[Key, Where]:
    """Returns where elements lie, by key. parts: a view of each bucket's flat tensor. keys: id of a parameter -> how
    many ranks, or which, hold it."""
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
    """Returns how many of `ranks`, an inner group, hold those elements of `t` that this rank holds, itself included.

    `shards` may name them. Else all ranks hold a plain tensor, or with `shards` this rank; a DTensor has placements.
    UserError if those are partial sums, or reach beyond the group.
    """
    if isinstance(shards, Mapping) and t in shards:
        if dist.get_rank() not in (holders := shards[t]) or not {*holders} <= {*ranks}:
            raise UserError(
                f"shards: ranks {[*holders]} are said to hold a parameter of rank {dist.get_rank()}, whose inner group "
                f"is {[*ranks]}: give ranks of that group, the rank itself among them"
            )
        return len({*holders})
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


def sum_parts(flat: Tensor, group: dist.ProcessGroup) -> Iterator[Stage]:
    """Reduces and scatters in place: part `rank` of `flat` becomes its sum over the workers; the rest is undefined.

    gloo's own reduce-scatter is an all-reduce inside. There every worker sends each part to its owner, which adds them.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = flat.view(n, -1)
    if backend_for(group, flat.device) == "nccl":
        work = dist.reduce_scatter_tensor(parts[rank], flat, group=group, async_op=True)
        assert work is not None
        yield [work], round((n - 1) / n * flat.nbytes)
        return
    for columns in parts.split(max(1, -(-parts.shape[1] // PIECES)), dim=1):
        theirs = torch.empty_like(mine := columns.contiguous())
        work = dist.all_to_all_single(theirs, mine, group=group, async_op=True)
        assert work is not None
        yield [work], round((n - 1) / n * mine.nbytes)
        columns[rank].copy_(theirs.sum(0))
