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

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from . import outer
from .averaging import Landing
from .checks import tensors_of
from .config import SCHEDULED, CO2Config, Schedule, check_stable, scheduled
from .errors import UserError
from .flat import is_dtensor, on_host
from .flight import AllReduce, Link
from .passes import make_boundary
from .rounds import LocalMethod
from .wires.formats import Wire
from .wires.quantized import HELD_BACK, Quantized, nothing_held_back


class Scheduled(LocalMethod):
    """A method with CO2's settings, which may change from round to round; both CO2 and ShardedCO2 are.

    config: those of the round that runs. schedule: see CO2.
    """

    config: CO2Config
    schedule: Schedule | None

    def check_settings(self) -> None:
        """Refuses what of the settings does not go together."""
        check_stable(self.config)

    def settings(self) -> Any:
        values = {name: getattr(self.config, name) for name in SCHEDULED} | {"tau": self.tau}
        return {name: value if value is None else float(value) for name, value in values.items()}  # 1 prints as 1.0

    def begin_round(self, number: int) -> None:
        if self.schedule:
            self.config = c = scheduled(self.config, self.schedule, number)
            self.check_settings()
            if c.tau != "auto":
                self.tau = c.tau
                if self.tuner:  # which then does not choose tau
                    self.tuner.given = self.tuner.tau = c.tau

    def arrives(self) -> bool:
        if self.config.delay == "auto":
            return self.flight.landed() or (self.tuner is not None and self.local_steps == self.tuner.needed)
        return not self.config.at_boundary and self.local_steps == self.config.delay


