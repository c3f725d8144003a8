"""Reads, logs and adds up the communication of each round, and traces some rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from core.baselines.table import Method
from core.compression.lgreco.choices import Allocation
from core.compression.lgreco.reducer import LGreco
from core.local_update import LocalUpdateMethod
from core.stats import RoundStats, defer
from core.tau import AdaptiveTau
from training.folder.run_folder import RunFolder
from training.recipe import Recipe
from training.start.workers import rank


@dataclass
class Overlap:
    """The communication of a whole run, added up over rounds, in seconds and bytes."""

    rounds: int = 0
    exposed_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    bytes_sent: float = 0.0

    def add(self, stats: dict[str, float]) -> None:
        self.rounds += 1
        self.exposed_seconds += stats["exposed_seconds"]
        self.allreduce_seconds += stats["allreduce_seconds"]
        self.bytes_sent += stats["bytes_sent"]

    @property
    def hidden_seconds(self) -> float:
        """Time of all-reduces during which the loop did not wait."""
        return max(0.0, self.allreduce_seconds - self.exposed_seconds)

    @property
    def hidden_share(self) -> float:
        """hidden_seconds as a share of the all-reduces' time, or 1 if there was none."""
        return self.hidden_seconds / self.allreduce_seconds if self.allreduce_seconds else 1.0

    @property
    def link_mbit(self) -> float:
        """Rate at which this worker sent during all-reduces, in Mbit/s."""
        return self.bytes_sent * 8e-6 / self.allreduce_seconds if self.allreduce_seconds else 0.0

    def summary(self) -> dict[str, float]:
        names = ("rounds", "exposed_seconds", "hidden_seconds", "allreduce_seconds", "hidden_share", "bytes_sent")
        return {name: getattr(self, name) for name in (*names, "link_mbit")}


class RoundLog:
    """Reads and logs the rounds of a run. `overlap` is the communication of all rounds that were read so far."""

    def __init__(self, recipe: Recipe, folder: RunFolder, device: torch.device):
        self.overlap = Overlap()
        self._folder = folder
        self._allocation: Allocation | None = None  # L-GreCo's last decision
        self._log_every = recipe.log_every
        self._on_gpu = device.type == "cuda"
        self._synchronous = False
        self._unread: list[tuple[int, RoundStats]] = []  # rounds whose times a GPU may not have measured yet
        self._unlogged: list[tuple[int, dict[str, Any]]] = []  # scalars that are being copied from a GPU
        self._step, self._trace, self._traced = 0, None, False
        if recipe.trace and rank() == 0:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self._on_gpu
            wait = 5 if recipe.co2.tau == "auto" else 1  # rounds, after which tau has been chosen
            when = schedule(wait=wait, warmup=1, active=2, repeat=1)
            self._trace = profile(activities=activities, schedule=when, on_trace_ready=self._write_trace)
            self._trace.start()

    def close_round(self, step: int, method: Method) -> None:
        """Call it when a round has closed. On a GPU it reads the round before, so that the host does not wait."""
        self._synchronous = method.tau == 1
        self._unread.append((step, method.stats))
        self.read(leave=int(self._on_gpu))
        pacing = method.sync_schedule if isinstance(method, LocalUpdateMethod) else None
        if isinstance(pacing, AdaptiveTau) and (decision := pacing.decision):
            sent = f"{method.stats.bytes_sent / 1e6:.3g} MB a round, {decision.exposed_share:.0%} of the time exposed"
            new = f"tau {decision.old} -> {decision.new}, compression {decision.compression}"
            self._folder.note(step, "tau", f"{new}: {decision.reason}; {sent}")
        self._note_allocation(step, method)
        if self._trace is not None:
            self._step = step
            self._trace.step()

    def log(self, step: int, scalars: Mapping[str, float | Tensor]) -> dict[str, float] | None:
        """Logs scalars, on a GPU the scalars of the last call. Returns the scalars that it logged last, or None."""
        self._unlogged.append((step, defer(scalars)))
        return self._log(leave=int(self._on_gpu))

    def read(self, leave: int = 0) -> None:
        """Adds up and logs all rounds but the newest `leave`, and with `leave` 0 all scalars.

        If every step is a round, it logs every log_every-th round only.
        """
        while len(self._unread) > leave:
            step, stats = self._unread.pop(0)
            values = stats.as_dict()
            self.overlap.add(values)
            if not self._synchronous or self.overlap.rounds % self._log_every == 0:
                self._folder.log(step, {f"round/{name}": value for name, value in values.items()})
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
        """Reads the remaining rounds, and ends the trace."""
        self.read()
        if self._trace is not None:
            self._step = step
            self._trace.stop()
            if not self._traced:
                self._folder.note(step, "trace", "no trace: the run has closed too few rounds")

    def _write_trace(self, finished: Any) -> None:
        """Writes a trace for https://ui.perfetto.dev, where gloo has its own thread, and NCCL its own stream."""
        self._traced, path = True, self._folder.path / "trace.json"
        finished.export_chrome_trace(str(path))
        self._folder.note(self._step, "trace", f"trace in {path}")

    def _note_allocation(self, step: int, method: Method) -> None:
        """Logs L-GreCo's newest decision once."""
        reducer = (
            method.reducer if isinstance(method, LocalUpdateMethod) else getattr(method.compression, "reducer", None)
        )
        found = reducer.allocation if isinstance(reducer, LGreco) else None
        if found is None or found is self._allocation:
            return
        self._allocation = found
        self._folder.note(step, "lgreco", f"L-GreCo: {found.reason}")
        self._folder.log(step, {"lgreco/bytes": found.bytes, "lgreco/uniform_bytes": found.uniform_bytes})
