"""The methods that CO2 is compared with, behind the same calls, and the one function that picks a method by name."""

from __future__ import annotations

import inspect
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from core.co2 import CO2, CO2Config
from core.collectives import Link, leave_group, new_group, ring_bytes
from core.errors import UserError
from core.groups import is_sharded
from core.overlap import Mark, RoundStats, Seconds, between, mark
from core.rounds import STEPS, Rounds, all_finished

MethodName = Literal["co2", "ddp", "local", "overlap_local", "slowmo"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)


@dataclass(frozen=True)
class SlowMoConfig:
    """SlowMo's settings (Wang et al., ICLR 2020); the period is CO2's tau."""

    outer_lr: float = 1.0
    """alpha"""
    outer_momentum: float = 0.5
    """beta"""

    def __post_init__(self) -> None:
        if not self.outer_lr > 0:
            raise UserError(f"slowmo outer_lr={self.outer_lr}: give a number above 0")
        if not 0 <= self.outer_momentum < 1:
            raise UserError(f"slowmo outer_momentum={self.outer_momentum}: give a number in [0, 1)")


@dataclass(frozen=True)
class OverlapLocalConfig:
    """Overlap-Local-SGD's settings (Wang, Liang and Joshi, ICASSP 2020); the period is CO2's tau."""

    pull: float = 0.6
    """a: how far each boundary pulls the local model towards the anchor."""
    anchor_momentum: float = 0.7
    """Momentum of the anchor."""

    def __post_init__(self) -> None:
        if not 0 < self.pull <= 1:
            raise UserError(f"overlap_local pull={self.pull}: give a number in (0, 1]")
        if not 0 <= self.anchor_momentum < 1:
            raise UserError(f"overlap_local anchor_momentum={self.anchor_momentum}: give a number in [0, 1)")


class _Blocking(Rounds):
    """A method that waits for the mean of the parameters at every boundary."""

    @torch.no_grad()
    def _close(self, *, finished: bool) -> bool:
        self._snapshot()
        self._launch(finished=finished)
        tail = self._land()
        if not (finished and tail[STEPS].item() == 0.0):  # nobody has moved: leave the parameters as they are
            self._apply()
            self._restore_buffers()
        return finished and all_finished(tail)

    @abstractmethod
    def _apply(self) -> None:
        """Uses the mean parameters in the flat buffers."""


class LocalSGD(_Blocking):
    """Local-SGD (Stich, ICLR 2019): every tau local steps the parameters are averaged, and everyone waits."""

    def _apply(self) -> None:
        views = [b.views[: len(ps)] for b, ps in zip(self.mean.buckets, self.bucket_params, strict=True)]
        self._set_params(views)


