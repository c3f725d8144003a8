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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import outer
from .fast import PASSES, Pass, WireConfig, make_boundary
from .flat import is_dtensor
from .rounds import Background, Landing, Link, LocalMethod, UserError


@dataclass(frozen=True)
class CO2Config:
    """The settings of the outer optimiser; defaults as in the example that the authors released."""

    tau: int | Literal["auto"] = 48
    """Local steps per round; the paper searched {1, 3, 6, 12, 24, 48, 96, 192}. auto: chosen from measured times, the
    fewest that hide the all-reduce, and again when those change."""
    tau_max: int = 192
    """With tau auto: never more local steps than this."""
    outer_lr: float = 1.0
    """alpha: the share of the momentum that the outer step takes."""
    outer_momentum: float = 0.5
    """beta: how much of the outer momentum survives a round."""
    gap: outer.Gap = "elementwise"
    """The staleness gap penalty Lambda: one of elementwise, norm, inner, none."""
    clip: float | None = 1.0
    """phi: clips each element of the outer momentum to [-phi, phi]; None for no clipping."""
    merge: outer.Merge = "outer"
    """What a worker continues from when a mean has landed: the outer iterate (the paper), mix, between it and the own
    parameters, or keep, the outer iterate and the own progress since the sending (for a copy of the parameters)."""
    mix: float = 0.5
    """Of merge mix: the share of the outer iterate; 1 for it alone."""
    delay: int | Literal["boundary", "auto"] = "boundary"
    """When a mean is merged: at the boundary a round after the sending (the paper); so many local steps after the
    sending, waiting for it where need be; or auto: as soon as it is there, by the next sending at the latest, on every
    worker by itself. 0 waits for it at once: nothing is hidden, nor stale."""
    sync_steps: int = 0
    """So many first steps after each of which the workers' parameters are averaged, everyone waiting."""
    allow_unstable: bool = False
    """Accept outer_momentum + outer_lr >= 1 without a gap penalty, to show that it diverges."""
    wire: WireConfig = field(default_factory=WireConfig)
    """How the pseudo-gradient crosses the network. The other methods always send float32."""
    update: Pass = "fast"
    """How steps 3 to 7 are computed: fast (one pass over memory), plain (core/outer.py's own), or compiled (that, by
    torch.compile)."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"{name}={getattr(self, name)!r}: {remedy}")

        is_int = isinstance(self.tau, int) and not isinstance(self.tau, bool) and self.tau >= 1
        require(is_int or self.tau == "auto", "tau", "give a whole number of local steps, 1 or more, or auto")
        require(self.tau_max >= 1, "tau_max", "give a whole number of local steps, 1 or more")
        require(0 < self.outer_lr < float("inf"), "outer_lr", "give a finite number above 0; 1.0 is usual")
        require(0 <= self.outer_momentum < 1, "outer_momentum", "give a number in [0, 1)")
        require(self.gap in outer.GAPS, "gap", f"choose one of {', '.join(outer.GAPS)}")
        require(self.clip is None or self.clip > 0, "clip", "give a number above 0, or None for no clipping")
        require(self.merge in outer.MERGES, "merge", f"choose one of {', '.join(outer.MERGES)}")
        require(0 < self.mix <= 1, "mix", "give a number in (0, 1]; 1 continues from the outer iterate alone")
        whole = isinstance(self.sync_steps, int) and self.sync_steps >= 0
        require(whole, "sync_steps", "give a whole number of steps, 0 or more")
        self._check_delay(require)
        require(isinstance(self.wire, WireConfig), "wire", "give a WireConfig, such as core.WireConfig('int8')")
        require(self.update in PASSES, "update", f"choose one of {', '.join(PASSES)}")

    @classmethod
    def recommended(cls, workers: int, steps: int | None = None) -> CO2Config:
        """What our measurements support in place of the paper's settings (results/RESULTS.md, "Hidden, and the loss").

        A mean is merged when it lands, the own progress since the sending is kept, for a copy of the parameters, and
        there is no penalty, for little is stale then. merge="mix" saves the copy and comes close.

        workers: their number; outer momentum costs most with few of them: 0 up to 16, beyond that what the authors'
        release sets, 0.2 up to 32, 0.5 up to 64, 0.6 above. steps: of the whole run, if known, so that it has twenty
        rounds at least. tau set by dataclasses.replace holds.
        """
        beta = next(b for limit, b in ((16, 0.0), (32, 0.2), (64, 0.5), (float("inf"), 0.6)) if workers <= limit)
        tau_max = 192 if steps is None else min(192, max(1, steps // 20))
        return cls("auto", tau_max, outer_momentum=beta, gap="none", merge="keep", delay="auto")

    def _check_delay(self, require: Callable[[bool, str, str], None]) -> None:
        number = self.delay if isinstance(self.delay, int) and not isinstance(self.delay, bool) else None
        known = number is not None or self.delay in ("boundary", "auto")
        require(known and (number or 0) >= 0, "delay", "give boundary, auto, or a whole number of local steps")
        if number is not None:
            require(self.tau != "auto", "delay", "with tau auto give delay boundary or auto")
            require(number <= int(self.tau), "delay", f"give at most tau={self.tau} local steps")
        require(number != 0 or self.gap == "none", "delay", f"nothing is stale then: set gap none, not {self.gap}")
        thrown = "merge outer would throw the steps since the sending away: set merge mix or keep"
        require(self.merge != "outer" or self.at_boundary or number == 0, "delay", thrown)
        from_outer = "gap inner measures from the outer iterate: set merge outer, or another gap"
        require(self.merge == "outer" or self.gap != "inner", "merge", from_outer)

    @property
    def tau_margin(self) -> float:
        """Of tau auto: by how much the local steps should outlast the all-reduce. Where means are merged on arrival so
        much that they come in the first two fifths of a round: fresh means are worth more than frequent ones, to there
        (results/RESULTS.md, "Hidden, and the loss").
        """
        return 0.25 if self.at_boundary else 1.5

    @property
    def at_boundary(self) -> bool:
        """Whether a mean is merged at the boundary after the one at which it was sent, in the paper's order."""
        return self.delay == "boundary" or (self.delay != "auto" and self.delay == self.tau)


