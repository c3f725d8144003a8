"""Passes over memory that compute core/outer.py's `update` faster; each is tested to be equal to it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..flat import triton_kernels
from ..outer import Boundary, Rule, all_seen, update
from .chunked import ChunkedBoundary

__all__ = ["PASSES", "CompiledBoundary", "Pass", "make_boundary"]

Pass = Literal["fast", "plain", "compiled"]
PASSES: tuple[Pass, ...] = ("fast", "plain", "compiled")


def make_boundary(
    kind: Pass,
    params: Sequence[Tensor],
    d: Tensor,
    x: Tensor,
    m: Tensor,
    sent: Tensor | None = None,
) -> Boundary:
    """fast: Triton's kernel on CUDA where Triton is installed (any CUDA build for Linux brings it), the in-place pass
    on a CPU; elsewhere plain, which is core/outer.py's own. compiled: that, by torch.compile."""
    flats = params, d, x, m, sent
    if kind == "compiled":
        return CompiledBoundary(*flats)
    if kind == "fast" and (kernels := triton_kernels(d.device)):
        return kernels.TritonBoundary(*flats)
    return ChunkedBoundary(*flats) if kind == "fast" and not d.is_cuda else Boundary(*flats)


class CompiledBoundary(Boundary):
    """core/outer.py's `update`, compiled by torch: what the hand-written passes are compared with."""

    def update(self, rule: Rule) -> Tensor:
        return all_seen([_compiled()(s, rule) for s in self.segments])


@functools.cache  # once for all buckets
def _compiled() -> Any:
    return torch.compile(update, dynamic=False)  # of unknown sizes some strided parameters do not compile
