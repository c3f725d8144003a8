"""CO2 (arXiv 2401.16265): tau local steps, while the all-reduce of the previous tau steps runs underneath.

    co2 = CO2(model.parameters(), CO2Config(tau=48), buffers=model.buffers())
    for batch in loader:
        loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()
        co2.step()
    co2.finish()

What is reduced is the difference x_{t,0} - x_{t,tau}, not the parameters: every worker holds the same x_{t,0}, so
the mean gives the same pseudo-gradient, keeps its precision in 16 bits, and x_{t-1,0} need not be kept, for
x_{t,0} - x_{t-1,0} = -alpha m_{t-1}. Beyond the live parameters that makes three copies: the outer iterate, the
momentum, and the buffer in flight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from core import outer, policies
from core.collectives import AsyncMean
from core.compressed import CompressedMean
from core.errors import UserError
from core.fused import CHUNK, BoundaryStats, Rule, Work, boundary
from core.outer import GAPS, Gap
from core.policies import POLICIES, PolicyName
from core.rounds import FIRST_STEP, STEPS, Rounds, all_finished
from core.wire import ROUNDINGS, WIRES, Rounding, Wire

OUTER_STEP = Work.MOMENTUM | Work.ADVANCE | Work.RESTORE


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
    gap: Gap = "elementwise"
    """The staleness gap penalty Lambda: one of elementwise, norm, inner, none."""
    clip: float | None = 1.0
    """phi: the outer momentum's clipping threshold; None for no clipping."""
    clip_by: Literal["element", "norm"] = "element"
    """Clip each element to [-phi, phi] (the paper), or the whole momentum to the norm phi."""
    delay: Literal[0, 1] = 1
    """1: use the mean one round late, hidden (CO2). 0: wait for it (an ablation; needs gap none)."""
    shard: bool = False
    """Share the outer iterate and momentum out over all workers: 1 + 2 / workers copies of the parameters, not 3."""
    policy: PolicyName = "penalty"
    """What to do about the delay. penalty: gap (the paper). In its place, with gap none: eager, the own newest part
    enters at once; mix, a restart between outer and local iterate; taylor, delay compensation."""
    mix: float = 0.5
    """Of policy mix: the share of the outer iterate at the restart; 1 for it alone."""
    taylor: float = 0.5
    """Of policy taylor: lambda, the strength of the correction; 0 for none."""
    nesterov: bool = False
    """Nesterov's outer momentum, as DiLoCo's: a copy of the parameters more, and no fused pass."""
    wire: Wire = "float32"
    """How the pseudo-gradient crosses the network: float32 (float64 for float64 parameters, a plain all-reduce), or
    rounded to bfloat16, float16, int8, int4 (core/wire.py). The other methods always send float32."""
    wire_rounding: Rounding = "nearest"
    """Of the narrow wire formats: nearest, or stochastic, whose mean over many rounds is exact."""
    error_feedback: bool = True
    """With a narrow wire format: what rounding left out goes along in the next round, for a copy of the parameters."""
    offload: bool = False
    """Keep the outer state and its all-reduce in the host's (pinned) memory: no copy of the parameters on a GPU."""
    allow_unstable: bool = False
    """Accept outer_momentum + outer_lr >= 1 without a gap penalty, to show that it diverges."""

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise UserError(f"{name}={getattr(self, name)!r}: {remedy}")

        is_int = isinstance(self.tau, int) and not isinstance(self.tau, bool) and self.tau >= 1
        require(is_int or self.tau == "auto", "tau", "give a whole number of local steps, 1 or more, or auto")
        require(self.tau_max >= 1, "tau_max", "give a whole number of local steps, 1 or more")
        require(0 < self.outer_lr < float("inf"), "outer_lr", "give a finite number above 0; 1.0 is usual")
        require(0 <= self.outer_momentum < 1, "outer_momentum", "give a number in [0, 1)")
        require(self.gap in GAPS, "gap", f"choose one of {', '.join(GAPS)}")
        require(self.clip is None or self.clip > 0, "clip", "give a number above 0, or None for no clipping")
        require(self.clip_by in ("element", "norm"), "clip_by", "choose element or norm")
        require(self.delay in (0, 1), "delay", "choose 1 (CO2) or 0 (wait for the mean)")
        require(self.policy in POLICIES, "policy", f"choose one of {', '.join(POLICIES)}")
        require(0 < self.mix <= 1, "mix", "give a number in (0, 1]; 1 restarts from the outer iterate alone")
        require(0 <= self.taylor < float("inf"), "taylor", "give a finite number, 0 or more")
        require(self.wire in WIRES, "wire", f"choose one of {', '.join(WIRES)}")
        require(self.wire_rounding in ROUNDINGS, "wire_rounding", f"choose one of {', '.join(ROUNDINGS)}")
        rounds = self.wire != "float32"
        require(rounds or self.wire_rounding == "nearest", "wire_rounding", "float32 rounds nothing; set a narrow wire")
        if not self.delay:
            require(self.policy == "penalty", "policy", "without delay there is nothing to correct; set policy penalty")
            require(self.gap == "none", "gap", "without delay nothing is stale; set gap none")
            require(self.tau != "auto", "tau", "without delay nothing is hidden; give a number of local steps")
        if self.policy != "penalty":
            require(self.gap == "none", "gap", f"policy {self.policy} takes the penalty's place; set gap none")
        if self.delay and self.gap == "none" and not self.allow_unstable:
            settings = self.policy, self.outer_lr, self.outer_momentum, self.nesterov
            if reason := policies.instability(*settings):
                raise UserError(reason)


