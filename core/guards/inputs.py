"""Refuses what no method can average: tensors, checkpoints, meshes, sharded models, and workers that cannot meet."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from ..buckets import is_dtensor, kind_of, local_shard
from ..comm import Reducer
from ..errors import UserError, env_number, require, shown
from ..groups import WORLD, backend_for, is_alive, of_all
from ..hooks import Hook, HookedMethod
from ..local_update import CHANGED, OWN_SCALARS

LISTS = "give a list of tensors, as a module's parameters() and buffers() return"
OF_MODULE = {"parameters": "parameters", "model_params": "parameters", "buffers": "buffers"}


def tensors_of(given: Iterable[Any], name: str) -> list[Tensor]:
    """Returns the tensors of any iterable as a list.

    UserError if `given` is a single tensor or a module, or a tensor has no memory yet, if there are no parameters, and
    in inference mode, because a method's tensors could not be written to later.
    """
    if torch.is_inference_mode_enabled():
        raise UserError(
            "made under torch.inference_mode(), a method could not train later: make it outside of that block"
        )
    if isinstance(given, Tensor | nn.Module) or not isinstance(given, Iterable):
        remedy = f"give model.{OF_MODULE[name]}()" if isinstance(given, nn.Module) and name in OF_MODULE else LISTS
        raise UserError(f"{name}: one {type(given).__name__} is given: {remedy}")
    tensors = list(given)
    if not tensors and OF_MODULE.get(name) == "parameters":
        what = "an exhausted generator or an empty list"
        raise UserError(f"got no {name} ({what}): give model.parameters() anew; each pipeline stage needs one")
    if others := [type(t).__name__ for t in tensors if not isinstance(t, Tensor)]:
        raise UserError(f"{name}: a {others[0]} is among them: {LISTS}")
    for number, t in enumerate(tensors):
        if is_lazy(t):
            raise UserError(
                f"{name}: number {number} is an {type(t).__name__}, of a lazy module, and has no shape yet: pass one "
                "batch through the model first"
            )
        if t.is_meta:
            raise UserError(
                f"{name}: number {number}, of shape {list(t.shape)}, is on the meta device and has no numbers: call "
                "model.to_empty(device=...) and initialize the model, or load weights, first"
            )
    return tensors


def check_inputs(given: Sequence[Tensor], params: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
    """Raises UserError for the first tensor that cannot be averaged.

    `given` are the user's parameters, `params` the trained ones with DTensors' local shards.
    """
    if not params:
        raise UserError("no parameter requires a gradient: nothing to train, so unfreeze some first")
    if not any(p.numel() for p in given if p.requires_grad):  # a DTensor counts all of its shards
        raise UserError("no parameter has an element: nothing to train")
    if params[0].device.type == "mps":
        raise UserError("parameters on mps, which has no float64 for the sums of the outer step: move the model to cpu")
    check_dense(params, "a parameter", ", or requires_grad_(False) to leave it as it is")
    check_dense(buffers, "a buffer")
    refuse_shared_storage(params)
    if (b := overlapping(buffers, params)) is not None:
        raise UserError(
            f"buffers: a tensor of shape {tuple(b.shape)} shares its memory with a parameter, which its average would "
            "overwrite: give model.buffers(), without parameters"
        )


def check_dense(tensors: Sequence[Tensor], what: str, remedy: str = "") -> None:
    """Raises UserError for the first tensor that cannot be averaged in place."""
    for t in tensors:
        if t.is_complex():
            text = f"of dtype {t.dtype}: only floating point can be averaged; give torch.view_as_real(tensor){remedy}"
        elif t.layout != torch.strided or t.is_nested:
            text = f"of layout {t.layout}: only dense ones can be averaged; call to_dense(){remedy}"
        elif t.is_inference():
            text = "an inference tensor (torch.inference_mode), which cannot be written to: clone() it outside"
        elif any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
            text = "expanded, so several elements share memory: give it memory of its own, as clone() does"
        else:
            continue
        raise UserError(f"{what} of shape {tuple(t.shape)} is {text}")


def check_group(places: int = 1, *, is_elastic: bool = False) -> None:
    """Raises UserError if several workers were started and torch.distributed is not initialized.

    Also if the elastic launcher has started them, and the method is not elastic.
    """
    if "CO2_WORKER" in os.environ and not is_elastic:
        raise UserError(
            "the elastic launcher restarts workers, and this method's workers cannot join again: loop over an "
            "ElasticLoop (a train script: give --elastic), or start the script with torchrun"
        )
    if places == 1 and (workers := env_number("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        raise UserError(
            f"WORLD_SIZE={workers}, but torch.distributed is not initialized: this worker would train alone; call "
            "init_process_group first"
        )


def refuse_shared_storage(params: Sequence[Tensor]) -> None:
    """Raises UserError if two parameters overlap in memory: every boundary would update them twice."""
    spans = [(_span(p), p.nbytes) for p in params if p.numel()]
    # other layouts, such as columns of one matrix, may interleave
    dense = sorted(span for span, nbytes in spans if span[2] - span[1] == nbytes)
    if any(one[0] == following[0] and following[1] < one[2] for one, following in itertools.pairwise(dense)):
        raise UserError(
            "two parameters share their memory: give the tensor that holds both, or one of them, as the same object"
        )


def overlapping(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor | None:
    """Returns the first tensor whose memory overlaps with a tensor of `others`, or None."""
    spans = sorted(_span(t) for t in others if t.numel())
    for t in tensors:
        device, start, end = _span(t)
        before = bisect_left(spans, (device, end, 0)) - 1  # the last that starts before this one ends
        if t.numel() and before >= 0 and spans[before][0] == device and spans[before][2] > start:
            return t
    return None


def _span(t: Tensor) -> tuple[str, int, int]:
    """Returns the tensor's device, and its first and last address."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return str(t.device), t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


