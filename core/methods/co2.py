"""CO2 by its name: as it is, or with its outer state shared out or in the host's memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..co2 import CO2
from ..config import check_shared, check_stable
from ..sharded.sharded import ShardedCO2
from .registry import Entry, Given


def make(given: Given) -> tuple[nn.Module, CO2 | ShardedCO2]:
    g = given
    more: dict[str, Any] = {"schedule": g.schedule, **g.options}
    if g.mesh is None and not g.shard and not g.offload:
        return g.model, CO2(g.params, g.co2, **more)
    return g.model, ShardedCO2(g.params, g.co2, mesh=g.mesh, shard=g.shard, offload=g.offload, **more)


def check(given: Given) -> None:
    check_shared(given.co2) if given.shard or given.offload else check_stable(given.co2)


ENTRY = Entry(
    "co2",
    make,
    check=check,
    reads_co2=True,
    takes=frozenset({"shard", "offload", "schedule", "elastic"}),
    hides=True,
)
