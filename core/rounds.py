"""What CO2 and its baselines share: local steps are counted, rounds close, and uneven workers end together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from core.collectives import AsyncMean, Link, view_as
from core.errors import UserError
from core.overlap import Mark, RoundStats, between, mark, ready
from core.tau import TauDecision, TauTuner

# Scalars that travel with every all-reduce: did this worker finish? how many local steps did it take?
# how far did its first local step go (the `inner` gap)? With tau="auto", two more for every worker: the seconds of its
# local step and of its last all-reduce, each worker writing its own places and 0 to the others'.
FINISHED, STEPS, FIRST_STEP = range(3)
TAIL = 3


class Rounds(ABC):
    """Counts local steps and closes a round on every tau-th; subclasses say what closing means.

    params: the parameters to train together (frozen ones are broadcast once and then left alone). buffers: floating
    point buffers to average, such as BatchNorm's running statistics; integer ones are broadcast once. Both are
    broadcast from rank 0, so that every worker starts alike. mirrors: where `params` are the float32 masters that an
    optimiser keeps of a 16-bit model, that model's parameters, in the same order: masters are averaged, and mirrors
    are refreshed from them at every boundary.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int | Literal["auto"],
        *,
        tau_max: int = 192,
        buffers: Iterable[Tensor] = (),
        mirrors: Iterable[Tensor] = (),
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
    ):
        given = _unique(params)
        self.of_shards = any(isinstance(p, DTensor) for p in given)
        local = {id(p): _local(p) for p in given}
        everything = list(local.values())
        self.params = [local[id(p)] for p in given if p.requires_grad]
        self._frozen = [p for p in given if not p.requires_grad]
        self._mirrors = [_local(p) for p in mirrors]
        if self._mirrors and [p.shape for p in self._mirrors] != [p.shape for p in self.params]:
            raise UserError(f"{len(self._mirrors)} mirrors for {len(self.params)} parameters: give one of each shape")
        fixed = _unique(buffers)
        self.buffers = [b for b in fixed if b.is_floating_point()]
        self.tuner = TauTuner(tau_max) if tau == "auto" else None
        self.tau: int = self.tuner.tau if self.tuner else tau  # pyright: ignore[reportAttributeAccessIssue]
        self._check(everything)
        self.local_steps = 0  # since the last round closed
        self.stats = RoundStats()
        self.tau_decision: TauDecision | None = None  # taken by tau="auto" at the last boundary
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        tail = TAIL + 2 * size if self.tuner else TAIL
        self.mean = self._make_mean([*self.params, *self.buffers], group=group, tail=tail, timeout=timeout, link=link)
        self._stepping_since: Mark = mark(self.mean.device)
        self._numbers = (0.0, 0.0)  # this worker's last known seconds of a local step and of an all-reduce
        self._arriving: tuple[Tensor, Mark] | None = None  # every worker's, on their way from the GPU
        self._agree([*everything, *fixed])
        # Parameters come first in each bucket, buffers behind them: this many elements are parameters.
        ids = {id(p) for p in self.params}
        self.bucket_params = [[t for t in ts if id(t) in ids] for ts in self.mean.members]
        self.sizes = [sum(t.numel() for t in ts) for ts in self.bucket_params]
        self._flats: dict[str, list[Tensor]] = dict(self.mean.state)  # the method's state, a tensor a bucket

    def step(self) -> bool:
        """Call after every optimiser step (also one that a GradScaler skipped). True when a round closed."""
        self.local_steps += 1
        if self.local_steps < self.tau:
            if self.local_steps == 1:
                self._stepping_since = mark(self.mean.device)
            self.mean.done()  # an error is known as soon as it can be
            return False
        self._check_frozen()
        self._boundary(finished=False)
        return True

    def finish(self) -> None:
        """Averages what is pending and leaves all workers with equal parameters. Every worker must call it.

        Workers may come here after different numbers of steps: the early ones take part in the others' rounds,
        contributing no change, until all have arrived. Training may go on afterwards.
        """
        while not self._boundary(finished=True):
            pass

    @property
    def rounds(self) -> int:
        """Rounds closed so far, those of finish() included."""
        return self.mean.launched

    def _boundary(self, *, finished: bool) -> bool:
        arrived = mark(self.mean.device)
        timed = self.local_steps - (self.tau > 1)
        self.stats = RoundStats(tau=self.tau, local_steps=self.local_steps)
        if timed > 0:
            self.stats.step_seconds = between(self._stepping_since, arrived, timed)
        self.tau_decision = None
        everyone = self._close(finished=finished)
        with torch.no_grad():
            _copy(self._mirrors, self.params)
        self._stepping_since = mark(self.mean.device)
        self.stats.boundary_seconds = between(arrived, self._stepping_since)
        return everyone

    @abstractmethod
    def _close(self, *, finished: bool) -> bool:
        """Ends the round; True once a mean has landed that every worker launched with `finished`."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides parameters and optimiser; waits for the all-reduce in flight.

        Take it at a round boundary and the run goes on from there bit for bit. Tensors are copies.
        """
        in_flight = self.mean.settle()
        return {
            "method": type(self).__name__,
            "flats": {name: [f.clone() for f in flats] for name, flats in self._flats.items()},
            "in_flight": [b.flat.clone() for b in self.mean.buckets] if in_flight else None,
            "local_steps": self.local_steps,
            "rounds": self.rounds,
            "tuner": self.tuner.state_dict() if self.tuner else None,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned, on every worker; parameters and optimiser are the caller's."""
        if state["method"] != type(self).__name__:
            raise UserError(
                f"the checkpoint is of {state['method']}, not {type(self).__name__}: resume with its method"
            )
        wanted = self._flats | {"all-reduce": [b.flat for b in self.mean.buckets]}
        saved = state["flats"] | {"all-reduce": state["in_flight"] or wanted["all-reduce"]}
        for name, flats in wanted.items():
            if (theirs := [len(f) for f in saved[name]]) != (mine := [len(f) for f in flats]):
                raise UserError(
                    f"the checkpoint's {name} has {theirs} elements, here it has {mine}: resume with the model, and "
                    "the buffers to average, that wrote it"
                )
        for name, flats in self._flats.items():
            for flat, value in zip(flats, saved[name], strict=True):
                flat.copy_(value)
        self.local_steps = state["local_steps"]
        if self.tuner and state["tuner"]:
            self.tuner.load_state_dict(state["tuner"])
            self.tau = self.tuner.tau
        self.mean.restore(state["in_flight"], launched=state["rounds"])

    def close(self) -> None:
        """Leaves the process group. Only after finish()."""
        self.mean.close()

    # -- for subclasses -------------------------------------------------------------------------------------

    def _make_mean(self, tensors: list[Tensor], **kwargs: Any) -> AsyncMean:
        return AsyncMean(tensors, **kwargs)

    @torch.no_grad()
    def _new_flats(self, name: str, *, zero: bool) -> tuple[list[Tensor], list[list[Tensor]]]:
        """State shaped like the parameters: a flat tensor a bucket, and its views; zeros or the parameters."""
        flats = [torch.zeros_like(b.flat[:n]) for b, n in zip(self.mean.buckets, self.sizes, strict=True)]
        views = [view_as(f, ps) for f, ps in zip(flats, self.bucket_params, strict=True)]
        if not zero:
            for piece, ps in zip(views, self.bucket_params, strict=True):
                _copy(piece, ps)
        self._flats[name] = flats
        return flats, views

    def _landed(self) -> list[Tensor]:
        """The parameters' part of each flat buffer of the all-reduce."""
        return [b.flat[:n] for b, n in zip(self.mean.buckets, self.sizes, strict=True)]

    def _set_params(self, views: list[list[Tensor]]) -> None:
        """Copies views, one list a bucket, into the live parameters."""
        for piece, ps in zip(views, self.bucket_params, strict=True):
            _copy(ps, piece)

    def _snapshot(self, *, exchange_buffers: bool = False) -> None:
        """Copies parameters and buffers into the flat buffers of the all-reduce.

        exchange_buffers: a mean has landed there, so the model's buffers take its place and it theirs.
        """
        own = [b.clone() for b in self.buffers]
        if exchange_buffers:
            self._restore_buffers()
        for bucket, ps in zip(self.mean.buckets, self.bucket_params, strict=True):
            _copy(bucket.views[: len(ps)], ps)
        self._send_buffers(own)

    def _send_buffers(self, values: list[Tensor]) -> None:
        """Copies the model's buffers, or values of theirs from before, behind the parameters."""
        value_of = {id(b): value for b, value in zip(self.buffers, values, strict=True)}
        for bucket, tensors, own in zip(self.mean.buckets, self.mean.members, self.bucket_params, strict=True):
            _copy(bucket.views[len(own) :], [value_of[id(b)] for b in tensors[len(own) :]])

    def _restore_buffers(self) -> None:
        """Copies the averaged buffers back into the model."""
        for bucket, tensors, own in zip(self.mean.buckets, self.mean.members, self.bucket_params, strict=True):
            _copy(tensors[len(own) :], bucket.views[len(own) :])

    def _launch(self, *, finished: bool, first_step: float | Tensor = 0.0) -> None:
        if self.tuner:
            self._tell()
        self.mean.launch([float(finished), float(self.local_steps), first_step])
        self.local_steps = 0

    def _land(self, *, divide: bool = True) -> Tensor:
        """Waits for the mean in flight, notes what that cost, and returns the averaged tail."""
        tail = self.mean.wait(divide=divide)
        self.stats.round = self.mean.launched
        self.stats.wait_seconds = self.mean.waited
        self.stats.allreduce_seconds = self.mean.seconds
        self.stats.bytes_sent = self.mean.bytes_sent
        if self.tuner:
            self._hear(tail)
        return tail

    # -- tau="auto" -----------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Writes this worker's latest times into its places of the tail."""
        if ready(self.stats.step_seconds, self.stats.allreduce_seconds) and float(self.stats.step_seconds):
            self._numbers = (float(self.stats.step_seconds), float(self.stats.allreduce_seconds))
        places = self.mean.tail_view[TAIL:].zero_()
        places[2 * self.mean.rank], places[2 * self.mean.rank + 1] = self._numbers

    def _hear(self, tail: Tensor) -> None:
        """Gives the tuner every worker's times; on a GPU those of the round before, so that nobody waits for it."""
        told = tail[TAIL:] * self.mean.world_size
        arrived, self._arriving = self._arriving, (told.to("cpu", non_blocking=True), mark(told.device))
        if not told.is_cuda:
            arrived = self._arriving
        elif arrived is not None and isinstance(arrived[1], torch.cuda.Event):
            arrived[1].synchronize()  # passed long ago
        if arrived is not None and self.tuner:
            steps, allreduces = arrived[0].view(-1, 2).unbind(1)
            self.tau_decision = self.tuner.hear(self.rounds, steps.tolist(), allreduces.tolist())
            self.tau = self.tuner.tau

    # -- construction ---------------------------------------------------------------------------------------

    def _check(self, params: list[Tensor]) -> None:
        if not isinstance(self.tau, int) or self.tau < 1:
            raise UserError(f"tau={self.tau!r}: give a whole number of local steps, 1 or more, or auto")
        if not self.params:
            raise UserError("no parameter requires a gradient: nothing to train")
        for t in [*params, *self.buffers]:
            if not t.is_floating_point():
                raise UserError(f"a parameter of dtype {t.dtype}: only floating point can be averaged")

    def _check_frozen(self) -> None:
        if any(p.requires_grad for p in self._frozen):
            raise UserError(
                "a parameter that was frozen when this object was built now requires a gradient and would never "
                "be averaged: build it again after changing requires_grad"
            )

    @torch.no_grad()
    def _agree(self, tensors: list[Tensor]) -> None:
        """Checks that all workers hold the same shapes and the same tau, then gives them rank 0's values."""
        group = self.mean.group
        if group is None:
            return
        mine = (type(self).__name__, self._signature(), [(tuple(t.shape), str(t.dtype)) for t in tensors])
        theirs: list[Any] = [None] * self.mean.world_size
        dist.all_gather_object(theirs, mine, group=group)
        for rank, other in enumerate(theirs):
            for ours, its in zip(theirs[0], other, strict=True):
                if ours != its:
                    raise UserError(f"workers differ: rank 0 has {_first_difference(ours, its)} of rank {rank}")
        for t in tensors:
            flat = t.detach().to(self.mean.device).contiguous()  # the host's, with outer state that lies there
            dist.broadcast(flat, group_src=0, group=group)
            t.copy_(flat)

    def _signature(self) -> Any:
        """What must be equal on all workers, compared at construction."""
        return f"tau={self.tau}"


def _local(p: Tensor) -> Tensor:
    """A DTensor's shard, which shares its memory; any other tensor itself."""
    shard: Any = p.detach() if isinstance(p, DTensor) else p
    return shard.to_local() if isinstance(p, DTensor) else p


def all_finished(tail: Tensor) -> bool:
    """Whether every worker launched the mean whose tail this is from finish(); reads it from the device."""
    return tail[FINISHED].item() > 1 - 1e-6  # one over the number of workers may be rounded


def _first_difference(a: Any, b: Any) -> str:
    if isinstance(a, list):
        if len(a) != len(b):
            return f"{len(a)} tensors, against {len(b)}"
        a, b = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
    return f"{a}, against {b}"


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    """In order, each tensor object once: shared parameters count once."""
    return list({id(t): t for t in tensors}.values())
