"""A method's state: saved, restored, and whether a checkpoint fits the method that loads it."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map_only

from .buckets import Bucket, copy
from .comm import Reducer
from .errors import UserError
from .hooks import GUARDS, HookedMethod
from .stats import AsyncReadback


def under_rank(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a worker's own state under a key with its rank.

    torch.distributed.checkpoint writes one dict for all workers, and each key once, even if workers hold different
    values.
    """
    return {f"rank{own_rank()}": state}


def of_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this worker's part of a state, or the part at index rank modulo their number if it has none."""
    ranks = sorted(int(key[4:]) for key in state if re.fullmatch(r"rank\d+", key))
    if not ranks:
        raise UserError(
            "the checkpoint's state has no key with a worker's rank, so an older version wrote it: resume with that "
            "version, or start afresh"
        )
    rank = own_rank()
    return state[f"rank{rank if rank in ranks else ranks[rank % len(ranks)]}"]


def own_rank() -> int:
    """Returns this process's rank, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else 0


def order_of(params: Iterable[Tensor]) -> int:
    """Returns a number that follows from the parameters' shapes and their order."""
    return zlib.crc32(str([tuple(p.shape) for p in params]).encode())


def check_saved(saved: Mapping[str, Sequence[Tensor]], current: Mapping[str, Sequence[Tensor]]) -> None:
    """Raises UserError if another model or other settings wrote a checkpoint."""
    if saved.keys() != current.keys():
        theirs, mine = (", ".join(sorted(names.keys() - {"all-reduce"})) for names in (saved, current))
        raise UserError(
            f"the checkpoint holds {theirs}, and this method holds {mine}: resume with the settings that wrote it"
        )
    for name, flats in current.items():
        if (theirs := [len(f) for f in saved[name]]) != (mine := [len(f) for f in flats]):
            raise UserError(
                f"the checkpoint's {name} has {theirs} elements, here it has {mine}: resume with the model, the "
                "buffers to average, the hooks and the compression that wrote it"
            )


def on_host(state: Any) -> Any:
    """Returns a state with copies of its tensors in host memory. The host waits for them.

    A GPU needs no memory for it. The host's memory is not pinned: torch would round it up to a power of two, and keep
    it.
    """
    return tree_map_only(Tensor, lambda t: t.to("cpu", copy=True), state)


