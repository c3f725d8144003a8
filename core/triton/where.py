"""On CUDA: zeros, or copies, where a flag on the device holds. Each program of the kernel reads the flag first: where
it does not hold, no other memory is touched, and nothing waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .shared import TYPES

CHUNK = 1 << 16  # elements of a program: where the flag is clear, a launch is all that it costs
BLOCK = 1024  # elements that a program takes at a time

Row = tuple[int, int, int]  # address, address of the source, elements


@triton.jit
def where_kernel(
    table,  # int64 [programs, 3]: rows
    flag,  # uint8, 0-d
    TO: tl.constexpr,
    SOURCE: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(flag) != 0:
        row = table + tl.program_id(0).to(tl.int64) * 3
        to = tl.load(row).to(tl.pointer_type(TO))
        source = tl.load(row + 1).to(tl.pointer_type(SOURCE))
        n = tl.load(row + 2).to(tl.int32)
        for start in range(0, n, BLOCK):
            lane = start + tl.arange(0, BLOCK)
            value = tl.zeros([BLOCK], TO)
            if COPIES:
                value = tl.load(source + lane, mask=lane < n, other=0.0).to(TO)
            tl.store(to + lane, value, mask=lane < n)


def queue(flag: Tensor, to: Sequence[Tensor], source: Sequence[Tensor] | None = None) -> list[int]:
    """Queues zeros for each of `to`, or a copy of its counterpart, where flag holds, 0-d bool. Returns the places of
    the tensors that it leaves to its caller: of another device, layout or dtype."""
    left: list[int] = []
    kinds: dict[tuple[torch.dtype, torch.dtype], list[Row]] = {}
    for i, (t, s) in enumerate(zip(to, to if source is None else source, strict=True)):
        if not _fits(t, flag) or not _fits(s, flag) or not (source is None or t.is_contiguous() and s.is_contiguous()):
            left.append(i)
        elif t.numel():
            kinds.setdefault((t.dtype, s.dtype), []).append((t.data_ptr(), s.data_ptr(), t.numel()))
    with torch.cuda.device_of(flag):  # nothing on a CPU, where only Triton's interpreter runs
        for dtypes, rows in kinds.items():
            table = _table(tuple(rows), tuple(d.itemsize for d in dtypes), flag.device)
            kinds_of = {"TO": TYPES[dtypes[0]], "SOURCE": TYPES[dtypes[1]], "COPIES": source is not None}
            where_kernel[(len(table),)](table, flag.view(torch.uint8), **kinds_of, BLOCK=BLOCK, num_warps=4)
    return left


def _fits(t: Tensor, flag: Tensor) -> bool:
    """Whether it lies beside the flag without gaps, in whatever order."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.device == flag.device and t.dtype in TYPES and (not t.numel() or last + 1 == t.numel())


@functools.lru_cache(maxsize=4096)  # the same tensors at every boundary
def _table(rows: tuple[Row, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [programs, 3]."""
    found = []
    for to, source, n in rows:
        first = torch.arange(0, n, CHUNK)
        found.append(torch.stack([to + first * sizes[0], source + first * sizes[1], (n - first).clamp(max=CHUNK)], 1))
    return torch.cat(found).to(device)
