"""CO2 by its name: as it is, or with its outer state shared out or in the host's memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..assembly import CO2, ShardedCO2
from ..sharded.checks import check_shared
from .registry import Entry, Given


def make(given: Given) -> tuple[nn.Module, CO2 | ShardedCO2]:
    g = given
    more: dict[str, Any] = {"schedule": g.schedule, **g.options}
    if g.mesh is None and not g.shard and not g.offload:
        return g.model, CO2(g.params, g.co2, **more)
    return g.model, ShardedCO2(g.params, g.co2, mesh=g.mesh, shard=g.shard, offload=g.offload, **more)


def check(given: Given) -> None:
    check_shared(given.co2, given.co2.wire.format) if given.shard or given.offload else given.co2.check_stable()


ENTRY = Entry(
    "co2",
    make,
    check=check,
    reads_co2=True,
    takes=frozenset({"shard", "offload", "schedule", "elastic"}),
    hides=True,
)