REQUIRED = ("method", "flats", "workers", "places", "reducer", "taus", "launched")
"""Keys in every method's part of a checkpoint."""


def check_state(method: HookedMethod, state: Mapping[str, Any]) -> None:
    """Raises UserError if another method or an older version, without a required key, wrote a checkpoint.

    The same holds for another number of workers, unless all workers had equal outer states, and for an average in
    flight that this method's reducer cannot go on with.
    """
    if (other := state.get("method", method.name)) != method.name:
        raise UserError(f"the checkpoint is of {other}, not {method.name}: resume with its method")
    required = (*REQUIRED, "fragments") if hasattr(method, "fragments") else REQUIRED
    if missing := [key for key in required if key not in state]:
        raise UserError(
            f"the checkpoint's state has no {missing[0]!r}, so an older version wrote it: resume with that version, or "
            "start afresh"
        )
    if state["workers"] != (workers := method.allreduce.world_size) and method.state and not method.replicated:
        raise UserError(
            f"the checkpoint is of {state['workers']} workers, here there are {workers}, and each held a part of the "
            "outer state of its own: resume with as many"
        )
    kind = state["reducer"] if method.reducer.changes else method.reducer.kind
    if state["in_flight"] and (state["reducer"] == Reducer.kind) != (kind == Reducer.kind):
        raise UserError(  # one holds a sum, the other a mean
            f"the checkpoint holds an all-reduce in {state['reducer']}, and {kind} cannot go on with it: resume "
            "with the compression that wrote it"
        )


def check_hooks(hooks: Sequence[Any]) -> None:
    """Raises UserError for objects of other classes, a hook of another method, and a repeated name."""
    names = {*OWN_SCALARS, CHANGED}
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise UserError(f"hooks: one {type(hook).__name__} is among them: give objects of a Hook's classes")
        if hasattr(hook, "method"):
            raise UserError(f"hooks: this {type(hook).__name__} belongs to another method: make one for each")
        own = {*hook.scalars, *hook.per_worker_scalars, *([hook.name] if hook.name else [])}
        if repeated := names & own | hook.scalars.keys() & hook.per_worker_scalars.keys():
            raise UserError(
                f"hooks: two have the name {min(repeated)!r}, of a scalar or of a state: give them different names"
            )
        names |= own