class CO2(Rounds):
    """Hides the all-reduce of a data-parallel training loop behind tau local steps.

    params: model.parameters() or any list of tensors, on this worker's device; every worker must pass the same shapes.
    config: see CO2Config. group: the workers (None: all). inner_group: workers that synchronise gradients every step,
    such as a node's; then `group` are the ranks with the same share across nodes, and the outer state is shared out
    inside the node. mesh: both, [replicate, shard]. See core/sharded.py, which these two and config.shard lead to.
    kwargs, all keywords of Rounds: buffers (BatchNorm statistics, to be averaged along; leave them out to keep them
    local), mirrors (of masters), timeout (seconds until a missing worker is an error), link (an emulated slow one).

    After n * tau calls of step() the parameters of every worker equal x_{n,0}, bit for bit. With policy eager or mix
    they differ by the own part, or the local share, until finish().
    """

    def __new__(cls, params: Any, config: CO2Config | None = None, *args: Any, **kwargs: Any) -> CO2:
        shared = {"inner_group", "mesh"} & {name for name, value in kwargs.items() if value is not None}
        if cls is CO2 and (shared or (config is not None and (config.shard or config.offload))):
            from core.sharded import ShardedCO2  # it derives from this class

            return object.__new__(ShardedCO2)
        return super().__new__(cls)

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        inner_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        **kwargs: Any,
    ):
        self.config = config or CO2Config()
        params = list(params)
        if type(self) is CO2 and any(isinstance(p, DTensor) for p in params):
            raise UserError(
                "DTensors as parameters need mesh=, or group= and inner_group=: norms are of the whole model"
            )
        super().__init__(params, self.config.tau, tau_max=self.config.tau_max, group=group, **kwargs)
        # x_{t,0} - x_{t-1,0} = -_last_lr * m: alpha, or 0 where the last boundary took no outer step
        self._last_lr = 0.0
        self._m_norm = self.mean.tail_view.new_zeros(())
        self._first_step: float | Tensor = 0.0  # ||x_{t,1} - x_{t,0}|| of the round that runs
        self._inner_scale = self._m_norm.clone()  # largest mean first step of the rounds that landed
        self._make_state()

    def _make_state(self) -> None:
        self._x, self._x_views = self._new_flats("outer_iterate", zero=False)
        self._m, _ = self._new_flats("outer_momentum", zero=True)
        c = self.config
        self._policy = policies.choose(c.policy, workers=self.mean.world_size, mix=c.mix, taylor=c.taylor)
        flats = list(zip(self.bucket_params, self._landed(), self._x, self._m, strict=True))
        self._steps = self._new_flats("outer_step", zero=True)[0] if c.nesterov else [None] * len(flats)
        own = self._new_flats("own_difference", zero=True)[0] if self._policy.own_part else [None] * len(flats)
        if c.policy == "penalty" and not c.nesterov:
            self._boundaries = [boundary(*f) for f in flats]
        else:
            more = zip(flats, self._steps, own, strict=True)
            self._boundaries = [policies.PolicyBoundary(*f, self._policy, step, last) for f, step, last in more]

    def _make_mean(self, tensors: list[Tensor], **kwargs: Any) -> AsyncMean:
        c = self.config
        if c.wire == "float32":
            return super()._make_mean(tensors, **kwargs)
        how = {"rounding": c.wire_rounding, "error_feedback": c.error_feedback, "moved": STEPS}
        return CompressedMean(tensors, {id(p) for p in self.params}, c.wire, **how, **kwargs)

    def _signature(self) -> Any:
        return asdict(self.config)

    def step(self) -> bool:
        """Call after every optimiser step. True when a round closed: then all workers hold x_{t+1,0}."""
        if self.config.gap == "inner" and self.local_steps == 0:
            self._first_step = self._displacement()
        return super().step()

    @torch.no_grad()
    def _close(self, *, finished: bool) -> bool:
        """Steps 2 to 7 in one pass; the launch comes after it because both need the one buffer."""
        everyone = stepped = False
        self._policy.finishing = finished
        if finished and not self.local_steps and self.config.policy == "mix":  # a mixed restart is no local step
            self._run(Work.RESTORE, Rule())
        landed = self.mean.in_flight  # never without delay
        if landed:
            everyone, stepped = self._receive(finished)
        elif self._policy.own_part and self.local_steps:  # no mean yet, but its own part is there
            stepped = True
            for d in self._landed():
                d.zero_()
        own = [b.clone() for b in self.buffers]
        if stepped and everyone:
            self._update(OUTER_STEP)
        elif stepped:
            self._update(OUTER_STEP | Work.SNAPSHOT)
        elif not everyone:
            self._run(Work.SNAPSHOT | Work.RESTORE if self.config.delay else Work.SNAPSHOT, Rule())
        if stepped and landed:  # an empty round carries older buffers
            self._restore_buffers()
        self._last_lr = self.config.outer_lr if stepped else 0.0
        if not everyone:
            self._send_buffers(own)
            self._launch(finished=finished, first_step=self._first_step)
        if not self.config.delay:
            everyone, stepped = self._receive(finished)
            if stepped:
                self._update(OUTER_STEP)
                self._restore_buffers()
            self._last_lr = self.config.outer_lr if stepped else 0.0
        if everyone and self._policy.own_part:
            self._unite()
        return everyone

    def _unite(self) -> None:
        """Workers with own parts all take the mean of their outer iterates and momenta, which follows the same rule."""
        for flats in (self._x, self._m):
            for d, flat in zip(self._landed(), flats, strict=True):
                d.copy_(flat)  # a failure leaves partial sums only there
            self.mean.average(self._landed())
            for d, flat in zip(self._landed(), flats, strict=True):
                flat.copy_(d)
        self._run(Work.RESTORE, Rule())

    def _receive(self, finished: bool) -> tuple[bool, bool]:
        """Step 2: waits for the sum over the workers, from which the boundary's pass takes the mean.

        Returns whether every worker had finished, and whether anyone had made a local step: a last, empty round
        must not move the parameters. Only finish() needs to know, so only finish() reads it from the device.
        """
        tail = self._land(divide=False)
        self._scale_buffers()
        everyone = finished and all_finished(tail)
        if everyone and tail[STEPS].item() == 0.0:
            return True, False
        torch.maximum(self._inner_scale, tail[FIRST_STEP].to(self._inner_scale), out=self._inner_scale)
        return everyone, True

    def _scale_buffers(self) -> None:
        """Makes means of the sums of BatchNorm's statistics, which no pass over the parameters reads."""
        for bucket, n in zip(self.mean.buckets, self.sizes, strict=True):
            bucket.flat[max(n, bucket.shared_numel) : bucket.numel].mul_(self.mean.scale)

    def _update(self, work: Work) -> None:
        """Steps 4 to 7, and 3 where `work` holds a snapshot; notes the statistics."""
        c = self.config
        squares = [b.rms_sum(self.mean.scale) for b in self._boundaries]
        delta_norm = _total(squares).sqrt()
        self.stats.pseudo_gradient_norm = delta_norm
        rms = gap = None
        if c.gap == "elementwise":
            rms = delta_norm / max(1, sum(self.sizes)) ** 0.5
        elif c.gap != "none":
            # `inner` takes the largest first step so far, so that a decaying learning rate does not shrink c
            scale = delta_norm if c.gap == "norm" else self.tau * self._inner_scale
            steps = [part for flat in self._steps if flat is not None for part in flat.split(CHUNK)]
            gap = outer.gap_scalar(self._last_lr * (outer.norm(steps) if steps else self._m_norm), scale)
        phi = c.clip if c.clip_by == "element" else None
        rule = Rule(c.outer_momentum, c.outer_lr, self._last_lr, phi, self.mean.scale, rms, gap)
        if c.clip is None or c.clip_by == "element":
            self._note(self._run(work, rule))
        else:
            self._note(self._run(Work.MOMENTUM, rule))
            self._clip_norm(c.clip)
            self._run(work & ~Work.MOMENTUM, rule)

    def _run(self, work: Work, rule: Rule) -> list[BoundaryStats]:
        return [b.run(work, rule) for b in self._boundaries]

    def _note(self, seen: list[BoundaryStats]) -> None:
        total = max(1, sum(self.sizes))
        self._m_norm = _total([s.momentum_squares for s in seen]).sqrt()
        self.stats.momentum_norm = self._m_norm
        self.stats.gap_mean = _total([s.gap_sum for s in seen]) / total
        self.stats.gap_max = torch.stack([s.gap_max.to(self._m_norm) for s in seen]).max()
        self.stats.clipped_share = _total([s.clipped for s in seen]) / total

    def _clip_norm(self, phi: float) -> None:
        factor = outer.clip_norm_factor(self._m_norm, phi)
        for m in self._m:
            m.mul_(factor.to(m))
        self._m_norm = self._m_norm * factor
        self.stats.momentum_norm = self._m_norm
        self.stats.clipped_share = (factor < 1).float()

    @torch.no_grad()
    def _displacement(self) -> Tensor:
        """||x_{t,1} - x_{t,0}||, 0-d, one tensor at a time."""
        norms = []
        for views, ps in zip(self._x_views, self.bucket_params, strict=True):
            norms += [outer.norm([p.to(x.dtype) - x.to(p.dtype)]) for x, p in zip(views, ps, strict=True)]
        return outer.norm(norms)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "inner_scale": self._inner_scale.clone(),
            "first_step": torch.as_tensor(self._first_step).clone(),
            "last_lr": self._last_lr,
            "m_norm": self._m_norm.clone(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["method"] == type(self).__name__ and (theirs := state["flats"].keys()) != (mine := self._flats.keys()):
            raise UserError(
                f"the checkpoint holds {', '.join(theirs)}, here it is {', '.join(mine)}: resume with the policy, and "
                "the other settings of CO2, that wrote it"
            )
        super().load_state_dict(state)
        self._inner_scale.copy_(state["inner_scale"])
        self._first_step = state["first_step"].to(self._inner_scale)
        self._last_lr = state["last_lr"]
        self._m_norm = state["m_norm"].to(self.mean.device)


def _total(parts: list[Tensor]) -> Tensor:
    """Their sum, 0-d, float64, where the first lies."""
    return torch.stack([p.to(parts[0].device, torch.float64) for p in parts]).sum()
