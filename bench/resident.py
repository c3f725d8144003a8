"""Memory as the kernel counts it, in bytes."""

from __future__ import annotations

from pathlib import Path


def free_bytes() -> int:
    """What this machine can still give away."""
    return _field("/proc/meminfo", "MemAvailable")


def resident_bytes() -> int:
    """What this process holds now."""
    return _field("/proc/self/status", "VmRSS")


def reset_peak() -> int:
    """Makes the kernel forget this process's peak; returns what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def peak_bytes() -> int:
    """The peak of resident memory since reset_peak."""
    return _field("/proc/self/status", "VmHWM")


def _field(path: str, name: str) -> int:
    """What stands behind `name:` in a file of /proc, in kB there."""
    rows = (row.split() for row in Path(path).read_text().splitlines())
    return 1024 * int(next(row[1] for row in rows if row and row[0] == f"{name}:"))
