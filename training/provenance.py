"""Of which code and packages a result is."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path


def version(package: str) -> str:
    """The installed version; empty for a package that is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of this checkout, with a mark when it has changes; empty outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10)
        return head.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
