"""CO2 under Nesterov's outer momentum, a round late or blocking: DiLoCo's outer step is a case of it.

It runs in the plain formulas, segment after segment: slower than CO2's own pass, with one more copy of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Unpack

from torch import Tensor

from .. import outer
from ..adaptive.config import AdaptiveConfig, largest_outer_lr
from ..adaptive.merging import MergingBoundary, restart, with_merge
from ..assembly import CO2, CO2Config, Options, of_kind
from ..config import require
from ..errors import UserError


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


@dataclass(frozen=True)
class DelayedConfig:
    """What is otherwise than in CO2."""

    nesterov: bool = False
    """Nesterov's outer momentum, as DiLoCo's, for a copy of the parameters more."""

    def check(self, co2: AdaptiveConfig) -> None:
        """Refuses what of CO2's settings does not go with these, and what may diverge."""
        if co2.merge != "outer" or not (co2.at_boundary or co2.delay == 0):
            raise UserError(
                f"merge={co2.merge!r}, delay={co2.delay!r}: the delayed methods restart from the outer iterate at a "
                "boundary; leave both out, or set delay 0"
            )
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
        limit = "a sum below 1"
        if self.nesterov:
            limit = "(1 - outer_momentum^2) outer_lr + (outer_momentum outer_lr)^2 < 1 - outer_momentum (Nesterov)"
        raise UserError(co2.unstable("set gap='elementwise'", limit))


class DelayedCO2(CO2):
    """CO2 with what `delayed` says. The arguments: see CO2."""

    name = "DelayedCO2"

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        delayed: DelayedConfig | None = None,
        **options: Unpack[Options],
    ):
        self.delayed = of_kind(delayed, DelayedConfig, "delayed")
        super().__init__(params, config, **options)

    def make_boundaries(self) -> list[MergingBoundary]:
        boundaries = super().make_boundaries()
        if not self.delayed.nesterov:
            return boundaries
        flats = zip(self.buckets, self._x, self._m, self.state.new("outer_step"), strict=True)
        return [_NesterovBoundary(self, b.params, b.payload, x, m, step) for b, x, m, step in flats if b.numel]

    def last_step_norm(self) -> Tensor:
        if not self.delayed.nesterov:
            return super().last_step_norm()
        return self._last_lr * outer.norm([step for step in self.state["outer_step"] if len(step)])

    def check_settings(self) -> None:
        self.delayed.check(self.config)

    def signature(self) -> Any:
        return asdict(self.config), asdict(self.delayed)


class _NesterovBoundary(MergingBoundary):
    """step: the last outer step over -alpha, flat as d, x and m. method: whose outer momentum is Nesterov's beta, for
    m is as long as its Delta."""

    def __init__(self, method: DelayedCO2, params: list[Tensor], d: Tensor, x: Tensor, m: Tensor, step: Tensor):
        super().__init__(params, d, x, m)
        self._method, self._step = method, step

    def update(self, rule: outer.Rule) -> Tensor:
        """merging.update with another step 7."""
        merged, seen = with_merge(rule), []
        steps = self._step.split([len(s.d) for s in self.segments])
        for s, step in zip(self.segments, steps, strict=True):
            own_difference = outer.difference(s) if merged.sends else s.d  # 3
            moved, scale = -rule.last_alpha * step, rule.scale
            delta = (scale.to(s.d) if isinstance(scale, Tensor) else scale) * s.d
            gap = outer.staleness_gap(s.m, rule, moved)
            m, numbers = outer.new_momentum(s.m, delta, rule, moved)  # 4, 5, 6
            s.m.copy_(m)
            step.copy_(nesterov(m, delta if gap is None else delta / gap, self._method.config.outer_momentum))
            s.x.copy_(outer.outer_step(s.x, step, rule.alpha))  # 7
            s.d.copy_(own_difference)
            restart(s, merged)
            seen.append(numbers)
        return outer.all_seen(seen)
