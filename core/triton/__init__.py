"""Triton's kernels for CUDA: the boundary, what happens where a flag holds, and the wire formats.

Each does what a plain part does, and is tested to be equal to it; core/assembly/kernels.py offers them. So it is
in Triton's interpreter, and in the instructions compiled for sm_80 and sm_90. On a device: not run.
"""

from .boundary import TritonBoundary
from .codec import TritonCodec
from .where import queue

__all__ = ["TritonBoundary", "TritonCodec", "queue"]