def check_env(env: Mapping[str, str] = os.environ) -> None:
    """Raises UserError if workers cannot meet with the rank, the port or the interfaces of this environment."""
    number, world = env_number("RANK", 0, env), env_number("WORLD_SIZE", 1, env, least=1)
    if number >= world:
        raise UserError(f"RANK={number} with WORLD_SIZE={world}: ranks are 0 to {world - 1}; start with torchrun")
    env_number("MASTER_PORT", 29500, env, least=1, most=65535)
    here = [name for _, name in socket.if_nameindex()]
    for name in filter(None, env.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in here:
            raise UserError(f"GLOO_SOCKET_IFNAME={name}: not of {', '.join(here)}: set one of these, or unset it")


def check_mesh(mesh: DeviceMesh) -> None:
    """Raises UserError unless the mesh has two dimensions."""
    if not hasattr(mesh, "ndim"):
        raise UserError(f"{shown('mesh', mesh)}: give a DeviceMesh, as torch's init_device_mesh or node_mesh returns")
    if mesh.ndim == 2:
        return
    names, usual = mesh.mesh_dim_names or (), ("dp_replicate", "dp_shard")
    listed = f" {', '.join(names)}" if names else ""
    remedy = f"give a mesh of two, such as init_device_mesh(DEVICE, (NODES, WORKERS OF A NODE), mesh_dim_names={usual})"
    if len(names) > 1:
        across, inside = usual if {*usual} <= {*names} else names[:2]
        pair = "mesh[ACROSS, INSIDE], with the names of the dimensions across nodes and inside a node"
        remedy = f'give two of its dimensions, {pair}, such as mesh["{across}", "{inside}"]'
    raise UserError(f"a mesh of {mesh.ndim} dimension{'s' * (mesh.ndim != 1)}{listed}: {remedy}")


def groups_of(
    mesh: DeviceMesh | None, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns the group across nodes and the group inside a node. Without a mesh, they are `group` and None."""
    if mesh is None:
        return group, None
    check_mesh(mesh)
    inner = mesh.get_group(1)
    check_names(inner)
    return mesh.get_group(0), inner


def check_names(group: dist.ProcessGroup | None) -> None:
    """Raises UserError if members of the group have made different numbers of process groups.

    torch names a group of some ranks by these ranks and that number. The members would wait for each other under
    different names.
    """
    if group is None or dist.get_world_size(group) == dist.get_world_size():
        return
    if backend_for(group, torch.device("cpu")) != "gloo":  # the members cannot compare
        return
    counts = of_all(len(WORLD.pg_names), group)
    if len({*counts}) > 1:
        raise UserError(
            f"ranks {dist.get_process_group_ranks(group)} have made {counts} process groups, so torch would give their "
            "next group different names: make this object before groups of some ranks, or as many groups on each rank"
        )


def names_of(tensors: Sequence[Tensor]) -> list[str]:
    """Returns each tensor's name in the outermost module that holds it, "" if none does.

    It searches Python's objects, in some 30 ms. Workers with the same modules get the same names.
    """
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module) and "_modules" in vars(o)]
    inner = {id(child) for module in modules for child in vars(module)["_modules"].values()}
    names = dict[int, str]()
    for root in [module for module in modules if id(module) not in inner]:
        for path, module in nn.Module.named_modules(root, prefix=type(root).__name__):
            for held in (vars(module).get("_parameters"), vars(module).get("_buffers")):
                for name, t in held.items() if isinstance(held, dict) else ():  # a ScriptModule has no dict
                    names[id(t)] = min(f"{path}.{name}", names.get(id(t), "~"))
    return [names.get(id(t), "") for t in tensors]


def check_order(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Raises UserError if the workers' tensors differ in shape or dtype, or have the same names in different orders.

    Tensors outside of modules have no names. Another number of tensors is left to `compare`.
    """
    mine = [(name, str(kind_of(local_shard(t)))) for name, t in zip(names_of(tensors), tensors, strict=True)]
    first, *others = of_all(mine, group)
    for rank, its in enumerate(others, start=1):
        pairs = [pair for pair in zip(first, its, strict=False) if pair[0] != pair[1]]
        remedy = "they are the same in another order: build the model in one order, from lists instead of sets"
        if sorted(first) != sorted(its):  # other names alone may come from a wrapper that only one worker has
            pairs, remedy = [pair for pair in pairs if pair[0][1] != pair[1][1]], "build the same model on all workers"
        if pairs and len(first) == len(its):
            ours, theirs = (" ".join(named).strip() for named in pairs[0])
            raise UserError(f"workers differ: rank 0 has {ours}, against {theirs} of rank {rank}: {remedy}")


def check_share(c: Any, *, shard: bool, split: bool = False, held: bool = False) -> None:
    """Raises UserError for settings that a rank with a share of the outer state cannot have.

    Args:
        c: The settings, a CO2Config.
        shard: Whether each worker owns only a part of the outer state. `split`: whether ranks hold shards.
        held: Whether `shards` names parameters that several ranks hold.
    """
    apart = "a parameter that several ranks of a node hold would be averaged at different times; give 1"
    require(c, not held or c.fragments in (1, "auto"), "fragments", f"each stage cuts its own part, so {apart}")
    at_blocks = "the owners' parts begin at whole blocks, so with shards"
    require(c, not (shard and split) or c.fragments in (1, "auto"), "fragments", f"{at_blocks} {apart}")
    if shard and c.compression.format == "lgreco":
        raise UserError(
            "compression.format='lgreco' with shard=True: no worker owns part of a low-rank or sparse average; give a "
            "uniform format, or leave out shard"
        )


FSDP = "torch.distributed.fsdp", "FullyShardedDataParallel"


def refuse_shards(params: Sequence[Tensor], group: dist.ProcessGroup | None, *, dtensors: bool = True) -> None:
    """Raises UserError if a model is sharded over the method's workers, by FullyShardedDataParallel or as DTensors.

    They would average different shards. A group of None means all workers. CO2 on a mesh supports DTensors.
    """
    workers, ours = _ranks(group or dist.group.WORLD), {id(p) for p in params}
    found: list[tuple[str, set[int]]] = []
    for p in filter(is_dtensor, params if dtensors else ()):
        dims = [dim for dim, placement in enumerate(p.placements) if not placement.is_replicate()]
        found += [("a DTensor (fully_shard)", _ranks(p.device_mesh.get_group(dim))) for dim in dims]
    for module in _instances(_imported(*FSDP)) if len(workers) > 1 else ():
        if "NO_SHARD" not in str(module.sharding_strategy) and any(id(p) in ours for p in module.parameters()):
            found.append(("FullyShardedDataParallel", _ranks(module.process_group)))
    for what, ranks in found:
        if len(over := workers & ranks) > 1:
            raise UserError(
                f"{what} shards the parameters over ranks {sorted(over)}, which are this method's workers: different "
                "shards would be averaged; give the method the whole model, or shard it inside nodes and give CO2 mesh="
            )


def _imported(module: str, name: str) -> Any:
    """Returns a class if its module was imported. Otherwise None, because no object of it can exist."""
    return getattr(sys.modules.get(module), name, None)


def _instances(*kinds: Any) -> Iterator[Any]:
    """Yields all objects of these classes and of their subclasses."""
    known = [kind for kind in kinds if kind is not None]
    for kind in known:
        known += [derived for derived in kind.__subclasses__() if derived not in known]
    return (o for o in (gc.get_referrers(*known) if known else ()) if type(o) in known)


def _ranks(group: dist.ProcessGroup | None) -> set[int]:
    """Returns a group's ranks, none for no group or a destroyed one."""
    return set(dist.get_process_group_ranks(group)) if group is not None and is_alive(group) else set()
