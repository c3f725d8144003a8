"""The outer step of CO2 (arXiv 2401.16265, steps 4 to 7 of Algorithm 1) as pure functions on tensors.

Symbols as in the paper: x_{t,0} the outer iterate of round t, m_t the outer momentum, Lambda_t >= 1 the
staleness gap, Delta = x_{t-1,0} - mean_i x^i_{t-1,tau} the pseudo-gradient that arrives one round late.
Nothing here communicates, and nothing is changed in place. Tensors may be whole flat buffers or slices of
them, in any floating dtype; what needs the whole vector (a norm, an RMS) is a 0-d tensor handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Gap = Literal["elementwise", "norm", "inner", "none"]
GAPS: tuple[Gap, ...] = ("elementwise", "norm", "inner", "none")

EPS = 1e-12  # keeps Lambda finite when a pseudo-gradient is exactly zero


def norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all elements of all tensors, 0-d; accumulates in the widest dtype given."""
    norms = [torch.linalg.vector_norm(t) for t in tensors]
    widest = max((n.dtype for n in norms), key=lambda d: torch.finfo(d).bits)
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device, widest) for n in norms]))


def rms(tensors: Sequence[Tensor]) -> Tensor:
    """Root mean square over all elements of all tensors, 0-d: c_t of the `elementwise` gap."""
    return norm(tensors) / max(1, sum(t.numel() for t in tensors)) ** 0.5


def gap_elementwise(last_step: Tensor, c: Tensor) -> Tensor:
    """Step 4: Lambda_t = 1 + |x_{t,0} - x_{t-1,0}| / (c_t + eps), element by element.

    last_step: x_{t,0} - x_{t-1,0}, any shape. c: 0-d, the RMS of the last outer pseudo-gradient. The reading
    of Gap-Aware (Barkai et al., ICLR 2020) in which the pseudo-gradient sets the scale.
    """
    return 1 + last_step.abs() / (c.to(last_step.dtype) + EPS)


def gap_scalar(last_step_norm: Tensor, c: Tensor) -> Tensor:
    """Step 4 with one Lambda_t for the whole model: 1 + ||x_{t,0} - x_{t-1,0}|| / (c + eps), 0-d.

    `norm`: c = ||Delta||. `inner`: c = tau x the norm of the first inner step's displacement.
    """
    return 1 + last_step_norm / (c + EPS)


def momentum(m: Tensor, delta: Tensor, beta: float, gap: Tensor | None = None) -> Tensor:
    """Step 5: m_t = beta m_{t-1} + Delta / Lambda_t. The penalty scales the new term only.

    gap: shaped as delta, or 0-d; None stands for Lambda = 1.
    """
    new = delta if gap is None else delta / gap.to(delta.dtype)
    return new + beta * m


def clip_elements(m: Tensor, phi: float) -> Tensor:
    """Step 6: clip(m_t, -phi, phi), element by element; the result is what is stored."""
    return m.clamp(-phi, phi)


def clip_norm_factor(m_norm: Tensor, phi: float) -> Tensor:
    """Step 6 by norm: the factor min(1, phi / ||m_t||), 0-d, that brings ||m_t|| down to phi at most."""
    return (phi / (m_norm + EPS)).clamp(max=1.0)


def outer_step(x: Tensor, m: Tensor, alpha: float) -> Tensor:
    """Step 7: x_{t+1,0} = x_{t,0} - alpha m_t."""
    return x - alpha * m
