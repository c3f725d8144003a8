"""Checks of a command's options; each UserError names the first value that cannot be.

They are not made where the options are read: tyro would dress their errors up.
"""

from __future__ import annotations

import math
from typing import Any

from core.errors import UserError

MOST_WORKERS = 1024
MOST_PARAMETERS = 1e12


def require_each_once(options: Any, *names: str) -> None:
    """Tuples with a value or more, none of them twice."""
    for name in names:
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name}={' '.join(map(str, values))}: give one or more, each once")


def require_positive(options: Any, *names: str) -> None:
    """Finite numbers above 0, alone or in a tuple."""
    for name in names:
        values = getattr(options, name)
        for value in values if isinstance(values, tuple) else (values,):
            if not 0 < value < math.inf:
                raise UserError(f"{name}={value}: give a number above 0")


def require_one_or_more(options: Any, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise UserError(f"{name}={getattr(options, name)}: give 1 or more")


def require_no_crowd(options: Any) -> None:
    """No more workers, alone or in a tuple, than there may be processes for."""
    most = max(options.workers) if isinstance(options.workers, tuple) else options.workers
    if most > MOST_WORKERS:
        raise UserError(f"workers={most}: give up to {MOST_WORKERS}, for each is a process on this machine")
