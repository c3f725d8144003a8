"""The methods that CO2 is compared with, behind the same calls, and make_method, which makes a method by name."""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .buckets import copy, copy_where, is_dtensor, rescale, tensors_of, views
from .build import CommonArgs, build_args_of_other
from .co2 import CO2
from .config import LARGE, CO2Config, CompressionConfig, Schedule, check_share, is_number, of_kind
from .ddp import DDP
from .errors import UserError
from .extra import Given
from .hooks import Hook
from .local_update import LocalUpdateMethod
from .outer import carried
from .testing.link import Link


class Blocking(LocalUpdateMethod):
    """Base class of methods that wait for an average at every boundary.

    It averages the differences from anchors, or the parameters if there are none.

    Args:
        params: See LocalUpdateMethod.
        tau: Local steps per round.
        compression: How the average is compressed for the network.
        **args: See CommonArgs.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        *,
        compression: CompressionConfig | None = None,
        **args: Unpack[CommonArgs],
    ):
        shared = CO2Config(tau=tau, compression=compression or CompressionConfig())
        super().__init__(
            given := tensors_of(params, "parameters"), **build_args_of_other(given, shared, args, overlap=False)
        )

    def _close_round(self, *, finished: bool) -> bool:
        for bucket, start in itertools.zip_longest(self.buckets, self.anchors):
            bucket.flatten(bucket.payload)
            if start is not None:  # send a difference, see LocalSGD
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

    With a compression it sends differences from the last average, at the cost of a copy of the parameters. Rounding the
    parameters themselves would lose more than a round changes them.

    Blocking lists its arguments.
    """

    name = "LocalSGD"

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        *,
        compression: CompressionConfig | None = None,
        **args: Unpack[CommonArgs],
    ):
        super().__init__(params, tau, compression=compression, **args)
        if compression is not None and compression.format != "float32":
            self.replicated = self.anchors = self.state.new("outer_iterate", of_params=True)

    def _apply(self) -> None:
        for bucket, start in itertools.zip_longest(self.buckets, self.anchors):
            average = bucket.payload if start is None else start.sub_(bucket.payload)
            copy(bucket.params, views(average, bucket.params))


@dataclass(frozen=True)
class SlowMoConfig:
    """SlowMo's settings (Wang et al., ICLR 2020). Its period is CO2's tau."""

    outer_lr: float = 1.0
    """alpha: scales the outer step."""
    outer_momentum: float = 0.5
    """beta: how much of the outer momentum survives a round."""

    def __post_init__(self) -> None:
        if not (is_number(self.outer_lr) and 0 < self.outer_lr < LARGE):
            raise UserError(f"slowmo.outer_lr={self.outer_lr}: give a finite number above 0, as 1.0 is usual")
        if not (is_number(self.outer_momentum) and 0 <= self.outer_momentum < 1):
            raise UserError(f"slowmo outer_momentum={self.outer_momentum}: give a number in [0, 1)")


class SlowMo(Blocking):
    """SlowMo (Wang et al., ICLR 2020): Local-SGD whose average takes a step with momentum.

    u <- beta u + mean_i (x_{t,0} - x^i_{t,tau}) / gamma, then x_{t+1,0} = x_{t,0} - alpha gamma u.

    The arguments that are not listed here are in Blocking's docstring.

    Args:
        config: SlowMo's settings.
        lr: Returns gamma, the current inner learning rate. None means a constant one, which cancels.
    """

    name = "SlowMo"

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        config: SlowMoConfig | None = None,
        *,
        lr: Callable[[], float] | None = None,
        compression: CompressionConfig | None = None,
        **args: Unpack[CommonArgs],
    ):
        self.config = of_kind(config, SlowMoConfig, "config")
        super().__init__(params, tau, compression=compression, **args)
        self._lr = lr or (lambda: 1.0)
        self._x = self.replicated = self.anchors = self.state.new("outer_iterate", of_params=True)
        self._u = self.state.new("outer_momentum")

    def _apply(self) -> None:
        gamma = max(self._lr(), 1e-12)  # a schedule may end at exactly 0
        for bucket, x, u in zip(self.buckets, self._x, self._u, strict=True):
            # u <- beta u + mean_i (x - x^i) / gamma
            u.mul_(carried(self.config.outer_momentum, self.growth)).add_(bucket.payload, alpha=1 / gamma)
            x.sub_(u, alpha=self.config.outer_lr * gamma)
            copy(bucket.params, views(x, bucket.params))