class SlowMo(_Blocking):
    """SlowMo (Wang et al., ICLR 2020): Local-SGD whose average takes a step with momentum.

    u <- beta u + (x_{t,0} - mean_i x^i_{t,tau}) / gamma;  x_{t+1,0} = x_{t,0} - alpha gamma u. lr: returns gamma, the
    inner learning rate of now; None stands for a constant one, which cancels.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        config: SlowMoConfig | None = None,
        *,
        lr: Callable[[], float] | None = None,
        **kwargs: Any,
    ):
        super().__init__(params, tau, **kwargs)
        self.config = config or SlowMoConfig()
        self._lr = lr or (lambda: 1.0)
        self._x, self._x_views = self._new_flats("outer_iterate", zero=False)
        self._u, _ = self._new_flats("outer_momentum", zero=True)

    def _apply(self) -> None:
        gamma = max(self._lr(), 1e-12)  # a schedule may end at exactly 0
        for x, u, mean in zip(self._x, self._u, self._landed(), strict=True):
            u.mul_(self.config.outer_momentum).add_(x - mean, alpha=1 / gamma)
            x.sub_(u, alpha=self.config.outer_lr * gamma)
        self._set_params(self._x_views)


class OverlapLocalSGD(Rounds):
    """Overlap-Local-SGD (Wang, Liang and Joshi, ICASSP 2020): an anchor model, averaged in the background.

    At a boundary the mean launched one round ago moves the anchor, v <- mu v + (mean - z), z <- z + v; each worker is
    pulled towards it, x^i <- x^i - a (x^i - z); and the mean of the pulled models is launched. Workers differ
    until finish(), which leaves all with the mean.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int | Literal["auto"],
        config: OverlapLocalConfig | None = None,
        **kwargs: Any,
    ):
        super().__init__(params, tau, **kwargs)
        self.config = config or OverlapLocalConfig()
        self._z, self._z_views = self._new_flats("anchor", zero=False)
        self._v, _ = self._new_flats("anchor_momentum", zero=True)

    @torch.no_grad()
    def _close(self, *, finished: bool) -> bool:
        landed = self.mean.in_flight
        if landed and self._receive(finished):
            return True
        for views, ps in zip(self._z_views, self.bucket_params, strict=True):
            for z, p in zip(views, ps, strict=True):
                p.lerp_(z.to(p.dtype), self.config.pull)
        self._snapshot(exchange_buffers=landed)
        self._launch(finished=finished)
        return False

    def _receive(self, finished: bool) -> bool:
        tail = self._land()
        for z, v, mean in zip(self._z, self._v, self._landed(), strict=True):
            v.mul_(self.config.anchor_momentum).add_(mean - z)
            z.add_(v)
        everyone = finished and all_finished(tail)
        if everyone:
            if tail[STEPS].item() > 0.0:  # an empty round carries older buffers
                self._restore_buffers()
            views = [b.views[: len(ps)] for b, ps in zip(self.mean.buckets, self.bucket_params, strict=True)]
            self._set_params(views)
        return everyone


