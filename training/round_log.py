"""What a run's rounds communicated: added up, logged, and traced where the recipe says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.methods import Method
from core.rounds import LocalMethod
from core.stats import Overlap, RoundStats, send_off
from training.allocations import AllocationLog
from training.folder import RunFolder
from training.recipe import Recipe
from training.trace import Trace
from training.workers import rank


class RoundLog:
    """Attributes: overlap, the communication of all rounds that were read so far; allocations, what L-GreCo decides."""

    def __init__(self, recipe: Recipe, folder: RunFolder, device: torch.device):
        self.overlap = Overlap()
        self._folder = folder
        self.allocations = AllocationLog(folder)
        self._log_every = recipe.log_every
        self._on_gpu = device.type == "cuda"
        self._synchronous = False
        self._unread: list[tuple[int, RoundStats]] = []  # rounds whose times a GPU may still be taking
        self._unlogged: list[tuple[int, dict[str, Any]]] = []  # scalars on their way from a GPU
        self._trace: Trace | None = None
        if recipe.trace and rank() == 0:
            first = 6 if recipe.co2.tau == "auto" else 2  # tau has been chosen by then
            self._trace = Trace(folder.path / "trace.json", cuda=self._on_gpu, first=first)

    def close_round(self, step: int, method: Method) -> None:
        """Call it when a round has closed. On a GPU the round's statistics are read when the next one closes, so that
        the host does not wait for them."""
        self._synchronous = method.tau == 1
        self._unread.append((step, method.stats))
        self.read(leave=int(self._on_gpu))
        if isinstance(method, LocalMethod) and (decision := method.tau_decision):
            sent = f"{method.stats.bytes_sent / 1e6:.3g} MB a round, {decision.exposed_share:.0%} of the time exposed"
            new = f"tau {decision.old} -> {decision.new}, wire {decision.wire}"
            self._folder.note(step, "tau", f"{new}: {decision.reason}; {sent}")
        self.allocations.read(step, method)
        if self._trace and self._trace.close_round():
            self._folder.note(step, "trace", f"trace in {self._trace.path}")

    def log(self, step: int, scalars: Mapping[str, float | Tensor]) -> dict[str, float] | None:
        """Logs scalars; on a GPU when the next ones come, or all are read, so that the host does not wait for them.
        Returns those that it logs last, None where it logs none."""
        self._unlogged.append((step, send_off(scalars)))
        return self._log(leave=int(self._on_gpu))

    def read(self, leave: int = 0) -> None:
        """Reads all rounds but the newest `leave`; all scalars, where it leaves none."""
        while len(self._unread) > leave:
            self._read()
        if not leave:
            self._log(leave)

    def _log(self, leave: int) -> dict[str, float] | None:
        values = None
        while len(self._unlogged) > leave:
            step, scalars = self._unlogged.pop(0)
            values = {name: float(value) for name, value in scalars.items()}
            self._folder.log(step, values)
        return values

    def finish(self, step: int) -> None:
        """Reads the rounds that are left, ends the trace, and draws the last allocation."""
        self.read()
        self.allocations.finish(step)
        if self._trace and self._trace.finish():
            self._folder.note(step, "trace", f"trace in {self._trace.path}")
        elif self._trace and not self._trace.began:
            self._folder.note(step, "trace", f"no trace, which begins when {self._trace.first} rounds have closed")

    def state_dict(self) -> dict[str, float]:
        return self.overlap.state_dict() | {"lgreco_seconds": self.allocations.seconds}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.overlap.load_state_dict(state)
        self.allocations.seconds = float(state.get("lgreco_seconds", 0.0))

    def _read(self) -> None:
        """Adds the oldest unread round up, and logs it; where every step is a round, only each log_every-th."""
        step, stats = self._unread.pop(0)
        values = stats.as_dict()
        self.overlap.add(values)
        if not self._synchronous or self.overlap.rounds % self._log_every == 0:
            self._folder.log(step, {f"round/{name}": value for name, value in values.items()})
