"""The methods that CO2 is compared with, behind the same calls, and the one function that picks a method by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..adaptive.schedules import Schedule
from ..assembly import CO2 as CO2
from ..assembly import CO2Config, Options, of_kind
from ..assembly import LGrecoConfig as LGrecoConfig
from ..assembly import ShardedCO2 as ShardedCO2
from ..assembly import WireConfig as WireConfig
from ..checkpoints.own_loop import load as load
from ..checkpoints.own_loop import save as save
from ..checkpoints.saved import Saved
from ..errors import UserError
from ..flat import is_dtensor
from ..riders import Rider
from ..sharded.checks import check_mesh
from ..testing.link import Link
from ..zeroth import ZerothConfig as ZerothConfig
from ..zeroth.elastic import ElasticZeroth as ElasticZeroth
from ..zeroth.method import Zeroth
from . import co2 as of_co2
from . import ddp, delayed, local_sgd, overlap_local_sgd, registry, slowmo, zeroth
from .ddp import DDP
from .delayed import DelayedCO2 as DelayedCO2
from .delayed import DelayedConfig as DelayedConfig
from .local_sgd import LocalSGD as LocalSGD
from .overlap_local_sgd import OverlapLocalConfig as OverlapLocalConfig
from .overlap_local_sgd import OverlapLocalSGD as OverlapLocalSGD
from .registry import Entry, Given
from .registry import Settings as Settings
from .slowmo import SlowMo as SlowMo
from .slowmo import SlowMoConfig as SlowMoConfig

REGISTRY: list[Entry] = [
    of_co2.ENTRY,
    ddp.ENTRY,
    delayed.ENTRY,
    local_sgd.ENTRY,
    overlap_local_sgd.ENTRY,
    slowmo.ENTRY,
    zeroth.ENTRY,
]
METHODS = tuple(entry.name for entry in REGISTRY if entry.kind != "optimizer")
Method = Saved | DDP | Zeroth


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
    share it. schedule: of co2, see CO2. lr: returns the current
    inner learning rate, for SlowMo. mesh: [nodes, workers of a node]: these synchronise gradients every step, and the
    method runs across nodes; ddp synchronises all every step anyway. With methods other than co2 riders then hear, of
    each node, the worker of their own place alone. shard, offload: see ShardedCO2. group, timeout,
    link, riders: see assembly.Options. settings: of the method, by its key: delayed, slowmo, overlap_local, or
    ddp_wire, how ddp's gradients cross the network.
    """
    entry = entry_of(name)
    co2 = of_kind(co2, CO2Config, "co2")
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
    return entry.make(Given(co2, own, model, options, {"shard": shard, "offload": offload}, schedule, lr, mesh))


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
    own = registry.own_settings(REGISTRY, entry, settings)
    registry.check(entry, Given(co2, own, outer_state={"shard": shard, "offload": offload}, schedule=schedule))
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
    known = {entry.name: entry for entry in REGISTRY}
    if name not in known:
        raise UserError(f"method {name!r}: choose one of {', '.join(known)}")
    return known[name]
