"""The memory of this process, as the kernel or torch's CUDA allocator counts it. Bytes."""

from __future__ import annotations

from pathlib import Path

import torch


def free_bytes(device: str = "cpu") -> int:
    """What the device, or this machine, can still give away."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else _field("/proc/meminfo", "MemAvailable")


def reset_peak(device: str = "cpu") -> int:
    """Forgets the peak so far; returns what the process holds now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _field("/proc/self/status", "VmRSS")


def peak_bytes(device: str = "cpu") -> int:
    """The peak since reset_peak: of torch's allocator on CUDA, else of this process's resident memory."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _field("/proc/self/status", "VmHWM")


def _field(path: str, name: str) -> int:
    """The value of `name:` in a file of /proc, which gives it in kB."""
    rows = (row.split() for row in Path(path).read_text().splitlines())
    return 1024 * int(next(row[1] for row in rows if row and row[0] == f"{name}:"))
