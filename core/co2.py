"""CO2 (arXiv 2401.16265): tau local steps, while the all-reduce of the previous tau steps runs underneath.

    co2 = CO2(model.parameters(), CO2Config(tau=48), buffers=model.buffers())
    for batch in loader:
        loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        co2.step()
    co2.finish()

Algorithm 1, outer step t on worker i; every worker begins it at the same x_{t,0}:

    1  tau local steps of any optimiser lead to x^i_{t,tau}
    2  wait for the all-reduce launched one round ago: Delta = x_{t-1,0} - mean_i x^i_{t-1,tau}
    3  launch the all-reduce of x_{t,0} - x^i_{t,tau}; it runs under the next round
    4  Lambda_t >= 1, the staleness gap, from x_{t,0} - x_{t-1,0}
    5  m_t = beta m_{t-1} + Delta / Lambda_t
    6  m_t <- clip(m_t, -phi, phi)
    7  x_{t+1,0} = x_{t,0} - alpha m_t, from which every worker restarts

What is reduced is the difference x_{t,0} - x_{t,tau}, not the parameters: every worker holds the same x_{t,0}, so
the mean gives the same pseudo-gradient, keeps its precision in 16 bits, and x_{t-1,0} need not be kept, for
x_{t,0} - x_{t-1,0} = -alpha m_{t-1}. Beyond the live parameters that makes three copies: the outer iterate, the
momentum, and the buffer in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from . import outer
from .config import OuterConfig, check_known
from .outer import make_boundary
from .rounds import Pacing, Rounds

Settings = Callable[[int], OuterConfig]  # of a round, from its number alone


class CO2(Rounds):
    """Hides the all-reduce of a data-parallel training loop behind tau local steps.

    params: model.parameters() or any list of tensors, on this worker's device; every worker must pass the same shapes.
    config: see OuterConfig; or a function of a round's number, from 0, that gives that round's. plugged: see Rounds.
    With none of it this is the paper's algorithm; core.CO2 is the same with all that runs on real clusters need.

    After n * tau calls of step() the parameters of every worker equal x_{n,0}, bit for bit.
    """

    name = "CO2"
    differences = needs_whole_norms = True
    numbers = ("_last_lr", "_m_norm")
    reads = OuterConfig  # whose settings it reads

    def __init__(
        self,
        params: Iterable[Tensor],
        config: OuterConfig | Settings | None = None,
        *,
        pacing: Pacing | None = None,
        **plugged: Any,
    ):
        given = config or OuterConfig()
        self._settings: Settings = given if callable(given) else lambda number: given
        self.config = self._settings(0)
        check_known(self.config, self.reads)
        self.check_settings()
        super().__init__(params, pacing=pacing or Pacing(lambda number: self._settings(number).tau), **plugged)
        self._x = self.replicas = self.starts = self.state.new("outer_iterate", of_params=True)
        self._m = self.state.new("outer_momentum")
        self._boundaries = self.make_boundaries()
        self._numel = sum(b.numel for b in self.buckets)
        # x_{t,0} - x_{t-1,0} = -_last_lr * m: alpha, or 0 where the last boundary took no outer step
        self._last_lr = 0.0
        self._m_norm = torch.zeros((), dtype=torch.float64, device=self.flight.device)

    def make_boundaries(self) -> list[outer.Boundary]:
        flats = zip(self.buckets, self._x, self._m, strict=True)
        return [make_boundary(b.params, b.payload, x, m) for b, x, m in flats if b.numel]

    def close_round(self, *, finished: bool) -> bool:
        """Steps 2 to 7. In the first round nothing has landed: x_{1,0} = x_{0,0}.

        One buffer serves both directions: the pass takes the mean out of it and puts in what this worker sends, so the
        launch comes last. A landing is empty, or the last one, only in finish().
        """
        landing = self.land(finished=finished) if self.flight.in_flight else None  # 2
        if landing and landing.empty:
            self._last_lr = 0.0
            return True
        self.pass_over(self.rule() if landing else None)  # 3 to 7
        if landing and landing.last:
            return True
        self.send(finished=finished)  # 3, the launch
        return False

    def rule(self) -> outer.Rule:
        """The numbers of steps 4 to 7 for what has landed: those that need the whole model."""
        c, scale = self.config, self.scale
        delta_norm = self.clock.stats.pseudo_gradient_norm = scale * outer.norm([b.payload for b in self.buckets])
        rms = delta_norm / self._numel**0.5 if c.gap == "elementwise" else None
        beta = outer.carried(c.outer_momentum, self.growth)
        return outer.Rule(beta, c.outer_lr, self._last_lr, c.clip, scale, rms, self.one_gap(delta_norm))

    def one_gap(self, delta_norm: Tensor) -> Tensor | None:
        """Lambda_t where it is one number for the whole model, 0-d. delta_norm: ||Delta||, 0-d."""
        return outer.gap_scalar(self.last_step_norm(), delta_norm) if self.config.gap == "norm" else None

    def last_step_norm(self) -> Tensor:
        """||x_{t,0} - x_{t-1,0}||, 0-d."""
        return self._last_lr * self._m_norm

    def pass_over(self, rule: outer.Rule | None) -> None:
        """outer.update, bucket by bucket. None: nothing has landed, so step 3 and the restart alone."""
        for bucket in self.buckets if rule is None else []:
            bucket.payload.zero_()  # a remainder from before a checkpoint was loaded may not be finite
        ruled = self.continued(rule or outer.NOTHING_LANDED)
        seen = outer.all_seen([b.run(ruled) for b in self._boundaries])
        self._last_lr = float(ruled.alpha)
        if rule:
            self.note(seen)

    def continued(self, rule: outer.Rule) -> outer.Rule:
        """The rule, and what the worker continues from: here x_{t+1,0}."""
        return rule

    def note(self, seen: Tensor) -> None:
        """Statistics of the round from [4] sums over the model (outer.new_momentum)."""
        stats = self.clock.stats
        stats.momentum_norm = self._m_norm = seen[0].sqrt()
        stats.gap_mean, stats.gap_max, stats.clipped_share = seen[1] / self._numel, seen[2], seen[3] / self._numel

    def begin_round(self, number: int) -> None:
        settings = self._settings(number)
        if settings is not self.config:
            self.config = settings
            self.check_settings()

    def check_settings(self) -> None:
        """UserError for settings that do not go together."""
        self.config.check_stable()

    def signature(self) -> Any:
        return asdict(self.config)
