"""The table of all methods, and make_method, which makes a method by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..buckets import is_dtensor
from ..co2 import CO2
from ..comm import Link
from ..config import CO2Config, CompressionConfig, Schedule, named, of_kind
from ..errors import UserError
from ..guards.arguments import refuse_unknown
from ..guards.extra import Given
from ..guards.inputs import check_mesh, check_share
from ..hooks import Hook
from ..local_update import LocalUpdateMethod
from .ddp import DDP
from .local import TAU_AUTO, DiLoCo, DiLoCoConfig, LocalSGD, OverlapLocalConfig, OverlapLocalSGD, SlowMo, SlowMoConfig


class Settings(NamedTuple):
    """A method's own settings: their key in make_method and the options --KEY.NAME, their dataclass, and their help."""

    key: str
    config: type
    help: str = ""


OF_OUTER_STEP = ("merge", "delay", "nesterov", "outlier")  # settings that comparisons do not share


@dataclass(frozen=True)
class MethodSpec:
    """Describes a method to make_method.

    Attributes:
        name: Its name.
        make: Makes the model that the loop calls, and the method, from the model, CO2's settings, the method's own, and
            the keyword arguments of its class.
        kind: hidden if all-reduces run during local steps, blocking if local steps wait for them, synchronous if every
            step is a round, optimizer if the method replaces the optimizer.
        settings: Its own settings, if it has any.
        reads_co2: Whether it uses all of CO2Config, not only tau.
        takes: The subset of shard, offload, schedule, lr, mesh, compression and elastic that it supports. With mesh it
            gets the whole mesh, otherwise the workers with the same index in their node.
    """

    name: str
    make: Callable[[nn.Module, CO2Config, Any, dict[str, Any]], tuple[nn.Module, Any]]
    kind: Literal["hidden", "blocking", "synchronous", "optimizer"]
    settings: Settings | None = None
    reads_co2: bool = False
    takes: frozenset[str] = frozenset()

    @property
    def local(self) -> bool:
        """Whether it takes local steps."""
        return self.kind in ("hidden", "blocking")


def _co2(model: nn.Module, co2: CO2Config, _: Any, args: Mapping[str, Any]) -> tuple[nn.Module, CO2]:
    """Makes CO2."""
    return model, CO2(model.parameters(), co2, **args)


def _ddp(model: nn.Module, _: Any, own: Any, args: Mapping[str, Any]) -> tuple[nn.Module, DDP]:
    """Makes DDP."""
    made = DDP(model, compression=own, **args)
    return made.model, made


def _with_rounds(
    make: Callable[..., Any], model: nn.Module, co2: CO2Config, own: Any, args: Mapping[str, Any]
) -> tuple[nn.Module, Any]:
    """Makes another method with local steps."""
    return model, make(model.parameters(), co2.tau, own, **args)


COMPRESSION, MESH = frozenset({"compression"}), frozenset({"mesh"})
OF_CO2 = MESH | {"shard", "offload", "schedule", "elastic"}
OF_TORCH = ("bucket_cap_mb", "find_unused_parameters")
OF_DDP = Settings("ddp_compression", CompressionConfig, "Of method ddp: how gradients are compressed for the network.")
OF_OVERLAP, OF_SLOWMO = Settings("overlap_local", OverlapLocalConfig), Settings("slowmo", SlowMoConfig)
OF_DILOCO = Settings("diloco", DiLoCoConfig)
REGISTRY: dict[str, MethodSpec] = {}


def register(spec: MethodSpec) -> None:
    """Adds a method, so that recipes and `spec_of` find it by its name."""
    REGISTRY[spec.name] = spec


register(MethodSpec("co2", _co2, "hidden", reads_co2=True, takes=OF_CO2))
register(MethodSpec("ddp", _ddp, "synchronous", OF_DDP, takes=MESH))
register(MethodSpec("diloco", partial(_with_rounds, DiLoCo), "blocking", OF_DILOCO, takes=COMPRESSION))
register(MethodSpec("local", partial(_with_rounds, LocalSGD), "blocking", takes=COMPRESSION))
register(MethodSpec("overlap_local", partial(_with_rounds, OverlapLocalSGD), "hidden", OF_OVERLAP, takes=COMPRESSION))
register(MethodSpec("slowmo", partial(_with_rounds, SlowMo), "blocking", OF_SLOWMO, takes=COMPRESSION | {"lr"}))
METHODS = tuple(REGISTRY)
Method = LocalUpdateMethod | DDP


