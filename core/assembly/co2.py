"""CO2 with all that runs on real clusters need, and what is plugged into any method: the riders in their order, the
pacing, the reducer and the flight.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from ..adaptive.config import Schedule, settings_of
from ..adaptive.merging import OnArrival
from ..adaptive.tau import Adaptive, TauTuner, Tuned
from ..checkpoints.saved import Saved
from ..errors import UserError
from ..flat import Bucket, Scalars, offer_kernels, tensors_of
from ..flight import Flight, Reducer, all_reduce
from ..robust import peers
from ..robust.agreement import Agreement
from ..robust.extra import Average, Given
from ..robust.guard import Guard, Spread
from ..robust.synchronous import refuse_shards
from ..robust.unfinished import Unfinished
from ..robust.watch import Masters, Watch
from ..rounds import Rider
from ..sharded.mesh import check_names
from ..testing.link import Link, flight_over
from ..wires.quantized import AutoWire
from .config import CO2Config, WireConfig, named_rule


@functools.cache
def takes_triton(device: torch.device) -> bool:
    """Triton comes with any CUDA build of torch for Linux."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def triton_kernels(device: torch.device) -> Any:
    """core/triton, where its kernels run on this device, else None."""
    if not takes_triton(device):
        return None
    from .. import triton  # takes a second

    return triton


offer_kernels(triton_kernels)


class Options(TypedDict, total=False):
    """What every method takes. buffers: see Rounds. model_params: where `params` are the float32 masters that an
    optimiser keeps of a 16-bit model, that model's parameters, in the same order. average: tensors that are evaluated
    and are not parameters, such as an EMA model, or a function that returns them: see robust.extra.Average. group: the
    workers (None: all). timeout: seconds until a missing worker is an error. link: an emulated slow one. riders: more
    of them, such as Requests and Snapshot."""

    buffers: Iterable[Tensor]
    model_params: Iterable[Tensor]
    average: Given
    group: dist.ProcessGroup | None
    timeout: float
    link: Link | None
    riders: Sequence[Rider]


def plugs(
    c: CO2Config,
    tau: Callable[[int], Any],
    options: Options,
    *,
    hidden: bool = True,
    times: bool = True,
    flight: Callable[..., Flight] | None = None,
) -> dict[str, Any]:
    """Rounds' arguments for a method with these settings.

    tau: number of a round -> its local steps. hidden: whether local steps run while a reduction is in flight. times:
    whether the workers may send each other their times, for which each needs a place of its own. flight: what makes
    the Flight, if not that class.
    """
    if unknown := options.keys() - Options.__annotations__:
        known = ", ".join(Options.__annotations__)
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}: the options are {known}")
    if not isinstance(more := options.get("riders", ()), Sequence):
        raise UserError(f"riders={more!r}: give a list of them")
    check_names(group := options.get("group"))
    tuned = tuned_for(c, dist.get_world_size(group) if dist.is_initialized() else 1) if times else None
    masters = tensors_of(options.get("model_params", ()), "parameters")
    given = options.get("average")
    average = None if given is None or (isinstance(given, list | tuple) and not given) else Average(given)
    guard = Guard(c.outlier)
    riders = [guard, Spread(guard), tuned, Agreement()]
    riders += [*more, Watch(masters), Masters(masters) if masters else None, average, Unfinished()]
    carries = {name: given for name, given in options.items() if name in ("group", "timeout")}
    return {
        "pacing": Adaptive(tau, c.delay, tuned=tuned),
        "buffers": options.get("buffers", ()),
        "flight": functools.partial(
            flight or flight_over(options.get("link")), hidden=hidden and c.delay != 0, roll=peers, **carries
        ),
        "reducer": _reducer(c.wire, tuned),
        "riders": [rider for rider in riders if rider is not None],
    }


def _reducer(wire: WireConfig, tuned: Tuned | None) -> Callable[[Sequence[Bucket], Scalars, Flight], Reducer]:
    if wire.format == "auto":
        first = tuned.tuner.wire if tuned else [*wire.choices][-1]  # one worker alone takes the last
        return functools.partial(AutoWire, first, wire.error_feedback)
    if wire.format == "float32":
        return all_reduce
    return lambda buckets, scalars, flight: wire.reducer(buckets, scalars, flight.rank, flight.world_size)


def plugs_of_other(params: Sequence[Tensor], c: CO2Config, options: Options, *, hidden: bool = True) -> dict[str, Any]:
    """`plugs` for a method that reads tau, tau_max and the wire of CO2's settings alone."""
    refuse_shards(params, options.get("group"))
    c.wire.check_given()
    c.wire.check(params, options.get("group"))
    return plugs(c, lambda number: c.tau, options, hidden=hidden)


def tuned_for(c: CO2Config, workers: int) -> Tuned | None:
    """The rider that hears the workers' times; None where neither tau, nor the wire, nor the local step at which a
    worker waits for a mean is chosen from them."""
    wires = c.wire.choices if workers > 1 else dict([*c.wire.choices.items()][-1:])
    given = None if c.tau == "auto" else c.tau
    if given is not None and len(wires) == 1 and (c.delay != "auto" or workers == 1):
        return None
    return Tuned(TauTuner(c.tau_max, c.tau_margin, wires, given=given))


class CO2(Saved, OnArrival):
    """Hides the all-reduce of a data-parallel training loop behind tau local steps.

    params: model.parameters() or any list of tensors, on this worker's device; every worker must pass the same shapes.
    config: see CO2Config. options: see Options. schedule: number of a round, from 0
    -> what of tau, outer_lr, outer_momentum and clip is in that round otherwise than in config; the same on all
    workers, which is checked in every round.

    With merge outer, after n * tau calls of step() the parameters of every worker equal x_{n,0}, bit for bit. Where
    workers synchronise gradients every step inside nodes, or hold shards of one model, ShardedCO2
    (core/sharded/sharded.py) is the class. The paper's algorithm and no more is core.co2.CO2.
    """

    reads = CO2Config

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        schedule: Schedule | None = None,
        **options: Unpack[Options],
    ):
        c, params = named_rule(config), tensors_of(params, "parameters")
        refuse_shards(params, options.get("group"))
        c.wire.check(params, options.get("group"))
        settings = settings_of(c, schedule)
        super().__init__(params, settings, **plugs(c, lambda number: settings(number).tau, options))
