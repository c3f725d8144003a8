"""Groups of workers: making and leaving them, what their members must agree on, and collectives over one of them.

A collective over a group is a stage: what has been started, and the bytes that this worker sends for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 - whose arguments' defaults else hold a default group past its end
from torch import Tensor

from .errors import UserError
from .flat import as_bits, kind_of, parts_of


class Pending(Protocol):
    """What is under way in the background: a dist.Work, or a copy between a GPU and the host."""

    def is_completed(self) -> bool: ...
    def wait(self, timeout: timedelta = ...) -> Any: ...


Stage = tuple[Sequence[Pending], int]  # collectives under way, and the bytes that this worker sends for them
# Thread blocks, each on a multiprocessor of its own, that one of NCCL's collectives may hold (results/gpu.md). Over
# sockets NCCL takes two; a matrix product beside eight that wait is 12 % slower, beside two 7 %.
MAX_CTAS = 8
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # torch honors both
DUMP = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
CONNECT_SIZES = (4, 1 << 20, 1 << 26)  # bytes: NCCL chooses among its algorithms by size
LONGEST = 1e8  # seconds of a timeout, three years
MIXED = 6364136223846793005  # odd, as Knuth's generator multiplies by


def ring_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that each of `world_size` workers sends in a ring all-reduce of a buffer of `nbytes` bytes."""
    return round(2 * (world_size - 1) / world_size * nbytes)


# Weakly held: gloo's threads end with the last reference, and one that outlives the interpreter aborts the process.
_spare: dict[tuple[object, ...], list[weakref.ref[dist.ProcessGroup]]] = {}  # of new_group's arguments: left
_hosts = weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]()  # of ranks: those that host_group has made


def backend_for(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend that moves tensors of this device: dist.get_backend says "undefined" where a group has one for each
    kind of device, as after init_process_group() without a backend."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "no")


def moved_by_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL moves the group's tensors: then a wait orders streams. gloo moves a GPU's tensors through the host,
    in threads of its own, and a wait for it blocks. UserError where the environment makes NCCL's waits block, too."""
    if device.type != "cuda" or backend_for(group, device) != "nccl":
        return False
    for name in BLOCKING:
        if os.environ.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name}={os.environ[name]}: the host would wait for every all-reduce, and nothing would be hidden; "
                "unset it"
            )
    return True


