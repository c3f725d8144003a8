"""The methods that CO2 is compared with, behind the same calls, and the one function that picks a method by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..adaptive.config import Schedule
from ..assembly import CO2 as CO2
from ..assembly import CO2Config, Options, of_kind
from ..assembly import LGrecoConfig as LGrecoConfig
from ..assembly import WireConfig as WireConfig
from ..checkpoints.own_loop import load as load
from ..checkpoints.own_loop import save as save
from ..checkpoints.saved import Saved
from ..errors import UserError
from ..flat import is_dtensor
from ..rounds import Rider
from ..sharded.mesh import check_mesh, check_shared
from ..sharded.sharded import ShardedCO2 as ShardedCO2
from ..testing.link import Link
from .ddp import DDP
from .delayed import DelayedCO2 as DelayedCO2
from .delayed import DelayedConfig as DelayedConfig
from .local_sgd import LocalSGD as LocalSGD
from .local_sgd import SlowMo as SlowMo
from .local_sgd import SlowMoConfig as SlowMoConfig
from .overlap_local_sgd import OverlapLocalConfig as OverlapLocalConfig
from .overlap_local_sgd import OverlapLocalSGD as OverlapLocalSGD


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
        """UserError for settings that the method does not have, or that do not go together. Comparisons may share CO2's
        settings of the outer step, but not its others."""
        c, remedy = given.co2, "leave it out"
        unread = [(key, getattr(given, key)) for key in ("shard", "offload", "schedule") if key not in self.takes]
        found = [key if key == "schedule" else f"{key}={value!r}" for key, value in unread if value]
        if not self.reads_co2 and not found:
            if c.wire.format != "float32" and "wire" not in self.takes:
                found, remedy = [f"wire.format={c.wire.format!r}"], "set ddp_wire" if self.name == "ddp" else remedy
            else:
                c.wire.check_given()
                changed = [key for key in ("merge", "delay", "outlier") if getattr(c, key) != getattr(CO2Config(), key)]
                found = [f"{key}={getattr(c, key)!r}" for key in changed]
        if found:
            raise UserError(f"{found[0]} is CO2's own, method {self.name!r} does not have it: {remedy}")
        self.check(given)


def _co2(given: Given) -> tuple[nn.Module, Any]:
    more: dict[str, Any] = {"schedule": given.schedule, **given.options}
    if given.mesh is None and not (given.shard or given.offload):
        return given.model, CO2(given.params, given.co2, **more)
    more |= {"mesh": given.mesh, "shard": given.shard, "offload": given.offload}
    return given.model, ShardedCO2(given.params, given.co2, **more)


def _check_co2(given: Given) -> None:
    if given.shard or given.offload:
        check_shared(given.co2, given.co2.wire.format)
    else:
        given.co2.check_stable()


def _ddp(given: Given) -> tuple[nn.Module, Any]:
    options: dict[str, Any] = {**given.options}
    made = DDP(given.model, average_buffers=bool(options.pop("buffers")), wire=given.own, **options)
    return made.model, made


def _check_ddp(given: Given) -> None:
    if given.own.format == "auto":
        raise UserError("ddp_wire.format='auto' is chosen together with tau, which ddp does not have: give a format")


def _local(given: Given) -> tuple[nn.Module, Any]:
    return given.model, LocalSGD(given.params, given.tau, wire=given.co2.wire, **given.options)


def _overlap_local(given: Given) -> tuple[nn.Module, Any]:
    c = given.co2
    more: dict[str, Any] = {"tau_max": c.tau_max, "wire": c.wire, **given.options}
    return given.model, OverlapLocalSGD(given.params, c.tau, given.own, **more)


def _slowmo(given: Given) -> tuple[nn.Module, Any]:
    more: dict[str, Any] = {"lr": given.lr, "wire": given.co2.wire, **given.options}
    return given.model, SlowMo(given.params, given.tau, given.own, **more)


def _delayed(given: Given) -> tuple[nn.Module, Any]:
    return given.model, DelayedCO2(given.params, given.co2, given.own, **given.options)


OF_CO2, WIRE = frozenset({"shard", "offload", "schedule", "elastic"}), frozenset({"wire"})
OF_DDP = Settings("ddp_wire", WireConfig, "Of method ddp: how gradients cross the network.")
OF_DELAYED = Settings("delayed", DelayedConfig, "Of method delayed: co2 under another outer momentum.")
OF_OVERLAP, OF_SLOWMO = Settings("overlap_local", OverlapLocalConfig), Settings("slowmo", SlowMoConfig)
REGISTRY: dict[str, Entry] = {}


def register(entry: Entry) -> None:
    """Adds a method, which recipes and `entry_of` then know by its name."""
    REGISTRY[entry.name] = entry


register(Entry("co2", _co2, "hidden", check=_check_co2, reads_co2=True, takes=OF_CO2))
register(Entry("ddp", _ddp, "synchronous", OF_DDP, check=_check_ddp))
register(Entry("delayed", _delayed, "hidden", OF_DELAYED, lambda given: given.own.check(given.co2), reads_co2=True))
register(Entry("local", _local, "blocking", check=lambda given: given.tau, takes=WIRE))
register(Entry("overlap_local", _overlap_local, "hidden", OF_OVERLAP, takes=WIRE))
register(Entry("slowmo", _slowmo, "blocking", OF_SLOWMO, check=lambda given: given.tau, takes=WIRE))
METHODS = tuple(REGISTRY)
Method = Saved | DDP


def make_method(
    name: str,
    model: nn.Module,
    *,
    co2: CO2Config | None = None,
    schedule: Schedule | None = None,
    lr: Callable[[], float] | None = None,
    average_buffers: bool = True,
    mesh: DeviceMesh | None = None,
    shard: bool = False,
    offload: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    link: Link | None = None,
    riders: Sequence[Rider] = (),
    **settings: Any,
) -> tuple[nn.Module, Method]:
    """The model to call in the loop, and the method whose step() follows every optimiser step.

    name: one of METHODS. co2: None for CO2Config(). The period of every local method is co2.tau, so that comparisons
    share it. schedule: of co2, see CO2. lr: returns the current inner learning rate, for SlowMo. mesh: [nodes, workers
    of a node]: these synchronise gradients every step, and the method runs across nodes; ddp synchronises all every
    step anyway. With methods other than co2 riders then hear, of each node, the worker of their own place alone. shard,
    offload: see ShardedCO2. group, timeout, link, riders: see assembly.Options. settings: of the method, by its key:
    delayed, slowmo, overlap_local, or ddp_wire, how ddp's gradients cross the network.
    """
    entry = entry_of(name)
    co2 = replace(of_kind(co2, CO2Config, "co2"))  # with all settings named: CO2 warns of none
    if not isinstance(model, nn.Module):
        raise UserError(f"model: a {type(model).__name__} is given: give the module itself")
    own = check_settings(name, co2, shard=shard, offload=offload, schedule=schedule, **settings)
    options = Options(group=group, timeout=timeout, link=link, riders=riders)
    options["buffers"] = list(model.buffers()) if average_buffers else []
    if mesh is not None and entry.local:
        check_mesh(mesh)
        if not any(map(is_dtensor, model.parameters())):  # sharded ones synchronise by themselves
            model = DistributedDataParallel(model, process_group=mesh.get_group(1))
        if "shard" not in entry.takes:
            check_apart(name, co2, mesh.size(1))
            options["group"] = mesh.get_group(0)
    return entry.make(Given(co2, own, model, options, shard, offload, schedule, lr, mesh))


def check_settings(
    name: str,
    co2: CO2Config,
    *,
    shard: bool = False,
    offload: bool = False,
    schedule: Schedule | None = None,
    **settings: Any,
) -> Any:
    """Refuses settings that the method does not have, rather than to leave them unused, or that do not go together;
    returns the method's own. settings: see make_method."""
    entry = entry_of(name)
    own = entry.settings.config() if entry.settings else None
    owners = {other.settings.key: other for other in REGISTRY.values() if other.settings}
    for key, value in settings.items():
        if key not in owners:
            raise TypeError(f"make_method() got an unexpected keyword argument {key!r}")
        owner, usual = owners[key], owners[key].settings.config()  # pyright: ignore[reportOptionalMemberAccess]
        value = of_kind(value, type(usual), key)
        if owner is entry:
            own = value
        elif value != usual:
            option, given = next((k, v) for k, v in vars(value).items() if v != getattr(usual, k))
            raise UserError(
                f"{key}.{option}={given!r} is method {owner.name}'s own, method {name!r} does not have it: leave it out"
            )
    entry.refuse(Given(co2, own, shard=shard, offload=offload, schedule=schedule))
    return own


def check_apart(name: str, co2: CO2Config, per_node: int) -> None:
    """Refuses what workers choose from measured times where a node's ranks take part in unlike groups."""
    entry = entry_of(name)
    if per_node > 1 and entry.local and "shard" not in entry.takes and "auto" in (co2.tau, co2.wire.format):
        raise UserError(
            f"tau={co2.tau!r}, wire.format={co2.wire.format!r} with method {name!r} and {per_node} workers a node: they"
            " would choose unlike ones; give a number and a format"
        )


def entry_of(name: str) -> Entry:
    """UserError where there is no such method."""
    if name not in REGISTRY:
        raise UserError(f"method {name!r}: choose one of {', '.join(REGISTRY)}")
    return REGISTRY[name]
