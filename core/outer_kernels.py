"""CO2's outer boundary on CUDA: one launch for all parameters, without a synchronisation (see core/outer.py).

The parameters lie anywhere, so a table names for each block of them the address, the place in the flat tensors and
the length. Parameters that are not contiguous have a second table, with strides, and a launch of their own.

Bytes per float32 parameter and round, each tensor read or written once: at the boundary, with restart or interpolate,
32 (p, d, x and m are read and written). On arrival with interpolate 40: 28 for the merge (d is only read) and 12 for
the difference (p and x are read, d is written). With keep_local 48: 32 (the snapshot is read, too) and 16 (it is
written). The norm of d, which the gaps need, reads 4 more in each case.

The arithmetic is core/outer.py's, operation by operation: products and sums are not fused, quotients are rounded to
nearest. Parameters, d, x and m are those of the plain pass bit for bit; what was seen is summed in another order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .compression.kernels import TYPES, divided, rounded
from .outer import EPS, OuterStep, Rule

BLOCK = 2048  # elements of a program
LAUNCH: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 8, "enable_fp_fusion": False}
NO_GAP, ONE_GAP, ELEMENT_GAPS = range(3)


@triton.jit
def place(table, P: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr):
    """Of this program's elements: pointers to the parameter's, places in the flat tensors (int64), and which exist.

    table: int64 [programs, 3 or 9]: address, offset, length; strided: first element, sizes 1 2, strides 0 1 2.
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
    snapshot_ptr,  # read by merge keep_local alone
    scalars,  # [9]: see TritonOuterStep._set_scalars
    gap_ptr,  # 0-d: c for ELEMENT_GAPS, Lambda for ONE_GAP
    seen_ptr,  # [programs, 4]: sum of m^2, sum and maximum of Lambda, clipped elements
    P: tl.constexpr,
    GAP: tl.constexpr,
    CLIP: tl.constexpr,
    MERGE: tl.constexpr,
    TAKES_DIFFERENCE: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    p_ptr, at, mask = place(table, P, STRIDED, BLOCK)
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    m = tl.load(m_ptr + at, mask=mask, other=0.0)
    new = tl.load(d_ptr + at, mask=mask, other=0.0) * tl.load(scalars + 4)
    p = tl.load(p_ptr, mask=mask, other=0.0).to(x.dtype)
    gap = tl.full([BLOCK], 1.0, x.dtype)  # step 4
    if GAP == 1:
        gap *= tl.load(gap_ptr).to(x.dtype)
    if GAP == 2:
        gap += divided(tl.abs(m * tl.load(scalars + 2)), tl.load(gap_ptr).to(x.dtype) + tl.load(scalars + 7))
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
    if MERGE == "interpolate":
        x = tl.load(scalars + 5) * x + tl.load(scalars + 6) * p
    if MERGE == "keep_local":
        x = x + (p - tl.load(snapshot_ptr + at, mask=mask, other=0.0))
    tl.store(p_ptr, rounded(x, P).to(P), mask=mask)
    seen = seen_ptr + tl.program_id(0).to(tl.int64) * 4
    tl.store(seen, tl.sum(m * m))
    tl.store(seen + 1, tl.sum(tl.where(mask, gap, 0.0)))
    tl.store(seen + 2, tl.max(tl.where(mask, gap, 1.0)))
    tl.store(seen + 3, tl.sum(clipped))