@dataclass(frozen=True)
class DiLoCoConfig:
    """DiLoCo's settings (Douillard et al. 2023). Its period is CO2's tau."""

    outer_lr: float = 0.7
    """alpha: scales the outer step."""
    outer_momentum: float = 0.9
    """beta: the Nesterov momentum."""


class DiLoCo(CO2):
    """DiLoCo (Douillard et al. 2023): every tau local steps, all workers wait for an outer step with Nesterov momentum.

    This is CO2 without the delay, the penalty and the clip. CO2Config(nesterov=True) hides the same step.

    The arguments that are not listed here are in Blocking's docstring.

    Args:
        config: DiLoCo's settings.
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
        blocking: dict[str, Any] = {"delay": 0, "gap": "none", "clip": None}
        c = CO2Config(tau=tau, compression=compression or CompressionConfig(), **step, **blocking)
        # with delay 0 an average has no gap, and nothing is hidden
        super().__init__(params, c, **args)


@dataclass(frozen=True)
class OverlapLocalConfig:
    """Overlap-Local-SGD's settings (Wang, Liang and Joshi, ICASSP 2020). Its period is CO2's tau."""

    pull: float = 0.6
    """a: the fraction by which each boundary pulls the local model towards the anchor."""
    anchor_momentum: float = 0.7
    """mu: momentum of the anchor."""

    def __post_init__(self) -> None:
        if not (is_number(self.pull) and 0 < self.pull <= 1):
            raise UserError(f"overlap_local pull={self.pull}: give a number in (0, 1]")
        if not (is_number(self.anchor_momentum) and 0 <= self.anchor_momentum < 1):
            raise UserError(f"overlap_local anchor_momentum={self.anchor_momentum}: give a number in [0, 1)")


class OverlapLocalSGD(LocalUpdateMethod):
    """Overlap-Local-SGD (Wang, Liang and Joshi, ICASSP 2020): an anchor model z, averaged in the background.

    At a boundary the average of the last round moves the anchor: v <- mu v + (mean - z), then z <- z + v. Each worker
    is pulled towards the anchor, x^i <- x^i - a (x^i - z), and the all-reduce of the pulled models starts. The workers
    send z minus the pulled model, because z is equal on all of them. They differ until finish(), which leaves all with
    the average.

    Args:
        params: See LocalUpdateMethod.
        tau: Local steps per round, or auto.
        config: The method's settings.
        tau_max: With tau auto, the most local steps per round.
        compression: How the average is compressed for the network.
        **args: See CommonArgs.
    """

    name = "OverlapLocalSGD"

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int | Literal["auto"],
        config: OverlapLocalConfig | None = None,
        *,
        tau_max: int = 192,
        compression: CompressionConfig | None = None,
        **args: Unpack[CommonArgs],
    ):
        self.config = of_kind(config, OverlapLocalConfig, "config")
        shared = CO2Config(tau=tau, tau_max=tau_max, compression=compression or CompressionConfig())
        super().__init__(given := tensors_of(params, "parameters"), **build_args_of_other(given, shared, args))
        self._z = self.replicated = self.anchors = self.state.new("outer_iterate", of_params=True)
        self._v = self.state.new("anchor_momentum")
        self._starts_near_anchor = True

    def _close_round(self, *, finished: bool) -> bool:
        if self.allreduce.in_flight:
            result = self._wait_allreduce(finished=finished)
            for bucket, z, v in zip(self.buckets, self._z, self._v, strict=True):
                rescale(bucket.payload, self._scale)
                # the payload holds z - mean
                v.mul_(carried(self.config.anchor_momentum, self.growth)).sub_(bucket.payload)
                torch.sub(z, bucket.payload, out=bucket.payload)  # the average of the pulled models
                z.add_(v)
            if result.is_last:
                for bucket in self.buckets:
                    copy(bucket.params, bucket.payload_views)
                return True
        for bucket, z in zip(self.buckets, self._z, strict=True):
            for p, anchor in zip(bucket.params, views(z, bucket.params), strict=True):
                p.lerp_(anchor.to(p.dtype), self.config.pull)  # x^i <- x^i - a (x^i - z)
            bucket.flatten(bucket.payload)
            torch.sub(z, bucket.payload, out=bucket.payload)
        self._start_allreduce(finished=finished)
        return False

    def _restart_from_anchor(self, where: Tensor | None = None) -> None:
        for bucket, z in zip(self.buckets, self._z, strict=True):
            anchor = views(z, bucket.params)
            copy(bucket.params, anchor) if where is None else copy_where(where, bucket.params, anchor)

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[bool]:
        """See Loop. During the block, the model holds the average of the models that were just sent.

        A run that ended at this boundary would end with this average.
        """
        if (equal := self.sync_for_eval()) or not self.at_boundary:
            yield equal
            return
        if not self.allreduce.arrived():
            with (
                self.clock.early_merge(self.tau),
                self.allreduce.counted(),
            ):  # the average is merged at the end of the round
                self.allreduce.drain()
        scale = 1 / self.scalars["weight"].double()  # NaN or infinite if no worker counts
        tensors = [t for b in self.buckets for t in (*b.params, *b.buffers)]
        own = [t.clone() for t in tensors]
        averages: list[Tensor] = []
        for bucket, z in zip(self.buckets, self._z, strict=True):
            averages += views(z - bucket.payload * scale.to(z), bucket.params)
            averages += [v * scale.to(v) for v in bucket.buffer_views]
        self._write_model(tensors, averages)
        self._at_common_model(True, "averaged_model()")
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


@dataclass(frozen=True)
class MethodArgs:
    """The arguments of make_method.

    Attributes:
        co2: CO2's settings.
        own: The method's own settings.
        model: The module that the loop calls.
        args: Arguments that all methods support.
        shard, offload, schedule, lr, mesh: See make_method.
    """

    co2: CO2Config
    own: Any = None
    model: nn.Module = field(default_factory=nn.Module)
    args: CommonArgs = field(default_factory=CommonArgs)
    shard: bool = False
    offload: bool = False
    schedule: Schedule | None = None
    lr: Callable[[], float] | None = None
    mesh: DeviceMesh | None = None

    @property
    def params(self) -> list[Tensor]:
        return list(self.model.parameters())

    @property
    def tau(self) -> int:
        """Local steps per round. UserError for auto, which chooses the fewest that hide the communication."""
        if self.co2.tau == "auto":
            raise UserError("tau='auto' with a method that hides no communication: give a number of local steps")
        return self.co2.tau


@dataclass(frozen=True)
class Settings:
    """A method's own settings.

    Attributes:
        key: The keyword of make_method, and the prefix of the train scripts' options, --KEY.NAME.
        config: Their dataclass.
        help: Shown with these options.
    """

    key: str
    config: type
    help: str = ""


@dataclass(frozen=True)
class MethodSpec:
    """Describes a method to make_method.

    Attributes:
        name: Its name.
        make: Makes the model that the loop calls, and the method.
        kind: hidden if all-reduces run during local steps, blocking if local steps wait for them, synchronous if every
            step is a round, optimizer if the method replaces the optimizer.
        settings: Its own settings, if it has any.
        check: Raises UserError for settings that exclude each other.
        reads_co2: Whether it uses all of CO2Config, not only tau and tau_max.
        takes: The subset of shard, offload, schedule, elastic and compression that it supports.
    """

    name: str
    make: Callable[[MethodArgs], tuple[nn.Module, Any]]
    kind: Literal["hidden", "blocking", "synchronous", "optimizer"]
    settings: Settings | None = None
    check: Callable[[MethodArgs], object] = lambda given: None
    reads_co2: bool = False
    takes: frozenset[str] = frozenset()

    @property
    def local(self) -> bool:
        """Whether it takes local steps."""
        return self.kind in ("hidden", "blocking")

    def refuse(self, given: MethodArgs) -> None:
        """Raises UserError for settings that the method does not have, or that exclude each other.

        Comparisons may share CO2's settings of the outer step, but not its other settings.
        """
        c, remedy = given.co2, "leave it out"
        unread = [(key, getattr(given, key)) for key in ("shard", "offload", "schedule") if key not in self.takes]
        found = [key if key == "schedule" else f"{key}={value!r}" for key, value in unread if value]
        if not self.reads_co2 and not found:
            if c.compression.format != "float32" and "compression" not in self.takes:
                found, remedy = (
                    [f"compression.format={c.compression.format!r}"],
                    "set ddp_compression" if self.name == "ddp" else remedy,
                )
            else:
                c.compression.check_given()
                own = ("merge", "delay", "nesterov", "outlier")
                changed = [key for key in own if getattr(c, key) != getattr(CO2Config(), key)]
                found = [f"{key}={getattr(c, key)!r}" for key in changed]
        if found:
            raise UserError(f"{found[0]} is CO2's own, method {self.name!r} does not have it: {remedy}")
        self.check(given)


def _co2(given: MethodArgs) -> tuple[nn.Module, Any]:
    """Makes CO2."""
    more: dict[str, Any] = {"mesh": given.mesh, "shard": given.shard, "offload": given.offload}
    return given.model, CO2(given.params, given.co2, schedule=given.schedule, **more, **given.args)


def _check_co2(given: MethodArgs) -> None:
    """Checks CO2's settings."""
    given.co2.check_stable()
    if given.shard or given.offload:
        check_share(given.co2, shard=given.shard)


