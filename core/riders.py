"""What travels beside the payload: a few numbers of every worker in each reduction, and what their sums mean to all.

A rider knows one thing, such as who is left out of a mean, or whether a worker wants to stop. The root knows none of
them by name: it calls each at the same points of a round, in the order in which they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .flat import Bucket, Scalars, State
from .flight import Flight
from .groups import Stage
from .reducer import Reducer
from .stats import RoundClock, RoundStats


class Method(Protocol):
    """What riders and pacings may use of the method that they are plugged into: see Rounds."""

    differences: bool
    sends_later: bool
    starts_roughly: bool
    title: str
    params: list[Tensor]
    buckets: list[Bucket]
    scalars: Scalars
    state: State
    replicas: list[Tensor]
    starts: list[Tensor]
    flight: Flight
    reducer: Reducer
    clock: RoundClock
    local_steps: int
    riders: list[Rider]

    @property
    def trained(self) -> Sequence[Tensor]: ...
    @property
    def stats(self) -> RoundStats: ...
    @property
    def rounds(self) -> int: ...
    @property
    def everybody(self) -> int: ...
    @property
    def tells(self) -> bool: ...
    @property
    def turn(self) -> int | None: ...
    def settings(self) -> Any: ...
    def left_out(self, where: Tensor) -> None: ...
    def sum_parts(self, numbers: Tensor) -> Iterator[Stage]: ...


class Heard(NamedTuple):
    """What the sums of a reduction were taken over."""

    round: int
    """The round that ended with their sending, from 0."""
    everybody: int
    """The number of processes."""
    workers: int
    """The number of payloads: fewer than processes where several processes hold parts of one payload."""


class Rider:
    """Every hook does nothing unless it is overridden. A reduction calls pack, stages, landed and hear, in this order;
    a round calls began first, end and moved last. Where reductions are hidden, landed and hear are about the reduction
    that was launched a round ago, and come before pack.

    name: under which a checkpoint keeps its state; "" keeps none. shared, of_each: its scalars, name -> how many
    numbers; of those in of_each every worker has a place of its own. method: whose reductions it goes along with.
    """

    name = ""
    shared: Mapping[str, int] = {}
    of_each: Mapping[str, int] = {}
    steps_change_it = False  # whether local steps change its state
    method: Method

    def attach(self, method: Method) -> None:
        """The method is made."""
        self.method = method

    def began(self) -> None:
        """This worker has taken the round's first local step."""

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
        return None

    @torch.no_grad()
    def load_state_dict(self, state: Any, *, of_others: bool) -> None:
        """state: None where the checkpoint holds none. of_others: another number of workers wrote it."""
