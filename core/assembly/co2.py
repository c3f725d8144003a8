"""CO2 and ShardedCO2 with all that runs on real clusters need."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..adaptive.arrival import OnArrival
from ..adaptive.schedules import Schedule, settings_of
from ..checkpoints.saved import Saved
from ..checks import tensors_of
from ..sharded import sharded
from ..sharded.checks import check_shared, groups_of
from ..sharded.placement import Holders
from .config import CO2Config, of_kind
from .plugged import Options, plugs


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
        c, params = of_kind(config, CO2Config, "config"), tensors_of(params, "parameters")
        c.wire.check(params, options.get("group"))
        settings = settings_of(c, schedule)
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
        c = of_kind(config, CO2Config, "config")
        settings = settings_of(c, schedule)
        check_shared(settings(0), c.wire.format)
        options["group"], inner_group = groups_of(mesh, options.get("group"), inner_group)
        how: dict[str, Any] = {"shards": shards, "shard": shard, "offload": offload}
        how |= {"timeout": options["timeout"]} if "timeout" in options else {}
        plugged = plugs(c, lambda number: settings(number).tau, options)
        super().__init__(params, settings, inner_group=inner_group, **how, **plugged)
