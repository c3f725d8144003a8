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

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from core import outer
from core.collectives import ThrottledLink
from core.errors import UserError
from core.outer import GAPS, Gap
from core.rounds import FINISHED, FIRST_STEP, STEPS, Rounds

CHUNK = 1 << 18  # elements per slice on a CPU: four float32 slices of 1 MiB stay in the L2 cache


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
        if not self.delay:
            require(self.gap == "none", "gap", "without delay nothing is stale; set gap none")
            require(self.tau != "auto", "tau", "without delay nothing is hidden; give a number of local steps")
        elif self.gap == "none" and self.outer_momentum + self.outer_lr >= 1 and not self.allow_unstable:
            total = self.outer_momentum + self.outer_lr
            raise UserError(
                f"outer_momentum={self.outer_momentum} + outer_lr={self.outer_lr} = {total:g} with gap='none' is "
                "unstable: a step delayed by one round settles only while beta + alpha rho / Lambda < 1, where rho "
                "nears 1 in directions that tau local steps solve; set gap='elementwise', or lower the two to a "
                "sum below 1 (allow_unstable=True runs it regardless)"
            )


class CO2(Rounds):
    """Hides the all-reduce of a data-parallel training loop behind tau local steps.

    params: model.parameters() or any list of tensors, on this worker's device; every worker must pass the same shapes.
    config: see CO2Config. buffers: BatchNorm statistics and the like, to be averaged along (pass none to keep
    them local). group: the workers (None: all). timeout: seconds until a missing worker is an error. link: an
    emulated slow link, for measurements.

    After n * tau calls of step() the parameters of every worker equal x_{n,0}, bit for bit.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        config: CO2Config | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        buffers: Iterable[Tensor] = (),
        timeout: float = 600.0,
        link: ThrottledLink | None = None,
    ):
        self.config = config or CO2Config()
        c = self.config
        super().__init__(params, c.tau, tau_max=c.tau_max, buffers=buffers, group=group, timeout=timeout, link=link)
        self._x, self._x_views = self._new_flats("outer_iterate", zero=False)
        self._m, _ = self._new_flats("outer_momentum", zero=True)
        # x_{t,0} - x_{t-1,0} = -_last_lr * m: alpha, or 0 where the last boundary took no outer step
        self._last_lr = 0.0
        self._first_step: float | Tensor = 0.0  # ||x_{t,1} - x_{t,0}|| of the round that runs
        self._inner_scale = self._m[0].new_zeros(())  # largest mean first step of the rounds that landed

    def _signature(self) -> Any:
        return asdict(self.config)

    def step(self) -> bool:
        """Call after every optimiser step. True when a round closed: then all workers hold x_{t+1,0}."""
        if self.config.gap == "inner" and self.local_steps == 0:
            self._first_step = self._displacement()
        return super().step()

    @torch.no_grad()
    def _close(self, *, finished: bool) -> bool:
        """Steps 2 to 7; the launch comes after the momentum only because both need the one buffer."""
        everyone = stepped = False
        landed = self.mean.in_flight  # never without delay
        if landed:
            everyone, stepped = self._receive(finished)
        if not everyone:
            self._send(finished, landed)
        if not self.config.delay:
            everyone, stepped = self._receive(finished)
        if stepped and (everyone or not self.config.delay):  # an empty round carries older buffers
            self._restore_buffers()
        self._last_lr = self.config.outer_lr if stepped else 0.0
        self._restart()
        return everyone

    def _send(self, finished: bool, landed: bool) -> None:
        """Step 3: snapshot x_{t,0} - x^i_{t,tau} and launch its mean; BatchNorm's means of the round before arrive."""
        self._snapshot(exchange_buffers=landed)
        for bucket, x, flat, s in self._slices():
            if bucket.dtype != x.dtype:  # 16-bit parameters restarted from the rounded iterate
                x = x.to(bucket.dtype).to(x.dtype)
            torch.sub(x, flat[s], out=flat[s])
        self._launch(finished=finished, first_step=self._first_step)

    def _receive(self, finished: bool) -> tuple[bool, bool]:
        """Steps 2, 4, 5, 6: waits for Delta and folds it into the momentum.

        Returns whether every worker had finished, and whether anyone had made a local step: a last, empty round
        must not move the parameters. Only finish() needs to know, so only finish() reads it from the device.
        """
        tail = self._land()
        everyone = finished and tail[FINISHED].item() == 1.0
        if everyone and tail[STEPS].item() == 0.0:
            return True, False
        torch.maximum(self._inner_scale, tail[FIRST_STEP].to(self._inner_scale), out=self._inner_scale)
        self._update_momentum()
        return everyone, True

    def _update_momentum(self) -> None:
        c = self.config
        deltas = self._means()
        self.stats.pseudo_gradient_norm = outer.norm(deltas)
        scale, scalar_gap = self._gap_scale(deltas)
        gap_sum = clipped = 0.0
        gap_max: Tensor | None = scalar_gap
        for _, m, flat, s in self._slices(self._m):
            gap = scalar_gap
            if c.gap == "elementwise":
                gap = outer.gap_elementwise(m * -self._last_lr, scale)
                gap_sum = gap_sum + gap.sum()
                gap_max = gap.max() if gap_max is None else torch.maximum(gap_max, gap.max())
            new = outer.momentum(m, flat[s], c.outer_momentum, gap)
            if c.clip is not None and c.clip_by == "element":
                clipped = clipped + (new.abs() > c.clip).sum()
                new = outer.clip_elements(new, c.clip)
            m.copy_(new)
        self.stats.momentum_norm = outer.norm(self._m)
        total = sum(self.sizes)
        if gap_max is not None:
            self.stats.gap_max = gap_max
            self.stats.gap_mean = gap_sum / total if c.gap == "elementwise" else gap_max
        self.stats.clipped_share = clipped / total
        if c.clip is not None and c.clip_by == "norm":
            self._clip_norm(c.clip)

    def _gap_scale(self, deltas: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """c_t of step 4, and Lambda_t where it is one number for the whole model."""
        c = self.config
        if c.gap == "elementwise":
            return outer.rms(deltas), None
        if c.gap == "none":
            return self._inner_scale, None
        # `inner` takes the largest first step so far, so that a decaying learning rate does not shrink c
        pseudo_gradient = torch.as_tensor(self.stats.pseudo_gradient_norm)
        scale = pseudo_gradient if c.gap == "norm" else self.tau * self._inner_scale
        return scale, outer.gap_scalar(self._last_lr * outer.norm(self._m), scale)

    def _clip_norm(self, phi: float) -> None:
        factor = outer.clip_norm_factor(torch.as_tensor(self.stats.momentum_norm), phi)
        for m in self._m:
            m.mul_(factor.to(m))
        self.stats.momentum_norm = self.stats.momentum_norm * factor
        self.stats.clipped_share = (factor < 1).float()

    def _restart(self) -> None:
        """Step 7: the outer step, from which every worker's parameters restart."""
        if self._last_lr:
            for (_, x, _, _), (_, m, _, _) in zip(self._slices(self._x), self._slices(self._m), strict=True):
                x.copy_(outer.outer_step(x, m, self._last_lr))
        self._set_params(self._x_views)

    def _slices(self, flats: list[Tensor] | None = None) -> Iterator[tuple[Any, Tensor, Tensor, slice]]:
        """(bucket, slice of `flats`, the bucket's flat buffer, which slice): cache-sized on a CPU, whole on a GPU."""
        for bucket, flat, n in zip(self.mean.buckets, flats or self._x, self.sizes, strict=True):
            chunk = n if flat.is_cuda else CHUNK
            for start in range(0, n, max(1, chunk)):
                s = slice(start, min(start + chunk, n))
                yield bucket, flat[s], bucket.flat, s

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
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._inner_scale.copy_(state["inner_scale"])
        self._first_step = state["first_step"].to(self._inner_scale)
        self._last_lr = state["last_lr"]
