"""CO2 by its name: as it is, or with its outer state shared out or in the host's memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..assembly import CO2, ShardedCO2
from ..sharded.checks import check_shared
from .registry import Entry, Given


def make(given: Given) -> tuple[nn.Module, CO2 | ShardedCO2]:
    more: dict[str, Any] = {"schedule": given.schedule, **given.options}
    if given.mesh is None and not any(given.outer_state.values()):
        return given.model, CO2(given.params, given.co2, **more)
    return given.model, ShardedCO2(given.params, given.co2, mesh=given.mesh, **given.outer_state, **more)


def check(given: Given) -> None:
    if any(given.outer_state.values()):
        check_shared(given.co2, given.co2.wire.format)
    else:
        given.co2.check_stable()


ENTRY = Entry(
    "co2",
    make,
    "hidden",
    check=check,
    reads_co2=True,
    takes=frozenset({"shard", "offload", "schedule", "elastic"}),
)
