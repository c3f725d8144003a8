"""What a run's rounds communicated: added up, logged, and traced where the recipe says so; what L-GreCo decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

from core.adaptive.tau import Adaptive
from core.lgreco.decide import Allocation
from core.lgreco.reducer import LGreco
from core.methods import Method
from core.rounds import Rounds
from core.stats import RoundStats, send_off
from training.folder import RunFolder
from training.recipe import Recipe
from training.workers import rank


@dataclass
class Overlap:
    """The communication of a whole run, added up round by round. Seconds, bytes."""

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
        """The all-reduces' own time that no loop waited for."""
        return max(0.0, self.allreduce_seconds - self.exposed_seconds)

    @property
    def hidden_share(self) -> float:
        """hidden_seconds as a share of the all-reduces' own time; 1 when there was none."""
        return self.hidden_seconds / self.allreduce_seconds if self.allreduce_seconds else 1.0

    @property
    def link_mbit(self) -> float:
        """The rate at which this worker sent while an all-reduce was under way, Mbit/s."""
        return self.bytes_sent * 8e-6 / self.allreduce_seconds if self.allreduce_seconds else 0.0

    def summary(self) -> dict[str, float]:
        names = ("rounds", "exposed_seconds", "hidden_seconds", "allreduce_seconds", "hidden_share", "bytes_sent")
        return {name: getattr(self, name) for name in (*names, "link_mbit")}


class RoundLog:
    """Attributes: overlap, the communication of all rounds that were read so far."""

    def __init__(self, recipe: Recipe, folder: RunFolder, device: torch.device):
        self.overlap = Overlap()
        self._folder = folder
        self._allocation: Allocation | None = None  # L-GreCo's last decision
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
        """Call it when a round has closed. On a GPU this reads the round before, so that the host does not wait."""
        self._synchronous = method.tau == 1
        self._unread.append((step, method.stats))
        self.read(leave=int(self._on_gpu))
        pacing = method.pacing if isinstance(method, Rounds) else None
        if isinstance(pacing, Adaptive) and (decision := pacing.decision):
            sent = f"{method.stats.bytes_sent / 1e6:.3g} MB a round, {decision.exposed_share:.0%} of the time exposed"
            new = f"tau {decision.old} -> {decision.new}, wire {decision.wire}"
            self._folder.note(step, "tau", f"{new}: {decision.reason}; {sent}")
        self._note_allocation(step, method)
        if self._trace and self._trace.close_round():
            self._folder.note(step, "trace", f"trace in {self._trace.path}")

    def log(self, step: int, scalars: Mapping[str, float | Tensor]) -> dict[str, float] | None:
        """Logs scalars, on a GPU those of the last call; returns what it logged last, if anything."""
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
        """Reads the rounds that are left, and ends the trace."""
        self.read()
        if self._trace and self._trace.finish():
            self._folder.note(step, "trace", f"trace in {self._trace.path}")
        elif self._trace and not self._trace.wrote:
            self._folder.note(step, "trace", f"no trace, which begins when {self._trace.first} rounds have closed")

    def _note_allocation(self, step: int, method: Method) -> None:
        """Logs L-GreCo's newest decision, once."""
        reducer = method.reducer if isinstance(method, Rounds) else getattr(method.wire, "reducer", None)
        found = reducer.allocation if isinstance(reducer, LGreco) else None
        if found is None or found is self._allocation:
            return
        self._allocation = found
        self._folder.note(step, "lgreco", f"L-GreCo: {found.reason}")
        if self._folder.writes:
            self._folder.writer.add_text("lgreco/layers", found.table(), step)
        numbers = {"bytes": sum(found.bytes), "uniform_bytes": found.uniform_bytes, "seconds": sum(found.seconds)}
        self._folder.log(step, {f"lgreco/{name}": value for name, value in numbers.items()})

    def _read(self) -> None:
        """Adds the oldest unread round up, and logs it; where every step is a round, only each log_every-th."""
        step, stats = self._unread.pop(0)
        values = stats.as_dict()
        self.overlap.add(values)
        if not self._synchronous or self.overlap.rounds % self._log_every == 0:
            self._folder.log(step, {f"round/{name}": value for name, value in values.items()})


class Trace:
    """A torch.profiler trace of `rounds` rounds, after the first `first` (1 or more), for https://ui.perfetto.dev.

    gloo's all-reduce has a thread of its own (`gloo:all_reduce`), NCCL's a stream.
    """

    def __init__(self, path: Path, *, cuda: bool = False, first: int = 2, rounds: int = 2):
        self.path, self.first = path, first
        self.wrote = False
        self._profile: Any = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda,
            schedule=schedule(wait=first - 1, warmup=1, active=rounds, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def _write(self, finished: Any) -> None:
        finished.export_chrome_trace(str(self.path))
        self.wrote = True

    def close_round(self) -> bool:
        """Call it when a round has closed; True when that wrote the trace."""
        before = self.wrote
        self._profile.step()
        return self.wrote and not before

    def finish(self) -> bool:
        """Writes what there is; True when that wrote the trace."""
        before = self.wrote
        self._profile.stop()
        return self.wrote and not before
