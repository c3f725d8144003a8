"""Schedules for CO2(schedule=...): from a round's number alone to the settings that it changes.

What a change of tau does to the outer momentum: core/outer.py, `carried`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import UserError
from .config import SCHEDULED, AdaptiveConfig

Schedule = Callable[[int], Mapping[str, Any]]
Config = TypeVar("Config", bound=AdaptiveConfig)


def settings_of(c: Config, schedule: Schedule | None) -> Callable[[int], Config]:
    """The settings of a round, by its number."""
    return functools.partial(_scheduled, c, schedule) if schedule else lambda number: c


def _scheduled(c: Config, schedule: Schedule, number: int) -> Config:
    changes = schedule(number)
    if not isinstance(changes, Mapping):
        raise UserError(
            f"the schedule gives {changes!r} for round {number}: return a dict of what changes, {{}} for none"
        )
    if unknown := changes.keys() - set(SCHEDULED):
        raise UserError(f"the schedule changes {', '.join(sorted(unknown))}: only {', '.join(SCHEDULED)} may change")
    if "tau" in changes and "auto" in (c.tau, changes["tau"]):
        raise UserError(f"the schedule gives tau={changes['tau']!r} while tau is {c.tau!r}: give numbers, or only auto")
    changed = replace(c, **changes)
    if changed.at_boundary != c.at_boundary and c.merge != "keep":  # which has one order for both
        raise UserError(
            f"the schedule gives tau={changed.tau} after tau={c.tau}, with merge={c.merge!r} and delay={c.delay}: at "
            "the end of a round a mean is merged otherwise than within one; keep tau above delay, or set delay auto"
        )
    return changed
