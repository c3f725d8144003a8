"""What any worker may ask of all, to stop or to save: all hear of it at the same boundary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UserError
from ..rounds import Heard, Rider

LASTING = {"stop"}


class Requests(Rider):
    """The next reduction carries what a worker has asked for; once that has landed it is `granted` on all workers, at
    the same boundary; on a GPU one boundary later, for the host does not wait for the number. A request to stop is
    granted until finish(): read it before. Any other is for one boundary.

    Attributes: granted, the names that were asked for by any worker.
    """

    def __init__(self, *names: str):
        self.shared = dict.fromkeys(names, 1)
        self.asked, self._heard, self.granted = set[str](), set[str](), set[str]()

    def finished(self) -> None:
        """A request to stop is answered. Any other that finish() has carried is granted until the next boundary."""
        for names in (self.asked, self._heard, self.granted):
            names -= LASTING

    def ask(self, name: str) -> None:
        if name not in self.shared:
            raise UserError(f"ask({name!r}): these Requests were made for {', '.join(self.shared)} alone")
        self.asked.add(name)

    def pack(self) -> None:
        for name, value in zip(self.shared, self.take(), strict=True):
            self.method.scalars.set(name, value)

    def hear(self, sums: Mapping[str, Sequence[float]], of: Heard) -> None:
        self.heard([sums[name][0] for name in self.shared])

    def end(self) -> None:
        self.granted = (self.granted & LASTING) | self._heard
        self._heard = set()

    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        for name in self.shared:  # the run that wrote it has met them
            self.method.scalars[name].zero_()

    # -- for methods without reductions of their own ---------------------------------------------------------

    def take(self) -> list[float]:
        """What this worker asks for, a number a name, to be summed over the workers."""
        numbers = [float(name in self.asked) for name in self.shared]
        self.asked &= LASTING
        return numbers

    def heard(self, sums: Sequence[float]) -> None:
        """The sums over the workers, in the order of the names."""
        self._heard |= {name for name, total in zip(self.shared, sums, strict=True) if total > 0.5}
