"""What a run's rounds communicated: added up, logged, and traced where the recipe says so; what L-GreCo decides."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from core.lgreco import Allocation, LGreco
from core.methods import Method
from core.rounds import Rounds
from core.stats import RoundStats, send_off
from training.folder import RunFolder
from training.progress import pacing_of
from training.recipe import Recipe
from training.workers import rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Overlap:
    """The communication of a whole run, added up round by round. Seconds, bytes."""

    rounds: int = 0
    exposed_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    bytes_sent: float = 0.0

    def add(self, stats: dict[str, float]) -> None:
        """A closed round's RoundStats.as_dict()."""
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
        """For the end of a run."""
        names = ("rounds", "exposed_seconds", "hidden_seconds", "allreduce_seconds", "hidden_share", "bytes_sent")
        return {name: getattr(self, name) for name in (*names, "link_mbit")}

    def state_dict(self) -> dict[str, float]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        vars(self).update({f.name: state[f.name] for f in fields(self)})


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
        the host waits for nothing that it has queued since."""
        self._synchronous = method.tau == 1
        self._unread.append((step, method.stats))
        self.read(leave=int(self._on_gpu))
        if (pacing := pacing_of(method)) and (decision := pacing.decision):
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


class AllocationLog:
    """model: gives the layers their names; None until it is known. seconds: that curves and programmes have taken, and
    telling what they chose."""

    def __init__(self, folder: RunFolder):
        self.model: nn.Module | None = None
        self.seconds = 0.0
        self._folder = folder
        self._last: Allocation | None = None
        self._names: list[str] = []

    def read(self, step: int, method: Method) -> None:
        """Logs the method's newest decision, once; nothing where it has none."""
        reducer = reducer_of(method)
        found = reducer.allocation if reducer is not None else None
        if reducer is None or found is None or found is self._last:
            return
        began = time.perf_counter()
        self._last, self._names = found, self._names_of(reducer)
        self._folder.note(step, "lgreco", f"L-GreCo: {found.reason}")
        if rank() == 0:
            self._folder.writer.add_text("lgreco/layers", found.table(self._names), step)
        seconds = sum(found.seconds) + time.perf_counter() - began
        self.seconds += seconds
        numbers = {"bytes": sum(found.bytes), "uniform_bytes": found.uniform_bytes, "seconds": seconds}
        self._folder.log(step, {f"lgreco/{name}": value for name, value in numbers.items()})

    def finish(self, step: int) -> None:
        """The picture of the last decision: at the end, for drawing takes longer than deciding."""
        if self._last is not None and rank() == 0:
            self._folder.writer.add_figure("lgreco/bits", picture(self._last, self._names), step)

    def _names_of(self, reducer: LGreco) -> list[str]:
        """The layers' names in the model; of a parameter that is not its own, such as a float32 master, the number."""
        known = {id(p): name for name, p in self.model.named_parameters()} if self.model is not None else {}
        params = [p for bucket in reducer.buckets for p in bucket.params if p.numel()]
        return [known.get(id(p), str(i)) for i, p in enumerate(params)]


def reducer_of(method: Method) -> LGreco | None:
    """The method's reducer, where it is L-GreCo's."""
    if isinstance(method, Rounds):
        found = method.reducer
    else:
        found = method.wire.reducer if method.wire is not None else None
    return found if isinstance(found, LGreco) else None


def picture(found: Allocation, names: list[str]) -> Figure:
    """Bits that a message holds for each element, by layer."""
    from matplotlib.figure import Figure  # here, for it is slow to import

    colours = {"raw": "0.7", "int": "C0", "top": "C1", "rank": "C2"}
    figure = Figure(figsize=(8, 1.2 + 0.16 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    rows = range(len(names))
    axes.barh(rows, found.bits, color=[colours[c.kind] for c in found.choices])
    axes.set_yticks(rows, [f"{name}: {choice}" for name, choice in zip(names, found.choices, strict=True)], fontsize=6)
    axes.set_xscale("log")
    axes.set_xlabel("bits an element")
    axes.invert_yaxis()
    return figure


class Trace:
    """Writes a torch.profiler trace of some rounds: the all-reduce is seen under the local steps.

    Open it in https://ui.perfetto.dev or chrome://tracing: gloo's all-reduce lies in a thread of its own
    (`gloo:all_reduce`), NCCL's in a stream of its own. The trace begins when `first` rounds have closed, so that
    everything has warmed up, and covers `rounds` rounds.
    """

    def __init__(self, path: Path, *, cuda: bool = False, first: int = 2, rounds: int = 2):
        self.path, self.first, self.rounds = path, first, rounds
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
        self._profile: Any = profile(activities=activities)
        self._running = False
        self._closed = 0

    @property
    def began(self) -> bool:
        return self._closed >= self.first

    def close_round(self) -> bool:
        """Call it when a round has closed; True when that wrote the trace."""
        self._closed += 1
        if self._closed == self.first:
            self._profile.start()
            self._running = True
        return self._closed == self.first + self.rounds and self.finish()

    def finish(self) -> bool:
        """Writes what there is; True when there was something (a run may end before the trace begins)."""
        if not self._running:
            return False
        self._running = False
        self._profile.stop()
        self._profile.export_chrome_trace(str(self.path))
        return True
