"""CO2's outer boundary on CUDA: one Triton kernel for all parameters, without a synchronization (see core/outer.py).

Parameters are separate allocations. So a table lists, for each block of them, the address, the offset in the flat
tensors and the length. Non-contiguous parameters have a second table with strides, and a second launch.

Memory traffic in bytes per float32 parameter and round, each tensor read or written once:

- restart at the boundary: 32. p, d, x and m are read and written.
- keep_local: 48. The merge needs 32, because it reads d and the snapshot. The difference needs 16: it reads p and x,
  and writes d and the snapshot.

The norm of d, which the gaps need, reads 4 more in each case.

The arithmetic equals core/outer.py operation by operation: no fused multiply-add, quotients rounded to nearest.
Parameters, d, x and m equal the plain pass bit for bit. Statistics are summed in another order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..outer import EPS, OuterStep, Rule
from .kernels import TYPES, divided, rounded

BLOCK = 2048  # elements per program
LAUNCH: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}
NO_GAP, ONE_GAP, ELEMENT_GAPS = range(3)


@triton.jit
def place(table, P: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns this program's pointers to the parameter, its offsets in the flat tensors (int64), and a mask.

    table: int64 [programs, 3 or 9]. A row has address, offset and length. With strides it also has the first element,
    sizes 1 and 2, and strides 0 to 2.
    """
    row = table + tl.program_id(0).to(tl.int64) * (9 if STRIDED else 3)
    p_ptr = tl.load(row).to(tl.pointer_type(P))
    lane = tl.arange(0, BLOCK)
    mask = lane < tl.load(row + 2)
    if STRIDED:
        i = tl.load(row + 3) + lane
        size1 = tl.load(row + 4)
        size2 = tl.load(row + 5)
        p_ptr += (i // (size1 * size2)) * tl.load(row + 6)
        p_ptr += (i // size2 % size1) * tl.load(row + 7) + (i % size2) * tl.load(row + 8)
    else:
        p_ptr += lane
    return p_ptr, tl.load(row + 1) + lane, mask


@triton.jit
def outer_step_kernel(
    table,
    d_ptr,
    x_ptr,
    m_ptr,
    snapshot_ptr,  # only merge keep_local reads it
    scalars,  # [7]: see TritonOuterStep._set_scalars
    gap_ptr,  # 0-d: c for ELEMENT_GAPS, Lambda for ONE_GAP
    stats_ptr,  # [programs, 4]: sum of m^2, sum and maximum of Lambda, clipped elements
    P: tl.constexpr,
    GAP: tl.constexpr,
    CLIP: tl.constexpr,
    MERGE: tl.constexpr,
    TAKES_DIFFERENCE: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Steps 3 to 7 of Algorithm 1 and the merge on one block of parameters."""
    p_ptr, at, mask = place(table, P, STRIDED, BLOCK)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    m = tl.load(m_ptr + at, mask=mask, other=0.0)
    new = tl.load(d_ptr + at, mask=mask, other=0.0) * tl.load(scalars + 4)
    p = tl.load(p_ptr, mask=mask, other=0.0).to(x.dtype)
    gap = tl.full([BLOCK], 1.0, x.dtype)  # step 4
    if GAP == 1:
        gap *= tl.load(gap_ptr).to(x.dtype)
    if GAP == 2:
        gap += divided(tl.abs(m * tl.load(scalars + 2)), tl.load(gap_ptr).to(x.dtype) + tl.load(scalars + 5))
    m = tl.load(scalars) * m + divided(new, gap)  # step 5
    clipped = tl.zeros([BLOCK], x.dtype)
    if CLIP:  # step 6
        phi = tl.load(scalars + 3)
        clipped = tl.where(tl.abs(m) > phi, 1.0, 0.0)
        m = tl.where(m > phi, phi, tl.where(m < -phi, -phi, m))  # NaN stays NaN
    tl.store(m_ptr + at, m, mask=mask)
    if TAKES_DIFFERENCE:  # step 3
        tl.store(d_ptr + at, rounded(x, P) - p, mask=mask)
    x = x - tl.load(scalars + 1) * m  # step 7
    tl.store(x_ptr + at, x, mask=mask)
    if MERGE == "keep_local":
        x = x + (p - tl.load(snapshot_ptr + at, mask=mask, other=0.0))
    tl.store(p_ptr, rounded(x, P).to(P), mask=mask)
    stats = stats_ptr + tl.program_id(0).to(tl.int64) * 4
    tl.store(stats, tl.sum(m * m))
    tl.store(stats + 1, tl.sum(tl.where(mask, gap, 0.0)))
    tl.store(stats + 2, tl.max(tl.where(mask, gap, 1.0)))
    tl.store(stats + 3, tl.sum(clipped))


@triton.jit
def copy_kernel(
    table,
    d_ptr,
    x_ptr,
    snapshot_ptr,
    scalars,
    P: tl.constexpr,
    TAKES: tl.constexpr,  # whether it is OuterStep.take, not OuterStep.restart
    WHERE: tl.constexpr,  # whether it restarts only if scalars[6] is not 0
    SNAPSHOT: tl.constexpr,  # whether there is a snapshot, for keep_local
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """OuterStep.take or OuterStep.restart on one block of parameters."""
    p_ptr, at, mask = place(table, P, STRIDED, BLOCK)
    if WHERE:
        mask = mask & (tl.full([BLOCK], tl.load(scalars + 6), tl.float32) != 0)
    x = rounded(tl.load(x_ptr + at, mask=mask, other=0.0), P)
    if TAKES:
        p = tl.load(p_ptr, mask=mask, other=0.0).to(x.dtype)
        tl.store(d_ptr + at, x - p, mask=mask)
        if SNAPSHOT:
            tl.store(snapshot_ptr + at, p, mask=mask)
    else:
        tl.store(p_ptr, x.to(P), mask=mask)
        if SNAPSHOT and WHERE:
            tl.store(snapshot_ptr + at, x, mask=mask)


class TritonOuterStep(OuterStep):
    """OuterStep as one kernel over a table of blocks. Scalars are on the device, and are written when they change."""

    def plan(self) -> None:
        """Builds the tables."""
        flat, strided = [], []
        offset = 0
        for p in self.own():
            (flat if p.is_contiguous() else strided).extend(blocks(p.detach(), offset))
            offset += p.numel()
        tables = [torch.cat(rows) for rows in (flat, strided) if rows]
        self._stats = self.d.new_zeros(sum(map(len, tables)), 4)
        stats_of_tables = self._stats.split([len(t) for t in tables])
        self._launches = [
            (t.to(self.d.device), s, t.shape[1] == 9) for t, s in zip(tables, stats_of_tables, strict=True)
        ]
        self._type = TYPES[self.params[0].dtype]
        self._scalars = self.d.new_zeros(7)
        self._values: list[float | Tensor | None] = [None] * 7

    def update(self, rule: Rule) -> Tensor:
        self._set_scalars(rule)
        gap, source = NO_GAP, self._scalars  # the kernel does not read source
        if rule.delta_rms is not None:
            gap, source = ELEMENT_GAPS, rule.delta_rms
        elif rule.gap is not None:
            gap, source = ONE_GAP, rule.gap
        snapshot = self.snapshot if rule.merge == "keep_local" else self.x
        with torch.cuda.device_of(self.d):  # no effect on a CPU, for Triton's interpreter
            for table, stats, strided in self._launches:
                outer_step_kernel[(len(table),)](
                    table, self.d, self.x, self.m, snapshot, self._scalars, source, stats,
                    P=self._type, GAP=gap, CLIP=rule.phi is not None, MERGE=rule.merge,
                    TAKES_DIFFERENCE=rule.takes_difference, STRIDED=strided, **LAUNCH,
                )  # fmt: skip
        sums = self._stats.sum(0, dtype=torch.float64)
        return torch.stack([sums[0], sums[1], self._stats[:, 2].amax().double(), sums[3]])

    @torch.no_grad()
    def take(self) -> None:
        self._copy(takes=True, where=None)

    @torch.no_grad()
    def restart(self, where: Tensor | None = None) -> None:
        self._copy(takes=False, where=where)

    def _copy(self, takes: bool, where: Tensor | None) -> None:
        """Launches copy_kernel."""
        self.locate()
        if where is not None:
            self._set({6: where})
        with torch.cuda.device_of(self.d):
            for table, _, strided in self._launches:
                copy_kernel[(len(table),)](
                    table, self.d, self.x, self.x if self.snapshot is None else self.snapshot, self._scalars,
                    P=self._type, TAKES=takes, WHERE=where is not None, SNAPSHOT=self.snapshot is not None,
                    STRIDED=strided, **LAUNCH,
                )  # fmt: skip

    def _set_scalars(self, rule: Rule) -> None:
        """Writes: 0 beta, 1 alpha, 2 last_alpha, 3 phi, 4 scale, 5 eps. 6 is `where`."""
        numbers = rule.beta, rule.alpha, rule.last_alpha, rule.phi or 0.0, rule.scale, EPS
        self._set(dict(enumerate(numbers)))

    def _set(self, numbers: dict[int, float | Tensor]) -> None:
        """Writes scalars by index, each with a fill kernel, because a copy from the host would synchronize."""
        for i, value in numbers.items():
            if isinstance(value, Tensor):
                self._scalars[i].copy_(value)
            elif isinstance(old := self._values[i], Tensor) or value != old:
                self._scalars[i].fill_(value)
            self._values[i] = value


def blocks(p: Tensor, offset: int) -> list[Tensor]:
    """Returns the table's rows of p, whose first element is flat[offset]: int64 [blocks, 3], or 9 with strides."""
    if p.numel() == 0:
        return []
    sizes, strides = collapse(p)
    if len(sizes) > 3:  # a row has room for three dimensions: use sub-tensors
        return [rows for i, part in enumerate(p) for rows in blocks(part, offset + i * part.numel())]
    first = torch.arange(0, p.numel(), BLOCK, device="cpu")
    lengths = (p.numel() - first).clamp(max=BLOCK)
    if p.is_contiguous():
        return [torch.stack([p.data_ptr() + first * p.element_size(), offset + first, lengths], 1)]
    layout = torch.tensor([*sizes[1:], *strides], device="cpu").expand(len(first), 5)
    start = torch.full_like(first, p.data_ptr())
    return [torch.cat([torch.stack([start, offset + first, lengths, first], 1), layout], 1)]


def collapse(p: Tensor) -> tuple[list[int], list[int]]:
    """Returns p's sizes and strides with neighboring dimensions merged where strides allow, padded to 3 in front."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(p.shape, p.stride(), strict=True):
        if size == 1:
            continue
        if sizes and strides[-1] == size * stride:
            sizes[-1] *= size
            strides[-1] = stride
        else:
            sizes.append(size)
            strides.append(stride)
    missing = max(0, 3 - len(sizes))
    return [1] * missing + sizes, [0] * missing + strides