def _ddp(given: MethodArgs) -> tuple[nn.Module, Any]:
    """Makes DDP."""
    options: dict[str, Any] = {**given.args, "mesh": given.mesh}
    made = DDP(given.model, average_buffers=bool(options.pop("buffers")), compression=given.own, **options)
    return made.model, made


def _check_ddp(given: MethodArgs) -> None:
    """Checks DDP's compression."""
    if given.own.format == "auto":
        raise UserError(
            "ddp_compression.format='auto' is chosen together with tau, which ddp does not have: give a format"
        )


def _local(given: MethodArgs) -> tuple[nn.Module, Any]:
    """Makes LocalSGD."""
    return given.model, LocalSGD(given.params, given.tau, compression=given.co2.compression, **given.args)


def _overlap_local(given: MethodArgs) -> tuple[nn.Module, Any]:
    """Makes OverlapLocalSGD."""
    c = given.co2
    more: dict[str, Any] = {"tau_max": c.tau_max, "compression": c.compression, **given.args}
    return given.model, OverlapLocalSGD(given.params, c.tau, given.own, **more)


def _slowmo(given: MethodArgs) -> tuple[nn.Module, Any]:
    """Makes SlowMo."""
    more: dict[str, Any] = {"lr": given.lr, "compression": given.co2.compression, **given.args}
    return given.model, SlowMo(given.params, given.tau, given.own, **more)


