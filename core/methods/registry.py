"""What is known of a method: its name, its settings, what it refuses, and how it is made. The list of all methods is in
core/methods/__init__.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..adaptive.schedules import Schedule
from ..assembly import CO2Config, Options, of_kind
from ..errors import UserError


@dataclass(frozen=True)
class Given:
    """What make_method was given. own: the method's own settings. model: to be called in the loop. options: what all
    methods take. outer_state: whether to shard and whether to offload it."""

    co2: CO2Config
    own: Any = None
    model: nn.Module = field(default_factory=nn.Module)
    options: Options = field(default_factory=Options)
    outer_state: Mapping[str, bool] = field(default_factory=dict)
    schedule: Schedule | None = None
    lr: Callable[[], float] | None = None
    mesh: DeviceMesh | None = None

    @property
    def params(self) -> list[Tensor]:
        return list(self.model.parameters())


@dataclass(frozen=True)
class Settings:
    """A method's own. config: their dataclass. key: of make_method's keywords, and before the names of train scripts'
    options, --KEY.NAME. help: of these."""

    key: str
    config: type
    help: str = ""


@dataclass(frozen=True)
class Entry:
    """A method.

    make: the model to call in the loop, and the method. kind: hidden, reductions run under local steps; blocking, local
    steps wait for them; synchronous, every step is a round; or optimizer, a method in an optimiser's place.
    settings: its own, if it has any. check: refuses settings that do not go together.
    reads_co2: whether it reads all of CO2Config, or tau and tau_max alone. takes: which of shard, offload, schedule,
    elastic and, of those that do not read all of CO2Config, wire.
    """

    name: str
    make: Callable[[Given], tuple[nn.Module, Any]]
    kind: Literal["hidden", "blocking", "synchronous", "optimizer"]
    settings: Settings | None = None
    check: Callable[[Given], object] = lambda given: None
    reads_co2: bool = False
    takes: frozenset[str] = frozenset()

    @property
    def local(self) -> bool:
        """Whether it takes local steps."""
        return self.kind in ("hidden", "blocking")


def own_settings(entries: Iterable[Entry], entry: Entry, given: Mapping[str, Any]) -> Any:
    """The method's own, of those given by key, or its defaults. Refuses another method's, rather than to leave them
    unused."""
    owners = {other.settings.key: (other.name, other.settings.config) for other in entries if other.settings}
    for key, value in given.items():
        if key not in owners:
            raise TypeError(f"make_method() got an unexpected keyword argument {key!r}")
        owner, config = owners[key]
        if owner == entry.name or of_kind(value, config, key) == (usual := config()):
            continue
        name, own = next((k, v) for k, v in vars(value).items() if v != getattr(usual, k))
        raise UserError(
            f"{key}.{name}={own!r} is method {owner}'s own, method {entry.name!r} does not have it: leave it out"
        )
    if entry.settings is None:
        return None
    return of_kind(given.get(entry.settings.key), entry.settings.config, entry.settings.key)


def check(entry: Entry, given: Given) -> None:
    """Refuses settings that the method does not have, or that do not go together."""
    for key, value in given.outer_state.items():
        if value and key not in entry.takes:
            raise UserError(f"{key}={value!r} is CO2's own, method {entry.name!r} does not have it: leave it out")
    if given.schedule is not None and "schedule" not in entry.takes:
        raise UserError(f"schedule is CO2's own, method {entry.name!r} does not have it: leave it out")
    if not entry.reads_co2:
        _check_unread(entry, given.co2)
    entry.check(given)


def _check_unread(entry: Entry, co2: CO2Config) -> None:
    """Of a method that reads tau, tau_max and perhaps the wire alone: comparisons may share CO2's other settings of the
    outer step, but not those of the rooms."""
    name = entry.name
    if co2.wire.format != "float32" and "wire" not in entry.takes:
        remedy = "set ddp_wire" if name == "ddp" else "leave it out"
        raise UserError(f"wire.format={co2.wire.format!r} is CO2's own, method {name!r} does not have it: {remedy}")
    co2.wire.check_given()
    for key in ("merge", "delay", "outlier"):
        if (value := getattr(co2, key)) != getattr(CO2Config(), key):
            raise UserError(f"{key}={value!r} is CO2's own, method {name!r} does not have it: leave it out")
