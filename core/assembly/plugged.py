"""What is plugged into a method: the riders in their order, the pacing, the reducer and the flight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import torch.distributed as dist
from torch import Tensor

from ..adaptive.pacing import Adaptive
from ..adaptive.tau import TauTuner, Tuned
from ..checks import tensors_of
from ..errors import UserError
from ..flat import Bucket, Scalars
from ..flight import Flight, Reducer, all_reduce
from ..robust import peers
from ..robust.agreement import Agreement
from ..robust.guard import Guard
from ..robust.masters import Masters
from ..robust.spread import Spread
from ..robust.watch import Watch
from ..rounds import Rider
from ..sharded.checks import check_names
from ..testing.link import Link, flight_over
from ..wires.auto import AutoWire
from .config import CO2Config
from .wire import WireConfig


class Options(TypedDict, total=False):
    """What every method takes. buffers: see Rounds. model_params: where `params` are the float32 masters that an
    optimiser keeps of a 16-bit model, that model's parameters, in the same order. group: the workers (None: all).
    timeout: seconds until a missing worker is an error. link: an emulated slow one. riders: more of them, such as
    Requests and Snapshot."""

    buffers: Iterable[Tensor]
    model_params: Iterable[Tensor]
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
    guard = Guard(c.outlier)
    riders = [guard, Spread(guard), tuned, Agreement()]
    riders += [*more, Watch(masters), Masters(masters) if masters else None]
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
