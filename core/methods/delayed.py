"""Other ways to live with a mean that arrives one round late, or without the delay: comparators of CO2's penalty.

They are CO2 with another pseudo-gradient, another restart, another outer momentum, or no delay. All run in the plain
formulas, segment after segment: slower than CO2's own pass, and with more memory where more state is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from .. import outer
from ..adaptive.config import AdaptiveConfig
from ..adaptive.merging import MergingBoundary, largest_outer_lr
from ..assembly import CO2, CO2Config, Options
from ..config import LARGE, require
from ..errors import UserError
from ..groups import all_reduce
from ..robust.guard import Guard
from .registry import Entry, Settings, of_kind

Policy = Literal["penalty", "eager", "taylor"]
POLICIES: tuple[Policy, ...] = ("penalty", "eager", "taylor")


# -- formulas -----------------------------------------------------------------------------------------------


def eager(delta: Tensor, own: Tensor, last_own: Tensor, share: float) -> Tensor:
    """The worker's own newest difference stands in for its older one in the mean that arrives late:
    Delta~^i_t = mean_{t-1} + (d^i_t - d^i_{t-1}) / G, with d^i_t = x^i_{t,0} - x^i_{t,tau}.

    delta: mean_{t-1}. own, last_own: d^i_t and d^i_{t-1}. share: 1 / G, one over the number of workers. The own parts
    cancel from round to round, so that with beta = 0 and no clipping the workers' outer iterates differ by
    alpha d^i_t / G and never drift apart; a clipped momentum may let them.
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


def nesterov(m: Tensor, new: Tensor, beta: float) -> Tensor:
    """What takes m_t's place in step 7 under Nesterov momentum: beta m_t + Delta_t / Lambda_t.

    new: Delta_t / Lambda_t, which m_t holds already. As in torch.optim.SGD, after Sutskever et al. (2013); DiLoCo
    (Douillard et al. 2023) takes its outer step so. m_t is clipped, what is added to it is not.
    """
    return beta * m + new


def nesterov_settles(alpha: float, beta: float) -> bool:
    """outer.settles under Nesterov momentum: (1 + beta) x_{t-1} - beta x_{t-2} stands in place of x_{t-1}, and Jury's
    criterion at rho = 1 is (1 - beta^2) alpha + beta^2 alpha^2 < 1 - beta."""
    return (1 - beta**2) * alpha + (beta * alpha) ** 2 < 1 - beta


def clip_norm_factor(m_norm: Tensor, phi: float) -> Tensor:
    """Step 6 by norm: the factor min(1, phi / ||m_t||), 0-d, that brings ||m_t|| down to phi at most."""
    return (phi / (m_norm + outer.EPS)).clamp(max=1.0)


