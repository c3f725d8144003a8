"""Leaving a worker out of a round's mean: one whose numbers are not finite, or have jumped far beyond its own before.

One NaN in one worker's contribution would be everybody's after the sum. So each worker judges what it is about to send;
if that is not sound, it sends zeros with weight 0, and starts anew where the others are. Every worker's weight and
verdict travel with the sum: the mean is over those that are left, and all workers learn in the same round who was not.
Nothing here makes the host wait for a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import DivergedError
from ..flat import Bucket, Scalars, local_shard, read_blocks, wipe
from ..outer import norm

SOUND, NOT_FINITE, JUMPED = 0, 1, 2  # verdicts
REASONS = {NOT_FINITE: "not finite", JUMPED: "out of proportion to its own before"}
WARM_UP = 5  # sound rounds before which nothing counts as a jump
MEMORY = 10  # sound rounds over which the usual size is taken
PATIENCE = 3  # rounds in which a worker may be left out again, right after the first one

LeftOut = Callable[[Tensor], None]


class Guard:
    """Judges what this worker sends, sets its weight in the mean, and hears the verdicts on all.

    The size of a round is the norm of its difference over the square root of its local steps, which neither steps in
    one direction nor a random walk raise much when tau changes. factor: a difference has jumped when that is more than
    so many times its usual size, the mean over the last sound rounds; None: only what is not finite is left out. A
    jump to a level that lasts, as when a learning rate starts anew, is a jump once: the next round near it is sound.
    EDiT (arXiv 2412.07210) also leaves a worker out whose pseudo-gradient's norm is far from its own running mean.

    scalars: with the places of `sizes`. device: of what is sent. names: of the workers. tells: whether this one warns.
    Attributes: verdict, 0-d, the last one on this worker; count, of the workers that were left out of what was heard
    last; state: [3] float64, the usual size, sound rounds so far, and the size of the last jump, for a checkpoint.
    """

    def __init__(self, scalars: Scalars, device: torch.device, rank: int, names: Sequence[str]):
        self.scalars, self.rank, self.names = scalars, rank, names
        self.factor: float | None = 10.0
        self.tells = rank == 0
        self.state = torch.zeros(3, dtype=torch.float64, device=device)
        self.verdict = torch.zeros((), dtype=torch.float64, device=device)
        self.count = 0
        self.forget_rounds()

    def forget_rounds(self) -> None:
        """As if nobody had ever been left out; every worker must call it at the same point."""
        self._in_a_row = [0] * len(self.names)

    @staticmethod
    def sizes(workers: int) -> dict[str, int]:
        """The scalars, and how many numbers each stands for."""
        return {"weight": 1, "left_out": workers}

    @property
    def left_out(self) -> Tensor:
        """Whether this worker was, in its last round, 0-d."""
        return self.verdict != SOUND

    @torch.no_grad()
    def judge(self, size: Tensor, steps: int) -> None:
        """Finds `verdict` on what is about to be sent.

        size: 0-d, its norm: not finite where any number is not. steps: local steps that led to the difference; 0: it is
        none, or there were none, so that nothing can have jumped.
        """
        self.verdict.copy_(self._judge(size.to(self.state), steps))

    @torch.no_grad()
    def weigh(self, buckets: Sequence[Bucket], weight: float = 1.0) -> None:
        """Makes zeros of what the buckets hold, if it is left out, and writes the scalars. weight: if it is not."""
        wipe([part for b in buckets for part in (b.payload, b.values)], self.left_out)
        if weight != 1:
            for flat in (part for b in buckets for part in (b.payload, b.values)):
                flat.mul_(weight)
        self.scalars.set("weight", torch.where(self.left_out, 0.0, weight))
        self.scalars["left_out"].view(-1).zero_()[self.rank].copy_(self.verdict)

    def _judge(self, size: Tensor, steps: int) -> Tensor:
        finite = size.isfinite()
        jumped = torch.zeros_like(finite)
        if steps and self.factor is not None:
            usual, rounds, last_jump = self.state.unbind()
            size = size / steps**0.5
            beyond = finite & (rounds >= WARM_UP) & (usual > 0) & (size > self.factor * usual)
            lasts = beyond & (size <= self.factor * last_jump)
            jumped = beyond & ~lasts
            sound = finite & ~jumped
            mean = usual + (size - usual) / (rounds + 1).clamp(max=MEMORY)
            usual = torch.where(sound, torch.where(lasts, size, mean), usual)
            self.state.copy_(torch.stack([usual, rounds + sound, torch.where(jumped, size, 0.0)]))
        return torch.where(finite, jumped.double() * JUMPED, float(NOT_FINITE))

    def land(self, nobody: float) -> Tensor:
        """What turns the weighted sum or mean that has landed into the weighted mean, 0-d float64: 1 over the weight in
        the same sum or mean; nobody: where that is 0, and so are all numbers."""
        weight = self.scalars["weight"].double()
        return torch.where(weight == 0, nobody, 1 / weight)

    def hear(self, verdicts: Sequence[float], number: int, workers: int | None = None) -> None:
        """The verdicts in round `number`, each in a worker's place, the same on all workers. workers: how many have
        sent, where there are places for more (None: as many).

        DivergedError when all are not finite, or one is left out once more after PATIENCE rounds.
        """
        codes = [round(verdict) for verdict in verdicts]
        self.count = len(codes) - codes.count(SOUND)
        if not self.count:
            self.forget_rounds()
            return
        self._in_a_row = [n + 1 if code else 0 for n, code in zip(self._in_a_row, codes, strict=True)]
        remedy = "lower the learning rate, clip gradients, or look at the data"
        if codes.count(NOT_FINITE) == (workers or len(codes)):
            raise DivergedError(f"what every worker has sent in round {number} is not finite: {remedy}")
        for name, code, rounds in zip(self.names, codes, self._in_a_row, strict=True):
            text = f"{name} is left out of the mean of round {number}: what it has sent is {REASONS.get(code)}"
            if rounds > PATIENCE:
                raise DivergedError(f"{text}, as in the {rounds - 1} rounds before; {remedy}")
            if code and self.tells:
                warnings.warn(f"{text}; it starts anew", stacklevel=2)


def size_of(buckets: Sequence[Bucket]) -> Tensor:
    """The norm of the payloads, 0-d; not finite where they or the buffers' values are not."""
    size = norm([b.payload for b in buckets]).double()
    for bucket in buckets:
        size = size + 0 * bucket.values.sum().to(size)
    return size


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all numbers are, 0-d, on the first one's device. DTensors: those that lie here."""
    ends = [torch.stack(torch.aminmax(t)).double() for t in (local_shard(t.detach()) for t in tensors) if t.numel()]
    return torch.stack([e.to(ends[0].device) for e in ends]).isfinite().all() if ends else torch.tensor(True)


def forget(optimizer: torch.optim.Optimizer) -> LeftOut:
    """For a method's `on_left_out`: what an optimiser has gathered becomes zero, where this worker was left out.

    So an Adam begins anew, while its NaN moments would spoil the next rounds, too. For optimisers whose state begins at
    zero, as torch's do (Adagrad's may begin above). The count of steps begins anew, too, where it lies on the device,
    as with fused=True.
    """

    def reset(left_out: Tensor) -> None:
        inner = getattr(optimizer, "optim", optimizer)  # ZeRO-1's own part
        held = [v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)]
        numbers = [local_shard(v) for v in held if v.is_floating_point()]
        wipe([v for v in numbers if v.device == left_out.device or not read_blocks(left_out)], left_out)

    return reset
