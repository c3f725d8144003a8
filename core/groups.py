"""Process groups: the workers' and a node's, the host's, and checks that their members agree."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .buckets import as_bits, is_dtensor, kind_of, parts_of
from .errors import CollectiveError, UserError, env_number

# Thread blocks that one NCCL collective may occupy, each on its own multiprocessor (results/gpu.md). Over sockets NCCL
# uses two. A matrix product is 11 % slower next to eight waiting blocks, and 7 % slower next to two.
MAX_CTAS = 8
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")  # torch reads both
DUMP = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
MOST_JSON = 1 << 26  # bytes of a member's values in of_all
LONGEST = 1e8  # seconds of the longest timeout, three years
AT_EXIT = 5.0  # seconds that the end of the process waits for groups that a thread destroys
WORLD: Any = dist.distributed_c10d._world  # torch's own tables of process groups
MIXED = 6364136223846793005  # an odd multiplier from Knuth's random number generator
# Weak references: gloo's threads end with the last reference, and a thread that outlives the interpreter aborts it.
_spare: dict[tuple[object, ...], list[weakref.ref[dist.ProcessGroup]]] = {}  # groups that were left, by arguments
_hosts = weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]()  # by ranks: groups that host_group has made


def backend_for(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns the backend that moves tensors of this device, "no" if there is none.

    dist.get_backend returns "undefined" for a group with one backend per device, as init_process_group() makes by
    default.
    """
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device.type, "no")


def moved_by_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether NCCL moves the group's tensors. If so, a wait only orders streams.

    gloo moves a GPU's tensors through the host in its own threads, and a wait blocks. UserError if an environment
    variable makes NCCL's waits block, too.
    """
    if device.type != "cuda" or backend_for(group, device) != "nccl":
        return False
    for name in BLOCKING:
        if os.environ.get(name, "0") not in ("", "0"):
            raise UserError(
                f"{name}={os.environ[name]}: the host would wait for every all-reduce, and nothing would be hidden; "
                "unset it"
            )
    return True


def new_group(
    group: dist.ProcessGroup | None,
    timeout: float,
    device: torch.device,
    backend: str | None = None,
    *,
    overlap: bool = False,
) -> dist.ProcessGroup | None:
    """Makes a process group with the ranks of `group`, or returns None if torch.distributed is not initialized.

    Args:
        group: The workers. None means all.
        timeout: Seconds until a missing member is an error.
        device: Device of the tensors that the group moves.
        backend: gloo or nccl. None means the backend of `group` for the device.
        overlap: Whether collectives run during local steps. Otherwise a worker waits for them, so they get all
            resources.

    Raises:
        UserError: If the timeout is no number of seconds, or `group` has no backend for the device.
    """
    if not isinstance(timeout, int | float) or not 0 < timeout < LONGEST:
        raise UserError(f"timeout={timeout!r}: give seconds, above 0 and below {LONGEST:g}")
    if not dist.is_initialized():
        return None
    everyone = group is None or dist.get_world_size(group) == dist.get_world_size()
    ranks = None if everyone else dist.get_process_group_ranks(group)
    backend = backend or backend_for(group, device)
    if backend == "no":
        remedy = "start it with backend 'cpu:gloo,cuda:nccl'"
        if device.type == "cpu":
            remedy += ", or move the model to the GPU before its method is made"
        raise UserError(
            f"the process group ({dist.get_backend_config(group)}) moves no {device.type} tensors: {remedy}"
        )
    left = _spare.get((tuple(ranks), timeout, backend, overlap), []) if ranks else []
    if left and is_alive(left[-1]()):
        return left.pop()()
    within = timedelta(seconds=timeout)
    if backend == "nccl":
        # After a failure torch's watchdog sleeps four times this long before it ends the process, a minute by default.
        os.environ.setdefault(*DUMP)
    made = dist.new_group(
        ranks,
        timeout=within,
        backend=backend,
        pg_options=_nccl_options(within, overlap) if backend == "nccl" else None,
        use_local_synchronization=not everyone,  # only members need to call
    )
    assert isinstance(made, dist.ProcessGroup), "only its ranks may use the group"
    return made


def _nccl_options(timeout: timedelta, overlap: bool) -> Any:
    """Options for a stream with high priority, so that a collective progresses while the GPU is busy.

    A collective that overlaps with local steps gets few thread blocks, because they spin until the slowest peer
    arrives.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # torch uses its own argument, and warns if the two differ
    options.is_high_priority_stream = True
    if overlap:
        options.config.max_ctas = MAX_CTAS
    return options


