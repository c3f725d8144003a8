"""Nodes of workers, as a mesh of two dimensions."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import UserError
from ..groups import set_timeout


def local_world_size(env: Mapping[str, str] = os.environ) -> int:
    """Workers per node, as torchrun or SLURM says; 1 without either. UserError where SLURM says unlike numbers."""
    if "LOCAL_WORLD_SIZE" in env:
        return int(env["LOCAL_WORLD_SIZE"])
    per_node = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")  # "8", "8(x16)" or "8(x2),4"
    first, *others = {int(part.partition("(")[0]) for part in per_node.split(",")}
    if others:
        raise UserError(f"SLURM_TASKS_PER_NODE={per_node}: start equally many on each node")
    return first


def node_mesh(device_type: str, per_node: int | None = None, timeout: float | None = None) -> DeviceMesh:
    """Mesh [nodes, workers of a node] with the dimensions "replicate" and "shard"; every worker must call it.

    per_node: workers that synchronise every step, consecutive ranks; None: those of a node. timeout: seconds until a
    missing worker is an error; None for torch's half an hour.
    """
    n, world = per_node or local_world_size(), dist.get_world_size()
    if n < 1 or world % n:
        raise UserError(f"{n} workers per node do not divide {world} workers: start equally many on each node")
    mesh = init_device_mesh(device_type, (world // n, n), mesh_dim_names=("replicate", "shard"))
    if timeout is not None:
        for group in mesh.get_all_groups():
            set_timeout(group, timeout)
    return mesh