class SavedMethod(HookedMethod):
    """The part of a LocalUpdateMethod that saves and restores its state."""

    _leaves_at = math.inf  # the boundary, by `rounds`, from which on a worker is in finish()
    _unsaved: Collection[str] = ()  # names in `state` that no later outer step reads: zeros after a resume
    _own_buffers: list[tuple[Bucket, list[Tensor]]]
    _changing: set[int] | None
    _sent: set[int] | None
    _sent_tau: int
    _arrived_tau: int
    _first_step: int
    _ended: bool | None
    _readback: AsyncReadback

    @torch.inference_mode(False)
    def state_dict(self, *, alone: bool = False) -> dict[str, Any]:
        """Returns the state that a resumed run needs besides parameters, buffers and optimizer.

        It waits for the all-reduce in flight, so every worker must call it or continue with its steps. In mid-round,
        with fragments and delay "auto", every worker must call it, and it may merge averages: copy the parameters
        afterwards. A run resumes bit for bit from any step. Tensors are copies in host memory. The only key is "rank"
        with this worker's number, because each worker saves its own state, model and optimizer. Objects with the same
        settings have the same keys and shapes, so torch.distributed.checkpoint can load into a new object's state.

        Args:
            alone: Whether only this worker calls it, while no other one can be a fragment ahead.
        """
        if not alone:
            self._come_even()
        return under_rank(self._local_state())

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned, on every worker.

        Load the model after this object was made, because its construction broadcasts rank 0's parameters. A different
        number of workers may resume if all workers held the same outer state. They discard error-feedback residuals.

        Args:
            state: One or several workers' states. If this worker's state is missing, it gets the state at index rank
                modulo their number.

        Raises:
            UserError: If another method, model or other settings wrote it, or another number of workers whose outer
                states differ.
        """
        self._load_local_state(of_rank(state))

    def _start_from_params(self) -> None:
        """Resets everything to its state at construction, with the current parameters."""
        self._readback = AsyncReadback()
        for flat in [b.flat for b in self.buckets] + [f for flats in self._residual().values() for f in flats]:
            flat.zero_()
        for name in self.state:
            self.state.begin(name)
        self._attach_again()

    def _attach_again(self) -> None:
        """Resets the hooks."""
        self.broadcasts_state, self._leaves_at = False, math.inf
        for hook in self.hooks:
            hook.attach(self)

    def _local_state(self) -> dict[str, Any]:
        """Returns this worker's part of state_dict."""
        self.allreduce.check_alive()
        self.allreduce.drain()
        self._saved_at = self.rounds, self.local_steps
        state = {
            "method": self.name,
            "state": {name: flats for name, flats in self.state.items() if name not in self._unsaved},
            "flats": [b.flat for b in self.buckets],
            "in_flight": self.allreduce.in_flight,
            "reducer": self.reducer.kind,
            "residual": self._residual(),
            "rank": self.allreduce.rank,
            "workers": self.allreduce.world_size,
            "places": self.allreduce.places,
            "local_steps": self.local_steps,
            "rounds": self.rounds,
            "launched": self.allreduce.launched,  # also of other fragments than the first
            "taus": [self._sent_tau, self._arrived_tau, self.tau],
            "order": order_of(self.trained),
            "hooks": {hook.name: hook.state_dict() for hook in self.hooks if hook.name},
            "first_buffers": [b.first_values for b, _ in self._own_buffers],
            "changing": None if self._changing is None else sorted(self._changing),
        }
        return on_host(state)

    def _load_local_state(self, state: dict[str, Any]) -> None:
        """Restores what _local_state returned."""
        GUARDS.inputs.check_state(self, state)
        kind = state["reducer"] if self.reducer.changes else self.reducer.kind
        resized_group = (state["workers"], state["places"]) != (self.allreduce.world_size, self.allreduce.places)
        # Error feedback belongs to a number of workers. A plain sum has none, and carries its own weight.
        sums = state["reducer"] == kind == Reducer.kind
        residual = not resized_group and not sums and "residual" in state  # elastic workers save none
        saved = dict(state.get("state", {}))  # torch.distributed.checkpoint drops an empty dict
        saved |= state["residual"] if residual else {}
        saved |= {name: [torch.zeros_like(flat) for flat in self.state[name]] for name in self._unsaved}
        flats = [b.flat for b in self.buckets]
        saved["all-reduce"] = state["flats"]
        if resized_group:  # cut, or padded with zeros
            pairs = zip(state["flats"], flats, strict=True)
            saved["all-reduce"] = [pad(flat, (0, len(own) - len(flat))) for flat, own in pairs]

        def current() -> dict[str, list[Tensor]]:
            return dict(self.state) | (self._residual() if residual else {}) | {"all-reduce": flats}

        check_saved(saved, current())
        if state.get("order", mine := order_of(self.trained)) != mine:  # none if another layout wrote it
            raise UserError(
                "the checkpoint's parameters have other shapes, or another order: give the parameters in the order in "
                "which the run that wrote it gave them, such as model.parameters()"
            )
        self.rounds = state["rounds"]
        self.allreduce.restore(state["launched"], state["in_flight"])
        for reducer in self._reducers():
            reducer.become(state["reducer"])
        changing = state.get("changing")
        self._sent = self._changing = None if changing is None else set(changing)
        for (bucket, _), first in zip(self._own_buffers, state.get("first_buffers", ()), strict=False):
            bucket.begin(first)
        self._choose_buffers()
        for name, held in current().items():
            copy(held, saved[name])
        others = state["rank"] != self.allreduce.rank
        for name, flats in self._residual().items():  # error feedback of another worker's rounding, or of another run's
            for flat in flats if not residual or (others and name.endswith("error_feedback")) else []:
                flat.zero_()
        self.scalars["finished"].zero_()  # a resumed run may train on
        self._readback = AsyncReadback()
        self.local_steps, self._ended = state["local_steps"], None
        self._first_step = self.local_steps + 1
        self.clock.steps_begin(after=self.local_steps)
        self._sent_tau, self._arrived_tau, tau = state["taus"]
        self.growth = self._sent_tau / self._arrived_tau
        self._attach_again()
        for hook in self.hooks:
            if resized_group:  # their meaning depends on the number of workers
                for name in (*hook.scalars, *hook.per_worker_scalars):
                    self.scalars[name].zero_()
            if hook.name and (held := state.get("hooks", {}).get(hook.name)) is not None:
                hook.load_state_dict(held)
        self._begin_round()
        if self.local_steps and self.sync_schedule.chooses:
            self.sync_schedule.tau = tau

    def _reducers(self) -> list[Reducer]:
        """The reducer of each fragment."""
        return [self.reducer]

    def _residual(self) -> dict[str, list[Tensor]]:
        """Error feedback of all reducers, by name."""
        states = [reducer.state for reducer in self._reducers()]
        return {name: [flat for state in states for flat in state[name]] for name in states[0]}

    def _come_even(self) -> None:  # noqa: B027
        """Starts what other workers have started. See CO2."""

    def _begin_round(self) -> None:  # noqa: B027
        """See LocalUpdateMethod."""

    def _choose_buffers(self) -> None:
        """Lets the buffers in `_sent` travel."""
        before = 0
        for bucket, own in self._own_buffers:
            bucket.choose_buffers(i for i in range(len(own)) if self._sent is None or before + i in self._sent)
            before += len(own)
