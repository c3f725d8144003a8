"""What is known of a method: its name, its settings, what it refuses, and how it is made. The dict of all methods is in
core/methods/__init__.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..adaptive.schedules import Schedule
from ..assembly import CO2Config, Options
from ..errors import UserError


@dataclass(frozen=True)
class Given:
    """What make_method was given. own: the method's own settings. model: to be called in the loop. options: what all
    methods take."""

    co2: CO2Config
    own: Any = None
    model: nn.Module = field(default_factory=nn.Module)
    options: Options = field(default_factory=Options)
    shard: bool = False
    offload: bool = False
    schedule: Schedule | None = None
    lr: Callable[[], float] | None = None
    mesh: DeviceMesh | None = None

    @property
    def params(self) -> list[Tensor]:
        return list(self.model.parameters())

    @property
    def tau(self) -> int:
        """UserError for auto, which chooses the fewest local steps that hide the communication."""
        if self.co2.tau == "auto":
            raise UserError("tau='auto' with a method that hides no communication: give a number of local steps")
        return self.co2.tau


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
    settings: its own, if it has any. check: refuses settings that do not go together. reads_co2: whether it reads all
    of CO2Config, or tau and tau_max alone. takes: which of shard, offload, schedule, elastic and, of those that do not
    read all of CO2Config, wire.
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

    def refuse(self, given: Given) -> None:
        """UserError for settings that the method does not have, or that do not go together."""
        for key in ("shard", "offload", "schedule"):
            if (value := getattr(given, key)) and key not in self.takes:
                shown = key if key == "schedule" else f"{key}={value!r}"
                raise UserError(f"{shown} is CO2's own, method {self.name!r} does not have it: leave it out")
        if not self.reads_co2:
            self._refuse_unread(given.co2)
        self.check(given)

    def _refuse_unread(self, co2: CO2Config) -> None:
        """Comparisons may share CO2's settings of the outer step, but not its others."""
        if co2.wire.format != "float32" and "wire" not in self.takes:
            remedy = "set ddp_wire" if self.name == "ddp" else "leave it out"
            given = f"wire.format={co2.wire.format!r}"
            raise UserError(f"{given} is CO2's own, method {self.name!r} does not have it: {remedy}")
        co2.wire.check_given()
        for key in ("merge", "delay", "outlier"):
            if (value := getattr(co2, key)) != getattr(CO2Config(), key):
                raise UserError(f"{key}={value!r} is CO2's own, method {self.name!r} does not have it: leave it out")
