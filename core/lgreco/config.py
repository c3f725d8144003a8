"""The settings of L-GreCo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..config import is_number, is_whole
from ..errors import UserError

Rule = Literal["lgreco", "uniform"]


@dataclass(frozen=True)
class LGrecoConfig:
    """Defaults are those of the released code, but for `every` and `first`, which are counted in its steps there."""

    rule: Rule = "lgreco"
    """lgreco: the fewest bytes within the error of the uniform setting; uniform: every layer the same, for good."""
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
        whole = "give a whole number of reductions, 1 or more"
        for name, ok, remedy in (
            ("rule", self.rule in get_args(Rule), f"choose one of {', '.join(get_args(Rule))}"),
            ("lowest_rank", is_number(self.lowest_rank) and 0 < self.lowest_rank <= 1, "give a number in (0, 1]"),
            (
                "highest_rank",
                is_number(self.highest_rank) and 1 <= self.highest_rank < float("inf"),
                "give a finite number, 1 or more",
            ),
            ("every", self.every is None or is_whole(self.every), whole),
            ("first", self.first is None or is_whole(self.first), whole),
        ):
            if not ok:
                raise UserError(f"wire.lgreco.{name}={getattr(self, name)!r}: {remedy}")