def _diloco(given: MethodArgs) -> tuple[nn.Module, Any]:
    """Makes DiLoCo."""
    return given.model, DiLoCo(given.params, given.tau, given.own, compression=given.co2.compression, **given.args)


OF_CO2, COMPRESSION = frozenset({"shard", "offload", "schedule", "elastic"}), frozenset({"compression"})
OF_TORCH = ("bucket_cap_mb", "find_unused_parameters")
OF_DDP = Settings("ddp_compression", CompressionConfig, "Of method ddp: how gradients are compressed for the network.")
OF_OVERLAP, OF_SLOWMO = Settings("overlap_local", OverlapLocalConfig), Settings("slowmo", SlowMoConfig)
OF_DILOCO = Settings("diloco", DiLoCoConfig)
REGISTRY: dict[str, MethodSpec] = {}


def register(spec: MethodSpec) -> None:
    """Adds a method, so that recipes and `spec_of` find it by its name."""
    REGISTRY[spec.name] = spec


register(MethodSpec("co2", _co2, "hidden", check=_check_co2, reads_co2=True, takes=OF_CO2))
register(MethodSpec("ddp", _ddp, "synchronous", OF_DDP, check=_check_ddp))
register(MethodSpec("diloco", _diloco, "blocking", OF_DILOCO, check=lambda given: given.tau, takes=COMPRESSION))
register(MethodSpec("local", _local, "blocking", check=lambda given: given.tau, takes=COMPRESSION))
register(MethodSpec("overlap_local", _overlap_local, "hidden", OF_OVERLAP, takes=COMPRESSION))
register(MethodSpec("slowmo", _slowmo, "blocking", OF_SLOWMO, check=lambda given: given.tau, takes=COMPRESSION))
METHODS = tuple(REGISTRY)
Method = LocalUpdateMethod | DDP


