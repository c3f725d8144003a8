"""What a checkpoint holds of a method, and how a run goes on from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UserError
from ..flat import copy
from ..flight import Reducer
from ..rounds import Rounds
from ..stats import Late


class Saved(Rounds):
    """A method that trains in rounds, can be saved, gone on with, and started anew from loaded weights. Where another
    class says what its rounds are: class SavedCO2(Saved, core.co2.CO2)."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides parameters and optimiser; waits for the all-reduce in flight, so every
        worker must come to it, or go on stepping.

        Take it at a round boundary and the run goes on from there bit for bit. Tensors are copies in the host's memory,
        and all is under one key, "rank" and this worker's number: each worker saves its own, with its model
        (BatchNorm's buffers, too) and optimiser. Of all objects with the same settings it has the same keys and shapes,
        so that torch.distributed.checkpoint can load into that of a new one.
        """
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

    @torch.no_grad()
    def resync(self) -> None:
        """Starts anew from the first worker's parameters as they are now; every worker must call it.

        Call it after weights were loaded into a model that this object already trains: else the next boundaries pull
        them back to where the old ones were. What is in flight is thrown away, and momenta are forgotten.
        """
        self.flight.restore(self.rounds, in_flight=False)
        self.begin_alike()
        self.local_steps, self._ended = 0, None
        self.start_from_params()

    def start_from_params(self) -> None:
        """Everything is as it was made, the parameters being the start."""
        self._late = Late()
        for flat in [b.flat for b in self.buckets] + [f for flats in self.reducer.state.values() for f in flats]:
            flat.zero_()
        for name in self.state:
            self.state.begin(name)
        for name in self.numbers:
            held = getattr(self, name)
            setattr(self, name, torch.zeros_like(held) if isinstance(held, Tensor) else type(held)())
        for rider in self.riders:
            rider.restart()
        self.moved(at_boundary=True)

    def own_state(self) -> dict[str, Any]:
        """This worker's part of state_dict."""
        self.flight.check_alive()
        self.flight.settle()
        self.saved_at = self.rounds, self.local_steps
        return {
            "method": self.name,
            "state": {name: on_host(flats) for name, flats in self.state.items()},
            "flats": on_host([b.flat for b in self.buckets]),
            "in_flight": self.flight.in_flight,
            "reducer": self.reducer.kind,
            "held_back": {name: on_host(flats) for name, flats in self.reducer.state.items()},
            "rank": self.flight.rank,
            "workers": self.flight.world_size,
            "places": self.flight.places,
            "local_steps": self.local_steps,
            "rounds": self.flight.launched,
            "taus": [self.sent_tau, self._moved_tau],
            "riders": {rider.name: on_host(rider.state_dict()) for rider in self.riders if rider.name},
        } | {name.removeprefix("_"): on_host(getattr(self, name)) for name in self.numbers}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Restores what own_state returned."""
        workers = self.flight.world_size
        check_run(state, self.name, workers, equal=bool(self.replicas) or not self.state)
        others = (state["workers"], state["places"]) != (workers, self.flight.places)
        # among others the error feedback is lost; a sum that has landed brings its weight along
        sums = state["reducer"] == Reducer.kind and (self.reducer.kind == Reducer.kind or self.reducer.changes)
        held_back = not others and not sums  # which hold nothing back
        saved = dict(state.get("state", {}))  # DCP's tools drop an empty one
        saved |= state.get("held_back", {}) if held_back else {}
        flats = [b.flat for b in self.buckets]
        saved["all-reduce"] = resized(state["flats"], flats) if others else state["flats"]
        check_saved(saved, self._kept(held_back))
        self.flight.restore(state["rounds"], state["in_flight"])
        self.reducer.become(state["reducer"])
        for name, held in self._kept(held_back).items():
            copy(held, saved[name])
        if state.get("rank", self.flight.rank) != self.flight.rank:
            self._forget_errors()
        for name in self.numbers:
            value, held = state[name.removeprefix("_")], getattr(self, name)
            setattr(self, name, value.to(held, copy=True) if isinstance(held, Tensor) else value)
        self.scalars["finished"].zero_()  # another run may train on
        self._late = Late()
        self.local_steps, self._ended = state["local_steps"], None
        self.sent_tau, self._moved_tau = state["taus"]
        self.growth = self.sent_tau / self._moved_tau
        for rider in self.riders:
            rider.load_state_dict(state.get("riders", {}).get(rider.name), of_others=others)
        self.begin_round(self.flight.launched)
        self.pacing.begin(self.flight.launched)

    def _forget_errors(self) -> None:
        """What error feedback held back of another worker's is not this one's."""
        for name, flats in self.reducer.state.items():
            for flat in flats if name.endswith("error_feedback") else []:
                flat.zero_()

    def _kept(self, held_back: bool) -> dict[str, list[Tensor]]:
        """What is loaded here, by name."""
        kept = dict(self.state) | (self.reducer.state if held_back else {})
        return kept | {"all-reduce": [b.flat for b in self.buckets]}


def under_rank(state: dict[str, Any]) -> dict[str, Any]:
    """What this worker alone holds, under a key with its rank: who writes one dict for all workers, as
    torch.distributed.checkpoint does, writes a key once, whatever the others hold."""
    return {f"rank{_rank()}": state}


def of_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """This worker's part; of as many parts as there are that of its rank modulo their number where it has none."""
    ranks = sorted(int(key[4:]) for key in state if re.fullmatch(r"rank\d+", key))
    if not ranks:
        raise UserError(
            "the checkpoint's state has no key with a worker's rank, as those of older versions: resume with the "
            "version that wrote it, or start afresh"
        )
    rank = _rank()
    return state[f"rank{rank if rank in ranks else ranks[rank % len(ranks)]}"]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


ALWAYS = ("method", "flats", "workers", "places", "reducer", "taus")  # in every method's part of a checkpoint


def check_run(state: Mapping[str, Any], method: str, workers: int, *, equal: bool) -> None:
    """Refuses a checkpoint of an older version, of another method, or of another number of workers unless all of them
    hold the same outer state."""
    if missing := [key for key in ALWAYS if key not in state]:
        raise UserError(
            f"the checkpoint's state has no {missing[0]!r}, as those of older versions: resume with the version that "
            "wrote it, or start afresh"
        )
    if state["method"] != method:
        raise UserError(f"the checkpoint is of {state['method']}, not {method}: resume with its method")
    if state["workers"] != workers and not equal:
        raise UserError(
            f"the checkpoint is of {state['workers']} workers, here there are {workers}, and each held a part of the "
            "outer state of its own: resume with as many"
        )


def check_saved(saved: Mapping[str, Sequence[Tensor]], here: Mapping[str, Sequence[Tensor]]) -> None:
    """Refuses a checkpoint of another model, or of other settings."""
    if saved.keys() != here.keys():
        theirs, mine = (", ".join(sorted(names.keys() - {"all-reduce"})) for names in (saved, here))
        raise UserError(f"the checkpoint holds {theirs}, here it is {mine}: resume with the settings that wrote it")
    for name, flats in here.items():
        if (theirs := [len(f) for f in saved[name]]) != (mine := [len(f) for f in flats]):
            raise UserError(
                f"the checkpoint's {name} has {theirs} elements, here it has {mine}: resume with the model, the "
                "buffers to average, the riders and the settings of the wire that wrote it"
            )


def resized(flats: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Each of flats, where it lies, as long as its counterpart: cut, or filled up with zeros."""
    found = [flat.new_zeros(len(other)) for flat, other in zip(flats, like, strict=True)]
    for new, flat in zip(found, flats, strict=True):
        n = min(len(new), len(flat))
        new[:n] = flat[:n]
    return found


def on_host(held: Any) -> Any:
    """A copy in the host's memory of a tensor, or of a list of them, one after the other: a GPU, which is waited for,
    holds no copy. Anything else as it is.

    The memory is not pinned: torch would round it up to a power of two, and keep it.
    """
    if isinstance(held, list):
        return [on_host(t) for t in held]
    return held.to("cpu", copy=True) if isinstance(held, Tensor) else held
