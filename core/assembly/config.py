"""All settings of CO2, those of its rooms put together, and how the mean over the workers crosses the network."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal, TypeVar, get_args

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..adaptive.config import AdaptiveConfig
from ..config import is_number, is_whole, require
from ..errors import UserError
from ..flat import Bucket, Scalars
from ..flight import Reducer
from ..groups import backend_for
from ..lgreco.choices import LGrecoConfig, parse
from ..sharded.mesh import check_mesh
from ..wires.formats import BLOCK, BLOCK_BYTES, Wire
from ..wires.quantized import Quantized

Format = Wire | Literal["lgreco", "auto"]
FORMATS: tuple[str, ...] = (*get_args(Wire), "lgreco", "auto")


@dataclass(frozen=True)
class WireConfig:
    """How the pseudo-gradient crosses the network."""

    format: Format = "float32"
    """float32 (float64 for float64 parameters, a plain all-reduce); rounded to bfloat16, float16, int8, int4 or int2;
    lgreco, every layer in a way of its own, chosen anew while training goes on; or auto: int4, or float32 where means
    are as fresh over it, as measured while training."""
    error_feedback: bool = True
    """With a narrow format: the rounding errors are added to the next round's message, for a copy of the parameters."""
    like: str = ""
    """Of lgreco: the uniform setting that it stays as close to the exact mean as: intB with B bits, topD, the largest
    D of each layer's elements, or rankR, such as int4, top0.01, rank4."""
    lgreco: LGrecoConfig = field(default_factory=LGrecoConfig)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"wire.format={self.format!r}: choose one of {', '.join(FORMATS)}")
        if self.format == "lgreco":
            parse(self.like)
            if not self.error_feedback:
                raise UserError("wire.error_feedback=False: wire.format lgreco always feeds back; leave it out")
        elif self.like or self.lgreco != LGrecoConfig():
            given = f"wire.like={self.like!r}" if self.like else f"wire.lgreco={self.lgreco}"
            raise UserError(f"{given} is of wire.format lgreco, not {self.format}: leave it out, or set that")

    def check(self, params: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
        """Refuses tensors and backends with which a narrow format was never run."""
        if self.format == "float32":
            return
        asked, remedy = f"wire.format={self.format!r}", "use wire.format float32"
        devices = sorted({str(t.device) for t in params})
        if len(devices) > 1:
            raise UserError(
                f"{asked} with parameters on {', '.join(devices)}: they have to lie on one device, or {remedy}"
            )
        if not params or not dist.is_initialized():
            return
        kind, backend = params[0].device.type, backend_for(group, params[0].device)
        if backend not in ("gloo", "nccl"):
            raise UserError(f"{asked} over {backend} backend for {kind} tensors: only gloo and nccl do, or {remedy}")

    def check_given(self) -> None:
        """For a method that chooses nothing from measured times."""
        if self.format == "auto":
            raise UserError("wire.format='auto' is CO2's own choice, from measured times: give another method a format")

    @property
    def choices(self) -> dict[str, float]:
        """The formats to choose from, the narrowest first -> bytes an element; of lgreco, unknown before it chooses,
        float32's. auto knows int4 alone beside float32: with error feedback it cost no loss (results/loss.md), and a
        trial takes rounds."""
        known = ("int4", "float32") if self.format == "auto" else (self.format,)
        return {wire: BLOCK_BYTES.get(wire, 4 * BLOCK) / BLOCK for wire in known}

    def reducer(self, buckets: Sequence[Bucket], scalars: Scalars, rank: int, world_size: int) -> Reducer:
        """The sender of the buckets in this format, which is not float32."""
        workers = rank, world_size
        if self.format == "lgreco":
            from ..lgreco.reducer import LGreco  # few need it

            return LGreco(buckets, scalars, *workers, self.like, self.lgreco)
        assert self.format not in ("float32", "auto")
        return Quantized(buckets, scalars, *workers, self.format, self.error_feedback)


Config = TypeVar("Config")


@dataclass(frozen=True)
class CO2Config(AdaptiveConfig):
    """All settings of CO2; defaults as in the example that the authors released.

    `CO2Config.recommended` and `CO2Config.paper` name the two sets of settings. CO2 warns if it gets a CO2Config(tau=N)
    with no other setting, which is the paper's.
    """

    _: KW_ONLY
    outlier: float | None = 10.0
    """A worker is left out of a round's mean, and starts anew, where its difference is more than so many times as large
    as its own usual one (core/robust/guard.py); None: only where it is not finite."""
    wire: WireConfig = field(default_factory=WireConfig)
    """How the pseudo-gradient crosses the network, and what local, overlap_local and slowmo send; ddp has ddp_wire."""

    _names_no_rule: ClassVar[bool] = False

    # __init__ and __post_init__ cannot tell a setting that was given from a default
    def __new__(cls, *args: Any, **given: Any) -> CO2Config:
        config = super().__new__(cls)
        object.__setattr__(config, "_names_no_rule", len(args) <= 1 and given.keys() <= {"tau"})
        return config

    def check(self) -> None:
        super().check()
        limits = self.outlier is None or (is_number(self.outlier) and self.outlier > 1)
        require(self, limits, "outlier", "give a number above 1, or None for no limit")
        require(self, isinstance(self.wire, WireConfig), "wire", "give a WireConfig, such as WireConfig('int8')")

    @classmethod
    def paper(cls, tau: int | Literal["auto"] = 48, **settings: Any) -> CO2Config:
        """Our reading of the paper's rule: an average arrives a whole round late, with the staleness gap penalty.

        docs/differences.md says what the paper leaves open. Our measurements support `recommended` instead. Its outer
        momentum is the one for 33 to 64 workers; the authors' release sets 0 up to 16, 0.2 up to 32 and 0.6 above 64.

        Args:
            tau: local steps per round.
            settings: other settings, such as outer_momentum=0.0.
        """
        rule: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.5, "gap": "elementwise", "clip": 1.0}
        rule |= {"merge": "outer", "delay": "boundary"}
        return cls(tau=tau, **rule | settings)

    @classmethod
    def recommended(
        cls,
        workers: int,
        steps: int | None = None,
        *,
        tau: int | Literal["auto"] = "auto",
        mesh: DeviceMesh | None = None,
    ) -> CO2Config:
        """What our measurements support in place of the paper's settings (results/loss.md).

        A mean is merged when it lands, the own progress since the sending is kept, for a copy of the parameters, and
        there is no penalty, for little is stale then. merge="mix" saves the copy and comes close. A mean crosses the
        network in int4, for 1 + 1/workers copies more, so that it lands sooner; where it would land within a local
        step anyway, in float32.

        workers: their number; outer momentum costs most with few of them: 0 up to 16, beyond that what the authors'
        release sets, 0.2 up to 32, 0.5 up to 64, 0.6 above. steps: of the whole run, if known, so that it has twenty
        rounds at least. tau: local steps per round; auto: from measured times. mesh: [nodes, workers of a node], for
        ShardedCO2: workers of a node must stay equal and hold only shares of the outer state, so of all this there is
        the outer momentum; a mean is merged in the paper's order, with its penalty, and crosses in float32.
        """
        for name, given in (("workers", workers), ("steps", 1 if steps is None else steps)):
            if not is_whole(given):
                raise UserError(f"{name}={given!r}: give their number, 1 or more")
        beta = next(b for limit, b in ((16, 0.0), (32, 0.2), (64, 0.5), (float("inf"), 0.6)) if workers <= limit)
        tau_max = 192 if steps is None else min(192, max(1, steps // 20))
        if mesh is not None:
            check_mesh(mesh)
            return cls(tau=tau, tau_max=tau_max, outer_momentum=beta)
        wire = WireConfig("auto")
        late = {"gap": "none", "merge": "keep", "delay": "auto"}
        return cls(tau=tau, tau_max=tau_max, outer_momentum=beta, wire=wire, **late)  # pyright: ignore


def named_rule(config: CO2Config | None) -> CO2Config:
    """The config that is given, or the default. Rank 0 warns if it has nothing but tau, which is the paper's rule."""
    c = of_kind(config, CO2Config, "config")
    if c._names_no_rule and not (dist.is_initialized() and dist.get_rank()):
        level, frame, inside = 1, sys._getframe(), (__name__.partition(".")[0], "contextlib")
        while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in inside:
            level, frame = level + 1, frame.f_back
        warnings.warn(
            f"CO2Config(tau={c.tau!r}) with nothing else is our reading of the paper's rule. On short runs its loss is "
            f"higher than with CO2Config.recommended(workers, steps, tau={c.tau!r}). Use that, or "
            f"CO2Config.paper(tau={c.tau!r}) for the paper's rule without this warning",
            stacklevel=level,
        )
    return c


def of_kind(given: Any, kind: type[Config], name: str) -> Config:
    """The settings, or the defaults where none are given; UserError for an object of another class."""
    if given is not None and not isinstance(given, kind):
        raise UserError(f"{name}={given!r}: give an object of {kind.__name__}, or leave it out")
    return given if given is not None else kind()
