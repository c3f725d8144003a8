"""Memory of the host that a GPU reads and writes by itself."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError

PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


def pinned(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros in the host's memory, [numel], pinned where there is a GPU: copies to and from it are queued, and no host
    waits. Of exactly that size: torch would round it up to a power of two, and keep it.

    UserError where the memory cannot be pinned.
    """
    nbytes = numel * dtype.itemsize
    if not nbytes or not torch.cuda.is_available():
        return torch.zeros(numel, dtype=dtype)
    # lives as long as what lies in it; not mmap itself, which lets go of its memory before it tells so
    memory = (ctypes.c_byte * nbytes).from_buffer(mmap.mmap(-1, nbytes))
    held = torch.frombuffer(memory, dtype=dtype)
    cudart: Any = torch.cuda.cudart()
    if code := int(cudart.cudaHostRegister(held.data_ptr(), nbytes, PORTABLE)):
        raise UserError(f"{nbytes} bytes of the host's memory cannot be pinned (CUDA error {code}): leave out offload")
    weakref.finalize(memory, _unpin, held.data_ptr(), torch.cuda.current_device()).atexit = False
    return held


def _unpin(address: int, device: int) -> None:
    """Once no copy that is queued uses the memory."""
    torch.cuda.synchronize(device)
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(address)