Schedule = Callable[[int], Mapping[str, Any]]


class CO2(LocalMethod):
    """Hides the all-reduce of a data-parallel training loop behind tau local steps.

    params: model.parameters() or any list of tensors, on this worker's device; every worker must pass the same shapes.
    config: see CO2Config. buffers: BatchNorm statistics, to be averaged along; leave them out to keep them local.
    model_params: of float32 masters, see LocalMethod. group: the workers (None: all). timeout: seconds until a
    missing worker is an error. link: an emulated slow one. schedule: number of a round, from 0 -> what of tau,
    outer_lr, outer_momentum and clip changes from then on; the same on all workers, which is checked in every round.

    After n * tau calls of step() the parameters of every worker equal x_{n,0}, bit for bit. Where workers synchronise
    gradients every step inside nodes, or hold shards of one model, ShardedCO2 (core/fast/sharded.py) is the class.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        *,
        buffers: Iterable[Tensor] = (),
        model_params: Iterable[Tensor] = (),
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
        schedule: Schedule | None = None,
    ):
        self.config = c = scheduled(config or CO2Config(), schedule, 0)
        self.schedule = schedule
        self.check_settings()
        params = list(params)
        if any(is_dtensor(p) for p in params):
            raise UserError("DTensors as parameters need ShardedCO2 with mesh=: their norms are of the whole model")
        c.wire.check(params, group)
        super().__init__(
            params,
            c.tau,
            tau_max=c.tau_max,
            tau_margin=c.tau_margin,
            sync_steps=c.sync_steps,
            buffers=buffers,
            model_params=model_params,
            group=group,
            timeout=timeout,
            link=link,
            scalars={"first_step": 1} if c.gap == "inner" else None,
        )
        self._x = self.new_state("outer_iterate", of_params=True)
        self._m = self.new_state("outer_momentum")
        sent = self.new_state("sent", of_params=True, own=True) if c.merge == "keep" else [None] * len(self.buckets)
        self.replicas = self.starts = self._x
        self.starts_roughly = c.merge != "outer"
        if c.wire.format != "float32":
            self.reducer = c.wire.reducer(self.buckets, self.scalars, self.background.rank, self.background.world_size)
        self._boundaries = [
            make_boundary(c.update, b.params, b.payload, x, m, y, merge=c.merge)
            for b, x, m, y in zip(self.buckets, self._x, self._m, sent, strict=True)
            if b.numel
        ]
        self._numel = sum(b.numel for b in self.buckets)
        # x_{t,0} - x_{t-1,0} = -_last_lr * m: alpha, or 0 where the last boundary took no outer step
        self._last_lr = 0.0
        self._m_norm = torch.zeros((), dtype=torch.float64, device=self.background.device)
        self._first_step = self._m_norm.clone()  # ||x_{t,1} - x_{t,0}|| of the round that runs
        self._inner_scale = self._m_norm.clone()  # the largest mean first step of the rounds that landed

    def close_round(self, *, finished: bool) -> bool:
        """Steps 2 to 7. In the first round nothing has landed: x_{1,0} = x_{0,0}.

        One buffer serves both directions: the pass takes the mean out of it and puts in what this worker sends, so the
        launch comes last. A landing is empty, or the last one, only in finish().
        """
        if self.config.merge == "keep" or not self.config.at_boundary:
            return self._send_and_merge_later(finished=finished)
        if finished and not self.local_steps:
            self._restart()  # a mixed restart is no local step
        landing = self.receive(finished=finished) if self.background.in_flight else None  # 2
        for bucket in self.buckets if landing is None else []:
            bucket.payload.zero_()  # a remainder from before a checkpoint was loaded may not be finite
        if landing and landing.empty:
            self._last_lr = 0.0
            return True
        rule = self.rule() if landing else outer.NOTHING_LANDED  # 4, what of it needs the whole model
        merge = "outer" if finished else self.config.merge
        self._pass(replace(rule, merge=merge, share=self.config.mix), moves=landing is not None)  # 3 to 7
        if landing and landing.last:
            return True
        self.send(finished=finished)  # 3, the launch
        return False

    def _send_and_merge_later(self, *, finished: bool) -> bool:
        """A boundary at which the worker goes on from where it is: step 3. What is in flight is merged before."""
        landing = self.merge(finished=finished) if self.background.in_flight else None
        if landing and landing.last:
            return True
        if finished and not self.local_steps:
            self._restart()  # what an earlier mean was mixed with is no local step
        for boundary in self._boundaries:
            boundary.take()
        self.send(finished=finished)
        return self.config.delay == 0 and self.merge(finished=finished).last

    def merge(self, *, finished: bool = False) -> Landing:
        """Steps 2 and 4 to 7, and the merge. In finish() no step follows, so nothing is mixed."""
        landing = self.receive(finished=finished)
        if landing.empty:
            self._last_lr = 0.0
        else:
            share = 0.0 if finished and self.config.delay != 0 else self.config.mix
            self._pass(replace(self.rule(), sends=False, merge=self.config.merge, share=share), moves=True)
        if landing.last:
            self._restart()
        return landing

    def _pass(self, rule: outer.Rule, *, moves: bool) -> None:
        """outer.update, segment by segment."""
        seen = outer.all_seen([b.run(rule) for b in self._boundaries])
        self._last_lr = float(rule.alpha)
        if moves:
            self.note(seen)

    def _restart(self) -> None:
        for boundary in self._boundaries:
            boundary.restart()

    def rule(self) -> outer.Rule:
        """The numbers of steps 4 to 7 for what has landed."""
        c, scale = self.config, self.reducer.scale
        delta_norm = scale * outer.norm([b.payload for b in self.buckets])
        self.stats.pseudo_gradient_norm = delta_norm
        rms = gap = None
        if c.gap == "elementwise":
            rms = delta_norm / self._numel**0.5
        elif c.gap == "norm":
            gap = outer.gap_scalar(self.last_step_norm(), delta_norm)
        elif c.gap == "inner":  # with the largest first step so far: a decaying learning rate does not shrink it
            torch.maximum(self._inner_scale, self.scalars["first_step"].double(), out=self._inner_scale)
            gap = outer.gap_scalar(self.last_step_norm(), self.tau * self._inner_scale)
        return outer.Rule(c.outer_momentum, c.outer_lr, self._last_lr, c.clip, scale, rms, gap)

    def last_step_norm(self) -> Tensor:
        """||x_{t,0} - x_{t-1,0}||, 0-d."""
        return self._last_lr * self._m_norm

    def note(self, seen: Tensor) -> None:
        """Statistics of the round from [4] sums over the model (outer.new_momentum)."""
        self._m_norm = seen[0].sqrt()
        self.stats.momentum_norm = self._m_norm
        self.stats.gap_mean, self.stats.gap_max = seen[1] / self._numel, seen[2]
        self.stats.clipped_share = seen[3] / self._numel

    def step(self) -> bool:
        """Call after every optimiser step. True when a round closed: then, with merge outer, all workers hold
        x_{t+1,0}."""
        if self.config.gap == "inner" and self.local_steps == 0:
            self._first_step = self._displacement()
        return super().step()

    def arrives(self) -> bool:
        return arrives(self.config, self.local_steps, self.background)

    def send(self, *, finished: bool) -> None:
        if self.config.gap == "inner":
            self.scalars.set("first_step", self._first_step)
        super().send(finished=finished)

    def check_settings(self) -> None:
        check_stable(self.config)

    @torch.no_grad()
    def _start_from_params(self) -> None:
        super()._start_from_params()
        self._last_lr = 0.0
        self._m_norm, self._first_step = torch.zeros_like(self._m_norm), torch.zeros_like(self._m_norm)
        self._inner_scale.zero_()

    def signature(self) -> Any:
        return asdict(self.config)

    def settings(self) -> Any:
        return settings_of(self.config, self.tau)

    def begin_round(self, number: int) -> None:
        if self.schedule:
            self.config = c = scheduled(self.config, self.schedule, number)
            self.check_settings()
            self.tau = self.tau if c.tau == "auto" else c.tau

    @torch.no_grad()
    def _displacement(self) -> Tensor:
        """||x_{t,1} - x_{t,0}||, 0-d, one tensor at a time."""
        norms = []
        for bucket, flat in zip(self.buckets, self._x, strict=True):
            for x, p in zip(outer.views(flat, bucket.params), bucket.params, strict=True):
                norms += [outer.norm([p.to(x.dtype) - x.to(p.dtype)])] if p.numel() else []
        return outer.norm(norms).double()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "inner_scale": self._inner_scale.clone(),
            "first_step": self._first_step.clone(),
            "last_lr": self._last_lr,
            "m_norm": self._m_norm.clone(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._inner_scale.copy_(state["inner_scale"])
        self._first_step = state["first_step"].to(self._m_norm)
        self._last_lr = state["last_lr"]
        self._m_norm = state["m_norm"].to(self._m_norm)


SCHEDULED = ("tau", "outer_lr", "outer_momentum", "clip")


def scheduled(c: CO2Config, schedule: Schedule | None, number: int) -> CO2Config:
    """The settings of round `number`."""
    changes = dict(schedule(number)) if schedule else {}
    if unknown := changes.keys() - set(SCHEDULED):
        raise UserError(f"the schedule changes {', '.join(sorted(unknown))}: only {', '.join(SCHEDULED)} may change")
    if "tau" in changes and "auto" in (c.tau, changes["tau"]):
        raise UserError(f"the schedule gives tau={changes['tau']!r} while tau is {c.tau!r}: give numbers, or only auto")
    return replace(c, **changes)


def settings_of(c: CO2Config, tau: int) -> dict[str, Any]:
    """What may change from round to round."""
    values = {name: getattr(c, name) for name in SCHEDULED} | {"tau": tau}
    return {name: value if value is None else float(value) for name, value in values.items()}  # 1 prints as 1.0


def arrives(c: CO2Config, local_steps: int, background: Background) -> bool:
    """Whether what is in flight is to be merged after so many local steps."""
    if c.delay == "auto":
        return background.landed()
    return not c.at_boundary and local_steps == c.delay


def check_stable(c: CO2Config) -> None:
    """Refuses a delayed outer step without a penalty that may diverge, and says why.

    Only the paper's order delays the outer step by a round. Else a difference is taken from the outer iterate as the
    means before have made it; and with merge keep the mean over the workers is SlowMo's, undelayed.
    """
    if c.merge == "keep" or not c.at_boundary:
        return
    if c.gap == "none" and not c.allow_unstable and not outer.settles(c.outer_lr, c.outer_momentum):
        raise UserError(unstable(c, "set gap='elementwise'", "a sum below 1"))


def unstable(c: CO2Config, remedy: str, limit: str) -> str:
    """Why a delayed outer step without a penalty may diverge with these settings."""
    return (
        f"outer_momentum={c.outer_momentum} + outer_lr={c.outer_lr} = {c.outer_lr + c.outer_momentum:g} with "
        "gap='none' is unstable: a step delayed by one round settles only while beta + alpha rho / Lambda < 1, where "
        f"rho nears 1 in directions that tau local steps solve; {remedy}, or lower the two to {limit} "
        "(allow_unstable=True runs it regardless)"
    )
