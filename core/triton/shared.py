"""What several kernels need: Triton's types, and arithmetic that rounds as torch's does."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TYPES = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def rounded(x, P: tl.constexpr):
    """x as P holds it, ties to even, in its own type. bfloat16 by its bits: Triton's interpreter would cut them off."""
    if tl.bfloat16 == P:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    if tl.float16 == P:
        x = x.to(P).to(x.dtype)
    return x


@triton.jit
def divided(a, b):
    """a / b to nearest; of float32 Triton's own / may be off in the last bit."""
    if a.dtype == tl.float32:
        quotient = tl.div_rn(a, b)
    else:
        quotient = a / b
    return quotient
