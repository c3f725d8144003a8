"""CO2 (Sun et al., ICLR 2024, arXiv 2401.16265): tau local steps run while the previous all-reduce is in flight.

    co2 = CO2(model.parameters(), CO2Config(tau=48), buffers=model.buffers())
    for batch in loader:
        loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        co2.step()
    co2.finish()

Algorithm 1, outer step t on worker i. Every worker starts it from the same outer iterate x_{t,0}:

    1  Take tau local steps with any optimizer, from x_{t,0} to x^i_{t,tau}.
    2  Wait for the all-reduce of round t-1: Delta = x_{t-1,0} - mean_i x^i_{t-1,tau}.
    3  Start the all-reduce of x_{t,0} - x^i_{t,tau}. It runs during the next round.
    4  Compute the staleness gap Lambda_t >= 1 from x_{t,0} - x_{t-1,0}.
    5  m_t = beta m_{t-1} + Delta / Lambda_t.
    6  m_t <- clip(m_t, -phi, phi).
    7  x_{t+1,0} = x_{t,0} - alpha m_t. Every worker continues from x_{t+1,0}.

The class runs these steps in one of two orders:

    paper order        1 2 4 5 6 7 3, all at the boundary. An average is one round old when it is used.
    merge on arrival   1 3 at the boundary; 2 4 5 6 7 as soon as the average arrives, during the next local steps. The
                       worker then continues from x_{t+1,0} plus its progress since the boundary (keep_local), or from
                       a mix of x_{t+1,0} and its parameters (interpolate). This order is ours, not the paper's.

Both orders all-reduce the difference x_{t,0} - x^i_{t,tau}, not the parameters. Every worker holds the same x_{t,0}, so
the average gives the same pseudo-gradient, and a difference keeps its precision in 16 bits. x_{t-1,0} need not be kept,
because x_{t,0} - x_{t-1,0} = -alpha m_{t-1}. The memory cost is three copies of the parameters: the outer iterate, the
momentum, and the buffer in flight. keep_local costs a fourth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Unpack

import torch
from torch import Tensor

from . import outer
from .buckets import tensors_of, views
from .build import CommonArgs, build_args
from .config import CO2Config, Schedule, named_rule, scheduled
from .local_update import LocalUpdateMethod, ReduceResult
from .usage import refuse_shards


class CO2(LocalUpdateMethod):
    """Hides the all-reduce of data-parallel training behind tau local steps.

    With merge "restart", the parameters of every worker equal x_{n,0} bit for bit after n * tau calls of step(). If
    workers synchronize gradients in every step inside a node, or hold shards of one model, use ShardedCO2.

    Args:
        params: model.parameters() or any list of tensors on this worker's device. Every worker must pass the same
            shapes.
        config: The settings of the method.
        schedule: From a round's number, counted from 0, to the settings that differ from config in that round. Allowed
            keys: tau, outer_lr, outer_momentum, clip. It must be the same on all workers, which every round checks.
        **args: See CommonArgs.
    """

    _name = "CO2"
    _sends_differences = _needs_global_norms = True
    _numbers = ("_last_alpha", "_momentum_norm")

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        schedule: Schedule | None = None,
        **args: Unpack[CommonArgs],
    ):
        c, params = named_rule(config), tensors_of(params, "parameters")
        refuse_shards(params, args.get("group"))
        c.compression.check(params, args.get("group"))
        self._build(params, c, schedule, **build_args(c, args, schedule))

    def _build(self, params: Iterable[Tensor], c: CO2Config, schedule: Schedule | None, **built: Any) -> None:
        """The rest of the constructor, which elastic_co2 calls with other arguments."""
        self._given, self._schedule = c, schedule
        self.config = c = scheduled(c, schedule, 0)
        c.check_stable()
        super().__init__(params, **built)
        self._starts_near_anchor = c.merge != "restart"
        self._in_paper_order = c.merge != "keep_local" and c.at_boundary
        # x_{t,0} and m_t, one flat tensor per bucket, float32 for 16-bit parameters
        self._x = self._replicated_state = self._anchor_params = self._state.new("outer_iterate", of_params=True)
        self._m = self._state.new("outer_momentum")
        none = [None] * len(self._buckets)
        # keep_local: the parameters when the all-reduce started
        snapshot = self._state.new("snapshot", of_params=True, own=True) if c.merge == "keep_local" else none
        # Nesterov with a gap: the last direction of step 7
        self._direction = self._state.new("outer_step") if c.nesterov and c.gap != "none" else []
        flats = zip(self._buckets, self._x, self._m, snapshot, self._direction or none, strict=True)
        self._outer_steps = [
            outer.make_outer_step(b.params, b.payload, x, m, y, z, nesterov=c.nesterov)
            for b, x, m, y, z in flats
            if b.numel
        ]
        self._numel = sum(b.numel for b in self._buckets)
        self._last_alpha = 0.0  # outer_lr of the last outer step; 0 if the last boundary took none
        self._momentum_norm = torch.zeros((), dtype=torch.float64, device=self._allreduce.device)

    # -- the boundary ------------------------------------------------------------------------------------------

    def _close_round(self, *, finished: bool) -> bool:
        # An average that has not arrived during the round is merged first.
        if not self._in_paper_order and self._allreduce.in_flight and self._merge(finished=finished).is_last:
            return True
        if finished and not self._local_steps:
            self._restart()  # the progress before an earlier merge was sent already, and must not be sent again
        if self._in_paper_order:
            return self._close_in_paper_order(finished=finished)
        for outer_step in self._outer_steps:
            outer_step.take()  # step 3: the payload, and the snapshot
        self._start_allreduce(finished=finished)  # step 3
        return self.config.delay == 0 and self._merge(finished=finished).is_last

    def _close_in_paper_order(self, *, finished: bool) -> bool:
        """Steps 2 to 7. In the first round no average has arrived, so x_{1,0} = x_{0,0}.

        One buffer serves both directions. The outer step reads the sum from it and writes the next difference to it, so
        the all-reduce starts last.
        """
        result = self._wait_allreduce(finished=finished) if self._allreduce.in_flight else None  # step 2
        if result and result.is_empty:
            self._last_alpha = 0.0
            return True
        merge = "restart" if finished else self.config.merge
        self._outer_step(merge, self.config.mix, arrived=result is not None)  # steps 4 to 7, and 3 into the payload
        if result and result.is_last:
            return True
        self._start_allreduce(finished=finished)  # step 3
        return False

    # -- merge on arrival --------------------------------------------------------------------------------------

    def _mid_round(self) -> None:
        """Merges the average in flight if it is due after this local step."""
        if not self._in_paper_order and self._sync_schedule.merges(self):
            self._merge_early(at_boundary=False)

    def _merge(self, *, finished: bool = False) -> ReduceResult:
        """Steps 2 and 4 to 7, then the merge. In finish() no local step follows, so nothing is mixed."""
        c = self.config
        result = self._wait_allreduce(finished=finished)  # step 2
        if not result.is_empty:
            self._outer_step(c.merge, 0.0 if finished and c.delay != 0 else c.mix, takes_difference=False)  # 4 to 7
        if result.is_last:  # nothing is stale any more
            self._restart()
            self._last_alpha = 0.0
        return result

    @torch.inference_mode(False)
    @torch.no_grad()
    def _merge_early(self, *, at_boundary: bool) -> None:
        """Merges the average in flight before the end of the round, or at a boundary before an evaluation."""
        with self._clock.early_merge(self._local_steps):
            self._merge()
            if not at_boundary:
                self._params_updated(at_boundary=False)
        if at_boundary:
            self._params_updated(at_boundary=True)

    def _reach_common_model(self) -> bool:
        """With keep_local on arrival it waits for the average in flight, and merges it."""
        c = self.config
        if c.delay == "auto" and c.merge == "keep_local" and self.at_boundary and self._allreduce.in_flight:
            self._merge_early(at_boundary=True)
        # with interpolate and delay 0 workers differ though nothing is in flight
        return super()._reach_common_model() and not (c.merge == "interpolate" and self._differs())

    # -- the outer step ----------------------------------------------------------------------------------------

    def _outer_step(
        self, merge: outer.Merge, share: float, *, arrived: bool = True, takes_difference: bool = True
    ) -> None:
        """Steps 4 to 7 and the merge with the sums in the payloads, in one pass over memory per bucket.

        Args:
            merge: How the worker continues.
            share: With interpolate, the weight of the outer iterate.
            arrived: Whether there is an average. If not, x and m stay.
            takes_difference: Whether the pass also writes step 3's difference to the payload.
        """
        c, stats = self.config, self._clock.stats
        if arrived:
            delta_norm = stats.pseudo_gradient_norm = self._scale * outer.norm([b.payload for b in self._buckets])
            last_step_norm = self._last_alpha * self._momentum_norm
            if self._direction and c.gap == "norm":
                last_step_norm = self._last_alpha * outer.norm([step for step in self._direction if len(step)])
            rule = outer.Rule(
                beta=outer.carried(c.outer_momentum, self._growth),
                alpha=c.outer_lr,
                last_alpha=self._last_alpha,
                phi=c.clip,
                scale=self._scale,
                c=delta_norm / self._numel**0.5 if c.gap == "elementwise" else None,
                gap=outer.gap_scalar(last_step_norm, delta_norm) if c.gap == "norm" else None,
                nesterov=c.outer_momentum if c.nesterov else None,
                merge=merge,
                share=share,
                takes_difference=takes_difference,
            )
        else:
            for bucket in self._buckets:
                bucket.payload.zero_()  # 0 times a NaN from before a checkpoint was loaded is a NaN
            rule = outer.Rule(nesterov=c.outer_momentum if c.nesterov else None, merge=merge, share=share)
        outer_stats = outer.run_all(self._outer_steps, rule)
        self._last_alpha = float(rule.alpha)
        if arrived:
            stats.momentum_norm = self._momentum_norm = outer_stats[0].sqrt()
            stats.gap_mean, stats.gap_max, stats.clipped_share = (
                outer_stats[1] / self._numel,
                outer_stats[2],
                outer_stats[3] / self._numel,
            )

    def _restart_from_anchor(self, where: Tensor | None = None) -> None:
        if self.config.merge != "restart":  # else every boundary restarts the worker
            self._restart(where)

    def _restart(self, where: Tensor | None = None) -> None:
        for outer_step in self._outer_steps:
            outer_step.restart(where)

    def _differs(self) -> bool:
        """Whether this worker's parameters differ from the outer iterate."""
        flats = zip(self._buckets, self._anchor_params, strict=True)
        pairs = (pair for b, flat in flats for pair in zip(b.params, views(flat, b.params), strict=True))
        return any(not torch.equal(p, x.to(p.dtype)) for p, x in pairs)  # one tensor at a time

    # -- settings ----------------------------------------------------------------------------------------------

    def _begin_round(self, number: int) -> None:
        if self._schedule is not None:
            self.config = scheduled(self._given, self._schedule, number)
            self.config.check_stable()

    def _signature(self) -> Any:
        return asdict(self.config)

    def _settings(self) -> Any:
        return self.config.changing(self._sync_schedule.tau)
