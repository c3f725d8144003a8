"""Where data sets lie, for all tasks."""

from __future__ import annotations

import os
from pathlib import Path

from core.errors import UserError


def data_root() -> Path:
    """The folder that CO2_DATA names, ~ being the home folder; `data` in the working directory where it is not set."""
    return Path(os.path.expanduser(os.environ.get("CO2_DATA") or "data"))


def missing(what: str, folder: Path, expected: str, stand_in: str, holds: str = "it") -> UserError:
    """The one line of a data set that is not there. folder: where it was looked for. expected: files, or what makes
    them. holds: what of it lies in CO2_DATA. stand_in: a recipe that needs no data."""
    unset = "" if os.environ.get("CO2_DATA") else " (CO2_DATA is not set)"
    return UserError(
        f"no {what} in {folder}{unset}: expected {expected}; set CO2_DATA to the folder that holds {holds}, or train "
        f"{stand_in}, which needs no data"
    )
