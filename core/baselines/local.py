"""The methods with local steps that CO2 is compared with, behind the same calls."""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from ..buckets import copy, copy_where, rescale, views
from ..co2 import CO2
from ..compression.config import CompressionConfig
from ..config import LARGE, CO2Config, CommonArgs, build_args, of_kind
from ..errors import UserError, is_number, is_whole, require, shown
from ..guards.arguments import checked
from ..guards.inputs import refuse_shards, tensors_of
from ..local_update import LocalUpdateMethod
from ..outer import carried

TAU_AUTO = "tau='auto' is CO2's own choice, from measured times: give another method a number of local steps"


def shared_settings(tau: int, compression: CompressionConfig | None, **more: Any) -> CO2Config:
    """Returns the settings that a method shares with CO2. UserError for tau auto, which is CO2's own choice."""
    if not is_whole(tau):
        auto = isinstance(tau, str) and tau == "auto"
        raise UserError(TAU_AUTO if auto else f"{shown('tau', tau)}: give a whole number of local steps, 1 or more")
    return CO2Config(tau=tau, compression=compression or CompressionConfig(), **more)


class BaselineArgs(CommonArgs):
    """Arguments that every baseline supports. compression: see Baseline."""

    compression: CompressionConfig | None


@checked
class Baseline(LocalUpdateMethod):
    """Base class of the methods that are no CO2.

    Args:
        params: See LocalUpdateMethod.
        tau: Local steps per round.
        config: The method's own settings, if it has any.
        compression: How the average is compressed for the network. Anchors are then kept, because rounding the
            parameters themselves would lose more than a round changes them.
        **args: See CommonArgs.
    """

    _settings: type = type(None)
    _keeps_anchors = _overlaps = False

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        config: Any = None,
        *,
        compression: CompressionConfig | None = None,
        **args: Unpack[CommonArgs],
    ):
        self.config = of_kind(config, self._settings, "config")
        shared, given = shared_settings(tau, compression), tensors_of(params, "parameters")
        refuse_shards(given, args.get("group"))
        shared.compression.check_given()
        shared.compression.check(given, args.get("group"))
        super().__init__(given, **build_args(shared, args, overlap=self._overlaps))
        if self._keeps_anchors or shared.compression.format != "float32":
            self.replicated = self.anchors = self.state.new("outer_iterate", of_params=True)


class Blocking(Baseline):
    """Base class of methods that wait for an average at every boundary.

    It averages the differences from anchors, or the parameters if there are none.
    """

    def _close_round(self, *, finished: bool) -> bool:
        for bucket, start in itertools.zip_longest(self.buckets, self.anchors):
            bucket.flatten(bucket.payload)
            if start is not None:
                torch.sub(start, bucket.payload, out=bucket.payload)
        self._start_allreduce(finished=finished)
        result = self._wait_allreduce(finished=finished)
        if not result.is_empty:
            for bucket in self.buckets:
                rescale(bucket.payload, self._scale)
            self._apply()
        return result.is_last

    @abstractmethod
    def _apply(self) -> None:
        """Uses the average in the payloads."""


class LocalSGD(Blocking):
    """Local-SGD (Stich, ICLR 2019): averages the parameters every tau local steps, and waits.

    With a compression it sends differences from the last average, at the cost of a copy of the parameters. Baseline
    lists the arguments.
    """

    name = "LocalSGD"

    def _apply(self) -> None:
        for bucket, start in itertools.zip_longest(self.buckets, self.anchors):
            average = bucket.payload if start is None else start.sub_(bucket.payload)
            copy(bucket.params, views(average, bucket.params))


@checked
@dataclass(frozen=True)
class SlowMoConfig:
    """SlowMo's settings (Wang et al., ICLR 2020). Its period is CO2's tau."""

    outer_lr: float = 1.0
    """alpha: scales the outer step."""
    outer_momentum: float = 0.5
    """beta: how much of the outer momentum survives a round."""

    def __post_init__(self) -> None:
        alpha, beta = self.outer_lr, self.outer_momentum
        above_0 = "give a finite number above 0, as 1.0 is usual"
        require(self, is_number(alpha) and 0 < alpha < LARGE, "outer_lr", above_0)
        require(self, is_number(beta) and 0 <= beta < 1, "outer_momentum", "give a number in [0, 1)")


@checked
class SlowMo(Blocking):
    """SlowMo (Wang et al., ICLR 2020): Local-SGD whose average takes a step with momentum.

    u <- beta u + mean_i (x_{t,0} - x^i_{t,tau}) / gamma, then x_{t+1,0} = x_{t,0} - alpha gamma u.

    Args:
        config: A SlowMoConfig.
        lr: Returns gamma, the current inner learning rate. None means a constant one, which cancels.
        **args: See Baseline.
    """

    name, _settings, _keeps_anchors = "SlowMo", SlowMoConfig, True

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        config: SlowMoConfig | None = None,
        *,
        lr: Callable[[], float] | None = None,
        **args: Unpack[BaselineArgs],
    ):
        super().__init__(params, tau, config, **args)
        self._lr = lr or (lambda: 1.0)
        self._u = self.state.new("outer_momentum")

    def _apply(self) -> None:
        gamma = max(self._lr(), 1e-12)  # a schedule may end at exactly 0
        for bucket, x, u in zip(self.buckets, self.anchors, self._u, strict=True):
            # u <- beta u + mean_i (x - x^i) / gamma
            u.mul_(carried(self.config.outer_momentum, self.growth)).add_(bucket.payload, alpha=1 / gamma)
            x.sub_(u, alpha=self.config.outer_lr * gamma)
            copy(bucket.params, views(x, bucket.params))


