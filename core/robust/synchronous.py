"""Optimizers and modules that synchronize a method's workers in every step.

All that is known of them is here. Where they mix up the workers' models, UserError says so. Where they only make
workers wait, so that no communication is hidden, a warning says so once. Neither concerns the workers of one node,
where the method runs across nodes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UserError
from ..flat import is_dtensor
from ..groups import is_alive

FSDP = "torch.distributed.fsdp", "FullyShardedDataParallel"
AVERAGER = "torch.distributed.algorithms.model_averaging.averagers", "ModelAverager"


def refuse_shards(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Refuses a model whose parts lie on a method's workers: they would average unlike parts of it.

    Args:
        params: The parameters that the method is given.
        group: The method's workers, None for all.

    Raises:
        UserError: DTensors or FullyShardedDataParallel shard the parameters over several of the workers.
    """
    for p in filter(is_dtensor, params):
        for dim, placement in enumerate(p.placements):
            over = _workers(group) & set(dist.get_process_group_ranks(p.device_mesh.get_group(dim)))
            if len(over) > 1 and not placement.is_replicate():
                raise UserError(_of_shards("a DTensor (fully_shard)", over))
    refuse_fsdp(params, group)


def refuse_fsdp(params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """As refuse_shards, without DTensors, for ShardedCO2, which looks at those itself."""
    workers = _workers(group)
    ours = {id(p) for p in params}
    for module in _instances(_imported(*FSDP)) if len(workers) > 1 else ():
        over = workers & _ranks(module.process_group)
        shards = "NO_SHARD" not in str(module.sharding_strategy)
        if len(over) > 1 and shards and any(id(p) in ours for p in module.parameters()):
            raise UserError(_of_shards("FullyShardedDataParallel", over))


def _workers(group: dist.ProcessGroup | None) -> set[int]:
    return set(dist.get_process_group_ranks(group)) if dist.is_initialized() else set()


def _of_shards(what: str, over: set[int]) -> str:
    return (
        f"{what} shards the parameters over ranks {sorted(over)}, which are this method's workers: unlike shards would "
        "be averaged; give the method the whole model, or shard it inside nodes and give ShardedCO2 mesh="
    )


def refuse_optimizer(optimizer: torch.optim.Optimizer, params: set[int], group: dist.ProcessGroup | None) -> None:
    """Refuses ZeroRedundancyOptimizer among a method's workers: it updates a part of the parameters on each of them,
    and copies it to the others, so that each would train a mixture of their models.

    Args:
        optimizer: Any optimizer that is about to take a step.
        params: The ids of the method's parameters.
        group: The method's workers, None for one worker.

    Raises:
        UserError: It is such an optimizer.
    """
    kind = _imported("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    if group is None or kind is None or not isinstance(optimizer, kind):
        return
    over = set(dist.get_process_group_ranks(group)) & _ranks(vars(optimizer)["process_group"])
    if len(over) > 1 and any(id(p) in params for g in optimizer.param_groups for p in g["params"]):
        raise UserError(
            f"{type(optimizer).__name__} shares out the parameters over ranks {sorted(over)} and copies them in every "
            "step: these workers take local steps, and each would get a mixture of their models; give each the "
            "optimizer inside it, or, with a mesh, process_group=mesh.get_group(1)"
        )


def collectives(group: dist.ProcessGroup | None, own: Sequence[dist.ProcessGroup]) -> dict[int, int]:
    """How many collectives have begun so far in each process group with several of a method's workers.

    Args:
        group: The method's workers, None for one worker.
        own: The method's own groups, which are not counted.
    """
    workers, found = set(dist.get_process_group_ranks(group)) if group is not None else set[int](), dict[int, int]()
    for other in list(dist.distributed_c10d._world.pg_map) if len(workers) > 1 else []:
        if all(other is not mine for mine in own) and len(workers & set(dist.get_process_group_ranks(other))) > 1:
            with contextlib.suppress(RuntimeError):  # a backend that counts nothing
                found[id(other)] = _begun(other)
    return found


def warn_of_step(optimizer: torch.optim.Optimizer, before: dict[int, int], after: dict[int, int]) -> bool:
    """Warns of an optimizer in whose step collectives have begun; whether it has. See `collectives`."""
    if not any(after[key] > before[key] for key in before.keys() & after.keys()):
        return False
    _warn(
        f"{type(optimizer).__name__} communicates among these workers in every step: they wait, so that nothing is "
        "hidden, or get a mixture of each other's models; take an optimizer of each worker's own, or, with a mesh, one "
        "over mesh.get_group(1)"
    )
    return True


def warn_of_synchronous(params: Sequence[Tensor], buffers: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Warns where training passes through modules or averagers that make a method's workers wait in every step.

    Such a module leaves no mark on its parameters: all of Python's objects are asked whether they refer to its class,
    some 30 ms. One that is there and not called does nothing.

    Args:
        params: The method's parameters.
        buffers: The buffers that it averages.
        group: Of the method, None for one worker.
    """
    if group is None:
        return
    workers, ours = set(dist.get_process_group_ranks(group)), {id(t) for t in (*params, *buffers)}
    replicated = {
        len(over)
        for p in filter(is_dtensor, params)
        for dim in range(p.device_mesh.ndim)
        if len(over := workers & set(dist.get_process_group_ranks(p.device_mesh.get_group(dim)))) > 1
    }
    if replicated:
        _warn(
            f"the parameters are DTensors that are replicated over {max(replicated)} of these workers, whose gradients "
            "are averaged in every step: give the plain model, or a mesh with these workers in its first dimension"
        )
    averager = _imported(*AVERAGER)
    for found in _instances(DistributedDataParallel, nn.SyncBatchNorm, _imported(*FSDP), averager):
        among = max((len(workers & _ranks(g)) for g in _groups_of(found)), default=0)
        if among < 2 or found in _looked_at:
            continue
        if averager is not None and isinstance(found, averager):
            if getattr(found, "step", 0) > 0:
                _looked_at.add(found)
                _warn(
                    f"{type(found).__name__} averages parameters among {among} of these workers, which wait for it, "
                    "while this method averages them, too: take the optimizer inside it, and no averager"
                )
        elif any(id(t) in ours for t in (*found.parameters(), *found.buffers())):
            _looked_at.add(found)
            found.register_forward_pre_hook(functools.partial(_before_pass, among))


def _groups_of(found: Any) -> list[dist.ProcessGroup]:
    """Over which groups a module or an averager communicates."""
    groups = [getattr(found, "process_group", None), getattr(found, "_inter_node_pg", None)]
    if isinstance(found, nn.SyncBatchNorm) and groups[0] is None:
        groups = [dist.group.WORLD]
    return [g for g in groups if g is not None]


def _before_pass(among: int, module: nn.Module, args: Any) -> None:
    """A hook of a module in `_looked_at`, until it has warned. A module can be pickled with it."""
    if module in _looked_at:
        warn: Any = torch.compiler.disable(_warn_of_pass)  # compiled code would keep the first pass's answer
        warn(among, module)


def _warn_of_pass(among: int, module: nn.Module) -> None:
    if module not in _looked_at or not torch.is_grad_enabled():
        return
    if isinstance(module, nn.SyncBatchNorm):
        if not module.training:
            return
        for other in [m for m in _looked_at if isinstance(m, nn.SyncBatchNorm)]:  # one warning for a model
            _looked_at.remove(other)
        _warn(
            f"the model has SyncBatchNorm, which waits for {among} of these workers in every forward and backward pass:"
            " take BatchNorm, whose statistics the method averages (buffers=model.buffers()), or, with a mesh, "
            "SyncBatchNorm with process_group=mesh.get_group(1)"
        )
    elif getattr(module, "require_backward_grad_sync", True):
        _looked_at.remove(module)
        _warn(
            f"the model is in {type(module).__name__}, which averages gradients among {among} of these workers in every"
            " step, while they wait, so that nothing is hidden: give the plain model to your loop, not that module, or "
            "with a mesh one over process_group=mesh.get_group(1)"
        )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def _begun(group: Any) -> int:
    """How many collectives have begun in it, by torch's own count."""
    return group._get_sequence_number_for_group()


def _imported(module: str, name: str) -> Any:
    """A class of a module that somebody has imported, else None: nothing of it can be there."""
    return getattr(sys.modules.get(module), name, None)


def _instances(*kinds: Any) -> Iterator[Any]:
    """All objects of these classes and of classes derived from them."""
    known = [kind for kind in kinds if kind is not None]
    for kind in known:
        known += [derived for derived in kind.__subclasses__() if derived not in known]
    return (o for o in (gc.get_referrers(*known) if known else ()) if type(o) in known)


def _ranks(group: dist.ProcessGroup) -> set[int]:
    """Its ranks; none for a group of a run before."""
    return set(dist.get_process_group_ranks(group)) if is_alive(group) else set()


_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()
