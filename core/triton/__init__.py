"""Triton's kernels for CUDA: the boundary, and the wire formats.

Tests hold each equal to the plain part that it stands for, in Triton's interpreter; on an H200 the boundary was, too
(results/gpu.json). core/assembly/co2.py offers them.
"""

from .boundary import TritonBoundary
from .codec import TritonCodec

__all__ = ["TritonBoundary", "TritonCodec"]
