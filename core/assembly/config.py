"""All settings of CO2, those of its rooms put together."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ..adaptive.config import AdaptiveConfig
from ..config import is_number, is_whole, require
from ..errors import UserError
from ..sharded.checks import check_mesh
from .wire import WireConfig

Config = TypeVar("Config")


@dataclass(frozen=True)
class CO2Config(AdaptiveConfig):
    """All settings of CO2; defaults as in the example that the authors released."""

    _: KW_ONLY
    outlier: float | None = 10.0
    """A worker is left out of a round's mean, and starts anew, where its difference is more than so many times as large
    as its own usual one (core/robust/guard.py); None: only where it is not finite."""
    wire: WireConfig = field(default_factory=WireConfig)
    """How the pseudo-gradient crosses the network, and what local, overlap_local and slowmo send; ddp has ddp_wire."""

    def check(self) -> None:
        super().check()
        limits = self.outlier is None or (is_number(self.outlier) and self.outlier > 1)
        require(self, limits, "outlier", "give a number above 1, or None for no limit")
        require(self, isinstance(self.wire, WireConfig), "wire", "give a WireConfig, such as WireConfig('int8')")

    @classmethod
    def recommended(cls, workers: int, steps: int | None = None, *, mesh: DeviceMesh | None = None) -> CO2Config:
        """What our measurements support in place of the paper's settings (results/loss.md).

        A mean is merged when it lands, the own progress since the sending is kept, for a copy of the parameters, and
        there is no penalty, for little is stale then. merge="mix" saves the copy and comes close. A mean crosses the
        network in int4, for 1 + 1/workers copies more, so that it lands sooner; where it would land within a local
        step anyway, in float32.

        workers: their number; outer momentum costs most with few of them: 0 up to 16, beyond that what the authors'
        release sets, 0.2 up to 32, 0.5 up to 64, 0.6 above. steps: of the whole run, if known, so that it has twenty
        rounds at least. tau set by dataclasses.replace holds. mesh: [nodes, workers of a node], for ShardedCO2: workers
        of a node must stay equal and hold only shares of the outer state, so of all this there is the outer momentum;
        a mean is merged in the paper's order, with its penalty, and crosses in float32.
        """
        for name, given in (("workers", workers), ("steps", 1 if steps is None else steps)):
            if not is_whole(given):
                raise UserError(f"{name}={given!r}: give their number, 1 or more")
        beta = next(b for limit, b in ((16, 0.0), (32, 0.2), (64, 0.5), (float("inf"), 0.6)) if workers <= limit)
        tau_max = 192 if steps is None else min(192, max(1, steps // 20))
        if mesh is not None:
            check_mesh(mesh)
            return cls(tau="auto", tau_max=tau_max, outer_momentum=beta)
        wire = WireConfig("auto")
        late = {"gap": "none", "merge": "keep", "delay": "auto"}
        return cls(tau="auto", tau_max=tau_max, outer_momentum=beta, wire=wire, **late)  # pyright: ignore


def of_kind(given: Any, kind: type[Config], name: str) -> Config:
    """The settings, or the defaults where none are given; UserError for an object of another class."""
    if given is not None and not isinstance(given, kind):
        raise UserError(f"{name}={given!r}: give an object of {kind.__name__}, or leave it out")
    return given if given is not None else kind()
