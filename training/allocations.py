"""What L-GreCo decides in a run: a line on the screen, a table and a picture of all layers in TensorBoard."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from torch import nn

from core.lgreco import Allocation, LGreco
from core.methods import Method
from core.rounds import LocalMethod
from training.folder import RunFolder
from training.workers import rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    if isinstance(method, LocalMethod):
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
