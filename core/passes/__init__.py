"""Steps 3 to 7 in one pass over memory, where core/outer.py's `update` takes several; each is tested to be equal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..flat import triton_kernels
from ..outer import Boundary
from .chunked import ChunkedBoundary


def make_boundary(params: Sequence[Tensor], d: Tensor, x: Tensor, m: Tensor) -> Boundary:
    """Triton's kernel on CUDA where Triton is installed (any CUDA build for Linux brings it), the in-place pass on a
    CPU; elsewhere the plain one."""
    if kernels := triton_kernels(d.device):
        return kernels.TritonBoundary(params, d, x, m)
    return (Boundary if d.is_cuda else ChunkedBoundary)(params, d, x, m)
