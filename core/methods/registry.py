"""What is known of a method: its name, its settings, what it refuses, and how it is made. The list of all methods is in
core/methods/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..adaptive.schedules import Schedule
from ..assembly import CO2Config, Options
from ..errors import UserError


@dataclass(frozen=True)
class Given:
    """What make_method was given. own: the method's own settings, of Entry.settings. model: to be called in the loop;
    params, its parameters. options: what all methods take."""

    co2: CO2Config
    own: Any = None
    model: nn.Module = field(default_factory=nn.Module)
    params: Iterable[Tensor] = ()
    options: Options = field(default_factory=Options)
    average_buffers: bool = True
    shard: bool = False
    offload: bool = False
    schedule: Schedule | None = None
    lr: Callable[[], float] | None = None
    mesh: DeviceMesh | None = None


@dataclass(frozen=True)
class Entry:
    """A method.

    make: the model to call in the loop, and the method. settings: the dataclass of its own settings, which make_method
    takes as keyword `key`, and train scripts as --KEY.NAME; help: of them. check: refuses settings that do not go
    together. reads_co2: whether it reads all of CO2Config, or tau and tau_max alone. takes: which of shard, offload,
    schedule and elastic. local: whether it takes local steps between rounds. hides: whether its reductions run under
    them. beside_optimizer: False where it takes the optimiser's place.
    """

    name: str
    make: Callable[[Given], tuple[nn.Module, Any]]
    settings: type | None = None
    key: str = ""
    help: str = ""
    check: Callable[[Given], object] = lambda given: None
    reads_co2: bool = False
    takes: frozenset[str] = frozenset()
    local: bool = True
    hides: bool = False
    beside_optimizer: bool = True


def find(entries: Iterable[Entry], name: str) -> Entry:
    """UserError where there is no such method."""
    known = {entry.name: entry for entry in entries}
    if name not in known:
        raise UserError(f"method {name!r}: choose one of {', '.join(known)}")
    return known[name]


def own_settings(entries: Iterable[Entry], entry: Entry, settings: Mapping[str, Any]) -> Any:
    """Of `settings`, by key, the method's own, or its defaults. Refuses those of another method, rather than to leave
    them unused."""
    owners = {other.key: other for other in entries if other.settings is not None}
    for key, value in settings.items():
        if key not in owners:
            raise TypeError(f"make_method() got an unexpected keyword argument {key!r}")
        owner, usual = owners[key], owners[key].settings
        if owner is entry or value is None or usual is None or value == usual():
            continue
        name, own = next((k, v) for k, v in vars(value).items() if v != getattr(usual(), k))
        raise UserError(
            f"{key}.{name}={own!r} is method {owner.name}'s own, method {entry.name!r} does not have it: leave it out"
        )
    given = settings.get(entry.key)
    return entry.settings() if given is None and entry.settings is not None else given


def check(entry: Entry, given: Given) -> None:
    """Refuses settings that the method does not have, or that do not go together."""
    for key in ("shard", "offload"):
        if (value := getattr(given, key)) and key not in entry.takes:
            raise UserError(f"{key}={value!r} is CO2's own, method {entry.name!r} does not have it: leave it out")
    if given.schedule is not None and "schedule" not in entry.takes:
        raise UserError(f"schedule is CO2's own, method {entry.name!r} does not have it: leave it out")
    if not entry.reads_co2:
        _check_taus_alone(entry.name, given.co2)
    entry.check(given)


def _check_taus_alone(name: str, co2: CO2Config) -> None:
    """What a method reads that knows tau and tau_max alone: comparisons may share CO2's other settings of the outer
    step, but not those of the rooms."""
    if co2.wire.format != "float32":
        remedy = "set ddp_wire" if name == "ddp" else "leave it out"
        raise UserError(f"wire.format={co2.wire.format!r} is CO2's own, method {name!r} does not have it: {remedy}")
    for key in ("merge", "delay", "steps", "outlier"):
        if (value := getattr(co2, key)) != getattr(CO2Config(), key):
            raise UserError(f"{key}={value!r} is CO2's own, method {name!r} does not have it: leave it out")
