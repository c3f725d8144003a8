"""The settings of when a mean is merged, into what, and how long rounds are; and their schedules, by a round's number.

What a change of tau does to the outer momentum: core/outer.py, `carried`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, TypeVar

from ..config import OuterConfig, is_number, is_whole, require
from ..errors import UserError

SCHEDULED = ("tau", "outer_lr", "outer_momentum", "clip")  # what may change from round to round


Merge = Literal["outer", "mix", "keep"]
MERGES: tuple[Merge, ...] = ("outer", "mix", "keep")


def largest_outer_lr(merge: Merge, beta: float, late: float) -> float:
    """The outer learning rate from which on a mean that is not merged in the paper's order makes some direction of a
    quadratic grow, without a penalty. beta: outer momentum. late: local steps from sending to merging, over tau.

    After what is left of an error by tau local steps (a) and by those behind the merge (b), Jury's criterion on the
    mean's map. Undelayed, and for all but keep: 2 (1 + beta). keep adds the old momentum's kick late: from late = 1,
    the worst, 2 (1 - beta^2).
    """
    limits = [2 * (1 + beta)]
    for i in range(1, 1000) if merge == "keep" and late > 0 else ():
        a = i / 1000
        b = a ** (1 - late)
        v = b - a
        limits.append((1 - beta) * (1 + v) * (1 + beta * v) / (v * (1 - beta + beta * b)))
    return 2 * (1 - beta**2) if merge == "keep" and late == 1 else min(limits)


@dataclass(frozen=True)
class AdaptiveConfig(OuterConfig):
    """The paper's settings, and when a mean is merged, into what, and how long rounds are."""

    tau: int | Literal["auto"] = 48  # pyright: ignore[reportIncompatibleVariableOverride]
    """Local steps per round; the paper searched {1, 3, 6, 12, 24, 48, 96, 192}. auto: chosen from measured times, the
    fewest that hide the all-reduce, and again when those change. Until they are known, rounds have two local steps."""
    _: KW_ONLY
    tau_max: int = 192
    """With tau auto: never more local steps than this."""
    merge: Merge = "outer"
    """What a worker continues from when a mean has landed: the outer iterate (the paper), mix, between it and the own
    parameters, or keep, the outer iterate and the own progress since the sending (for a copy of the parameters)."""
    mix: float = 0.5
    """Of merge mix: the share of the outer iterate; 1 for it alone."""
    delay: int | Literal["boundary", "auto"] = "boundary"
    """When a mean is merged: at the boundary a round after the sending (the paper); so many local steps after the
    sending, waiting for it where need be; or auto: as soon as it is there, on every worker by itself, which waits
    for it after the local steps that the link needs, known after four rounds. Without that a mean would come as late as
    the slowest worker sends, up to a round, which costs loss. 0 waits at once: nothing is hidden, nor stale."""

    def check(self) -> None:
        lasts = is_whole(self.tau) or self.tau == "auto"
        require(self, lasts, "tau", "give a whole number of local steps, 1 or more, or auto")
        require(self, is_whole(self.tau_max), "tau_max", "give a whole number of local steps, 1 or more")
        self.check_outer()
        require(self, self.merge in MERGES, "merge", f"choose one of {', '.join(MERGES)}")
        shared = is_number(self.mix) and 0 < self.mix <= 1
        require(self, shared, "mix", "give a number in (0, 1]; 1 continues from the outer iterate alone")
        self._check_delay()

    def _check_delay(self) -> None:
        number = self.delay if isinstance(self.delay, int) and not isinstance(self.delay, bool) else None
        known = number is not None or self.delay in ("boundary", "auto")
        require(self, known and (number or 0) >= 0, "delay", "give boundary, auto, or a whole number of local steps")
        if number is not None:
            require(self, self.tau != "auto", "delay", "with tau auto give delay boundary or auto")
            require(self, number <= int(self.tau), "delay", f"give at most tau={self.tau} local steps")
        nothing_stale = f"nothing is stale then: set gap none, not {self.gap}"
        require(self, number != 0 or self.gap == "none", "delay", nothing_stale)
        thrown = "merge outer would throw the steps since the sending away: set merge mix or keep"
        require(self, self.merge != "outer" or self.at_boundary or number == 0, "delay", thrown)

    def changing(self, tau: int) -> dict[str, float | None]:
        """What may change from round to round, to be compared among the workers. tau: the round's."""
        values = {name: getattr(self, name) for name in SCHEDULED} | {"tau": tau}
        return {name: value if value is None else float(value) for name, value in values.items()}  # 1 prints as 1.0

    def check_stable(self) -> None:
        """Only the paper's order delays the outer step by a round. Else a difference is taken from the outer iterate as
        the means before have made it; with merge keep the momentum's kick alone is late, by as much as the mean."""
        if self.merge != "keep" and self.at_boundary:
            return super().check_stable()
        whole = isinstance(self.delay, str)  # boundary, or auto, which may come as late
        late = 1.0 if whole else int(self.delay) / int(self.tau)  # pyright: ignore[reportArgumentType]
        limit = largest_outer_lr(self.merge, self.outer_momentum, late)
        require(
            self,
            self.gap != "none" or self.allow_unstable or self.outer_lr < limit,
            "outer_lr",
            f"with merge={self.merge!r}, delay={self.delay!r}, outer_momentum={self.outer_momentum} and gap='none' it "
            f"diverges from {limit:.3g} on in directions that tau local steps solve; lower one of the two "
            "(allow_unstable=True runs it regardless)",
        )

    @property
    def tau_margin(self) -> float:
        """Of tau auto: by how much the local steps should outlast the all-reduce. Where means are merged on arrival so
        much that they come in the first two fifths of a round: fresh means are worth more than frequent ones, to there
        (results/loss.md).
        """
        return 0.25 if self.at_boundary else 1.5

    @property
    def at_boundary(self) -> bool:
        """Whether a mean is merged at the boundary after the one at which it was sent, in the paper's order."""
        return self.delay == "boundary" or (self.delay != "auto" and self.delay == self.tau)


Schedule = Callable[[int], Mapping[str, Any]]
Config = TypeVar("Config", bound=AdaptiveConfig)


def settings_of(c: Config, schedule: Schedule | None) -> Callable[[int], Config]:
    """The settings of a round, by its number."""
    return functools.partial(_scheduled, c, schedule) if schedule else lambda number: c


def _scheduled(c: Config, schedule: Schedule, number: int) -> Config:
    changes = schedule(number)
    if not isinstance(changes, Mapping):
        raise UserError(
            f"the schedule gives {changes!r} for round {number}: return a dict of what changes, {{}} for none"
        )
    if unknown := changes.keys() - set(SCHEDULED):
        raise UserError(f"the schedule changes {', '.join(sorted(unknown))}: only {', '.join(SCHEDULED)} may change")
    if "tau" in changes and "auto" in (c.tau, changes["tau"]):
        raise UserError(f"the schedule gives tau={changes['tau']!r} while tau is {c.tau!r}: give numbers, or only auto")
    changed = replace(c, **changes)
    if changed.at_boundary != c.at_boundary and c.merge != "keep":  # which has one order for both
        raise UserError(
            f"the schedule gives tau={changed.tau} after tau={c.tau}, with merge={c.merge!r} and delay={c.delay}: at "
            "the end of a round a mean is merged otherwise than within one; keep tau above delay, or set delay auto"
        )
    return changed
