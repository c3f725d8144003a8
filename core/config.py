"""The paper's settings. Those of a room are declared there, and put together in core/assembly.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from . import outer
from .errors import UserError

LARGE = 1e4  # no factor of an outer step that trains comes near
SCHEDULED = ("tau", "outer_lr", "outer_momentum", "clip")  # what may change from round to round
GAPS = ("elementwise", "norm", "none")


def require(settings: Any, ok: bool, name: str, remedy: str) -> None:
    """UserError that names a setting's value and the remedy, unless it is ok."""
    if not ok:
        raise UserError(f"{name}={getattr(settings, name)!r}: {remedy}")


@dataclass(frozen=True)
class OuterConfig:
    """The settings of the outer optimiser; defaults as in the example that the authors released."""

    tau: int = 48
    """Local steps per round; the paper searched {1, 3, 6, 12, 24, 48, 96, 192}."""
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
        whole = isinstance(self.tau, int) and not isinstance(self.tau, bool) and self.tau >= 1
        require(self, whole, "tau", "give a whole number of local steps, 1 or more")
        require(self, self.gap in GAPS, "gap", f"choose one of {', '.join(GAPS)}")
        self.check_outer()

    def check_outer(self) -> None:
        """The part of check() that no room extends."""
        require(self, 0 < self.outer_lr < LARGE, "outer_lr", "give a finite number above 0, as 1.0 is usual")
        require(self, 0 <= self.outer_momentum < 1, "outer_momentum", "give a number in [0, 1)")
        require(self, self.clip is None or self.clip > 0, "clip", "give a number above 0, or None for no clipping")

    def changing(self, tau: int) -> dict[str, float | None]:
        """What may change from round to round, to be compared among the workers. tau: the round's."""
        values = {name: getattr(self, name) for name in SCHEDULED} | {"tau": tau}
        return {name: value if value is None else float(value) for name, value in values.items()}  # 1 prints as 1.0

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
