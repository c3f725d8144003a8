"""Leaving a worker out of a round's mean: one whose numbers are not finite, or have jumped far beyond its own before.

One NaN in one worker's contribution would be everybody's after the sum. So each worker judges what it is about to send;
if that is not sound, it sends zeros with weight 0, and starts anew where the others are. Every worker's weight and
verdict travel with the sum: the mean is over those that are left, and all workers learn in the same round who was not.
Nothing here makes the host wait for a GPU.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DivergedError
from ..flat import first_spoilt, local_shard, read_blocks
from ..groups import Stage
from ..outer import norm
from ..rounds import Heard, Rider, Rounds

SOUND, NOT_FINITE, JUMPED, BUFFER = 0, 1, 2, 3  # verdicts; from BUFFER on: the buffer of that number is not finite
REASONS = {NOT_FINITE: "not finite", JUMPED: "out of proportion to its own before"}
WARM_UP = 5  # sound rounds before which nothing counts as a jump
MEMORY = 10  # sound rounds over which the usual size is taken
LEFT_OUT_AGAIN = 3  # rounds in which a worker may be left out again, right after the first one

LeftOut = Callable[[Tensor], None]


class Guard(Rider):
    """Judges what this worker sends, sets its weight in the mean, and hears the verdicts on all.

    The size of a round is the norm of its difference over the square root of its local steps, which neither steps in
    one direction nor a random walk raise much when tau changes. factor: a difference has jumped when that is more than
    so many times its usual size, the mean over the last sound rounds; None: only what is not finite is left out. A
    jump to a level that lasts, as when a learning rate starts anew, is a jump once: the next round near it is sound.
    EDiT (arXiv 2412.07210) also leaves a worker out whose pseudo-gradient's norm is far from its own running mean.

    Attributes: on_left_out, called with a 0-d truth value after a round: whether this worker was left out of its mean,
    for what the inner optimiser has gathered, as `forget` does; on a CPU only where it was. verdict, size, 0-d,
    the last one on this worker, and the norm of what it judged; count, of the workers that were left out of what was
    heard last; state: [3] float64, the usual size, sound rounds so far, and the size of the last jump, for a
    checkpoint.
    """

    name, of_each = "guard", {"left_out": 1}

    def __init__(self, factor: float | None = 10.0):
        self.factor = factor
        self.on_left_out: LeftOut | None = None
        self.count = 0

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        flight = method.flight
        ranks = range(flight.places) if flight.group is None else dist.get_process_group_ranks(flight.group)
        self.names = [f"{method.title} {rank}" for rank in ranks]
        self.state = torch.zeros(3, dtype=torch.float64, device=flight.device)
        self.verdict = torch.zeros((), dtype=torch.float64, device=flight.device)
        self.others_came()

    def pack(self) -> None:
        m = self.method
        self._steps = m.local_steps if m.differences else 0
        if m.sends_later:
            return
        self.judge(norm([b.payload for b in m.buckets]).double(), self._spoilt_buffer())
        m.left_out(self.is_left_out)

    def stages(self) -> Iterator[Stage]:
        """Those that hold parts of one payload are left out together."""
        if self.method.sends_later:
            size = norm([b.payload for b in self.method.buckets]).double()
            square = torch.where(self._spoilt_buffer() > 0, float("nan"), size.square()).view(1)
            yield from self.method.sum_parts(square)
            self.judge(square[0].sqrt())

    def _spoilt_buffer(self) -> Tensor:
        m = self.method
        return first_spoilt([b.values for b in m.buckets], m.first_values, m.buckets)

    def left_out(self, where: Tensor) -> None:
        if self.on_left_out is not None and (read_blocks(where) or where):
            self.on_left_out(where)

    def restart(self) -> None:
        self.state.zero_()

    def others_came(self) -> None:
        """As if no worker had ever been left out."""
        self._in_a_row = [0] * len(self.names)

    def state_dict(self) -> Any:
        return self.state

    @torch.no_grad()
    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        if state is not None:
            self.state.copy_(state)
        if of_others:
            self.method.scalars["left_out"].zero_()

    @property
    def is_left_out(self) -> Tensor:
        """Whether this worker was, in its last round, 0-d."""
        return self.verdict != SOUND

    @torch.no_grad()
    def judge(self, size: Tensor, spoilt: Tensor | None = None) -> None:
        """Finds `verdict` on what the buckets hold, about to be sent, makes zeros of it if it is left out, and writes
        the scalars.

        Args:
            size: The norm of the payloads, 0-d: not finite where any number is not.
            spoilt: The number of a buffer that is not finite, from 1, 0 for none; 0-d.
        """
        size = size.to(self.state)
        number = torch.zeros_like(size) if spoilt is None else spoilt.to(size)
        self.size = torch.where(number > 0, float("nan"), size)
        verdict = self._judge(self.size, self._steps)
        self.verdict.copy_(torch.where((number > 0) & size.isfinite(), number - 1 + BUFFER, verdict))
        scalars = self.method.scalars
        wipe([part for b in self.method.buckets for part in (b.payload, b.values)], self.is_left_out)
        scalars.set("weight", torch.where(self.is_left_out, 0.0, scalars["weight"]))
        scalars["left_out"].view(-1).zero_()[self.method.flight.place].copy_(self.verdict)

    def _judge(self, size: Tensor, steps: int) -> Tensor:
        """steps: local steps that led to the difference; 0: it is none, or there were none, so that it has no jump."""
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

    def hear(self, sums: Mapping[str, Sequence[float]], of: Heard) -> None:
        """The verdicts, each in a worker's place, the same on all workers.

        DivergedError when all are not finite, or one is left out once more after LEFT_OUT_AGAIN rounds.
        """
        codes = [round(verdict * of.workers / of.everybody) for verdict in sums["left_out"]]
        self.count = self.method.stats.left_out = len(codes) - codes.count(SOUND)
        if not self.count:
            self.others_came()
            return
        self._in_a_row = [n + 1 if code else 0 for n, code in zip(self._in_a_row, codes, strict=True)]
        remedy = "lower the learning rate, clip gradients, or look at the data"
        bad = [code for code in codes if code == NOT_FINITE or code >= BUFFER]
        if len(bad) == of.workers:
            what = self._name(bad[0]) if bad[0] >= BUFFER else self._live_buffer()
            what = f"; {what}" if what else ""
            raise DivergedError(f"what every worker has sent in round {of.round} is not finite{what}: {remedy}")
        for name, code, rounds in zip(self.names, codes, self._in_a_row, strict=True):
            if not code:
                continue
            text = f"{name} is left out of the mean of round {of.round}: what it has sent is {self._reason(code)}"
            if rounds > LEFT_OUT_AGAIN:
                raise DivergedError(f"{text}, as in the {rounds - 1} rounds before; {remedy}")
            if self.method.tells:
                warnings.warn(f"{text}; it starts anew", stacklevel=2)

    def _reason(self, code: int) -> str:
        return REASONS.get(code) or f"not finite, {self._name(code)}"

    def _name(self, code: int) -> str:
        """The buffer that a verdict is about: its number among those given, its shape, and where a module has it."""
        m = self.method
        known = {id(b): given for b, given in zip(m.buffers, m.given_buffers.items(), strict=True)}
        number, buffer = known[id([b for bucket in m.buckets for b in bucket.buffers][code - BUFFER])]
        return f"buffer {number}{owner_of(buffer)}, of shape {list(buffer.shape)}"

    def _live_buffer(self) -> str:
        """The first of this worker's buffers that has turned other than finite; "" for none, and where the parameters
        have, too."""
        m = self.method
        if not all(bool(p.isfinite().all()) for p in m.params):
            return ""
        spoilt = int(first_spoilt([b.flat_buffers() for b in m.buckets], m.first_values, m.buckets))
        return self._name(spoilt - 1 + BUFFER) if spoilt else ""


def owner_of(buffer: Tensor) -> str:
    """Which module has it under which name, for a message."""
    for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:
        for name, held in module._buffers.items():
            if held is buffer:
                return f" ({name} of a {type(module).__name__})"
    return ""


def wipe(flats: Sequence[Tensor], where: Tensor) -> None:
    """Makes zeros of all, NaN or not, if `where` holds, a 0-d truth value; a GPU is not waited for."""
    if read_blocks(where):
        for flat in flats:
            flat.masked_fill_(where.to(flat.device), 0)
    elif where and flats:
        torch._foreach_zero_(list(flats))  # pyright: ignore[reportPrivateImportUsage]


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


class Spread(Rider):
    """Notes in RoundStats.disagreement how far the workers' parameters were from their mean, the root of the mean
    square of the distances, when they sent what has landed in the round: mean_i ||x^i - mean||^2.

    What worker i sends is d^i = x - x^i with one x on all, so this is mean_i ||d^i||^2 - ||mean d||^2, weighted as the
    mean is; the guard, which comes before, knows ||d^i||. The difference of two squares: a disagreement below a
    thousandth of the pseudo-gradient's norm is rounding, and over narrow wires what they round is in it. For methods
    that send differences from equal outer iterates at the boundary, as CO2 does; docs/theory.md predicts its size.
    """

    shared = {"squares": 1}

    def __init__(self, guard: Guard):
        self._guard = guard
        self._square: Tensor | None = None  # mean_i ||d^i||^2 of what has landed, 0-d

    @torch.no_grad()
    def pack(self) -> None:
        m = self.method
        if m.differences and not m.sends_later:
            weight = m.scalars["weight"]
            square = self._guard.size.square().to(weight)
            m.scalars.set("squares", torch.where(weight > 0, weight * square, 0.0))

    @torch.no_grad()
    def landed(self) -> None:
        weight, square = self.method.scalars["weight"].double(), self.method.scalars["squares"].double()
        self._square = torch.where(weight > 0, square / weight, 0.0)

    @torch.no_grad()
    def end(self) -> None:
        stats = self.method.stats
        mean = stats.pseudo_gradient_norm
        if self._square is not None and isinstance(mean, Tensor) and not self.method.sends_later:
            stats.disagreement = (self._square - mean.to(self._square).square()).clamp(min=0).sqrt()
        self._square = None