class DDP:
    """torch's DistributedDataParallel itself, behind the calls of the local methods: every step is a round.

    model: to be called in place of the wrapped one. BatchNorm statistics stay local until finish() averages them, for
    DDP's own broadcast would block every forward pass. A model of DTensors synchronises itself over all workers where
    it was sharded so (training.zero.shard_model with everywhere=True); its communication is not measured: nan.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        average_buffers: bool = True,
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
    ):
        self.tau = 1
        self.rounds = 0
        self.stats = RoundStats()
        self.group = new_group(group, timeout)
        self._timeout = timeout
        self.model = model
        self._buffers = [b for b in model.buffers() if b.is_floating_point()] if average_buffers else []
        self._link = link
        self._reset()
        if self.group is not None:
            self.world_size = dist.get_world_size(self.group)
        self._sharded = is_sharded(model)
        if self.group is not None and not self._sharded:
            known = inspect.signature(DistributedDataParallel).parameters
            name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch < 2.13
            no_broadcast: dict[str, Any] = {name: False}
            ddp = DistributedDataParallel(model, process_group=self.group, **no_broadcast)
            ddp.register_comm_hook(None, self._all_reduce)
            self.model = ddp

    def _reset(self) -> None:
        self._bytes = 0
        self._spans: list[tuple[Mark, Mark]] = []  # of each bucket: launched, landed

    def _all_reduce(self, _, bucket):  # DDP wants no annotation, or types it can evaluate
        """The default hook (mean of the gradients), timed, and held back by the emulated link if there is one."""
        gradients = bucket.buffer().div_(self.world_size)
        started = mark(gradients.device)
        sent = ring_bytes(gradients.numel() * gradients.element_size(), self.world_size)
        ready_at = self._link.reserve(sent) if self._link else 0.0
        work = dist.all_reduce(gradients, group=self.group, async_op=True)
        assert work is not None

        def land(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            time.sleep(max(0.0, ready_at - time.perf_counter()))
            self._spans.append((started, mark(gradients.device)))  # on a GPU the current stream is the collective's
            self._bytes += sent
            return future.value()[0]

        return work.get_future().then(land)

    def step(self) -> bool:
        """Call after every optimiser step; always True, for the gradients were averaged.

        Exposed is what the last bucket takes: its launch is where backward ends. All buckets together count from
        the first one's launch, without the gaps between them.
        """
        self.rounds += 1
        self.stats = RoundStats(self.rounds, local_steps=1, bytes_sent=self._bytes)
        if self._spans:
            last = self._spans[-1]
            self.stats.wait_seconds = between(*last)
            self.stats.allreduce_seconds = _union(self._spans)
        if self._sharded:
            self.stats.wait_seconds = self.stats.allreduce_seconds = float("nan")
        self._reset()
        return True

    def finish(self) -> None:
        """Averages the buffers; the parameters are equal already."""
        for b in self._buffers if self.group is not None else []:
            dist.all_reduce(b, group=self.group)
            b.div_(self.world_size)

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]

    def close(self) -> None:
        """Leaves the process group."""
        if self.group is not None:
            leave_group(self.group, self._timeout)
            self.group = None


def _union(spans: list[tuple[Mark, Mark]]) -> Seconds:
    """How long at least one of them ran; on a GPU from the first's start to the last's end, gaps included."""
    if isinstance(spans[0][0], torch.cuda.Event):
        return between(spans[0][0], spans[-1][1])
    total = until = 0.0
    for start, end in spans:
        assert not isinstance(start, torch.cuda.Event) and not isinstance(end, torch.cuda.Event)
        total += end - max(start, until)
        until = end
    return total


Method = CO2 | LocalSGD | OverlapLocalSGD | SlowMo | DDP


def make_method(
    name: str,
    model: nn.Module,
    *,
    co2: CO2Config | None = None,
    slowmo: SlowMoConfig | None = None,
    overlap_local: OverlapLocalConfig | None = None,
    lr: Callable[[], float] | None = None,
    average_buffers: bool = True,
    mesh: DeviceMesh | None = None,
    **kwargs: Any,
) -> tuple[nn.Module, Method]:
    """The model to call in the loop, and the method whose step() follows every optimiser step.

    name: one of METHODS. The period of every local method is co2.tau, so that comparisons share it. lr: returns the
    current inner learning rate, for SlowMo. mesh: [nodes, workers of a node]: these synchronise gradients every step,
    and the method runs across nodes. ddp synchronises all every step anyway. kwargs: group, timeout, link.
    """
    co2 = co2 or CO2Config()
    for key, plain in (("wire", "float32"), ("shard", False), ("offload", False)):
        if name != "co2" and getattr(co2, key) != plain:
            raise UserError(f"{key}={getattr(co2, key)!r} is CO2's own, method {name!r} does not have it: leave it out")
    if name == "ddp":
        ddp = DDP(model, average_buffers=average_buffers, **kwargs)
        return ddp.model, ddp
    params = list(model.parameters())
    kwargs["buffers"] = list(model.buffers()) if average_buffers else []
    if mesh is not None and not is_sharded(model):  # sharded ones synchronise by themselves
        model = DistributedDataParallel(model, process_group=mesh.get_group("shard"))
    if name == "co2":
        return model, CO2(params, co2, mesh=mesh, **kwargs)
    if mesh is not None:
        kwargs["group"] = mesh.get_group("replicate")
    if name == "overlap_local":
        return model, OverlapLocalSGD(params, co2.tau, overlap_local, tau_max=co2.tau_max, **kwargs)
    if name not in METHODS:
        raise UserError(f"method {name!r}: choose one of {', '.join(METHODS)}")
    if not isinstance(co2.tau, int):
        raise UserError(f"tau='auto' with method {name!r}: it hides no communication; give a number of local steps")
    if name == "local":
        return model, LocalSGD(params, co2.tau, **kwargs)
    return model, SlowMo(params, co2.tau, slowmo, lr=lr, **kwargs)
