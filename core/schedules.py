"""Schedules for CO2(schedule=...): from a round's number alone to the settings that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import UserError


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
