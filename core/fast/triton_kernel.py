"""CO2's outer boundary on CUDA: one launch for all parameters, without a synchronisation (see core/outer.py).

The parameters lie anywhere, so a table names for each block of them the address, the place in the flat tensors and
the length. Parameters that are not contiguous have a second table, with strides, and a launch of their own.
"""

# triton is no dependency of ours, and its kernels are Python in form only
# pyright: reportMissingImports=false, reportPossiblyUnboundVariable=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..outer import EPS, Boundary, Rule

BLOCK = 2048  # elements of a program
NO_GAP, ONE_GAP, ELEMENT_GAPS = range(3)
TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def boundary_kernel(
    table,  # int64 [programs, 3 or 9]: address, offset, length; strided: first element, sizes 1 2, strides 0 1 2
    d_ptr,
    x_ptr,
    m_ptr,
    scalars,  # [5]: beta, alpha, last_alpha, phi, scale
    gap_ptr,  # 0-d: c for ELEMENT_GAPS, Lambda for ONE_GAP
    seen_ptr,  # [programs, 4]: sum of m^2, sum and maximum of Lambda, clipped elements
    EPS: tl.constexpr,
    P: tl.constexpr,
    GAP: tl.constexpr,
    CLIP: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = table + program * (9 if STRIDED else 3)
    p_ptr = tl.load(row).to(tl.pointer_type(P))
    offset = tl.load(row + 1)
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
    x = tl.load(x_ptr + offset + lane, mask=mask, other=0.0)
    m = tl.load(m_ptr + offset + lane, mask=mask, other=0.0)
    new = tl.load(d_ptr + offset + lane, mask=mask, other=0.0) * tl.load(scalars + 4)
    gap = tl.full([BLOCK], 1.0, x.dtype)  # step 4
    if GAP == 1:
        gap *= tl.load(gap_ptr).to(x.dtype)
    if GAP == 2:
        gap += tl.abs(m * tl.load(scalars + 2)) / (tl.load(gap_ptr).to(x.dtype) + EPS)
    m = tl.load(scalars) * m + new / gap  # step 5
    clipped = tl.zeros([BLOCK], x.dtype)
    if CLIP:  # step 6
        phi = tl.load(scalars + 3)
        clipped = tl.where(tl.abs(m) > phi, 1.0, 0.0)
        m = tl.where(m > phi, phi, tl.where(m < -phi, -phi, m))  # NaN stays NaN
    tl.store(m_ptr + offset + lane, m, mask=mask)
    p = tl.load(p_ptr, mask=mask, other=0.0).to(x.dtype)
    tl.store(d_ptr + offset + lane, x.to(P).to(x.dtype) - p, mask=mask)  # step 3
    x = x - tl.load(scalars + 1) * m  # step 7
    tl.store(x_ptr + offset + lane, x, mask=mask)
    tl.store(p_ptr, x.to(P), mask=mask)
    seen = seen_ptr + program * 4
    tl.store(seen, tl.sum(m * m))
    tl.store(seen + 1, tl.sum(tl.where(mask, gap, 0.0)))
    tl.store(seen + 2, tl.max(tl.where(mask, gap, 1.0)))
    tl.store(seen + 3, tl.sum(clipped))


class TritonBoundary(Boundary):
    """The boundary as one kernel over a table of blocks. Scalars lie on the device and change when they change."""

    def plan(self) -> None:
        flat, strided = [], []
        offset = 0
        for p in self.params:
            (flat if p.is_contiguous() else strided).extend(blocks(p.detach(), offset))
            offset += p.numel()
        tables = [torch.cat(rows) for rows in (flat, strided) if rows]
        self._launches = [(t.to(self.d.device), self.d.new_zeros(len(t), 4), t.shape[1] == 9) for t in tables if len(t)]
        self._scalars = self.d.new_zeros(5)
        self._values: tuple[float, ...] = ()

    def update(self, rule: Rule) -> Tensor:
        self._set_scalars(rule)
        gap, source = NO_GAP, self._scalars  # any tensor where the kernel reads none
        if rule.gap is not None:
            gap, source = ONE_GAP, rule.gap
        elif rule.c is not None:
            gap, source = ELEMENT_GAPS, rule.c
        with torch.cuda.device_of(self.d):  # nothing on a CPU, where only Triton's interpreter runs
            for table, seen, strided in self._launches:
                boundary_kernel[(len(table),)](
                    table, self.d, self.x, self.m, self._scalars, source, seen,
                    EPS=EPS, P=TYPES[self.params[0].dtype], GAP=gap, CLIP=rule.phi is not None,
                    STRIDED=strided, BLOCK=BLOCK, num_warps=8,
                )  # fmt: skip
        seen = torch.cat([s for _, s, _ in self._launches])
        sums = seen.sum(0, dtype=torch.float64)
        return torch.stack([sums[0], sums[1], seen[:, 2].amax().double(), sums[3]])

    def _set_scalars(self, rule: Rule) -> None:
        """Filled one by one, in the state's precision: a copy from the host would synchronise."""
        scale = 0.0 if isinstance(rule.scale, Tensor) else rule.scale
        values = (rule.beta, float(rule.alpha), float(rule.last_alpha), rule.phi or 0.0, scale)
        if values != self._values:
            for i, value in enumerate(values):
                self._scalars[i].fill_(value)
            self._values = values
        if isinstance(rule.scale, Tensor):
            self._scalars[4].copy_(rule.scale)
            self._values = ()


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
