"""The boundary in one pass over memory, where core/outer.py's `update` takes several: here on a CPU, in place.

Each element of the parameters p, the landed buffer d, the outer iterate x and the momentum m is read and written
once: 8 accesses, 32 bytes a float32 parameter. The elementwise gap needs the RMS of d over the whole model before
that: 4 bytes more. A segment's d, x, m, p and the scratch stay in the cache from its first operation to its last.

The result is not bit for bit that of `update`: Lambda / scale is divided by instead of Lambda, which saves a pass for
scaling d, and the slope of Lambda is computed once. Both round differently in the last digit where the number of
workers is no power of two, or the gap is elementwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .flat import copy, kernels_of
from .outer import EPS, Boundary, Rule, Segment


class ChunkedBoundary(Boundary):
    """In place, one cache-sized segment after the other; correct on any device, but it synchronises a GPU."""

    def plan(self) -> None:
        super().plan()
        longest = max((len(s.d) for s in self.segments), default=0)
        self._scratch = self.d.new_empty(longest)
        self.narrow = self.params[0].dtype != self.d.dtype
        self._rounded = self._scratch.to(self.params[0].dtype) if self.narrow else None

    def update(self, rule: Rule) -> Tensor:
        slope = 0.0 if rule.c is None else float(rule.last_alpha) / (rule.c.item() + EPS)
        gap = 1.0 if rule.gap is None else rule.gap.item()
        seen = []
        for s in self.segments:
            seen.append(_momentum(s, self._scratch[: len(s.d)], rule, gap, slope))
            self.send(s, rule)
            s.x.sub_(s.m, alpha=float(rule.alpha))
            self.restart_segment(s, rule)
        squares, gaps, tops, clipped = zip(*seen, strict=True)
        numbers = [sum(squares), sum(gaps), max(tops), sum(clipped)]
        return torch.tensor(numbers, dtype=torch.float64, device=self.d.device)

    def send(self, s: Segment, rule: Rule) -> None:
        """Step 3 of a segment."""
        self.take_difference(s)

    def restart_segment(self, s: Segment, rule: Rule) -> None:
        """What the worker continues from."""
        copy(s.params, s.x_views)

    def take_difference(self, s: Segment) -> None:
        """d <- r(x) - p, with r(x) = x rounded to p's dtype."""
        if self._rounded is None and len(s.params) == 1:
            torch.sub(s.x_views[0], s.params[0], out=s.d_views[0])
            return
        s.d.copy_(s.x if self._rounded is None else self._rounded[: len(s.d)].copy_(s.x))
        torch._foreach_sub_(s.d_views, s.params)  # pyright: ignore[reportPrivateImportUsage]


def _momentum(s: Segment, scratch: Tensor, rule: Rule, gap: float, slope: float) -> tuple[float, float, float, float]:
    """m <- clip(beta m + Delta / Lambda), where Lambda = 1 + slope |m|, or `gap` where slope is 0. Returns what was
    seen, as new_momentum does, in plain numbers: on a CPU .item() costs nothing worth saving."""
    gap_sum, gap_max, clipped, scale = gap * len(s.m), gap, 0.0, float(rule.scale)
    if slope:
        torch.abs(s.m, out=scratch)  # then Lambda / scale, which saves scaling d
        torch.add(s.m.new_tensor(1 / scale), scratch, alpha=slope / scale, out=scratch)
        gap_sum = scratch.sum().item() * scale
        gap_max = scratch.amax().item() * scale
        torch.div(s.d, scratch, out=scratch)
        torch.add(scratch, s.m, alpha=rule.beta, out=s.m)
    else:
        s.m.mul_(rule.beta).add_(s.d, alpha=scale / gap)
    if rule.phi is not None:
        low, high = torch.aminmax(s.m)
        if not (-rule.phi <= low.item() and high.item() <= rule.phi):  # mostly nothing is clipped: one read
            clipped = torch.abs(s.m, out=scratch).gt_(rule.phi).sum().item()
            s.m.clamp_(-rule.phi, rule.phi)
    return torch.dot(s.m, s.m).item(), gap_sum, gap_max, clipped


def make_boundary(params: Sequence[Tensor], d: Tensor, x: Tensor, m: Tensor) -> Boundary:
    """Triton's kernel on CUDA where Triton is installed, the in-place pass on a CPU; elsewhere the plain one."""
    if kernels := kernels_of(d.device):
        return kernels.TritonBoundary(params, d, x, m)
    return (Boundary if d.is_cuda else ChunkedBoundary)(params, d, x, m)
