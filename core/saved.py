"""What a checkpoint holds of a method, and how a run goes on from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_run, check_saved, of_rank, under_rank
from .flat import copy, on_host, resized
from .held import Held
from .pacing import Pacing
from .reducer import AllReduce
from .stats import Late


class Saved(Held):
    """The half of Rounds that writes and reads checkpoints; Rounds says what the attributes are."""

    pacing: Pacing
    local_steps: int
    sent_tau: int
    growth: float
    _moved_tau: int
    _closing_tau: int
    _late: Late
    _ended: bool | None

    def begin_round(self, number: int) -> None:
        """See Rounds."""
        raise NotImplementedError

    def check_saving(self) -> None:
        """UserError where this state would be of no use."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides parameters and optimiser; waits for the all-reduce in flight, so every
        worker must come to it, or go on stepping.

        Take it at a round boundary and the run goes on from there bit for bit. Tensors are copies in the host's memory,
        and all is under one key, "rank" and this worker's number: each worker saves its own, with its model
        (BatchNorm's buffers, too) and optimiser. Of all objects with the same settings it has the same keys and shapes,
        so that torch.distributed.checkpoint can load into that of a new one.
        """
        self.check_saving()  # first: own_state waits for what is in flight
        return under_rank(self.own_state())

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned, on every worker; parameters and optimiser are the caller's.

        state: may hold several workers' parts. A worker whose own is missing, as where fewer wrote it, takes that of
        its rank modulo their number. Load the model after this object was made, not before: making it broadcasts rank
        0's parameters and buffers. Another number of workers may go on with what any of those that wrote it held, but
        for outer state that is unlike on all workers (UserError); what a narrow wire format held back is lost then.
        """
        self.load_own_state(of_rank(state))

    def own_state(self) -> dict[str, Any]:
        """This worker's part of state_dict; a subclass adds what it keeps."""
        self.flight.check_alive()
        self.flight.settle()
        return {
            "method": self.name,
            "state": {name: on_host(flats) for name, flats in self.state.items()},
            "flats": on_host([b.flat for b in self.buckets]),
            "in_flight": self.flight.in_flight,
            "reducer": self.reducer.kind,
            "held_back": {name: on_host(flats) for name, flats in self.reducer.state.items()},
            "workers": self.flight.world_size,
            "places": self.flight.places,
            "local_steps": self.local_steps,
            "rounds": self.flight.launched,
            "taus": [self.sent_tau, self._moved_tau],
            "riders": {rider.name: on_host(rider.state_dict()) for rider in self.riders if rider.name},
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restores what own_state returned."""
        workers = self.flight.world_size
        check_run(state, self.name, workers, equal=bool(self.replicas) or not self.state)
        others = (state["workers"], state["places"]) != (workers, self.flight.places)
        # among others the error feedback is lost; a sum that has landed brings its weight along
        held_back = not others and self._holds_back(state["reducer"])
        saved = dict(state.get("state", {}))  # DCP's tools drop an empty one
        saved |= state.get("held_back", {}) if held_back else {}
        flats = [b.flat for b in self.buckets]
        saved["all-reduce"] = resized(state["flats"], flats) if others else state["flats"]
        check_saved(saved, self._kept(held_back))
        self.flight.restore(state["rounds"], state["in_flight"])
        self.reducer.become(state["reducer"])
        for name, held in self._kept(held_back).items():
            copy(held, saved[name])
        self.scalars["finished"].zero_()  # another run may train on
        self._late = Late()
        self.local_steps, self._ended = state["local_steps"], None
        self.sent_tau, self._moved_tau = state["taus"]
        self.growth = self.sent_tau / self._moved_tau
        for rider in self.riders:
            rider.load_state_dict(state.get("riders", {}).get(rider.name), of_others=others)
        self.begin_round(self.flight.launched)
        self.pacing.begin(self.flight.launched, self.local_steps)
        self._closing_tau = self.pacing.tau  # of a newcomer, who sends before a round of its own has closed

    def _holds_back(self, kind: str) -> bool:
        """Whether a checkpoint of a reducer of this kind has to have what this one holds back."""
        plain = kind == AllReduce.kind and (self.reducer.kind == AllReduce.kind or self.reducer.changes)
        return not plain

    def _kept(self, held_back: bool) -> dict[str, list[Tensor]]:
        """What is loaded here, by name."""
        kept = dict(self.state) | (self.reducer.state if held_back else {})
        return kept | {"all-reduce": [b.flat for b in self.buckets]}
