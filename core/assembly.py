"""CO2 with all that runs on real clusters need, and what the other methods take of it: the one place of the root that
knows the rooms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypedDict, Unpack

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .adaptive.arrival import OnArrival
from .adaptive.config import AdaptiveConfig
from .adaptive.inner_gap import FirstStep
from .adaptive.pace import BySpeed
from .adaptive.pacing import Adaptive
from .adaptive.schedules import Schedule, scheduled
from .adaptive.tau import TauTuner, Tuned
from .checkpoints.saved import Saved
from .checks import tensors_of
from .config import is_whole
from .elastic.flight import ElasticFlight
from .elastic.joining import Joining, check_elastic
from .elastic.members import Members
from .errors import UserError
from .flight import Flight
from .riders import Rider
from .robust import peers
from .robust.agreement import Agreement
from .robust.guard import Guard, Guarded
from .robust.masters import Masters
from .robust.spread import Spread
from .robust.watch import Watch
from .sharded import sharded
from .sharded.checks import check_mesh, check_shared, groups_of
from .sharded.placement import Holders
from .testing.link import Link, SlowFlight, flight_over
from .wires.auto import AutoWire
from .wires.config import WireConfig, Wired


@dataclass(frozen=True)
class CO2Config(Wired, Guarded, AdaptiveConfig):
    """All settings of CO2; defaults as in the example that the authors released."""

    def check(self) -> None:
        for part in (AdaptiveConfig, Guarded, Wired):
            part.check(self)

    @classmethod
    def recommended(cls, workers: int, steps: int | None = None, *, mesh: DeviceMesh | None = None) -> CO2Config:
        """What our measurements support in place of the paper's settings (results/loss.md).

        A mean is merged when it lands, the own progress since the sending is kept, for a copy of the parameters, and
        there is no penalty, for little is stale then. merge="mix" saves the copy and comes close. A mean crosses the
        network in int4, for 1 + 1/workers copies more, so that it lands sooner; where it would land within a local
        step anyway, in float32.

        workers: their number; outer momentum costs most with few of them: 0 up to 16, beyond that what the authors'
        release sets, 0.2 up to 32, 0.5 up to 64, 0.6 above. steps: of the whole run, if known, so that it has twenty
        rounds at least. tau set by dataclasses.replace holds. mesh: [nodes, workers of a node], for ShardedCO2: workers
        of a node must stay equal and hold only shares of the outer state, so of all this there is the outer momentum;
        a mean is merged in the paper's order, with its penalty, and crosses in float32.
        """
        for name, given in (("workers", workers), ("steps", 1 if steps is None else steps)):
            if not is_whole(given):
                raise UserError(f"{name}={given!r}: give their number, 1 or more")
        beta = next(b for limit, b in ((16, 0.0), (32, 0.2), (64, 0.5), (float("inf"), 0.6)) if workers <= limit)
        tau_max = 192 if steps is None else min(192, max(1, steps // 20))
        if mesh is not None:
            check_mesh(mesh)
            return cls(tau="auto", tau_max=tau_max, outer_momentum=beta)
        wire = WireConfig("auto")
        late = {"gap": "none", "merge": "keep", "delay": "auto"}
        return cls(tau="auto", tau_max=tau_max, outer_momentum=beta, wire=wire, **late)  # pyright: ignore


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


class Moved:
    """An attribute that has gone elsewhere: reading it raises AttributeError and writing to it UserError, which would
    otherwise have no effect, and no word about it. to: where it is now."""

    def __init__(self, to: str):
        self._to = to

    def __set_name__(self, owner: type, name: str) -> None:
        self._text = f"{owner.__name__} has no {name} any more: it is {self._to}"

    def __get__(self, instance: object, owner: type | None = None) -> NoReturn:
        raise AttributeError(self._text)

    def __set__(self, instance: object, value: object) -> NoReturn:
        raise UserError(self._text)


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
    skip_after, on_left_out = Moved("co2.pacing.skip_after"), Moved("co2.rider(Guard).on_left_out")

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        schedule: Schedule | None = None,
        **options: Unpack[Options],
    ):
        c, params = checked(config), tensors_of(params, "parameters")
        c.wire.check(params, options.get("group"))
        settings = functools.partial(scheduled, c, schedule) if schedule else lambda number: c
        super().__init__(params, settings, **plugs(c, lambda number: settings(number).tau, options))


class ShardedCO2(sharded.ShardedCO2):
    """CO2 whose outer state is shared out over the workers of a node, over all workers, or lies on the host.

        mesh = node_mesh("cuda", 8)  # of core.sharded.mesh: nodes of eight consecutive ranks
        loops = DistributedDataParallel(model, process_group=mesh.get_group("shard"))  # to be called in the loop
        co2 = ShardedCO2(model.parameters(), CO2Config(tau=48), mesh=mesh, buffers=model.buffers())

    In that order: DistributedDataParallel writes the parameters when it is made, of which ShardedCO2 would warn.

    mesh: [replicate, shard], as node_mesh makes it; or its two dimensions as groups: inner_group, a node's
    ranks, and group, of Options, the ranks with the same share across nodes; that alone, or neither: all workers are
    equal. shards, shard, offload: see core/sharded/sharded.py. The other arguments: see CO2.
    """

    skip_after, on_left_out = Moved("co2.pacing.skip_after"), Moved("co2.rider(Guard).on_left_out")

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        mesh: DeviceMesh | None = None,
        inner_group: dist.ProcessGroup | None = None,
        shards: bool | Holders = False,
        shard: bool = False,
        offload: bool = False,
        schedule: Schedule | None = None,
        **options: Unpack[Options],
    ):
        c = checked(config)
        settings = functools.partial(scheduled, c, schedule) if schedule else lambda number: c
        check_shared(settings(0), c.wire.format)
        options["group"], inner_group = groups_of(c, mesh, options.get("group"), inner_group)
        how: dict[str, Any] = {"shards": shards, "shard": shard, "offload": offload}
        how |= {"timeout": options["timeout"]} if "timeout" in options else {}
        plugged = plugs(c, lambda number: settings(number).tau, options)
        super().__init__(params, settings, inner_group=inner_group, **how, **plugged)


class SlowElasticFlight(SlowFlight, ElasticFlight):
    """ElasticFlight over an emulated link."""


class ElasticCO2(Saved, OnArrival):
    """What elastic_co2 makes: it reads the settings of all riders."""

    reads = CO2Config


def elastic_co2(
    params: Iterable[Tensor],
    config: CO2Config | None = None,
    *,
    members: Members,
    buffers: Iterable[Tensor] = (),
    timeout: float = 600.0,
    link: Link | None = None,
    schedule: Schedule | None = None,
    riders: Sequence[Rider] = (),
) -> tuple[OnArrival, Joining]:
    """CO2 whose workers come and go (core/elastic/joining.py), and the rider that lets them in.

    The arguments: see CO2. tau auto, steps by speed and narrow wires are refused; wire auto stands for float32. It
    takes a copy of the parameters more. members: see Members. Make it on every worker before any process group exists,
    then call the rider's `join` on all.
    """
    given = checked(config)
    check_elastic(given)
    c = replace(given, wire=WireConfig())
    settings = functools.partial(scheduled, c, schedule)
    options = Options(buffers=buffers, timeout=timeout, riders=riders)
    carrier = functools.partial(SlowElasticFlight, link=link) if link else ElasticFlight
    flight = functools.partial(carrier, members=members)
    plugged = plugs(c, lambda number: settings(number).tau, options, times=False, flight=flight)
    joining = Joining(members, at_once=c.delay == 0)
    plugged["riders"].insert(0, joining)
    return ElasticCO2(params, settings, **plugged), joining


def checked(config: CO2Config | None) -> CO2Config:
    """The settings, or the defaults; UserError for an object of another class."""
    if isinstance(config, CO2Config | None):
        return config or CO2Config()
    raise UserError(f"config={config!r}: give a CO2Config, such as CO2Config(tau=48)")


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
    group, wire = options.get("group"), c.wire.format
    rank, workers = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    by_speed = BySpeed(rank, workers) if c.steps == "by_speed" else None
    tuned = tuned_for(c, workers) if times else None
    masters = tensors_of(options.get("model_params", ()), "parameters")
    guard = Guard(c.outlier)
    riders = [guard, by_speed, Spread(guard), tuned, FirstStep() if c.gap == "inner" else None, Agreement()]
    riders += [*more, Watch(masters), Masters(masters) if masters else None]
    carries = {name: given for name, given in options.items() if name in ("group", "timeout")}
    plugged: dict[str, Any] = {
        "pacing": Adaptive(tau, c.delay, tuned=tuned, by_speed=by_speed),
        "buffers": options.get("buffers", ()),
        "flight": functools.partial(
            flight or flight_over(options.get("link")), hidden=hidden and c.delay != 0, roll=peers, **carries
        ),
        "riders": [rider for rider in riders if rider is not None],
    }
    if wire == "auto":
        first = tuned.tuner.wire if tuned else [*c.wire.choices][-1]  # one worker alone takes the last
        plugged["reducer"] = functools.partial(AutoWire, first, c.wire.error_feedback)
    elif wire != "float32":
        plugged["reducer"] = lambda buckets, scalars, flight: c.wire.reducer(
            buckets, scalars, flight.rank, flight.world_size
        )
    return plugged


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
    by_speed = c.steps == "by_speed"
    waits = c.delay != "auto" or by_speed or workers == 1
    return Tuned(TauTuner(c.tau_max, c.tau_margin, wires, by_speed=by_speed, given=given, waits=waits))
