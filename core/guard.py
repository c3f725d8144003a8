"""Leaving a worker out of a round's mean: one whose numbers are not finite, or have jumped far beyond its own before.

One NaN in one worker's contribution would be everybody's after the sum. So each worker judges what it is about to send;
if that is not sound, it sends zeros with weight 0, and starts anew where the others are. Every worker's weight and
verdict travel with the sum: the mean is over those that are left, and all workers learn in the same round who was not.
Nothing here makes the host wait for a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import DivergedError
from .flat import local_shard, wipe

SOUND, NOT_FINITE, JUMPED = 0, 1, 2  # verdicts
REASONS = {NOT_FINITE: "not finite", JUMPED: "out of proportion to its own before"}
WARM_UP = 5  # sound rounds before which nothing counts as a jump
MEMORY = 10  # sound rounds over which the usual size is taken
PATIENCE = 3  # rounds in which a worker may be left out again, right after the first one

LeftOut = Callable[[Tensor], None]


class Guard:
    """Judges what this worker sends, and hears the verdicts of all.

    The size of a round is the norm of its difference over the square root of its local steps, which neither steps in
    one direction nor a random walk raise much when tau changes. factor: a difference has jumped when that is more than
    so many times its usual size, the mean over the last sound rounds; None: only what is not finite is left out. A
    jump to a level that lasts, as when a learning rate starts anew, is a jump once: the next round near it is sound.
    EDiT (arXiv 2412.07210) also leaves a worker out whose pseudo-gradient's norm is far from its own running mean.

    state: [3] float64 on the device: the usual size, sound rounds so far, and the size of the last jump. A checkpoint
    holds it.
    """

    def __init__(self, device: torch.device, workers: int, factor: float | None = 10.0):
        self.factor = factor
        self.state = torch.zeros(3, dtype=torch.float64, device=device)
        self.verdict = torch.zeros((), dtype=torch.float64, device=device)  # the last one, of this worker
        self._in_a_row = [0] * workers

    @torch.no_grad()
    def judge(self, size: Tensor, steps: int) -> Tensor:
        """The verdict, 0-d, on what is about to be sent, and from now on `verdict`.

        size: 0-d, its norm: not finite where any number is not. steps: local steps that led to the difference; 0: it is
        none, or there were none, so that nothing can have jumped.
        """
        usual, rounds, last_jump = self.state.unbind()
        size = size.to(self.state) / max(1, steps) ** 0.5
        finite = size.isfinite()
        jumped = torch.zeros_like(finite)
        if steps and self.factor is not None:
            jumped = finite & (rounds >= WARM_UP) & (usual > 0) & (size > self.factor * usual)
            lasting = jumped & (size <= self.factor * last_jump)
            jumped = jumped & ~lasting
            mean = usual + (size - usual) / (rounds + 1).clamp(max=MEMORY)
            sound = finite & ~jumped
            usual = torch.where(sound, torch.where(lasting, size, mean), usual)
            last_jump = torch.where(jumped, size, torch.zeros_like(size))
            self.state.copy_(torch.stack([usual, rounds + sound, last_jump]))
        self.verdict.copy_(torch.where(finite, jumped * JUMPED, NOT_FINITE))
        return self.verdict

    def hear(self, verdicts: Sequence[float], number: int, ranks: Sequence[int], *, tells: bool) -> int:
        """The verdicts of all workers in round `number`, the same on all workers; how many were left out.

        ranks: how to call the workers. tells: whether this worker warns. DivergedError when all are not finite, or one
        is left out once more after PATIENCE rounds.
        """
        codes = [round(verdict) for verdict in verdicts]
        self._in_a_row = [n + 1 if code else 0 for n, code in zip(self._in_a_row, codes, strict=True)]
        out = {i: code for i, code in enumerate(codes) if code != SOUND}
        remedy = "lower the learning rate, clip gradients, or look at the data"
        if len(codes) == list(codes).count(NOT_FINITE):
            who = f"{len(codes)} workers'" if len(codes) > 1 else "the worker's"
            raise DivergedError(f"all {who} numbers of round {number} are not finite: {remedy}")
        for i, code in out.items():
            text = f"rank {ranks[i]} was left out of the mean of round {number}, where it was {REASONS[code]}"
            if self._in_a_row[i] > PATIENCE:
                raise DivergedError(f"{text}, as in the {self._in_a_row[i] - 1} rounds before: {remedy}")
            if tells:
                warnings.warn(f"{text}; it starts anew from the outer iterate", stacklevel=2)
        return len(out)


def forget(optimizer: torch.optim.Optimizer) -> LeftOut:
    """For a method's `on_left_out`: what an optimiser has gathered becomes zero, where this worker was left out.

    So an Adam begins anew, while its NaN moments would spoil the next rounds, too. For optimisers whose state begins at
    zero, as torch's do (Adagrad's may begin above). The count of steps begins anew, too, where it lies on the device,
    as with fused=True.
    """

    def reset(left_out: Tensor) -> None:
        inner = getattr(optimizer, "optim", optimizer)  # ZeRO-1's own part
        for state in inner.state.values():
            numbers = [local_shard(v) for v in state.values() if isinstance(v, Tensor) and v.is_floating_point()]
            wipe([v for v in numbers if v.device == left_out.device or not left_out.is_cuda], left_out)

    return reset
