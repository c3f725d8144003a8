"""Builds the parts of a method: its hooks in their order, its sync schedule, its compression and its all-reduce."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import torch.distributed as dist
from torch import Tensor

from . import failure
from .buckets import Bucket, BucketShare, Scalars, tensors_of
from .comm import AsyncAllReduce, Reducer, all_reduce
from .config import CO2Config, CompressionConfig, Schedule, scheduled
from .errors import UserError
from .extra import ExtraAverage, Given
from .hooks import ConsensusDistance, Hook, MasterWeightSync, OutlierFilter, ReplicaChecksum
from .local_update import SyncSchedule
from .placement import check_names
from .tau import AdaptiveTau, TauHook, TauTuner
from .testing.link import Link, allreduce_over
from .usage import UsageChecks, refuse_shards


class CommonArgs(TypedDict, total=False):
    """Arguments that every method supports.

    Attributes:
        buffers: The model's buffers, see LocalUpdateMethod.
        model_params: The 16-bit model's parameters, if `params` are the float32 masters that an optimizer keeps of it,
            in the same order.
        average: Tensors that are evaluated but not trained, such as an EMA model, or a function that returns them. See
            ExtraAverage.
        group: The workers. None means all.
        timeout: Seconds until a missing worker is an error.
        link: An emulated slow network.
        hooks: More hooks, such as Requests and Snapshot.
    """

    buffers: Iterable[Tensor]
    model_params: Iterable[Tensor]
    average: Given
    group: dist.ProcessGroup | None
    timeout: float
    link: Link | None
    hooks: Sequence[Hook]


def build_args(
    c: CO2Config,
    args: CommonArgs,
    schedule: Schedule | None = None,
    *,
    overlap: bool = True,
    owned: bool = False,
    allreduce: Callable[..., AsyncAllReduce] | None = None,
) -> dict[str, Any]:
    """Returns LocalUpdateMethod's keyword arguments for a method with these settings.

    Args:
        c: The settings.
        args: The arguments that every method supports.
        schedule: See CO2.
        overlap: Whether local steps run during an all-reduce.
        owned: Whether each worker gets only the part of an average that it owns.
        allreduce: Makes the AsyncAllReduce, if it is not that class.
    """
    if unknown := args.keys() - CommonArgs.__annotations__:
        known = ", ".join(CommonArgs.__annotations__)
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}: the options are {known}")
    if not isinstance(more := args.get("hooks", ()), Sequence):
        raise UserError(f"hooks={more!r}: give a list of them")
    check_names(group := args.get("group"))
    workers = dist.get_world_size(group) if dist.is_initialized() else 1
    if allreduce is None:  # elastic workers come and go
        c.check_workers(workers)
    tau_hook = tau_hook_for(c, workers)
    masters = tensors_of(args.get("model_params", ()), "parameters")
    extra = args.get("average")
    outliers = OutlierFilter(c.outlier)
    # in the order in which they are called
    hooks = [outliers, ConsensusDistance(outliers), tau_hook, ReplicaChecksum(), *more]
    hooks += [MasterWeightSync(masters)] if masters else []
    if extra is not None and not (isinstance(extra, list | tuple) and not extra):
        hooks.append(ExtraAverage(extra))
    hooks.append(UsageChecks(masters))
    tau: Any = c.tau if schedule is None else lambda number: scheduled(c, schedule, number).tau
    fixed = tau_hook is None and c.delay == "boundary"  # no choice from measured times, and no merge within a round
    of_group = {name: given for name, given in args.items() if name in ("group", "timeout")}
    make = allreduce or allreduce_over(args.get("link"))
    return {
        "sync_schedule": SyncSchedule(tau) if fixed else AdaptiveTau(tau, c.delay, tau_hook),
        "buffers": args.get("buffers", ()),
        # with delay 0 the worker waits at once
        "allreduce": functools.partial(make, overlap=overlap and c.delay != 0, failures=failure, **of_group),
        "reducer": _reducer(c.compression, tau_hook, owned),
        "hooks": [hook for hook in hooks if hook is not None],
    }


def tau_hook_for(c: CO2Config, workers: int) -> TauHook | None:
    """Returns the hook that receives the workers' times, or None if nothing is chosen from them.

    The choices are tau, the compression, and the local step at which a worker waits for an average.
    """
    formats = c.compression.choices if workers > 1 else dict([*c.compression.choices.items()][-1:])
    given = None if c.tau == "auto" else c.tau
    cuts = c.cuts and workers > 1
    if given is not None and len(formats) == 1 and not cuts and (c.delay != "auto" or workers == 1):
        return None
    return TauHook(TauTuner(c.tau_max, c.tau_margin, formats, given=given, cuts=cuts))


def _reducer(
    compression: CompressionConfig, tau_hook: TauHook | None, owned: bool
) -> Callable[[Sequence[Bucket | BucketShare], Scalars, AsyncAllReduce], Reducer]:
    """Returns the function that makes the Reducer."""
    if compression.format == "float32":
        return functools.partial(all_reduce, owned=owned)
    if compression.format == "auto":
        from .compression.quantized import AutoCompression

        first = tau_hook.tuner.compression if tau_hook else [*compression.choices][-1]  # one worker uses the last
        return functools.partial(AutoCompression, first, compression.error_feedback, owned=owned)
    return lambda buckets, scalars, allreduce: compression.reducer(
        buckets, scalars, allreduce.rank, allreduce.world_size, owned=owned
    )


def build_args_of_other(
    params: Sequence[Tensor], c: CO2Config, args: CommonArgs, *, overlap: bool = True
) -> dict[str, Any]:
    """Does build_args for a method that uses only tau, tau_max and compression of CO2's settings."""
    refuse_shards(params, args.get("group"))
    c.compression.check_given()
    c.compression.check(params, args.get("group"))
    return build_args(c, args, overlap=overlap)
