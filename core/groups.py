"""Groups of workers: the nodes of a cluster, and what a group does with the equal parts of a flat tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.collectives import Stage
from core.errors import UserError

PIECES = 16  # a sum over the workers goes in so many pieces, for the sake of its temporary


def local_world_size(env: Mapping[str, str] = os.environ) -> int:
    """Workers per node, as torchrun or SLURM says; 1 without either."""
    if "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_WORLD_SIZE"])
    per_node = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")  # "8" or "8(x16)"
    return int(per_node.partition("(")[0])


def node_mesh(device_type: str, per_node: int | None = None) -> DeviceMesh:
    """Mesh [nodes, workers of a node] with the dimensions "replicate" and "shard"; every worker must call it.

    per_node: workers that synchronise every step, consecutive ranks; None: those of a node.
    """
    n, world = per_node or local_world_size(), dist.get_world_size()
    if n < 1 or world % n:
        raise UserError(f"{n} workers per node do not divide {world} workers: start equally many on each node")
    return init_device_mesh(device_type, (world // n, n), mesh_dim_names=("replicate", "shard"))


def sum_parts(flat: Tensor, group: dist.ProcessGroup) -> Iterator[Stage]:
    """Reduce-scatter in place: part `rank` of `flat` becomes its sum over the workers; the rest is left undefined.

    NCCL has it. gloo's own is an all-reduce inside, so there every worker sends each part to its owner, who adds them.
    """
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = flat.view(n, -1)
    sent = round((n - 1) / n * flat.numel() * flat.element_size())
    if dist.get_backend(group) == "nccl":
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


def gather_parts(flat: Tensor, group: dist.ProcessGroup) -> Stage:
    """All-gather in place: every worker gets part i of `flat` from worker i."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, torch < 2.13
    own = flat.view(n, -1)[rank].clone()
    work = gather(flat, own, group=group, async_op=True)
    assert work is not None
    return [work], (n - 1) * own.numel() * own.element_size()