@checked
@dataclass(frozen=True)
class DiLoCoConfig:
    """DiLoCo's settings (Douillard et al. 2023). Its period is CO2's tau."""

    outer_lr: float = 0.7
    """alpha: scales the outer step."""
    outer_momentum: float = 0.9
    """beta: the Nesterov momentum."""


@checked
class DiLoCo(CO2):
    """DiLoCo (Douillard et al. 2023): every tau local steps, all workers wait for an outer step with Nesterov momentum.

    This is CO2 without the delay, the penalty and the clip. CO2Config(nesterov=True) hides the same step. `config` is a
    DiLoCoConfig. Baseline lists the other arguments.
    """

    name = "DiLoCo"

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        config: DiLoCoConfig | None = None,
        *,
        compression: CompressionConfig | None = None,
        **args: Unpack[CommonArgs],
    ):
        own = of_kind(config, DiLoCoConfig, "config")
        step: dict[str, Any] = {"outer_lr": own.outer_lr, "outer_momentum": own.outer_momentum, "nesterov": True}
        c = shared_settings(tau, compression, delay=0, gap="none", clip=None, **step)
        # with delay 0 an average has no gap, and nothing is hidden
        super().__init__(params, c, **args)


@checked
@dataclass(frozen=True)
class OverlapLocalConfig:
    """Overlap-Local-SGD's settings (Wang, Liang and Joshi, ICASSP 2020). Its period is CO2's tau."""

    pull: float = 0.6
    """a: the fraction by which each boundary pulls the local model towards the anchor."""
    anchor_momentum: float = 0.7
    """mu: momentum of the anchor."""

    def __post_init__(self) -> None:
        a, mu = self.pull, self.anchor_momentum
        require(self, is_number(a) and 0 < a <= 1, "pull", "give a number in (0, 1]")
        require(self, is_number(mu) and 0 <= mu < 1, "anchor_momentum", "give a number in [0, 1)")


class OverlapLocalSGD(Baseline):
    """Overlap-Local-SGD (Wang, Liang and Joshi, ICASSP 2020): an anchor model z, averaged in the background.

    At a boundary the average of the last round moves the anchor: v <- mu v + (mean - z), then z <- z + v. Each worker
    is pulled towards the anchor, x^i <- x^i - a (x^i - z), and the all-reduce of the pulled models starts. The workers
    send z minus the pulled model, because z is equal on all of them. They differ until finish(), which leaves all with
    the average. Baseline lists the arguments. `config` is an OverlapLocalConfig.
    """

    name, _settings = "OverlapLocalSGD", OverlapLocalConfig
    _keeps_anchors = _overlaps = _starts_near_anchor = True

    def __init__(self, *given: Any, **args: Any):
        super().__init__(*given, **args)
        self._v = self.state.new("anchor_momentum")

    @property
    def begins_apart(self) -> bool:
        return True  # also after finish(), which leaves the average and not the anchor

    def _close_round(self, *, finished: bool) -> bool:
        if self.allreduce.in_flight:
            result = self._wait_allreduce(finished=finished)
            for bucket, z, v in zip(self.buckets, self.anchors, self._v, strict=True):
                rescale(bucket.payload, self._scale)
                # the payload holds z - mean
                v.mul_(carried(self.config.anchor_momentum, self.growth)).sub_(bucket.payload)
                torch.sub(z, bucket.payload, out=bucket.payload)  # the average of the pulled models
                z.add_(v)
            if result.is_last:
                for bucket in self.buckets:
                    copy(bucket.params, bucket.payload_views)
                return True
        for bucket, z in zip(self.buckets, self.anchors, strict=True):
            for p, anchor in zip(bucket.params, views(z, bucket.params), strict=True):
                p.lerp_(anchor.to(p.dtype), self.config.pull)  # x^i <- x^i - a (x^i - z)
            bucket.flatten(bucket.payload)
            torch.sub(z, bucket.payload, out=bucket.payload)
        self._start_allreduce(finished=finished)
        return False

    def _restart_from_anchor(self, where: Tensor) -> None:
        for bucket, z in zip(self.buckets, self.anchors, strict=True):
            copy_where(where, bucket.params, views(z, bucket.params))

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[bool]:
        """See Loop. During the block, the model holds the average of the models that were just sent.

        A run that ended at this boundary would end with this average.
        """
        if (equal := self.sync_for_eval()) or not self.at_boundary:
            yield equal
            return
        if not self.allreduce.arrived():
            with self.clock.early_merge(self.tau), self.allreduce.counted():
                self.allreduce.drain()  # the average is merged at the end of the round
        scale = 1 / self.scalars["weight"].double()  # NaN or infinite if no worker counts
        tensors = [t for b in self.buckets for t in (*b.params, *b.buffers)]
        own = [t.clone() for t in tensors]
        averages: list[Tensor] = []
        for bucket, z in zip(self.buckets, self.anchors, strict=True):
            averages += views(z - bucket.payload * scale.to(z), bucket.params)
            averages += [v * scale.to(v) for v in bucket.buffer_views]
        self._write_model(tensors, averages)
        self._at_common_model(True)
        try:
            yield True
        finally:
            self._write_model(tensors, own)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write_model(self, tensors: list[Tensor], values: list[Tensor]) -> None:
        """Copies values to tensors of the model."""
        copy(tensors, values)
        self._params_updated(at_boundary=True)