def make_method(
    name: str,
    model: nn.Module,
    *,
    co2: CO2Config | None = None,
    schedule: Schedule | None = None,
    lr: Callable[[], float] | None = None,
    average_buffers: bool = True,
    average: Given | None = None,
    mesh: DeviceMesh | None = None,
    shard: bool = False,
    offload: bool = False,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    link: Link | None = None,
    hooks: Sequence[Hook] = (),
    **settings: Any,
) -> tuple[nn.Module, Method]:
    """Makes a method by its name.

    CO2 describes shard and offload. CommonArgs describes average (which ddp does not need), group, timeout, link
    and hooks.

    Args:
        name: One of METHODS, or a registered method.
        model: The module to train, on this worker's device.
        co2: CO2's settings. None means CO2Config(). All local methods use its tau, so that comparisons share the
            period.
        schedule: CO2's schedule, see CO2.
        lr: Returns the current inner learning rate, for SlowMo.
        average_buffers: Whether the model's floating-point buffers are averaged.
        mesh: [nodes, workers per node]. The workers of a node synchronize gradients in every step, and the method runs
            across nodes. With methods other than co2, hooks then receive only the workers with the same index in their
            node. ddp synchronizes all workers in every step, and compresses only what crosses nodes (see DDP).
        **settings: The method's own settings by its key: diloco, slowmo, overlap_local, or ddp_compression. With ddp
            also bucket_cap_mb and find_unused_parameters of torch's DistributedDataParallel.

    Returns:
        The module to call in the loop, and the method, whose step() follows every optimizer step.

    Raises:
        UserError: For an unknown method, or settings that it does not support.
    """
    spec = spec_of(name)
    co2 = replace(of_kind(co2, CO2Config, "co2"))  # names all settings, so that CO2 does not warn
    if not isinstance(model, nn.Module):
        raise UserError(f"model: a {type(model).__name__} is given: give the module itself")
    of_torch = {key: settings.pop(key) for key in OF_TORCH if name == "ddp" and key in settings}
    own = check_settings(name, co2, shard=shard, offload=offload, schedule=schedule, **settings)
    options = CommonArgs(group=group, timeout=timeout, link=link, hooks=hooks, **of_torch)
    options["buffers"] = list(model.buffers()) if average_buffers else []
    if average is not None and spec.local:
        options["average"] = average
    if mesh is not None and spec.local:
        from .placement import check_mesh

        check_mesh(mesh)
        if not any(map(is_dtensor, model.parameters())):  # sharded models synchronize themselves
            # averages a node's gradients in every step
            model = DistributedDataParallel(model, process_group=mesh.get_group(1))
        if "shard" not in spec.takes:
            check_apart(name, co2, mesh.size(1))
            options["group"] = mesh.get_group(0)  # the method averages across nodes only
    return spec.make(MethodArgs(co2, own, model, options, shard, offload, schedule, lr, mesh))


def check_settings(
    name: str,
    co2: CO2Config,
    *,
    shard: bool = False,
    offload: bool = False,
    schedule: Schedule | None = None,
    **settings: Any,
) -> Any:
    """Returns the method's own settings, or None if it has none. For the arguments, see make_method.

    UserError for settings that the method does not have, so that none is silently unused, or that exclude each other.
    """
    spec = spec_of(name)
    own = spec.settings.config() if spec.settings else None
    owners = {other.settings.key: other for other in REGISTRY.values() if other.settings}
    for key, value in settings.items():
        if key not in owners:
            raise TypeError(f"make_method() got an unexpected keyword argument {key!r}")
        owner, default = owners[key], owners[key].settings.config()  # pyright: ignore[reportOptionalMemberAccess]
        value = of_kind(value, type(default), key)
        if owner is spec:
            own = value
        elif value != default:  # another method's settings, which would be unused
            option, given = next((k, v) for k, v in vars(value).items() if v != getattr(default, k))
            raise UserError(
                f"{key}.{option}={given!r} is method {owner.name}'s own, method {name!r} does not have it: leave it out"
            )
    spec.refuse(MethodArgs(co2, own, shard=shard, offload=offload, schedule=schedule))
    return own


def check_apart(name: str, co2: CO2Config, per_node: int) -> None:
    """Raises UserError for choices from measured times if a node's ranks would make them in different groups."""
    spec = spec_of(name)
    if per_node > 1 and spec.local and "shard" not in spec.takes and "auto" in (co2.tau, co2.compression.format):
        raise UserError(
            f"tau={co2.tau!r}, compression.format={co2.compression.format!r} with method {name!r} and {per_node} "
            "workers a node: they would make different choices; give a number and a format"
        )


def spec_of(name: str) -> MethodSpec:
    """Returns the description of a method. UserError if there is none."""
    if name not in REGISTRY:
        raise UserError(f"method {name!r}: choose one of {', '.join(REGISTRY)}")
    return REGISTRY[name]
