"""A script that ends without finish(), while its workers hold different models."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import warnings
import weakref

from ..rounds import Rider, Rounds


class Unfinished(Rider):
    """Warns once as the process ends, on the rank that reports what concerns all, if finish() is missing.

    Workers differ after local steps, and while a reduction is in flight. There is no warning in these cases:

    - The process ends with an uncaught exception, or the method was left after one (leave(), a failed all-reduce).
    - state_dict() was called since the last step: a saved run goes on from there.
    - The process was forked after the method was made, as a data loader's workers are.
    - The method was collected, and another one was made since then.
    """

    def attach(self, method: Rounds) -> None:
        super().attach(method)
        self._process = os.getpid()
        _dropped.clear()
        _alive.add(self)
        _register()

    def text(self) -> str:
        """The warning; "" where nothing is missing."""
        m = self.method
        if self._process != os.getpid() or m.flight.world_size == 1 or not m.tells or m.flight.failed:
            return ""
        if not (m.local_steps or m.flight.in_flight) or m.saved_at == (m.rounds, m.local_steps):
            return ""
        return (
            f"the script ends without {m.name}.finish(), {m.local_steps} local steps after round {m.rounds}: each "
            "worker holds a model of its own, which is not the trained one; call finish() on every worker after the "
            "loop, or run the loop in a with block: with CO2(...) as co2"
        )

    def __del__(self) -> None:
        """A script's main() has returned, perhaps: the process may end next."""
        if not sys.is_finalizing() and hasattr(self, "_process") and (text := self.text()):
            _dropped.append(text)


_alive: weakref.WeakSet[Unfinished] = weakref.WeakSet()
_dropped: list[str] = []  # texts of methods that were collected since the last one was made


@functools.cache
def _register() -> None:
    atexit.register(_warn)


def _warn() -> None:
    if hasattr(sys, "last_type"):  # an uncaught exception
        return
    texts = [text for rider in list(_alive) if (text := rider.text())] or _dropped
    if texts:
        warnings.warn(texts[0], stacklevel=1)
