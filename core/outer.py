"""The outer step of CO2 (arXiv 2401.16265, steps 4 to 7 of Algorithm 1) as pure functions on tensors.

Symbols as in the paper: x_{t,0} the outer iterate of round t, m_t the outer momentum, Lambda_t >= 1 the
staleness gap, Delta = x_{t-1,0} - mean_i x^i_{t-1,tau} the pseudo-gradient that arrives one round late.
Nothing here communicates, and nothing is changed in place. Tensors may be whole flat buffers or slices of
them, in any floating dtype; what needs the whole vector (a norm, an RMS) is a 0-d tensor handed in.

Below them the formulas of other ways to live with the delay, which core/policies.py puts in the penalty's place.
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
    """Euclidean norm over all elements of all tensors, 0-d, in the widest dtype given.

    Piece by piece: torch's sum over one float32 tensor on a CPU loses a third of it at 3e8 elements.
    """
    norms = [torch.linalg.vector_norm(piece) for t in tensors for piece in t.reshape(-1).split(1 << 24)]
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


def outer_step(x: Tensor, m: Tensor, alpha: float | Tensor) -> Tensor:
    """Step 7: x_{t+1,0} = x_{t,0} - alpha m_t."""
    return x - alpha * m


def eager(delta: Tensor, own: Tensor, last_own: Tensor, share: float) -> Tensor:
    """The worker's own newest difference stands in for its older one in the mean that arrives late:
    Delta~^i_t = mean_{t-1} + (d^i_t - d^i_{t-1}) / G, with d^i_t = x^i_{t,0} - x^i_{t,tau}.

    delta: mean_{t-1}. own, last_own: d^i_t and d^i_{t-1}. share: 1 / G, one over the number of workers.
    Kale, Douillard and Donchev, "Eager Updates for Overlapped Communication and Computation in DiLoCo" (2025).
    """
    return delta + share * (own - last_own)


def delay_compensated(delta: Tensor, moved: Tensor, strength: float) -> Tensor:
    """First-order Taylor correction of DC-ASGD (Zheng et al., ICML 2017): Delta + lambda Delta^2 moved, by element.

    moved: x_{t,0} - x_{t-1,0}, from where Delta was taken to where it is used; without Nesterov -alpha m_{t-1}.
    There the gradient g, here Delta, which plays the part of a learning rate times g: x moves against both, so a step
    that goes on in Delta's direction shrinks it. strength: lambda, with one over that learning rate in it.
    """
    return delta + strength * delta * delta * moved


def mix(x: Tensor, p: Tensor, share: float) -> Tensor:
    """Where a worker restarts: share x_{t+1,0} + (1 - share) x^i_{t,tau}, between the outer and its own iterate.

    Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512).
    """
    return share * x + (1 - share) * p


def nesterov(m: Tensor, new: Tensor, beta: float) -> Tensor:
    """What takes m_t's place in step 7 under Nesterov momentum: beta m_t + Delta_t / Lambda_t.

    new: Delta_t / Lambda_t, which m_t holds already. As in torch.optim.SGD, after Sutskever et al. (2013); DiLoCo
    (Douillard et al. 2023) takes its outer step so. m_t is clipped, what is added to it is not.
    """
    return beta * m + new


def settles(alpha: float, beta: float, nesterov: bool = False) -> bool:
    """Whether a step delayed by one round, without a penalty, settles however far tau local steps solve a direction.

    On a quadratic whose error tau local steps reduce by the share rho, x_{t+1} = (1 + beta) x_t - beta x_{t-1} - alpha
    rho x_{t-1}; Nesterov puts (1 + beta) x_{t-1} - beta x_{t-2} in place of the last. Jury's criterion at rho = 1, the
    worst: beta + alpha < 1, and (1 - beta^2) alpha + beta^2 alpha^2 < 1 - beta.
    """
    if nesterov:
        return (1 - beta**2) * alpha + (beta * alpha) ** 2 < 1 - beta
    return beta + alpha < 1
