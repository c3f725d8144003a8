"""Triton's kernels, offered to whatever has a pass over memory of its own."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from ..flat import offer_kernels


@functools.cache
def takes_triton(device: torch.device) -> bool:
    """Triton comes with any CUDA build of torch for Linux."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def triton_kernels(device: torch.device) -> Any:
    """core/triton, where its kernels run on this device, else None."""
    if not takes_triton(device):
        return None
    from .. import triton  # takes a second

    return triton


offer_kernels(triton_kernels)