@torch.no_grad()
def connect(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
    """Makes NCCL's connections for all-reduces up to `nbytes` bytes, and for the collectives of compressed ones.

    NCCL connects when an algorithm is first used, and the host then waits inside the call for the latest peer. All
    members call this function together, before training. A first compressed all-reduce still waits (results/gpu.md).
    """
    for size in sorted({min(size, max(4, nbytes)) for size in CONNECT_SIZES}):
        dist.all_reduce(torch.zeros(size // 4, device=device), group=group)
    rows = torch.zeros(dist.get_world_size(group), 16, dtype=torch.uint8, device=device)
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
    dist.all_gather([*rows.unbind()], rows[0].clone(), group=group)


def new_group(
    group: dist.ProcessGroup | None,
    timeout: float,
    device: torch.device,
    backend: str | None = None,
    *,
    hidden: bool = False,
) -> dist.ProcessGroup | None:
    """A process group with the ranks of `group` (None: all) and `timeout` seconds, used by nobody else.

    device: of the tensors that it moves. backend: gloo or nccl; None for what `group` uses there. hidden: whether its
    collectives run underneath local steps; somebody waits for the others, which nothing may slow down. Returns None
    when torch.distributed is not initialised: then there is one worker.
    """
    if not isinstance(timeout, int | float) or not 0 < timeout < LONGEST:
        raise UserError(f"timeout={timeout!r}: give seconds, above 0 and below {LONGEST:g}")
    if not dist.is_initialized():
        return None
    everyone = group is None or dist.get_world_size(group) == dist.get_world_size()
    ranks = None if everyone else dist.get_process_group_ranks(group)
    backend = backend or backend_for(group, device)
    if backend == "no":
        raise UserError(
            f"the process group ({dist.get_backend_config(group)}) moves no {device.type} tensors: start it with "
            "backend 'cpu:gloo,cuda:nccl'"
        )
    left = _spare.get((tuple(ranks), timeout, backend, hidden), []) if ranks else []
    if left and is_alive(left[-1]()):
        return left.pop()()
    within = timedelta(seconds=timeout)
    if backend == "nccl":
        # after a failure torch's watchdog sleeps four times as long before it ends the process: a minute by default
        os.environ.setdefault(*DUMP)
    made = dist.new_group(
        ranks,
        timeout=within,
        backend=backend,
        pg_options=_nccl_options(within, hidden) if backend == "nccl" else None,
        use_local_synchronization=not everyone,  # only the members need to call
    )
    assert isinstance(made, dist.ProcessGroup), "only its ranks may use the group"
    return made


def _nccl_options(timeout: timedelta, hidden: bool) -> Any:
    """High priority, so that a collective's blocks get their turn beside a full device. Of hidden ones few blocks, for
    they are held, spinning, until the slowest peer has arrived."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # torch takes its own argument, and warns where the two differ
    options.is_high_priority_stream = True
    if hidden:
        options.config.max_ctas = MAX_CTAS
    return options


def host_group(group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> dist.ProcessGroup | None:
    """Those workers in a group over gloo, for what is said beside training: objects and tensors of the host's memory.

    Such control may come between unlike rounds of the workers, while torch and NCCL demand one order over all groups
    of a device. `group` (None: the default one) serves where gloo moves its CPU tensors, else a default group that has
    gloo and the same ranks, else one with `timeout` that is made here, once: all members must come to the first call.
    None: there is one worker.
    """
    if not dist.is_initialized():
        return None
    group, cpu = group or dist.group.WORLD, torch.device("cpu")
    ranks = tuple(dist.get_process_group_ranks(group))
    everyone = [dist.group.WORLD] if len(ranks) == dist.get_world_size() else []
    for known in (group, *everyone):
        if backend_for(known, cpu) == "gloo":
            return known
    if not is_alive(known := _hosts.get(ranks)) and (known := new_group(group, timeout, cpu, "gloo")):
        _hosts[ranks] = known
    return known


def of_all(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each member gives, by rank; nobody goes on before all have come here."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=host_group(group))
    return found


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """How long collectives that start from now on may take; with NCCL its watchdog ends the process after that. Over
    gloo older torch (2.6, 2.7; mended by pytorch's #158128) keeps the timeout that the group was made with."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def leave_group(group: dist.ProcessGroup, timeout: float, *, hidden: bool = False) -> None:
    """Destroys a group of new_group, made with this timeout and hidden, or keeps it for the next one with its ranks.

    torch names a subgroup after its ranks, so that a second one would find the first one's addresses in the store.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        _spare.setdefault((tuple(ranks), timeout, dist.get_backend(group), hidden), []).append(weakref.ref(group))
    else:
        dist.destroy_process_group(group)


def drop_groups(groups: list[dist.ProcessGroup], after: threading.Thread | None) -> None:
    """Destroys them, so that who waits for this worker in one sees it broken, once a thread that uses them has ended;
    nobody waits for that here. Empties the list: connections close when nothing refers to them."""
    if after is not None:
        threading.Thread(target=lambda: (after.join(), drop_groups(groups, None)), daemon=True).start()
        return
    while groups:
        with contextlib.suppress(ValueError):  # the caller has destroyed all meanwhile
            dist.destroy_process_group(groups.pop())


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Whether torch.distributed still knows the group; not after destroy_process_group() and a new start."""
    return group in dist.distributed_c10d._world.pg_map


def compare(settings: tuple[Any, ...], tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """UserError on all workers unless all of them hold the same settings, shapes and dtypes."""
    kinds = [f"{len(tensors)} tensors", *map(kind_of, tensors)]
    theirs = of_all([*settings, *kinds], group)
    for rank, other in enumerate(theirs):
        for ours, its in zip(theirs[0], other, strict=False):  # in unlike numbers of tensors this is what differs first
            if ours != its:
                raise UserError(f"workers differ: rank 0 has {ours}, against {its} of rank {rank}")


@torch.no_grad()
def alike(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all members hold the same bits in tensors that `compare` has passed; the same answer for all. device:
    where tensors lie that the group moves.

    Each member sums up its bits with random weights: sums of unlike bits are equal once in 2^32 times, at most.
    """
    many = 1 << (22 if device.type == "cuda" else 17)  # at a time: what fills a GPU, or fits a cache
    odd = torch.empty(many, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0)) | 1
    weights, found = functools.cache(odd.to), torch.zeros((), dtype=torch.int64, device=device)
    for dense in (part for t in tensors for part in parts_of(t)):
        bits = as_bits(dense).contiguous().view(-1)
        bits = bits.view(torch.int32) if bits.element_size() == 8 else bits  # two signs of 64 bits would cancel out
        for part in bits.split(many):
            found = MIXED * found + (part * weights(dense.device)[: len(part)]).sum().to(device)
    ends = torch.stack([found, ~found])  # ~ turns the order of integers around
    dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group)
    return bool(ends[0] == ~ends[1])


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """The first member's values for all. Where all hold them, as after one seed, 16 bytes cross the link.

    They travel as bytes: gloo and NCCL know few dtypes.
    """
    if alike(tensors, group, device):
        return
    for bits in (as_bits(part) for t in tensors for part in parts_of(t)):
        flat = bits.to(device).contiguous().view(-1)
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)
        if flat.data_ptr() != bits.data_ptr():  # else it was written in place
            bits.copy_(flat.view(bits.shape))


def all_reduce(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Stage:
    """Starts the sum over the workers of each tensor, in place."""
    works = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats if flat.numel()]
    n = dist.get_world_size(group)
    sent = sum(ring_bytes(flat.numel() * flat.element_size(), n) for flat in flats)
    return [work for work in works if work is not None], sent


def send_first(flats: Sequence[Tensor], group: dist.ProcessGroup) -> Stage:
    """Starts sending the first member's values of each tensor to all; the bytes are the members' mean."""
    works = [dist.broadcast(flat, group_src=0, group=group, async_op=True) for flat in flats if flat.numel()]
    n = dist.get_world_size(group)
    sent = sum(round((n - 1) / n * flat.nbytes) for flat in flats)
    return [work for work in works if work is not None], sent


def all_gather(to: Tensor, own: Tensor, group: dist.ProcessGroup) -> Stage:
    """Part i of `to`, which is contiguous, becomes `own` of worker i."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, torch < 2.13
    work = gather(to.view(-1), own, group=group, async_op=True)
    assert work is not None
    return [work], (dist.get_world_size(group) - 1) * own.nbytes


def gather_parts(flat: Tensor, group: dist.ProcessGroup) -> Stage:
    """All-gather in place: every worker gets part i of `flat` from worker i."""
    return all_gather(flat, flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)].clone(), group)
