"""The settings of L-GreCo: its choices, how it decides, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import is_number, is_whole
from ..errors import UserError

KNOWN = {"family": ("same", "any"), "error": ("norm", "squared")}
RULES = ("lgreco", "uniform")


@dataclass(frozen=True)
class LGrecoConfig:
    """Defaults are those of the released code, but for `every` and `first`, which are counted in its steps there."""

    family: Literal["same", "any"] = "same"
    """Choose among other bits, densities or ranks of the uniform setting's family, or among all of them."""
    rule: str = "lgreco"
    """lgreco: the fewest bytes within the error of the uniform setting; uniform: every layer the same, for good; or a
    Decider of one's own by its name, such as bench.rules.Accordion."""
    error: Literal["norm", "squared"] = "norm"
    """The measure of a layer's error that adds up: its norm (as released), or its square, as in the whole model's."""
    lowest_rank: float = 0.5
    """The lowest rank that is tried, in units of the uniform one: gamma."""
    highest_rank: float = 2.0
    """The highest rank that is tried, in units of the uniform one: beta."""
    every: int | None = None
    """The most reductions between two decisions; None for 20 rounds of CO2, 100 steps of ddp."""
    first: int | None = None
    """The reduction after which it decides first; None for 3 rounds of CO2, 10 steps of ddp. The time between two
    decisions doubles from there up to `every`."""

    def __post_init__(self) -> None:
        for name, known in KNOWN.items():
            if getattr(self, name) not in known:
                raise UserError(f"wire.lgreco.{name}={getattr(self, name)!r}: choose one of {', '.join(known)}")
        if self.rule not in RULES and "." not in str(self.rule):
            raise UserError(f"wire.lgreco.rule={self.rule!r}: choose one of {', '.join(RULES)}, or name module.Class")
        if not (is_number(self.lowest_rank) and 0 < self.lowest_rank <= 1):
            raise UserError(f"wire.lgreco.lowest_rank={self.lowest_rank!r}: give a number in (0, 1]")
        if not (is_number(self.highest_rank) and 1 <= self.highest_rank < float("inf")):
            raise UserError(f"wire.lgreco.highest_rank={self.highest_rank!r}: give a finite number, 1 or more")
        for name in ("every", "first"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise UserError(f"wire.lgreco.{name}={value!r}: give a whole number of reductions, 1 or more")
