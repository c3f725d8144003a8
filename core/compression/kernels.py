"""The compression formats on CUDA. One kernel encodes a bucket, one averages a chunk, and one decodes, at any size.

Memory traffic for int4 with error feedback, in bytes per float32 element: encoding takes 12.5 (it reads value and
error, and writes error and bytes), and decoding takes 4.5. The average of n workers takes n / 2 + 8.5 per element of
this worker's chunk, which is a share 1 / n of the elements.

The arithmetic equals core/compression/formats.py, operation by operation. Products and sums are not fused, and
quotients are rounded to nearest. So bytes, averages and errors equal the plain codec's bit for bit. There are two
exceptions: the sign of a zero, and the bits of a block that is not finite, which decodes to non-finite numbers anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import BITS, BLOCK, BLOCK_BYTES

TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def rounded(x, P: tl.constexpr):
    """Rounds x to P, ties to even, in its own type. bfloat16 is rounded by its bits: Triton's interpreter truncates."""
    if tl.bfloat16 == P:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if tl.float16 == P:
        x = x.to(P).to(x.dtype)
    return x


@triton.jit
def divided(a, b):
    """Returns a / b rounded to nearest. Triton's own float32 division may be off in the last bit."""
    if a.dtype == tl.float32:
        quotient = tl.div_rn(a, b)
    else:
        quotient = a / b
    return quotient


BLOCKS = 8  # blocks per program
ELEMENTS = 1024  # elements per program of mean_kernel
WARPS = 4


@triton.jit
def where(blocks, BLOCKS: tl.constexpr):
    """Returns this program's part of the work, all int64.

    The parts are its worker, the blocks of that worker's chunk, whether the blocks exist, and the places of their
    elements among the elements of all chunks, [blocks, 256].
    """
    worker = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = (worker * blocks + block)[:, None] * 256 + tl.arange(0, 256)[None, :]
    return worker, block, block < blocks, place