# -- the method ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DelayedConfig:
    """What is done about the delay, in place of CO2's penalty or beside it."""

    policy: Policy = "penalty"
    """penalty: co2.gap (the paper). In its place, with co2.gap none: eager, the own newest part enters at once; taylor,
    delay compensation."""
    taylor: float = 0.5
    """Of policy taylor: lambda, the strength of the correction; 0 for none."""
    nesterov: bool = False
    """Nesterov's outer momentum, as DiLoCo's, for a copy of the parameters more."""
    clip_by: Literal["element", "norm"] = "element"
    """Clip each element to [-phi, phi] (the paper), or the whole momentum to the norm phi."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"delayed {name}={getattr(self, name)!r}: {remedy}")

        require(self.policy in POLICIES, "policy", f"choose one of {', '.join(POLICIES)}")
        require(0 <= self.taylor < LARGE, "taylor", "give a finite number, 0 or more, as 0.5 is usual")
        require(self.clip_by in ("element", "norm"), "clip_by", "choose element or norm")

    def check(self, co2: AdaptiveConfig) -> None:
        """Refuses what of CO2's settings does not go with these, and what may diverge.

        No policy changes the limit that outer.settles gives: where tau local steps solve a direction (rho = 1)
        Taylor's term is of third order, so that beyond the limit a cycle replaces the minimum; and an own part of
        1 / G leaves beta + (1 - 1 / G) alpha < 1, which tends to the same with the number of workers G, unknown here.
        """
        if co2.steps != "even":
            raise UserError(f"steps={co2.steps!r}: the delayed methods know no weights by steps; leave it out")
        if self.policy != "penalty" and co2.gap != "none":
            raise UserError(f"gap={co2.gap!r}: policy {self.policy} takes the penalty's place; set gap none")
        if co2.merge != "outer" or not (co2.at_boundary or co2.delay == 0):
            raise UserError(
                f"merge={co2.merge!r}, delay={co2.delay!r}: the delayed methods restart from the outer iterate at a "
                "boundary; leave both out, or set delay 0"
            )
        if co2.delay == 0 and self.policy != "penalty":
            raise UserError(f"delayed policy={self.policy!r}: with delay 0 nothing is to be corrected; set penalty")
        settles = nesterov_settles if self.nesterov else outer.settles
        if co2.gap != "none" or co2.allow_unstable:
            return
        if co2.delay == 0:  # Jury's criterion, blocking: Nesterov's has 1 + 2 beta in the denominator
            beta = co2.outer_momentum
            most = largest_outer_lr(co2.merge, beta, 0.0) / (1 + 2 * beta * self.nesterov)
            blocking = f"with delay=0 and outer_momentum={beta} it diverges from {most:.3g} on; lower one of the two"
            require(co2, co2.outer_lr < most, "outer_lr", f"{blocking} (allow_unstable=True runs it regardless)")
            return
        if settles(co2.outer_lr, co2.outer_momentum):
            return
        remedy = "set gap='elementwise'" if self.policy == "penalty" else "set policy='penalty' and gap='elementwise'"
        limit = "a sum below 1"
        if self.nesterov:
            limit = "(1 - outer_momentum^2) outer_lr + (outer_momentum outer_lr)^2 < 1 - outer_momentum (Nesterov)"
        raise UserError(co2.unstable(remedy, limit))


class DelayedCO2(CO2):
    """CO2 with what `delayed` says. The arguments: see CO2.

    With policy eager the workers' parameters differ by the own part until finish().
    """

    name = "DelayedCO2"

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        delayed: DelayedConfig | None = None,
        **options: Unpack[Options],
    ):
        self.delayed = d = of_kind(delayed, DelayedConfig, "delayed")
        super().__init__(params, config, **options)
        if d.policy == "eager":  # the workers' differ
            self.replicas, self.starts_roughly = [], True
        none = [None] * len(self.buckets)
        self._steps = self.state.new("outer_step") if d.nesterov else none
        own = self.state.new("own_difference") if d.policy == "eager" else none
        flats = zip(self.buckets, self._x, self._m, self._steps, own, strict=True)
        self._delayed = [
            _DelayedBoundary(b.params, b.payload, x, m, d, self.flight.world_size, step, last)
            for b, x, m, step, last in flats
            if b.numel
        ]

    def close_round(self, *, finished: bool) -> bool:
        if self.config.delay == 0:
            return self._close_at_once(finished=finished)
        landing = self.land(finished=finished) if self.flight.in_flight else None
        if landing and landing.empty:
            self._last_lr = 0.0
        else:
            self._start_anew_before()
            self._outer_step(self._rule_now(landing is not None))
        if landing and landing.last:
            if self.delayed.policy == "eager":
                self._unite()
            return True
        self.send(finished=finished)
        return False

    def _start_anew_before(self) -> None:
        """With policy eager the own difference is used before it is sent, and so is judged before."""
        if self.delayed.policy == "eager":
            size = outer.norm([b.own_norm() for b in self._delayed])
            for buffer in (b for bucket in self._own_buffers for b in bucket):
                size = size + 0 * buffer.sum().to(size)
            where = self.rider(Guard).judge_early(size, self.local_steps)
            for boundary in self._delayed:
                boundary.restart(where)

    def _rule_now(self, landed: bool) -> outer.Rule:
        if landed:
            return self.rule()
        if self.delayed.policy == "eager" and self.local_steps:  # no mean yet, but its own part is there
            for bucket in self.buckets:
                bucket.payload.zero_()
            return self.rule()
        return outer.NOTHING_LANDED

    def _close_at_once(self, *, finished: bool) -> bool:
        """Without delay: sends the difference, waits for its mean, and takes the outer step."""
        for boundary in self._delayed:
            boundary.take()
        self.send(finished=finished)
        landing = self.land(finished=finished)
        if landing.empty:
            self._last_lr = 0.0
        else:
            self._outer_step(self.rule())
        return landing.last

    def _outer_step(self, rule: outer.Rule) -> None:
        """Steps 4 to 6 of the whole model, then clipping by norm, then step 7 with 3."""
        moves = rule is not outer.NOTHING_LANDED
        if moves:
            by_norm = self.delayed.clip_by == "norm" and rule.phi is not None
            momentum_rule = replace(rule, phi=None) if by_norm else rule
            self.note(outer.all_seen([b.momentum(momentum_rule) for b in self._delayed]))
            if by_norm:
                self._clip_norm(rule.phi)
        for boundary in self._delayed:
            boundary.advance(rule, self.config.outer_momentum)
        self._last_lr = float(rule.alpha)

    def _clip_norm(self, phi: float | None) -> None:
        assert phi is not None
        factor = clip_norm_factor(self._m_norm, phi)
        for m in self._m:
            m.mul_(factor.to(m))
        self._m_norm = self._m_norm * factor
        self.stats.momentum_norm = self._m_norm
        self.stats.clipped_share = (factor < 1).float()

    def last_step_norm(self) -> Tensor:
        if not self.delayed.nesterov:
            return super().last_step_norm()
        return self._last_lr * outer.norm([step for step in self._steps if step is not None])

    @torch.no_grad()
    def _unite(self) -> None:
        """Workers with own parts all take the mean of their outer iterates and momenta, which follows the same rule."""
        for flats in (self._x, self._m):
            for bucket, flat in zip(self.buckets, flats, strict=True):
                bucket.payload.copy_(flat)  # a failure leaves partial sums only there
            if self.flight.group is not None:
                reason = _sum([b.payload for b in self.buckets], self.flight.group)
                if reason:  # raised out here, where no traceback keeps the collectives, and so their connections
                    raise self.flight._failure(reason)
            for bucket, flat in zip(self.buckets, flats, strict=True):
                flat.copy_(bucket.payload / self.flight.world_size)
        for boundary in self._delayed:
            boundary.restart()

    def check_settings(self) -> None:
        self.delayed.check(self.config)

    def signature(self) -> Any:
        return asdict(self.config), asdict(self.delayed)


def _sum(flats: Sequence[Tensor], group: dist.ProcessGroup) -> str:
    """Each of flats becomes its sum over the workers, for which this waits; why it failed, "" where it has not."""
    try:
        for work in all_reduce(flats, group)[0]:
            work.wait()
    except RuntimeError as error:
        return str(error)
    return ""


class _DelayedBoundary(MergingBoundary):
    """Steps 3 to 7 in two passes, between which the whole momentum may be clipped. step: with Nesterov, the last outer
    step over -alpha; last_own: with policy eager, d^i_{t-1}. Both flat, as d, x and m."""

    def __init__(
        self,
        params: Sequence[Tensor],
        d: Tensor,
        x: Tensor,
        m: Tensor,
        delayed: DelayedConfig,
        workers: int,
        step: Tensor | None,
        last_own: Tensor | None,
    ):
        super().__init__(params, d, x, m)
        self.delayed, self.workers, self.step, self.last_own = delayed, workers, step, last_own

    @torch.no_grad()
    def momentum(self, rule: outer.Rule) -> Tensor:
        """Steps 4 to 6, with the policy's pseudo-gradient; what was seen, [4]."""
        seen = []
        for s, where in self._places():
            before = s.m if self.step is None else self.step[where]
            moved = -rule.last_alpha * before
            delta = self._pseudo_gradient(s, where, rule.scale * s.d, moved)
            m, numbers = outer.new_momentum(s.m, delta, rule, moved)
            if self.step is not None:
                gap = outer.staleness_gap(s.m, rule, moved)
                self.step[where] = delta if gap is None else delta / gap
            s.m.copy_(m)
            seen.append(numbers)
        return outer.all_seen(seen)

    def _pseudo_gradient(self, s: outer.Segment, where: slice, delta: Tensor, moved: Tensor) -> Tensor:
        if self.delayed.policy == "taylor":
            return delay_compensated(delta, moved, self.delayed.taylor)
        if self.last_own is None:
            return delta
        own, last_own = outer.difference(s), self.last_own[where].clone()
        self.last_own[where] = own
        return eager(delta, own, last_own, 1 / self.workers)

    @torch.no_grad()
    def own_norm(self) -> Tensor:
        """Of the worker's difference, 0-d."""
        self.locate()
        return outer.norm([outer.difference(s) for s in self.segments])

    @torch.no_grad()
    def advance(self, rule: outer.Rule, beta: float) -> None:
        """Step 3 into d, step 7, and the restart. beta: of Nesterov's step, whose m is as long as its Delta."""
        self.take()
        for s, where in self._places():
            step = s.m
            if self.step is not None and rule is not outer.NOTHING_LANDED:
                step = self.step[where].copy_(nesterov(s.m, self.step[where], beta))
            s.x.copy_(outer.outer_step(s.x, step, rule.alpha))
        self.restart()

    def _places(self) -> Iterator[tuple[outer.Segment, slice]]:
        """The segments, and where in the flat tensors they lie."""
        self.locate()
        start = 0
        for s in self.segments:
            yield s, slice(start, start + len(s.d))
            start += len(s.d)


ENTRY = Entry(
    "delayed",
    lambda given: (given.model, DelayedCO2(given.params, given.co2, given.own, **given.options)),
    "hidden",
    Settings("delayed", DelayedConfig, "Of method delayed: co2 with another way to live with the delay."),
    check=lambda given: given.own.check(given.co2),
    reads_co2=True,
)