def host_group(group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> dist.ProcessGroup | None:
    """Returns a gloo group for control messages: objects, and tensors in host memory. None if there is one worker.

    Workers may send control messages in different rounds. torch and NCCL demand the same order of collectives over all
    groups of a device, so these messages need gloo. `group` itself (None means all workers) is used if gloo moves its
    CPU tensors, then a default group with the same ranks and gloo. Otherwise a group with `timeout` is made once, and
    all members must make the first call.
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
    """Gathers JSON values from each member, by rank. No member returns before all have called it.

    Tuples arrive as lists. torch's all_gather_object would unpickle, and so run, whatever a peer sends.
    """
    own = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    if not dist.is_initialized():
        return [json.loads(own.numpy().tobytes())]
    host, n = host_group(group), dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(n)]
    dist.all_gather(sizes, torch.tensor([len(own)], device="cpu"), group=host)
    if (longest := int(max(sizes))) > MOST_JSON:
        raise CollectiveError(f"a worker sends {longest} bytes of settings, over {MOST_JSON}: it is damaged or hostile")
    rows = list(torch.zeros(n, longest, dtype=torch.uint8, device="cpu"))
    dist.all_gather(rows, torch.nn.functional.pad(own, (0, longest - len(own))), group=host)
    return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def leave_group(group: dist.ProcessGroup, timeout: float, *, overlap: bool = False) -> None:
    """Destroys a group made by new_group with this timeout and overlap, or keeps it for reuse by the same ranks.

    torch names a group of some ranks after these ranks. A second one would find the first one's addresses in the store.
    """
    if not is_alive(group):  # destroy_process_group() came first
        return
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        _spare.setdefault((tuple(ranks), timeout, dist.get_backend(group), overlap), []).append(weakref.ref(group))
    else:
        dist.destroy_process_group(group)


def drop_groups(groups: list[dist.ProcessGroup], after: threading.Thread | None) -> None:
    """Destroys groups and empties the list, so that peers that wait for this worker get an error.

    If the thread `after` still uses the groups, they are destroyed in the background when it ends.
    """
    if after is not None:
        thread = threading.Thread(target=lambda: (after.join(), drop_groups(groups, None)), daemon=True)
        thread.start()
        atexit.register(thread.join, AT_EXIT)  # a thread that destroys a group at the end would abort the process
        return
    while groups:
        with contextlib.suppress(ValueError):  # the caller may have destroyed all groups meanwhile
            dist.destroy_process_group(groups.pop())


def is_alive(group: dist.ProcessGroup | None) -> bool:
    """Returns whether torch.distributed has this group. It has not after destroy_process_group()."""
    return group in WORLD.pg_map


def compare(settings: tuple[Any, ...], tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Raises UserError on all workers unless all have the same settings, shapes and dtypes."""
    named = [[f"{k}={v}" for k, v in s.items()] if isinstance(s, dict) else [str(s)] for s in settings]
    theirs = of_all([*itertools.chain(*named), f"{len(tensors)} tensors", *map(str, map(kind_of, tensors))], group)
    for rank, other in enumerate(theirs):
        for ours, its in zip(theirs[0], other, strict=False):  # if numbers of tensors differ, that comes first
            if ours != its:
                raise UserError(
                    f"workers differ: rank 0 has {ours}, against {its} of rank {rank}: give all workers the same"
                )


@torch.no_grad()
def alike(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether all members hold the same bits. The answer is the same on all members.

    `compare` must have accepted the tensors. The group moves tensors of `device`. The members compare sums of the bits
    with random weights. Sums of different bits agree with a probability of at most 2^-32.
    """
    many = 1 << (22 if device.type == "cuda" else 17)  # elements that fill a GPU, or fit a CPU's cache
    odd = torch.empty(many, dtype=torch.int64, device="cpu").random_(generator=torch.Generator().manual_seed(0)) | 1
    weights, checksum = functools.cache(odd.to), torch.zeros((), dtype=torch.int64, device=device)
    for dense in (part for t in tensors for part in parts_of(t)):
        bits = as_bits(dense).contiguous().view(-1)
        bits = bits.view(torch.int32) if bits.element_size() == 8 else bits  # an even number of sign bits would cancel
        for part in bits.split(many):
            checksum = MIXED * checksum + (part * weights(dense.device)[: len(part)]).sum().to(device)
    ends = torch.stack([checksum, ~checksum])  # ~ reverses the order of integers, so one MIN gives both ends
    dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group)
    return bool(ends[0] == ~ends[1])


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Gives all members the first member's values.

    If all have them already, as after equal seeds, only 16 bytes are sent. Tensors are sent as bytes, because gloo and
    NCCL support few dtypes.
    """
    if alike(tensors, group, device):
        return
    for bits in (as_bits(part) for t in tensors for part in parts_of(t)):
        flat = bits.to(device).contiguous().view(-1)
        dist.broadcast(flat.view(torch.uint8), group_src=0, group=group)
        if flat.data_ptr() != bits.data_ptr():  # otherwise the broadcast wrote in place
            bits.copy_(flat.view(bits.shape))


def local_world_size(env: Mapping[str, str] = os.environ) -> int:
    """Returns the number of workers per node from torchrun's or Slurm's environment; 1 without either.

    UserError if nodes have different numbers of workers.
    """
    if "LOCAL_WORLD_SIZE" in env:
        return env_number("LOCAL_WORLD_SIZE", 1, env, least=1)
    name = "SLURM_NTASKS_PER_NODE" if env.get("SLURM_NTASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"
    per_node = [part.partition("(")[0] for part in env.get(name, "1").split(",")]  # of "8", "8(x16)" or "8(x2),4"
    first, *others = {env_number(name, 1, {name: part}, least=1) for part in per_node}  # distinct numbers of workers
    if others:
        raise UserError(f"{name}={env[name]}: start equally many on each node")
    return first


Holders = Mapping[Tensor, Sequence[int]]  # parameter -> the ranks that hold the same elements of it as this rank
Holding = tuple[int, tuple[int, ...]]  # how many ranks hold a tensor, and which ones, if that is known


def holding_of(t: Tensor, ranks: Sequence[int], shards: bool | Holders) -> Holding:
    """Returns which of `ranks`, an inner group, hold the same elements of `t` as this rank, itself included.

    If `shards` does not name them, all ranks hold a plain tensor, or only this rank if `shards` is True. A DTensor's
    placements name its holders. UserError if a DTensor holds partial sums, or holders are outside of the group.
    """
    if isinstance(shards, Mapping) and t in shards:
        if dist.get_rank() not in (holders := shards[t]) or not {*holders} <= {*ranks}:
            raise UserError(
                f"shards: ranks {[*holders]} should hold a parameter of rank {dist.get_rank()}, whose inner group is "
                f"{[*ranks]}: give ranks of that group, including rank {dist.get_rank()}"
            )
        return len({*holders}), tuple(sorted({*holders}))
    separate = shards is not False
    if not is_dtensor(t):
        return (1, ()) if separate else (len(ranks), tuple(ranks))
    mesh = t.device_mesh
    holders = len(set(mesh.mesh.flatten().tolist()) & set(ranks)) if separate else len(ranks)
    for dim, placement in enumerate(t.placements):
        if placement.is_partial():
            raise UserError(f"a DTensor placed as {placement!r}: redistribute it to Replicate() or Shard(dim) first")
        if placement.is_replicate():
            continue
        over = dist.get_process_group_ranks(mesh.get_group(dim))
        if not set(over) <= set(ranks):
            raise UserError(
                f"a DTensor is sharded over ranks {over}, and the inner group is {list(ranks)}: different shards would "
                "be averaged; give mesh=[replicate, shard] whose second dimension holds the whole model"
            )
        holders //= len(over)  # each of these ranks holds different elements
    return holders, tuple(ranks) if holders == len(ranks) else ()
