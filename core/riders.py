"""What travels beside the payload: a few numbers of every worker in each reduction, and what their sums mean to all.

A rider knows one thing, such as who is left out of a mean, or whether a worker wants to stop. The root knows none of
them by name: it calls each at the same points of a round, in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import UserError
from .groups import Stage
from .held import Held


class Heard(NamedTuple):
    """What the sums of a reduction were taken over. round: that ended with their sending, from 0. everybody: the number
    of processes. workers: that of payloads, fewer where several processes hold parts of one payload."""

    round: int
    everybody: int
    workers: int


class Rider:
    """Every hook does nothing unless it is overridden. A reduction calls pack, stages, landed and hear, in this order;
    a round calls end and moved last. Where reductions are hidden, landed and hear are about the reduction
    that was launched a round ago, and come before pack.

    name: under which a checkpoint keeps its state; "" keeps none. shared, of_each: its scalars, name -> how many
    numbers; of those in of_each every worker has a place of its own. method: whose reductions it goes along with.
    """

    name = ""
    shared: Mapping[str, int] = {}
    of_each: Mapping[str, int] = {}
    method: Held

    def attach(self, method: Held) -> None:
        """The method is made."""
        self.method = method

    def pack(self) -> None:
        """Before a launch: writes its scalars; may change what is sent, and its weight."""

    def stages(self) -> Iterator[Stage]:
        """What is sent ahead of the payload, in the background."""
        yield from ()

    def landed(self) -> None:
        """The sum has landed, and nothing has used it yet."""

    def hear(self, sums: Mapping[str, Sequence[float]], of: Heard) -> None:
        """The sums over all processes, as the host knows them: on a GPU those of the reduction before."""

    def end(self) -> None:
        """The round is over: what was heard takes effect, on all workers at once."""

    def moved(self, *, at_boundary: bool) -> None:
        """The method has written the parameters."""

    def finishing(self) -> None:
        """finish() begins."""

    def finished(self) -> None:
        """finish() is over."""

    def restart(self) -> None:
        """Everything starts anew from the parameters."""

    def left_out(self, where: Tensor) -> None:
        """where: 0-d truth value. Where it is true, this worker starts anew from where the others are."""

    def others_came(self) -> None:
        """The method goes on among other workers, which have not heard what this one has heard."""

    def state_dict(self) -> Any:
        """A tensor, a list of tensors, or plain values; a checkpoint copies tensors to the host's memory."""

    @torch.no_grad()
    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        """state: None where the checkpoint holds none. of_others: another number of workers wrote it."""


def check_riders(riders: Sequence[Any]) -> None:
    """Refuses what is no rider, one that goes along with another method, and two whose numbers share a name."""
    names: set[str] = set()
    for rider in riders:
        if not isinstance(rider, Rider):
            raise UserError(f"riders: {rider!r} is among them: give objects of a Rider's classes")
        if hasattr(rider, "method"):
            raise UserError(f"riders: this {type(rider).__name__} goes along with another method: make one for each")
        if twice := names & (own := {*rider.shared, *rider.of_each, *([rider.name] if rider.name else [])}):
            raise UserError(f"riders: two have the name {min(twice)!r}, of a scalar or of a state: make them differ")
        names |= own
