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
from torch.distributed.tensor import DTensor

from . import outer
from .fast import PASSES, Pass, WireConfig, make_boundary
from .rounds import Link, LocalMethod, UserError


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
        require(isinstance(self.wire, WireConfig), "wire", "give a WireConfig, such as core.WireConfig('int8')")
        require(self.update in PASSES, "update", f"choose one of {', '.join(PASSES)}")


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
        if any(isinstance(p, DTensor) for p in params):
            raise UserError("DTensors as parameters need ShardedCO2 with mesh=: their norms are of the whole model")
        c.wire.check(params, group)
        super().__init__(
            params,
            c.tau,
            tau_max=c.tau_max,
            buffers=buffers,
            model_params=model_params,
            group=group,
            timeout=timeout,
            link=link,
            scalars={"first_step": 1} if c.gap == "inner" else None,
        )
        self._x = self.new_state("outer_iterate", of_params=True)
        self._m = self.new_state("outer_momentum")
        self.replicas = self.starts = self._x
        if c.wire.format != "float32":
            self.reducer = c.wire.reducer(self.buckets, self.scalars, self.background.rank, self.background.world_size)
        flats = zip(self.buckets, self._x, self._m, strict=True)
        self._boundaries = [make_boundary(c.update, b.params, b.payload, x, m) for b, x, m in flats if b.numel]
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
        landing = self.receive(finished=finished) if self.background.in_flight else None  # 2
        for bucket in self.buckets if landing is None else []:
            bucket.payload.zero_()  # a remainder from before a checkpoint was loaded may not be finite
        if landing and landing.empty:
            self._last_lr = 0.0
            return True
        rule = self.rule() if landing else outer.NOTHING_LANDED  # 4, what of it needs the whole model
        seen = outer.all_seen([b.run(rule) for b in self._boundaries])  # 3 to 7, segment by segment: outer.update
        self._last_lr = float(rule.alpha)
        if landing:
            self.note(seen)
        if landing and landing.last:
            return True
        self.send(finished=finished)  # 3, the launch
        return False

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
        """Call after every optimiser step. True when a round closed: then all workers hold x_{t+1,0}."""
        if self.config.gap == "inner" and self.local_steps == 0:
            self._first_step = self._displacement()
        return super().step()

    def send(self, *, finished: bool) -> None:
        if self.config.gap == "inner":
            self.scalars.set("first_step", self._first_step)
        super().send(finished=finished)

    def check_settings(self) -> None:
        check_stable(self.config)

    def resync(self) -> None:
        super().resync()
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
    return {name: getattr(c, name) for name in SCHEDULED} | {"tau": tau}


def check_stable(c: CO2Config) -> None:
    """Refuses a delayed outer step without a penalty that may diverge, and says why."""
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
