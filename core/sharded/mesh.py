"""Nodes of workers as a mesh of two dimensions, its groups, and the settings that shared outer state supports."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..adaptive.config import AdaptiveConfig
from ..errors import UserError
from ..groups import backend_for, of_all, set_timeout


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


def check_shared(c: AdaptiveConfig, wire: str = "float32") -> None:
    """Raises UserError for settings that may diverge, or need the whole outer state in one place. wire: its format."""
    c.check_stable()
    problems = []
    if c.merge != "outer" or not c.at_boundary:
        problems.append(
            f"merge={c.merge!r} with delay={c.delay!r} needs the outer state whole: shared, it knows merge outer with "
            "delay boundary (the paper)"
        )
    if wire != "float32":
        problems.append(f"wire.format={wire!r} needs unshared outer state: set wire.format float32")
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