@triton.jit
def decoded(at, live, D: tl.constexpr, HEAD: tl.constexpr, BITS: tl.constexpr):
    """Returns decoded blocks, [blocks, 256] in D, with zeros where not live.

    Args:
        at: Pointers to the blocks' beginnings, [blocks].
        live: Whether each block exists, [blocks].
        D: Type of the result.
        HEAD: Bytes of the scale, 0 with bfloat16.
        BITS: Bits of an element.
    """
    i = tl.arange(0, 256)[None, :]
    mask = live[:, None]
    if BITS == 16:
        bits = tl.load((at + HEAD).to(tl.pointer_type(tl.int16))[:, None] + i, mask=mask, other=0)
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(D)
    elif BITS == 8:
        values = tl.load((at + HEAD).to(tl.pointer_type(tl.int8))[:, None] + i, mask=mask, other=0).to(D)
    else:
        byte = tl.load((at + HEAD)[:, None] + i % (32 * BITS), mask=mask, other=0).to(tl.int32)
        values = (((byte >> (i // (32 * BITS) * BITS)) & ((1 << BITS) - 1)) - (1 << (BITS - 1))).to(D)
    if HEAD > 0:
        scale = tl.load(at.to(tl.pointer_type(tl.float32)), mask=live, other=0.0)
        values = values * scale.to(D)[:, None]
    return values


@triton.jit
def largest(values):
    """Returns the largest magnitudes of [blocks, 256], float32 [blocks], compared by their bits, so NaN is largest."""
    if values.dtype == tl.float64:
        top = tl.max(values.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF, axis=1)
        top = top.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        top = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    return top


@triton.jit
def float_encoded(values, at, live):
    """Stores blocks as bfloat16. Returns the values that they decode to."""
    into = at.to(tl.pointer_type(tl.int16))[:, None] + tl.arange(0, 256)[None, :]
    narrow = rounded(values.to(tl.float32), tl.bfloat16)
    bits = tl.where(narrow == narrow, narrow.to(tl.int32, bitcast=True) >> 16, 0x7FC0)
    tl.store(into, bits.to(tl.int16), mask=live[:, None])
    return (bits << 16).to(tl.float32, bitcast=True).to(values.dtype)


@triton.jit
def int_encoded(values, at, live, HEAD: tl.constexpr, BITS: tl.constexpr):
    """Stores blocks as integers of BITS bits. Returns the values that they decode to."""
    D: tl.constexpr = values.dtype
    level: tl.constexpr = (1 << (BITS - 1)) - 1
    far: tl.constexpr = 6755399441055744.0 if tl.float64 == D else 12582912.0  # 1.5 x 2^52 or 2^23, where the grid is 1
    top = largest(values)
    scale = tl.div_rn(top, tl.full(top.shape, level, tl.float32))
    tl.store(at.to(tl.pointer_type(tl.float32)), scale, mask=live)
    q = divided(values, tl.where(scale == 0, 1.0, scale).to(D)[:, None])
    q = tl.where(q > level, level, tl.where(q < -level, -level, q)).to(D)
    q = tl.where(q == q, (q + far) - far, 0.0).to(D)  # ties to even
    u = q.to(tl.int32)
    if BITS < 8:
        u = u + (1 << (BITS - 1))
    # the lowest BITS bits of each element, 8 / BITS elements per byte
    fields = tl.reshape(u & ((1 << BITS) - 1), [u.shape[0], 8 // BITS, 32 * BITS])
    bytes = tl.sum(fields << (tl.arange(0, 8 // BITS) * BITS)[None, :, None], axis=1)
    tl.store((at + HEAD)[:, None] + tl.arange(0, 32 * BITS)[None, :], bytes.to(tl.uint8), mask=live[:, None])
    return q * scale.to(D)[:, None]


@triton.jit
def sent(
    values, error_ptr, moved_ptr, at, place, live, HEAD: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Stores Q(d + e), and sets e <- d + e - Q(d + e). Without movement it stores Q(d), and sets e <- e + d - Q(d).

    Args:
        values: d.
        error_ptr: e.
        moved_ptr: Whether a worker has moved.
        at: Pointers to the encoded blocks.
        place: Places of the elements among the errors.
        live: Whether each block exists.
    """
    kept = tl.load(error_ptr + place, mask=live[:, None], other=0.0) + values
    moved = tl.full(place.shape, tl.load(moved_ptr), tl.int32) != 0
    values = tl.where(moved, kept, values)
    if BITS == 16:
        back = float_encoded(values, at, live)
    else:
        back = int_encoded(values, at, live, HEAD, BITS)
    tl.store(error_ptr + place, kept - back, mask=live[:, None])


@triton.jit
def encode_kernel(
    values_ptr, numel, error_ptr, moved_ptr, rows_ptr, stride, blocks,
    HEAD: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Encodes a payload for all workers.

    Args:
        values_ptr: The payload, [numel]. Zeros are encoded beyond it.
        error_ptr: The errors, [workers x blocks x 256].
        moved_ptr: Whether a worker has moved, 0-d uint8.
        rows_ptr: The encoded rows, uint8 [workers, blocks x bytes], `stride` bytes apart.
    """
    worker, block, live, place = where(blocks, BLOCKS)
    values = tl.load(values_ptr + place, mask=live[:, None] & (place < numel), other=0.0)
    at = rows_ptr + worker * stride + block * (HEAD + 32 * BITS)
    sent(values, error_ptr, moved_ptr, at, place, live, HEAD, BITS)


@triton.jit
def average_kernel(
    rows_ptr, stride, workers, error_ptr, moved_ptr, out_ptr, blocks,
    D: tl.constexpr, HEAD: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Averages the workers' rows of one chunk, and encodes the average.

    Args:
        rows_ptr: As for encode_kernel.
        error_ptr: The errors of the average, [blocks x 256].
        moved_ptr: As for encode_kernel.
        out_ptr: The encoded average, uint8 [blocks x bytes].
    """
    _, block, live, place = where(blocks, BLOCKS)
    at = rows_ptr + block * (HEAD + 32 * BITS)
    total = tl.zeros([BLOCKS, 256], D)
    for _ in range(workers):
        total += decoded(at, live, D, HEAD, BITS)
        at += stride
    mean = divided(total, tl.full(total.shape, workers, D))
    sent(mean, error_ptr, moved_ptr, out_ptr + block * (HEAD + 32 * BITS), place, live, HEAD, BITS)


@triton.jit
def decode_kernel(
    rows_ptr, stride, blocks, values_ptr, numel,
    D: tl.constexpr, HEAD: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Decodes rows, as encode_kernel stores them, to values [numel]."""
    worker, block, live, place = where(blocks, BLOCKS)
    values = decoded(rows_ptr + worker * stride + block * (HEAD + 32 * BITS), live, D, HEAD, BITS)
    tl.store(values_ptr + place, values, mask=live[:, None] & (place < numel))


@triton.jit
def mean_kernel(rows_ptr, workers, out_ptr, numel, D: tl.constexpr, ELEMENTS: tl.constexpr):
    """Averages rows [workers, numel], added in their order."""
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    total = tl.zeros([ELEMENTS], D)
    row = rows_ptr + place
    for _ in range(workers):
        total += tl.load(row, mask=place < numel, other=0.0)
        row += numel
    tl.store(out_ptr + place, divided(total, tl.full([ELEMENTS], workers, D)), mask=place < numel)


class TritonCodec:
    """The codec for CUDA, with the methods of core.compression.quantized.SegmentCodec."""

    def encode(self, payload: Tensor, rows: Tensor, compression: str, error: Tensor, moved: Tensor) -> None:
        blocks = _blocks(rows, compression)
        at = (error, moved.view(torch.uint8), rows, rows.stride(0), blocks)
        grid = (triton.cdiv(blocks, BLOCKS), len(rows))
        _launch(encode_kernel, grid, payload, len(payload), *at, **_format(compression))

    def average(self, rows: Tensor, out: Tensor, compression: str, error: Tensor, moved: Tensor) -> None:
        blocks = _blocks(rows, compression)
        at = (rows.stride(0), len(rows), error, moved.view(torch.uint8), out, blocks)
        fixed = {"D": TYPES[error.dtype]} | _format(compression)
        _launch(average_kernel, (triton.cdiv(blocks, BLOCKS),), rows, *at, **fixed)

    def decode(self, rows: Tensor, compression: str, payload: Tensor) -> None:
        blocks = _blocks(rows, compression)
        grid = (triton.cdiv(blocks, BLOCKS), len(rows))
        at = (rows.stride(0), blocks, payload, len(payload))
        _launch(decode_kernel, grid, rows, *at, D=TYPES[payload.dtype], **_format(compression))

    def mean(self, rows: Tensor) -> Tensor:
        out = torch.empty_like(rows[0])
        fixed, grid = {"D": TYPES[rows.dtype], "ELEMENTS": ELEMENTS}, (triton.cdiv(len(out), ELEMENTS),)
        _launch(mean_kernel, grid, rows, len(rows), out, len(out), **fixed)
        return out


def _blocks(rows: Tensor, compression: str) -> int:
    """Returns the blocks of each row. Scales are read as float32, so they must be aligned."""
    assert rows.data_ptr() % 4 == 0 and rows.stride(0) % 4 == 0
    return rows.shape[1] // BLOCK_BYTES[compression]


def _format(compression: str) -> dict[str, Any]:
    bits = BITS.get(compression, 16)
    return {"HEAD": BLOCK_BYTES[compression] - BLOCK // 8 * bits, "BITS": bits, "BLOCKS": BLOCKS}


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **fixed: Any) -> None:
    first = next(a for a in args if isinstance(a, Tensor))
    if all(grid):
        with torch.cuda.device_of(first):  # no effect on a CPU, where only Triton's interpreter runs
            kernel[grid](*args, **fixed, num_warps=WARPS, enable_fp_fusion=False)
