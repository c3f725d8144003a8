"""A checkpoint's state without waiting for what is in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..rounds import Rider, Rounds
from .saved import Saved, under_rank


class Snapshot(Rider):
    """Gives the state of a boundary when what is in flight there has landed."""

    def __init__(self) -> None:
        self._wanted: Callable[[dict[str, Any]], None] | None = None
        self._of_now: dict[str, Any] = {}  # what the local steps of the next round change

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        assert isinstance(method, Saved), "see core.assembly"
        self._saved = method

    def ask(self, then: Callable[[dict[str, Any]], None]) -> None:
        """Calls `then` with what state_dict would return at this boundary, without waiting: when what is in flight has
        landed, at the next boundary at the latest; at once where nothing is in flight. Copy
        parameters and optimiser here.

        Where one was asked for before, that is given first, for which this waits.
        """
        self.hand_over()
        m, self._wanted = self._saved, then
        self._of_now = {"local_steps": m.local_steps}
        if not self.method.flight.in_flight:
            self.hand_over()

    def hand_over(self) -> None:
        """Waits for what is in flight and gives the snapshot that was asked for, where one was."""
        if self._wanted is not None:
            then, self._wanted = self._wanted, None
            then(under_rank(self._saved.own_state() | self._of_now))

    def landed(self) -> None:
        self.hand_over()

    def restart(self) -> None:
        self._wanted = None

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        self._wanted = None
