"""Schedules for CO2(schedule=...): from a round's number alone to the settings that it changes.

What a change of tau does to the outer momentum: core/outer.py, `carried`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..errors import UserError
from .config import SCHEDULED, AdaptiveConfig

Schedule = Callable[[int], Mapping[str, Any]]
Config = TypeVar("Config", bound=AdaptiveConfig)

NUMBERS: dict[str, tuple[Callable[[str], Any], ...]] = {
    "warm_up_momentum": (int,), "ramp_tau": (int,), "quadratic": (float, int),
}  # fmt: skip
FORMS = "warm_up_momentum:ROUNDS, ramp_tau:FIRST, or quadratic:SCALE:LEAST"


def scheduled(c: Config, schedule: Schedule | None, number: int) -> Config:
    """The settings of round `number`."""
    changes = schedule(number) if schedule else {}
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


def warm_up_momentum(beta: float, rounds: int) -> Callable[[int], dict[str, Any]]:
    """Outer momentum from 0 up to beta, in equal steps over so many rounds (Pier, arXiv 2511.17849, warms it up)."""
    if rounds < 1:
        raise UserError(f"rounds={rounds}: give 1 or more")
    return lambda number: {"outer_momentum": beta * min(1.0, number / rounds)}


def ramp_tau(tau: int, first: int = 1) -> Callable[[int], dict[str, Any]]:
    """Local steps a round: first, twice that, and so on up to tau."""
    if not 1 <= first <= tau:
        raise UserError(f"first={first}: give 1 to tau={tau}")
    return lambda number: {"tau": min(tau, first << min(number, 64))}


class QuadraticTau:
    """The quadratic synchronisation rule (Gu et al., ICLR 2024): tau = max(least, (scale / lr)^2, rounded down).

    lr: the inner learning rate of an optimiser step, counted from 0; taken where a round begins. most: never above.
    """

    def __init__(self, lr: Callable[[int], float], scale: float, least: int, most: int = 192):
        if not (1 <= least <= most and scale > 0):
            raise UserError(f"least={least}, most={most}, scale={scale}: give 1 <= least <= most and a scale above 0")
        self.lr, self.scale, self.least, self.most = lr, scale, least, most
        self._taus: list[int] = []
        self._begins = 0  # the step at which the first round begins that is not in the list

    def __call__(self, number: int) -> dict[str, Any]:
        while len(self._taus) <= number:
            lr = self.lr(self._begins)
            wanted = self.most if lr <= 0 else int(min(self.most, (self.scale / lr) ** 2))
            self._taus.append(max(self.least, wanted))
            self._begins += self._taus[-1]
        return {"tau": self._taus[number]}


def from_text(texts: Sequence[str], config: AdaptiveConfig, lr: Callable[[int], float]) -> Schedule | None:
    """What `texts` name, as the command line gives them (FORMS), together; None of nothing.

    config: says where the momentum and tau end: at outer_momentum and tau, of the quadratic rule at tau_max. lr: see
    QuadraticTau.
    """
    parts = [_one(text, config, lr) for text in texts]
    changed = [key for part in parts for key in part(0)]
    if twice := next((key for key in changed if changed.count(key) > 1), None):
        raise UserError(f"schedule {' '.join(texts)}: two of them change {twice}; give one")

    def together(number: int) -> dict[str, Any]:
        return {key: value for part in parts for key, value in part(number).items()}

    return together if parts else None


def _one(text: str, config: AdaptiveConfig, lr: Callable[[int], float]) -> Callable[[int], dict[str, Any]]:
    name, *words = text.split(":")
    try:
        numbers = [kind(word) for kind, word in zip(NUMBERS[name], words, strict=True)]
    except (KeyError, ValueError):
        raise UserError(f"schedule {text!r}: give {FORMS}") from None
    if name == "warm_up_momentum":
        if not config.outer_momentum:
            raise UserError(f"schedule {text}: outer_momentum=0 leaves nothing to warm up to; set it, or leave it out")
        return warm_up_momentum(config.outer_momentum, *numbers)
    if config.tau == "auto":
        raise UserError(f"schedule {text}: tau auto chooses tau itself; give a number for tau, or leave it out")
    if name == "ramp_tau":
        return ramp_tau(config.tau, *numbers)
    return QuadraticTau(lr, *numbers, most=config.tau_max)