def make_method(
    name: str,
    model: nn.Module,
    *,
    co2: CO2Config | None = None,
    schedule: Schedule | None = None,
    lr: Callable[[], float] | None = None,
    average: Given | None = None,
    mesh: DeviceMesh | None = None,
    shard: bool = False,
    offload: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    link: Link | None = None,
    hooks: Sequence[Hook] = (),
    **settings: Any,
) -> tuple[nn.Module, Method]:
    """Makes a method by its name. It averages the model's floating-point buffers.

    CO2 describes shard and offload. CommonArgs describes average (which ddp does not need), group, timeout, link
    and hooks.

    Args:
        name: One of METHODS, or a registered method.
        model: The module to train, on this worker's device.
        co2: CO2's settings. None means CO2Config(). All local methods use its tau, so that comparisons share the
            period.
        schedule: CO2's schedule, see CO2.
        lr: Returns the current inner learning rate, for SlowMo.
        mesh: [nodes, workers per node]. The workers of a node synchronize gradients in every step, and the method runs
            across nodes. With methods other than co2, hooks then receive only the workers with the same index in their
            node. ddp synchronizes all workers in every step, and compresses only what crosses nodes (see DDP).
        **settings: The method's own settings by its key: diloco, slowmo, overlap_local, or ddp_compression. With ddp
            also bucket_cap_mb and find_unused_parameters of torch's DistributedDataParallel.

    Returns:
        The module to call in the loop, and the method, whose step() follows every optimizer step.

    Raises:
        UserError: For an unknown method, or settings that it does not support.
    """
    spec = spec_of(name)
    co2 = named(of_kind(co2, CO2Config, "co2"))
    if not isinstance(model, nn.Module):
        raise UserError(f"model: a {type(model).__name__} is given: give the module itself")
    of_torch = {key: settings.pop(key) for key in OF_TORCH if name == "ddp" and key in settings}
    own = check_settings(name, co2, shard=shard, offload=offload, schedule=schedule, **settings)
    of_some = {"schedule": schedule, "lr": lr, "mesh": mesh, "shard": shard, "offload": offload}
    of_some |= {"compression": co2.compression}
    options: dict[str, Any] = {"group": group, "timeout": timeout, "link": link, "hooks": hooks, **of_torch}
    options |= {key: value for key, value in of_some.items() if key in spec.takes}
    if spec.local:
        options["buffers"] = list(model.buffers())
    if average is not None and spec.local:
        options["average"] = average
    if mesh is not None and spec.local:
        check_mesh(mesh)
        if not any(map(is_dtensor, model.parameters())):  # sharded models synchronize themselves
            # averages a node's gradients in every step
            model = DistributedDataParallel(model, process_group=mesh.get_group(1))
        if "mesh" not in spec.takes:
            options["group"] = mesh.get_group(0)  # the method averages across nodes only
    return spec.make(model, co2, own, options)


def check_settings(
    name: str,
    co2: CO2Config,
    *,
    shard: bool = False,
    offload: bool = False,
    schedule: Schedule | None = None,
    **settings: Any,
) -> Any:
    """Returns the method's own settings, or None if it has none. For the arguments, see make_method.

    UserError for settings that the method does not have, so that none is silently unused, or that exclude each other.
    Comparisons may share CO2's settings of the outer step, but not its other settings.
    """
    spec, remedy, default_co2 = spec_of(name), "leave it out", CO2Config()
    own = spec.settings.config() if spec.settings else None
    owners = {other.settings.key: other for other in REGISTRY.values() if other.settings}
    common = [*inspect.signature(make_method).parameters][:-1]
    refuse_unknown("make_method", settings, [*common, *owners, *(OF_TORCH if name == "ddp" else ())])
    for key, value in settings.items():
        owner, default = owners[key], owners[key].settings.config()  # pyright: ignore[reportOptionalMemberAccess]
        value = of_kind(value, type(default), key)
        if owner is spec:
            own = value
        elif value != default:  # another method's settings, which would be unused
            option, given = next((k, v) for k, v in vars(value).items() if v != getattr(default, k))
            raise UserError(
                f"{key}.{option}={given!r} is method {owner.name}'s own, method {name!r} does not have it: leave it out"
            )
    args = {"shard": shard, "offload": offload, "schedule": schedule}
    found = {key: value for key, value in args.items() if value and key not in spec.takes}
    if not spec.reads_co2 and not found:
        if "compression" in spec.takes:
            co2.compression.check_given()
        elif co2.compression.format != "float32":
            found["compression.format"] = co2.compression.format
            remedy = "set ddp_compression" if name == "ddp" else remedy
        found |= {k: value for k in OF_OUTER_STEP if (value := getattr(co2, k)) != getattr(default_co2, k)}
    for key, value in found.items():
        what = key if callable(value) else f"{key}={value!r}"
        raise UserError(f"{what} is CO2's own, method {name!r} does not have it: {remedy}")
    if spec.local and not spec.reads_co2 and co2.tau == "auto":
        raise UserError(TAU_AUTO)
    if spec.reads_co2:
        co2.check_stable()
        check_share(co2, shard=shard)
    if isinstance(own, CompressionConfig):
        own.check_given()
    return own


def spec_of(name: str) -> MethodSpec:
    """Returns the description of a method. UserError if there is none."""
    if name not in REGISTRY:
        raise UserError(f"method {name!r}: choose one of {', '.join(REGISTRY)}")
    return REGISTRY[name]
