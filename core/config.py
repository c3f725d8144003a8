"""The paper's settings. Those of core/adaptive are declared there, all others in core/assembly/config.py."""

from __future__ import annotations

from dataclasses import KW_ONLY, MISSING, dataclass, fields
from numbers import Real
from typing import Any, Literal

from . import outer
from .errors import UserError

LARGE = 1e4  # no factor of an outer step that trains comes near
GAPS = ("elementwise", "norm", "none")


def is_number(value: Any) -> bool:
    """Whether it can be compared with numbers: a text cannot."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether it is a whole number above 0, as a number of local steps."""
    return isinstance(value, int) and is_number(value) and value >= 1


def require(settings: Any, ok: bool, name: str, remedy: str) -> None:
    """UserError that names a setting's value and the remedy, unless it is ok."""
    if not ok:
        raise UserError(f"{name}={getattr(settings, name)!r}: {remedy}")


def check_known(config: Any, kind: type[OuterConfig]) -> None:
    """UserError for a config with settings that a method would leave unused which reads those of `kind` alone."""
    if not isinstance(config, kind):
        raise UserError(f"config={config!r}: give an object of {kind.__name__}")
    known = {f.name for f in fields(kind)}
    kind(**{name: getattr(config, name) for name in known})
    for f in fields(config):
        usual = f.default if f.default_factory is MISSING else f.default_factory()
        unread = f.name not in known and getattr(config, f.name) != usual
        require(config, not unread, f.name, f"this class does not read it: leave it out, or take {__package__}.CO2")


@dataclass(frozen=True)
class OuterConfig:
    """The settings of the outer optimiser; defaults as in the example that the authors released."""

    tau: int = 48
    """Local steps per round; the paper searched {1, 3, 6, 12, 24, 48, 96, 192}."""
    _: KW_ONLY
    outer_lr: float = 1.0
    """alpha: the share of the momentum that the outer step takes."""
    outer_momentum: float = 0.5
    """beta: how much of the outer momentum survives a round."""
    gap: Literal["elementwise", "norm", "none"] = "elementwise"
    """The staleness gap penalty Lambda: one of elementwise, norm, none."""
    clip: float | None = 1.0
    """phi: clips each element of the outer momentum to [-phi, phi]; None for no clipping."""
    allow_unstable: bool = False
    """Accept outer_momentum + outer_lr >= 1 without a gap penalty, to show that it diverges."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """UserError for a value with which nothing can be trained."""
        require(self, is_whole(self.tau), "tau", "give a whole number of local steps, 1 or more")
        self.check_outer()

    def check_outer(self) -> None:
        """The part of check() that no room extends."""
        alpha, beta, phi = self.outer_lr, self.outer_momentum, self.clip
        require(self, self.gap in GAPS, "gap", f"choose one of {', '.join(GAPS)}")
        above_0 = "give a finite number above 0, as 1.0 is usual"
        require(self, is_number(alpha) and 0 < alpha < LARGE, "outer_lr", above_0)
        require(self, is_number(beta) and 0 <= beta < 1, "outer_momentum", "give a number in [0, 1)")
        clips = phi is None or (is_number(phi) and phi > 0)
        require(self, clips, "clip", "give a number above 0, or None for no clipping")

    def check_stable(self) -> None:
        """Refuses a delayed outer step without a penalty that may diverge, and says why."""
        if self.gap == "none" and not self.allow_unstable and not outer.settles(self.outer_lr, self.outer_momentum):
            raise UserError(self.unstable("set gap='elementwise'", "a sum below 1"))

    def unstable(self, remedy: str, limit: str) -> str:
        """Why a delayed outer step without a penalty may diverge with these settings."""
        return (
            f"outer_momentum={self.outer_momentum} + outer_lr={self.outer_lr} = "
            f"{self.outer_lr + self.outer_momentum:g} with gap='none' is unstable: a step taken one round late settles "
            "only while beta + alpha rho / Lambda < 1, where rho nears 1 in directions that tau local steps solve; "
            f"{remedy}, or lower the two to {limit} (allow_unstable=True runs it regardless)"
        )
