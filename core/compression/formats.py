"""Compression formats: a tensor as the bytes that cross the network, in blocks of 256 elements.

| format | bytes per block | each element |
|---|---|---|
| bfloat16 | 512 | rounded to 8 significant binary digits; no scale, because it has float32's range |
| int8 | 4 + 256 | s q, q in -127 ... 127, s = the block's largest magnitude / 127 |
| int4, int2 | 4 + 32 B | s q, q in -L ... L, L = 2^(B - 1) - 1, s = the block's largest magnitude / L; B bits |

The B bits of q + L + 1 of the elements i, i + 32 B, i + 2 x 32 B, ... share a byte. The first element has its lowest
bits.

The scale s leads its block, as float32. A bfloat16 scale would save 2 bytes in 132 at best, but it must be rounded up,
which costs more precision than it saves. 8-bit optimizers have such symmetric scales (Dettmers et al., ICLR 2022), and
a nonlinear map. Only L-GreCo uses int2.

NaN, infinity and a float64 beyond float32's range stay visible. All 256 elements of their block decode to non-finite
numbers, or in bfloat16 the element itself does.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

UniformFormat = Literal["float32", "bfloat16", "int8", "int4"]
NarrowFormat = Literal["bfloat16", "int8", "int4", "int2"]
UNIFORM_FORMATS: tuple[UniformFormat, ...] = get_args(UniformFormat)

BLOCK = 256  # elements
INTS: tuple[NarrowFormat, ...] = ("int8", "int4", "int2")
BITS = {compression: int(compression.removeprefix("int")) for compression in INTS}
BLOCK_BYTES = {"bfloat16": 2 * BLOCK} | {w: 4 + BLOCK // 8 * b for w, b in BITS.items()}
LEVELS = {compression: (1 << bits - 1) - 1 for compression, bits in BITS.items()}


def nbytes(compression: str, numel: int) -> int:
    """Returns the bytes of `numel` elements, which must be a multiple of BLOCK."""
    assert numel % BLOCK == 0, f"{numel} elements are no whole blocks"
    return numel // BLOCK * BLOCK_BYTES[compression]


def encode(x: Tensor, compression: str, *, lost: Tensor | None = None) -> Tensor:
    """Encodes a tensor, and rounds ties to even.

    Args:
        x: Shape [n], float32 or float64, n a multiple of BLOCK.
        compression: Name of the format.
        lost: Shape [n]. The values that the bytes decode to are subtracted from it.

    Returns:
        The bytes, uint8 [nbytes(compression, n)].
    """
    if compression == "bfloat16":
        payload = x.float().to(torch.bfloat16).view(torch.uint8)
        if lost is not None:
            lost.sub_(decode(payload, compression, lost.dtype))
    else:
        blocks = x.reshape(-1, BLOCK)
        # On a CPU amax and amin take a tenth of vector_norm's time. abs: devices differ in the sign of max(0, -0).
        top = torch.maximum(blocks.amax(1), -blocks.amin(1)).float().abs()
        # CUDA divides by a plain number inexactly, by its reciprocal
        scale = (top / top.new_full((), LEVELS[compression]))[:, None]
        q = blocks / scale.masked_fill(scale == 0, 1.0)  # a block of zeros
        q.round_().clamp_(-LEVELS[compression], LEVELS[compression])
        if lost is not None:
            lost.view(q.shape).sub_(q.to(lost.dtype) * scale)
        body = q.to(torch.int8).view(torch.uint8) if compression == "int8" else _pack(q, BITS[compression])
        payload = torch.cat([scale.view(torch.uint8), body], dim=1).view(-1)
    return payload


def decode(payload: Tensor, compression: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decodes the bytes of n elements, uint8 [nbytes(compression, n)].

    Args:
        payload: The bytes.
        compression: Name of the format.
        dtype: float32 or float64.

    Returns:
        The decoded elements, [n] in `dtype`.
    """
    if compression == "bfloat16":
        return payload.clone().view(torch.bfloat16).to(dtype)  # the clone is aligned
    blocks = payload.view(-1, BLOCK_BYTES[compression])
    scale = blocks[:, :4].clone().view(torch.float32)
    body = blocks[:, 4:]
    y = body.view(torch.int8).to(dtype) if compression == "int8" else _unpack(body, BITS[compression]).to(dtype)
    return y.mul_(scale).view(-1)


def _pack(q: Tensor, bits: int) -> Tensor:
    """Packs whole numbers [blocks, 256], |q| < 2^(bits - 1), to uint8 [blocks, 32 bits]."""
    u = q.add_(1 << bits - 1).to(torch.int8).view(torch.int64)  # a NaN may have any bits: the scale marks it
    first, *others = u.chunk(8 // bits, dim=1)
    for i, other in enumerate(others, 1):
        first = first | (other << i * bits)
    return first.view(torch.uint8)


def _unpack(body: Tensor, bits: int) -> Tensor:
    """Returns the inverse of _pack, as int8."""
    u = torch.empty(len(body), BLOCK // 8, dtype=torch.int64, device=body.device)
    packed = body.clone(memory_format=torch.contiguous_format).view(torch.int64)
    mask = int.from_bytes(bytes([(1 << bits) - 1] * 8), "little")  # eight bytes at once: an eighth of the operations
    for i, part in enumerate(u.chunk(8 // bits, dim=1)):
        part.copy_((packed >> i * bits).bitwise_and_(mask))
    return u.view(torch.int8).sub_(1 << bits - 1)