@triton.jit
def copy_kernel(
    table,
    d_ptr,
    x_ptr,
    snapshot_ptr,
    scalars,
    P: tl.constexpr,
    TAKES: tl.constexpr,  # OuterStep.take; else restart
    WHERE: tl.constexpr,  # restart, but only where scalars[8] says so
    SNAPSHOT: tl.constexpr,  # whether `snapshot` is kept
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    p_ptr, at, mask = place(table, P, STRIDED, BLOCK)
    if WHERE:
        mask = mask & (tl.full([BLOCK], tl.load(scalars + 8), tl.float32) != 0)
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
    """The boundary as one kernel over a table of blocks. Scalars lie on the device and change when they change."""

    def plan(self) -> None:
        flat, strided = [], []
        offset = 0
        for p in self.params:
            (flat if p.is_contiguous() else strided).extend(blocks(p.detach(), offset))
            offset += p.numel()
        tables = [torch.cat(rows) for rows in (flat, strided) if rows]
        self._seen = self.d.new_zeros(sum(map(len, tables)), 4)
        each = self._seen.split([len(t) for t in tables])
        self._launches = [(t.to(self.d.device), s, t.shape[1] == 9) for t, s in zip(tables, each, strict=True)]
        self._type = TYPES[self.params[0].dtype]
        self._scalars = self.d.new_zeros(9)
        self._values: list[float | Tensor | None] = [None] * 9

    def update(self, rule: Rule) -> Tensor:
        self._set_scalars(rule)
        gap, source = NO_GAP, self._scalars  # any tensor where the kernel reads none
        if rule.delta_rms is not None:
            gap, source = ELEMENT_GAPS, rule.delta_rms
        elif rule.gap is not None:
            gap, source = ONE_GAP, rule.gap
        snapshot = self.snapshot if rule.merge == "keep_local" else self.x
        with torch.cuda.device_of(self.d):  # nothing on a CPU, where only Triton's interpreter runs
            for table, seen, strided in self._launches:
                outer_step_kernel[(len(table),)](
                    table, self.d, self.x, self.m, snapshot, self._scalars, source, seen,
                    P=self._type, GAP=gap, CLIP=rule.phi is not None, MERGE=rule.merge,
                    TAKES_DIFFERENCE=rule.takes_difference, STRIDED=strided, **LAUNCH,
                )  # fmt: skip
        sums = self._seen.sum(0, dtype=torch.float64)
        return torch.stack([sums[0], sums[1], self._seen[:, 2].amax().double(), sums[3]])

    @torch.no_grad()
    def take(self) -> None:
        self._copy(takes=True, where=None)

    @torch.no_grad()
    def restart(self, where: Tensor | None = None) -> None:
        self._copy(takes=False, where=where)

    def _copy(self, takes: bool, where: Tensor | None) -> None:
        self.locate()
        if where is not None:
            self._set({8: where})
        with torch.cuda.device_of(self.d):
            for table, _, strided in self._launches:
                copy_kernel[(len(table),)](
                    table, self.d, self.x, self.x if self.snapshot is None else self.snapshot, self._scalars,
                    P=self._type, TAKES=takes, WHERE=where is not None, SNAPSHOT=self.snapshot is not None,
                    STRIDED=strided, **LAUNCH,
                )  # fmt: skip

    def _set_scalars(self, rule: Rule) -> None:
        mixed = rule.share, 1 - rule.share
        numbers = rule.beta, rule.alpha, rule.last_alpha, rule.phi or 0.0, rule.scale, *mixed, EPS
        self._set(dict(enumerate(numbers)))

    def _set(self, numbers: dict[int, float | Tensor]) -> None:
        """Place in `scalars` -> number; filled one by one, in the state's precision: a copy from the host would
        synchronise."""
        for i, value in numbers.items():
            if isinstance(value, Tensor):
                self._scalars[i].copy_(value)
            elif isinstance(old := self._values[i], Tensor) or value != old:
                self._scalars[i].fill_(value)
            self._values[i] = value


def blocks(p: Tensor, offset: int) -> list[Tensor]:
    """The table's rows of p, [blocks, 3] or (not contiguous) [blocks, 9], int64, p's first element at flat[offset]."""
    if p.numel() == 0:
        return []
    sizes, strides = collapse(p)
    if len(sizes) > 3:  # no row has room for its strides: one sub-tensor at a time
        return [rows for i, part in enumerate(p) for rows in blocks(part, offset + i * part.numel())]
    first = torch.arange(0, p.numel(), BLOCK)
    lengths = (p.numel() - first).clamp(max=BLOCK)
    if p.is_contiguous():
        return [torch.stack([p.data_ptr() + first * p.element_size(), offset + first, lengths], 1)]
    layout = torch.tensor([*sizes[1:], *strides]).expand(len(first), 5)
    start = torch.full_like(first, p.data_ptr())
    return [torch.cat([torch.stack([start, offset + first, lengths, first], 1), layout], 1)]


def collapse(p: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of p with neighbouring dimensions merged where the strides allow, padded to 3 in front."""
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
