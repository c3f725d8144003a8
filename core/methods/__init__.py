"""The methods that CO2 is compared with, behind the same calls, and the one function that picks a method by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..adaptive.schedules import Schedule
from ..assembly import CO2, CO2Config, Options, ShardedCO2
from ..errors import UserError
from ..flight import Link
from ..riders import Rider
from ..rounds import Rounds
from ..sharded.checks import check_mesh, check_shared
from ..wires.config import LGrecoConfig, WireConfig
from ..zeroth import ZerothConfig
from ..zeroth import elastic as elastic_zeroth
from ..zeroth.elastic import ElasticZeroth
from ..zeroth.method import Zeroth
from .ddp import DDP, is_sharded
from .delayed import DelayedCO2, DelayedConfig
from .local_sgd import LocalSGD
from .overlap_local_sgd import OverlapLocalConfig, OverlapLocalSGD
from .slowmo import SlowMo, SlowMoConfig

__all__ = [
    "CO2",
    "DDP",
    "METHODS",
    "CO2Config",
    "DelayedCO2",
    "DelayedConfig",
    "ElasticZeroth",
    "LGrecoConfig",
    "LocalSGD",
    "Method",
    "MethodName",
    "OverlapLocalConfig",
    "OverlapLocalSGD",
    "ShardedCO2",
    "SlowMo",
    "SlowMoConfig",
    "UserError",
    "WireConfig",
    "Zeroth",
    "ZerothConfig",
    "check_settings",
    "elastic_zeroth",
    "make_method",
]

MethodName = Literal["co2", "ddp", "delayed", "local", "overlap_local", "slowmo", "zo"]
METHODS: tuple[MethodName, ...] = tuple(name for name in get_args(MethodName) if name != "zo")  # beside an optimiser
Method = Rounds | DDP | Zeroth


def make_method(
    name: str,
    model: nn.Module,
    *,
    co2: CO2Config | None = None,
    delayed: DelayedConfig | None = None,
    slowmo: SlowMoConfig | None = None,
    overlap_local: OverlapLocalConfig | None = None,
    schedule: Schedule | None = None,
    lr: Callable[[], float] | None = None,
    average_buffers: bool = True,
    mesh: DeviceMesh | None = None,
    shard: bool = False,
    offload: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    link: Link | None = None,
    ddp_wire: WireConfig | None = None,
    riders: Sequence[Rider] = (),
) -> tuple[nn.Module, Method]:
    """The model to call in the loop, and the method whose step() follows every optimiser step.

    name: one of METHODS. The period of every local method is co2.tau, so that comparisons share it. schedule: of co2,
    see CO2. lr: returns the current inner learning rate, for SlowMo. mesh: [nodes, workers of a node]: these
    synchronise gradients every step, and the method runs across nodes; ddp synchronises all every step anyway. shard,
    offload: see ShardedCO2. group, timeout, link: see Rounds. ddp_wire: of ddp, how gradients cross the network.
    """
    if name == "zo":
        raise UserError(
            "method 'zo' takes the place of an optimiser: make a core.zeroth.ZerothOrder, and call its step"
        )
    co2 = co2 or CO2Config()
    check_settings(name, co2, delayed or DelayedConfig(), shard=shard, offload=offload, ddp_wire=ddp_wire)
    if schedule is not None and name != "co2":
        raise UserError(f"schedule is CO2's own, method {name!r} does not have it: leave it out")
    if name == "ddp":
        ddp = DDP(model, average_buffers=average_buffers, group=group, timeout=timeout, link=link, wire=ddp_wire)
        return ddp.model, ddp
    if mesh is not None:
        check_mesh(mesh)
    params = list(model.parameters())
    buffers = list(model.buffers()) if average_buffers else []
    if mesh is not None and not is_sharded(model):  # sharded ones synchronise by themselves
        model = DistributedDataParallel(model, process_group=mesh.get_group(1))
    common = Options(buffers=buffers, group=group, timeout=timeout, link=link, riders=riders)
    if name == "co2" and (mesh is not None or shard or offload):
        how: dict[str, Any] = {"mesh": mesh, "shard": shard, "offload": offload, "schedule": schedule}
        return model, ShardedCO2(params, co2, **how, **common)
    if mesh is not None:
        common["group"] = mesh.get_group(0)
    if name == "co2":
        return model, CO2(params, co2, schedule=schedule, **common)
    if name == "delayed":
        return model, DelayedCO2(params, co2, delayed, **common)
    if name == "overlap_local":
        return model, OverlapLocalSGD(params, co2.tau, overlap_local, tau_max=co2.tau_max, **common)
    assert isinstance(co2.tau, int)
    if name == "local":
        return model, LocalSGD(params, co2.tau, **common)
    return model, SlowMo(params, co2.tau, slowmo, lr=lr, **common)


def check_settings(
    name: str,
    co2: CO2Config,
    delayed: DelayedConfig,
    *,
    shard: bool,
    offload: bool,
    ddp_wire: WireConfig | None = None,
) -> None:
    """Refuses settings that the method does not have, rather than to leave them unused, or that do not go together."""
    if name not in get_args(MethodName):
        raise UserError(f"method {name!r}: choose one of {', '.join(get_args(MethodName))}")
    for key, value in (("shard", shard), ("offload", offload and name != "zo")):
        if value and name != "co2":
            raise UserError(f"{key}={value!r} is CO2's own, method {name!r} does not have it: leave it out")
    if ddp_wire is not None and ddp_wire.format == "auto":
        raise UserError("ddp_wire.format='auto' is chosen together with tau, which ddp does not have: give a format")
    if name != "ddp" and ddp_wire is not None and ddp_wire.format != "float32":
        remedy = "set co2.wire" if name in ("co2", "delayed") else "leave it out"
        raise UserError(f"ddp_wire.format={ddp_wire.format!r} is method ddp's own, not {name}'s: {remedy}")
    if name not in ("co2", "delayed") and co2.wire.format != "float32":
        remedy = "set ddp_wire" if name == "ddp" else "leave it out"
        raise UserError(f"wire.format={co2.wire.format!r} is CO2's own, method {name!r} does not have it: {remedy}")
    for key in ("merge", "delay", "steps", "outlier") if name not in ("co2", "delayed") else ():
        if (value := getattr(co2, key)) != getattr(CO2Config(), key):
            raise UserError(f"{key}={value!r} is CO2's own, method {name!r} does not have it: leave it out")
    if name != "delayed" and delayed != DelayedConfig():
        key, value = next((k, v) for k, v in vars(delayed).items() if v != getattr(DelayedConfig(), k))
        raise UserError(
            f"delayed.{key}={value!r} is method delayed's own, method {name!r} does not have it: leave it out"
        )
    if co2.tau == "auto" and name in ("local", "slowmo"):
        raise UserError(f"tau='auto' with method {name!r}: it hides no communication; give a number of local steps")
    if name == "delayed":
        delayed.check(co2)
    elif name == "co2":
        check_shared(co2, co2.wire.format) if shard or offload else co2.check_stable()