class CO2(Scheduled):
    """Hides the all-reduce of a data-parallel training loop behind tau local steps.

    params: model.parameters() or any list of tensors, on this worker's device; every worker must pass the same shapes.
    config: see CO2Config. buffers: BatchNorm statistics, to be averaged along; leave them out to keep them local.
    model_params: of float32 masters, see LocalMethod. group: the workers (None: all). timeout: seconds until a
    missing worker is an error. link: an emulated slow one. schedule: number of a round, from 0 -> what of tau,
    outer_lr, outer_momentum and clip changes from then on; the same on all workers, which is checked in every round.

    After n * tau calls of step() the parameters of every worker equal x_{n,0}, bit for bit. Where workers synchronise
    gradients every step inside nodes, or hold shards of one model, ShardedCO2 (core/sharded/sharded.py) is the class.
    """

    differences = True

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
        params = tensors_of(params, "parameters")
        if any(is_dtensor(p) for p in params):
            raise UserError("DTensors as parameters need ShardedCO2 with mesh=: their norms are of the whole model")
        c.wire.check(params, group)
        super().__init__(
            params,
            c.tau,
            tau_max=c.tau_max,
            tau_margin=c.tau_margin,
            wires=c.wire.choices,
            waits=c.delay != "auto",
            sync_steps=c.sync_steps,
            by_speed=c.steps == "by_speed",
            buffers=buffers,
            model_params=model_params,
            group=group,
            timeout=timeout,
            link=link,
            scalars={"first_step": 1} if c.gap == "inner" else None,
        )
        self.guard.factor = c.outlier
        self._x = self.state.new("outer_iterate", of_params=True)
        self._m = self.state.new("outer_momentum")
        sent = self.state.new("sent", of_params=True, own=True) if c.merge == "keep" else [None] * len(self.buckets)
        self.replicas = self.starts = self._x
        self.starts_roughly = c.merge != "outer"
        self._wire: Wire = "float32"
        self._take_wire(next(iter(self.wires)))
        self._boundaries = [
            make_boundary(c.update, b.params, b.payload, x, m, y)
            for b, x, m, y in zip(self.buckets, self._x, self._m, sent, strict=True)
            if b.numel
        ]
        self._numel = sum(b.numel for b in self.buckets)
        # x_{t,0} - x_{t-1,0} = -_last_lr * m: alpha, or 0 where the last boundary took no outer step
        self._last_lr = 0.0
        self._m_norm = torch.zeros((), dtype=torch.float64, device=self.flight.device)
        self._first_step = self._m_norm.clone()  # ||x_{t,1} - x_{t,0}|| of the round that runs
        self._inner_scale = self._m_norm.clone()  # the largest mean first step of the rounds that landed

    @property
    def hides(self) -> bool:
        return self.config.delay != 0

    def close_round(self, *, finished: bool) -> bool:
        """Steps 2 to 7. In the first round nothing has landed: x_{1,0} = x_{0,0}.

        One buffer serves both directions: the pass takes the mean out of it and puts in what this worker sends, so the
        launch comes last. A landing is empty, or the last one, only in finish().
        """
        if self.config.merge == "keep" or not self.config.at_boundary:
            return self._send_and_merge_later(finished=finished)
        if finished and not self.local_steps:
            self._restart()  # a mixed restart is no local step
        landing = self.receive(finished=finished) if self.flight.in_flight else None  # 2
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
        landing = self.merge(finished=finished) if self.flight.in_flight else None
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
        if not landing.empty:
            share = 0.0 if finished and self.config.delay != 0 else self.config.mix
            self._pass(replace(self.rule(), sends=False, merge=self.config.merge, share=share), moves=True)
        if landing.last:  # nothing is stale any more
            self._restart()
            self._last_lr = 0.0
        return landing

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[bool]:
        """See LocalMethod: with merge keep no worker has progress of its own when it has merged what it just sent."""
        c = self.config
        at_one_boundary = not self.local_steps and self.skip_after is None and not self.apart
        if c.delay == "auto" and c.merge == "keep" and at_one_boundary and self.flight.in_flight:
            self._merge_early()
            self._watch.begin()
        with super().shared_model() as equal:  # with merge mix and delay 0 workers differ though nothing is in flight
            yield equal and not (c.merge == "mix" and self._displacement().item())

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
        c, scale = self.config, self.scale
        delta_norm = scale * outer.norm([b.payload for b in self.buckets])
        self.stats.pseudo_gradient_norm = delta_norm
        rms = gap = None
        if c.gap == "elementwise":
            rms = delta_norm / self._numel**0.5
        elif c.gap == "norm":
            gap = outer.gap_scalar(self.last_step_norm(), delta_norm)
        elif c.gap == "inner":  # with the largest first step so far: a decaying learning rate does not shrink it
            first, weight = self.scalars["first_step"].double(), self.scalars["weight"].double()
            torch.maximum(self._inner_scale, torch.where(weight > 0, first / weight, 0.0), out=self._inner_scale)
            gap = outer.gap_scalar(self.last_step_norm(), self.sent_tau * self._inner_scale)
        beta = outer.carried(c.outer_momentum, self.growth)
        return outer.Rule(beta, c.outer_lr, self._last_lr, c.clip, scale, rms, gap)

    def last_step_norm(self) -> Tensor:
        """||x_{t,0} - x_{t-1,0}||, 0-d."""
        return self._last_lr * self._m_norm

    def note(self, seen: Tensor) -> None:
        """Statistics of the round from [4] sums over the model (outer.new_momentum)."""
        self._m_norm = seen[0].sqrt()
        self.stats.momentum_norm = self._m_norm
        self.stats.gap_mean, self.stats.gap_max = seen[1] / self._numel, seen[2]
        self.stats.clipped_share = seen[3] / self._numel

    def step(self, *, last: bool = False) -> bool:
        """See LocalMethod. When a round closed, with merge outer, all workers hold x_{t+1,0}."""
        if self.config.gap == "inner" and self.local_steps == 0:
            self._first_step = self._displacement()
        return super().step(last=last)

    def _take_wire(self, format: str) -> None:
        """What is sent from now on; nothing may be in flight. Error feedback begins with nothing held back; what the
        wire before has held back goes along with the payload."""
        if format == self._wire:
            return
        if isinstance(self.reducer, Quantized):
            self.reducer.release()
        workers = self.flight.rank, self.flight.world_size
        self._wire = cast(Wire, format)
        if self._wire == "float32":
            self.reducer = AllReduce([b.flat for b in self.buckets], self.flight.world_size)
        else:
            self.reducer = replace(self.config.wire, format=self._wire).reducer(self.buckets, self.scalars, *workers)

    def weigh(self) -> None:
        super().weigh()
        if self.tuner:
            self._take_wire(self.tuner.wire)  # chosen from what has landed, so alike on all workers
        if self.config.gap == "inner":
            weight = self.scalars["weight"].double()
            self.scalars.set("first_step", torch.where(weight > 0, weight * self._first_step, 0.0))

    def was_left_out(self, where: Tensor) -> None:
        super().was_left_out(where)
        for boundary in self._boundaries if self.config.merge != "outer" else []:  # else every boundary restarts it
            boundary.restart(where)

    @torch.no_grad()
    def _start_from_params(self) -> None:
        super()._start_from_params()
        self._last_lr = 0.0
        self._m_norm, self._first_step = torch.zeros_like(self._m_norm), torch.zeros_like(self._m_norm)
        self._inner_scale.zero_()

    def signature(self) -> Any:
        return asdict(self.config)

    @torch.no_grad()
    def _displacement(self) -> Tensor:
        """||x_{t,1} - x_{t,0}||, 0-d, one tensor at a time."""
        norms = []
        for bucket, flat in zip(self.buckets, self._x, strict=True):
            for x, p in zip(outer.views(flat, bucket.params), bucket.params, strict=True):
                norms += [outer.norm([p.to(x.dtype) - x.to(p.dtype)])] if p.numel() else []
        return outer.norm(norms).double()

    def of_now(self) -> dict[str, Any]:
        return super().of_now() | {"first_step": self._first_step.clone()}

    def own_state(self) -> dict[str, Any]:
        state = super().own_state() | {
            "inner_scale": on_host(self._inner_scale),
            "first_step": on_host(self._first_step),
            "last_lr": self._last_lr,
            "m_norm": on_host(self._m_norm),
            "wire": self._wire,
        }
        wire = self.config.wire
        if wire.format == "auto" and wire.error_feedback and not self.reducer.state:  # the same keys over any wire
            state["state"] |= nothing_held_back(self.buckets, self.flight.world_size, "cpu")
        return state

    def load_own_state(self, state: dict[str, Any]) -> None:
        wire = state.get("wire", self._wire)  # of another method none, which is refused below
        if self.config.wire.format == "auto":
            self._take_wire(wire)
        if wire == "float32":
            kept = {name: flats for name, flats in state.get("state", {}).items() if name not in HELD_BACK}
            state = state | {"state": kept}
        super().load_own_state(state)
        self._inner_scale.copy_(state["inner_scale"])
        self._first_step = state["first_step"].to(self._m_norm)
        self._last_lr = state["last_lr"]
        self._m_norm = state["m_norm"].to(self._m_norm)
