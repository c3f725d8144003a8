"""What L-GreCo chooses from, how it decides, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UserError

RULES = ("lgreco", "accordion", "lgreco_accordion", "legacy", "uniform")
FIXED = ("legacy", "uniform")  # decide once, before anything is sent
KNOWN = {"family": ("same", "any"), "rule": RULES, "error": ("norm", "squared")}


@dataclass(frozen=True)
class LGrecoConfig:
    """Defaults are those of the released code, but for `every` and `first`, which are counted in its steps there."""

    family: Literal["same", "any"] = "same"
    """Choose among other bits, densities or ranks of the uniform setting's family, or among all of them."""
    rule: Literal["lgreco", "accordion", "lgreco_accordion", "legacy", "uniform"] = "lgreco"
    """lgreco: the fewest bytes within the error of the uniform setting; accordion: half or twice that setting, by how
    much a layer's norm has changed; lgreco_accordion: lgreco within the error of Accordion's choices; legacy: more than
    that setting for layers of few elements, by LEGACY's rule of sizes, for good; uniform: every layer the same, for
    good."""
    error: Literal["norm", "squared"] = "norm"
    """What of a layer's error adds up: its norm (as released), or its square, as in the whole model's error."""
    share: float = 1.0
    """The budget, as a share of the uniform setting's error: alpha."""
    lowest_rank: float = 0.5
    """Of a rank: the least that is tried, in units of the uniform one: gamma."""
    highest_rank: float = 2.0
    """Of a rank: the greatest that is tried, in units of the uniform one: beta."""
    every: int | None = None
    """Reductions between two decisions, at least; None for 20 rounds of CO2, 100 steps of ddp."""
    first: int | None = None
    """The reduction after which it decides first; None for 3 rounds of CO2, 100 steps of ddp."""
    time_share: float = 0.01
    """Of the time since the first reduction: what deciding may take. The next decision waits until it keeps that, as
    measured by all workers, so that two runs may decide at different times; 1 for every `every`-th reduction. On a GPU
    the device's time counts, between events of its stream."""

    def __post_init__(self) -> None:
        for name, known in KNOWN.items():
            if getattr(self, name) not in known:
                raise UserError(f"wire.lgreco.{name}={getattr(self, name)!r}: choose one of {', '.join(known)}")
        if not 0 < self.share < float("inf"):
            raise UserError(f"wire.lgreco.share={self.share!r}: give a finite number above 0")
        if not 0 < self.lowest_rank <= 1:
            raise UserError(f"wire.lgreco.lowest_rank={self.lowest_rank!r}: give a number in (0, 1]")
        if not 1 <= self.highest_rank < float("inf"):
            raise UserError(f"wire.lgreco.highest_rank={self.highest_rank!r}: give a finite number, 1 or more")
        if not 0 < self.time_share <= 1:
            raise UserError(f"wire.lgreco.time_share={self.time_share!r}: give a number in (0, 1]")
        for name in ("every", "first"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise UserError(f"wire.lgreco.{name}={value!r}: give a whole number of reductions, 1 or more")
