"""What CO2 and its baselines share: local steps are counted, rounds close, and uneven workers end together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Agreement
from .checks import check_frozen, check_group, check_inputs, check_run, check_saved, tensors_of
from .collectives import AllReduce, Background, Link, Reducer, Stage
from .errors import UserError
from .flat import (
    Scalars,
    State,
    copy,
    copy_where,
    local_shard,
    make_buckets,
    of_each,
    read_blocks,
    rescale,
    resized,
    unique,
)
from .guard import Guard, LeftOut, size_of
from .pace import Pace
from .stats import RoundClock, RoundStats
from .tau import FLOAT32, TauDecision, TauTuner
from .watch import Watch


class Landing(NamedTuple):
    """What has landed. Only finish() reads it from the device."""

    last: bool
    """Every worker sent it from finish(): no round follows."""
    empty: bool
    """Besides, nobody had taken a step: it must move nothing."""


class LocalMethod(ABC):
    """Counts local steps and closes a round on every tau-th; subclasses say in `close_round` what closing means.

    params: the parameters to train together (frozen ones are broadcast once and then left alone). buffers: floating
    point buffers to average, such as BatchNorm's running statistics; integer ones are broadcast once. Both are
    broadcast from rank 0, so that every worker starts alike. Convert a model (dtype, device, memory format) before this
    object is made: what puts new tensors in their place is not seen. model_params: where `params` are the float32
    masters that an optimiser keeps of a 16-bit model, that model's parameters, in the same order: masters are averaged,
    and the model is refreshed from them at every boundary. group: the workers (None: all). timeout: seconds until a
    missing worker is an error. link: an emulated slow one.

    For subclasses: tau_max, tau_margin, wires, waits: of tau auto, see TauTuner; one worker alone takes the last wire.
    sync_steps: so many first steps after each of which all wait for the mean of the parameters. by_speed: whether
    slower workers take fewer steps, see Pace. scalars: name -> how many numbers of that name travel along, beside those
    that every method has. parts, on_host: see flat.Bucket. backend: of the communication, None for the group's.

    Attributes: skipped, local steps of the round that closed last which this worker has left out, being slower: its
    data and learning rate may then keep step with the others'. sent_tau, of the round whose reduction is in flight, or
    landed last; growth, that over the tau of the one before, for an outer momentum (see outer.carried). on_left_out,
    called with a 0-d truth value after a round: whether this worker was left out of its mean (see guard.py), for what
    the inner optimiser has gathered, as guard.forget does; on a CPU only where it was. skip_after, to be set before the
    first step: seconds that a boundary waits for a mean, None for as long as it takes. A round whose predecessor's mean
    does not come, as when a link is down, goes on for tau local steps more, and so on: nothing is thrown away, nor sent
    before it has come. Each worker decides by itself, for the outer state follows from the means alone, whenever they
    are merged.
    """

    differences = False  # whether payloads are differences: zero where nothing has moved
    member = "rank"  # what a worker is called
    more_scalars: ClassVar[Mapping[str, int]] = {}  # of a class, as `scalars`

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int | Literal["auto"],
        *,
        tau_max: int = 192,
        tau_margin: float = 0.25,
        wires: Mapping[str, float] = FLOAT32,
        sync_steps: int = 0,
        buffers: Iterable[Tensor] = (),
        model_params: Iterable[Tensor] = (),
        group: dist.ProcessGroup | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
        by_speed: bool = False,
        waits: bool = True,
        scalars: Mapping[str, int] | None = None,
        parts: int = 1,
        on_host: bool = False,
        backend: str | None = None,
    ):
        given = unique(tensors_of(params, "parameters"))
        fixed = [local_shard(b) for b in unique(tensors_of(buffers, "buffers"))]
        everything = [local_shard(p) for p in given]
        self.params = [shard for p, shard in zip(given, everything, strict=True) if p.requires_grad]
        self._frozen = [p for p in given if not p.requires_grad]
        self._model_params = [local_shard(p) for p in tensors_of(model_params, "parameters")]
        self.buffers = [b for b in fixed if b.is_floating_point()]
        number = None if tau == "auto" else tau
        slot, slots = self.slot(group)
        self.wires = wires if slots > 1 else dict([*wires.items()][-1:])
        tuning = {"by_speed": by_speed, "given": number, "waits": waits or by_speed or slots == 1}
        tuned = number is None or len(self.wires) > 1
        self.tuner = TauTuner(tau_max, tau_margin, self.wires, **tuning) if tuned else None
        self.tau: int = self.tuner.tau if self.tuner else tau  # pyright: ignore[reportAttributeAccessIssue]
        check_inputs(self.tau, given, self.params, self.buffers, self._model_params)
        self.local_steps = 0  # since the last round closed
        self._ended: bool | None = None  # after step(last=True): whether all workers have ended
        self.sync_steps = sync_steps  # those that are left
        self.skip_after: float | None = None
        self._spans = 1  # of tau local steps each, that the round that runs has
        self._lead = 0  # steps that it has beyond that, see TauTuner
        self._closing_tau = self.sent_tau = self._moved_tau = self.tau
        self.growth = 1.0
        known = dict(self.more_scalars) | Agreement.sizes(slots, self.tuner, by_speed)
        self.scalars = Scalars(dict(scalars or {}) | known)  # those of each worker last, where `resized` cuts
        self.buckets = make_buckets(self.params, self.buffers, self.scalars.numel, parts, on_host)
        self.scalars.attach(self.buckets[0].scalars)
        device = self.buckets[0].flat.device
        self.background = self.make_background(device, group=group, timeout=timeout, link=link, backend=backend)
        self.reducer: Reducer = AllReduce([b.flat for b in self.buckets], self.background.world_size)
        self.scale: float | Tensor = self.reducer.scale  # see receive
        self.state = State(self.buckets)
        self.replicas: list[Tensor] = []  # state, flat, that is equal on all workers, bit for bit
        self.starts: list[Tensor] = []  # where rounds begin, a flat tensor a bucket; empty where that is not kept
        self.starts_roughly = False  # whether workers begin near there, and not there
        ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else range(slots)
        self.guard = Guard(self.scalars, device, slot, [f"{self.member} {rank}" for rank in ranks])
        self.on_left_out: LeftOut | None = None
        self.pace = Pace(slot, slots) if by_speed else None
        self.skipped = 0
        self._agreement = Agreement(self.scalars, self.background, self.everybody, self.tuner, self.pace, self.guard)
        self._wanted: tuple[Callable[[dict[str, Any]], None], dict[str, Any]] | None = None  # who waits for a snapshot
        self._shared_from_start = [*everything, *fixed]
        self.background.agree((type(self).__name__, self.signature()), self._shared_from_start)
        self._refresh_model()
        self._own_buffers = [[b.clone() for b in bucket.buffers] for bucket in self.buckets]
        trained = [p for p in given if p.requires_grad]
        self._watch = Watch(trained, self.params, self._start_of_each, lambda: self.starts_roughly)
        self._watch.begin()
        self._clock = RoundClock(device)

    # -- for users ------------------------------------------------------------------------------------------

    def step(self, *, last: bool = False) -> bool:
        """Call after every optimiser step (also one that a GradScaler skipped). True when a round closed: on all
        workers at the same step, but with skip_after, and while they are `apart`.

        last: finish() follows. It then waits for one all-reduce, of which else it needs a second where a round has
        just closed, only to hear that no worker has sent anything since.
        """
        if self._ended is not None:
            raise UserError("step() after step(last=True): call finish() between them")
        if self.sync_steps:
            return self._synchronise(finished=False)
        self.local_steps += 1
        if self.local_steps < self._spans * self.own_tau:
            if self.local_steps == 1:
                self._clock.steps_begin()
            self.background.done()  # an error is known as soon as it can be
            if self.background.in_flight and self.arrives() and not self._is_late():
                self._merge_early()
            return False
        if not last and self._is_late():
            self._spans += 1
            return False
        check_frozen(self._frozen)
        ended = self._boundary(finished=last)
        self._ended = ended if last else None
        return True

    def finish(self) -> None:
        """Averages what is pending and leaves all workers with equal parameters. Every worker must call it.

        Workers may come here after different numbers of steps: the early ones take part in the others' rounds,
        contributing no change, until all have arrived. Their rounds have a round's usual size: nobody knows whether
        another worker still trains, and one that does sends all it has. Training may go on afterwards, and
        `stop_agreed` is False again.
        """
        while not self._ended:
            self._ended = self._synchronise(finished=True) if self.sync_steps else self._boundary(finished=True)
        self._ended = None
        self._agreement.forget_stop()

    def catch_up(self, rounds: int) -> None:
        """Closes rounds, waiting for each mean, until there are so many: the most of any worker, where `skip_after` has
        led them to one point in unlike rounds and a checkpoint needs them in one. Every worker must call it."""
        while self.rounds < rounds:
            self._boundary(finished=False)

    @torch.no_grad()
    def resync(self) -> None:
        """Starts anew from the first worker's parameters as they are now; every worker must call it.

        Call it after weights were loaded into a model that this object already trains: else the next boundaries pull
        them back to where the old ones were. What is in flight is thrown away, and momenta are forgotten.
        """
        self._wanted = None
        self.background.discard()
        self.background.agree((type(self).__name__, self.signature()), self._shared_from_start)
        self.local_steps, self._ended = 0, None
        self._start_from_params()

    def _start_from_params(self) -> None:
        """Everything is as it was made, the parameters being the start."""
        self._refresh_model()
        self.guard.state.zero_()
        for bucket in self.buckets:
            bucket.flat.zero_()
        self.state.restart()
        for flat in (flat for flats in self.reducer.state.values() for flat in flats):
            flat.zero_()
        self._watch.begin()

    def ask_to_stop(self) -> None:
        """Any worker may: the next reduction carries it, and once that has landed `stop_agreed` is True on all workers,
        at the same boundary; on a GPU one boundary later, for the host does not wait for the number."""
        self._agreement.ask_to_stop()

    @property
    def stop_agreed(self) -> bool:
        """Whether a worker has called ask_to_stop and all have heard of it; so until finish(): read it before."""
        return self._agreement.stop

    def ask_to_save(self) -> None:
        """Any worker may: as ask_to_stop, but `save_agreed` is True from that boundary to the next one."""
        self._agreement.ask_to_save()

    @property
    def save_agreed(self) -> bool:
        """Whether a worker has called ask_to_save, and all have heard of it at the last boundary."""
        return self._agreement.save

    @property
    def stats(self) -> RoundStats:
        """Of the round that closed last; from a merge in mid-round on, of the one that runs."""
        return self._clock.stats

    @property
    def tau_decision(self) -> TauDecision | None:
        """Taken by tau="auto" at the last boundary, if any was."""
        return self._agreement.tau_decision

    @property
    def own_tau(self) -> int:
        """The local steps of this worker in the round that runs: tau, or fewer where it is slower; more, once, where
        tau auto has led the workers apart."""
        return (self.pace.steps(self.tau) if self.pace else self.tau) + self._lead

    @property
    def apart(self) -> bool:
        """Whether the round that closed last did so at unlike steps of the workers, the same on all: in the first
        rounds of tau auto where means are merged on arrival. Evaluate, save and stop when it is False."""
        return self.tuner is not None and self.tuner.apart

    @property
    def rounds(self) -> int:
        """Rounds closed so far, those of finish() included."""
        return self.background.launched

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs besides parameters and optimiser; waits for the all-reduce in flight, so every
        worker must come to it, or go on stepping.

        Take it at a round boundary and the run goes on from there bit for bit. Tensors are copies. Each worker saves
        its own, with its model (BatchNorm's buffers, too) and optimiser.
        """
        self.background.check_alive()
        in_flight = self.background.settle()
        return {
            "method": type(self).__name__,
            "state": {name: [f.clone() for f in flats] for name, flats in (self.state | self.reducer.state).items()},
            "in_flight": [b.flat.clone() for b in self.buckets] if in_flight else None,
            "workers": self.background.world_size,
            "local_steps": self.local_steps,
            "sync_steps": self.sync_steps,
            "rounds": self.rounds,
            "tau": self.tau,
            "lead": self._lead,
            "taus": (self.sent_tau, self._moved_tau),
            "tuner": self.tuner.state_dict() if self.tuner else None,
            "guard": self.guard.state.clone(),
            "pace": self.pace.state_dict() if self.pace else None,
        }

    def snapshot(self, then: Callable[[dict[str, Any]], None]) -> None:
        """Calls `then` with what state_dict would return here, without waiting: when what is in flight is received, at
        the next boundary at the latest; at once where nothing is. Parameters and optimiser are to be copied here.

        Where one was asked for before, that is given first, for which this waits.
        """
        self.hand_over()
        self._wanted = then, self.of_now()
        if not self.background.in_flight:
            self.hand_over()

    def hand_over(self) -> None:
        """Waits for what is in flight and gives a snapshot that was asked for, where one was."""
        if self._wanted is not None:
            (then, of_then), self._wanted = self._wanted, None
            then(self.state_dict() | of_then)

    def of_now(self) -> dict[str, Any]:
        """What in state_dict the local steps of the next round change."""
        return {"local_steps": self.local_steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what state_dict returned, on every worker; parameters and optimiser are the caller's.

        Load the model after this object was made, not before: making it broadcasts rank 0's parameters and buffers.
        Another number of workers may go on with what any of those that wrote it held, but for outer state that is
        unlike on all workers (UserError); what a narrow wire format held back is lost then.
        """
        flats, workers = [b.flat for b in self.buckets], self.background.world_size
        check_run(state, type(self).__name__, workers, equal=bool(self.replicas) or not self.state)
        here, saved = self.state | self.reducer.state, state["state"]
        others = state["workers"] != workers
        in_flight = state["in_flight"] or flats
        if others:
            here, saved = self.state, {name: f for name, f in saved.items() if name not in self.reducer.state}
            in_flight = resized(in_flight, flats)  # a sum or a mean: its weight says over how much
        here, saved = here | {"all-reduce": flats}, saved | {"all-reduce": in_flight}
        check_saved(saved, here)
        self._wanted = None
        self.background.restore(state["rounds"], state["in_flight"] is not None)
        for name, held in here.items():
            copy(held, saved[name])
        self._agreement.loaded(of_others=others)
        self._ended, self.local_steps, self.sync_steps = None, state["local_steps"], state["sync_steps"]
        if self.tuner and state["tuner"]:
            self.tuner.load_state_dict(state["tuner"])
            self.tau, self._lead = state["tau"], state.get("lead", 0)
        self.sent_tau, self._moved_tau = state.get("taus", (state["tau"], state["tau"]))
        self.growth = self.sent_tau / self._moved_tau
        self.guard.state.copy_(state["guard"])
        if self.pace and state["pace"] and not others:
            self.pace.load_state_dict(state["pace"])
        self.begin_round(self.rounds)
        self._closing_tau = self.tau  # of a newcomer, who sends before a round of its own has closed
        self._spans = self.local_steps // self.own_tau + 1
        self._watch.skip()  # the model may be loaded after this

    def close(self) -> None:
        """Leaves the process group. Only after finish()."""
        self.background.close()

    # -- for subclasses -------------------------------------------------------------------------------------

    def make_background(self, device: torch.device, **options: Any) -> Background:
        """What the reductions run in."""
        check_group()
        return Background(device, **options)

    def slot(self, group: dist.ProcessGroup | None) -> tuple[int, int]:
        """This worker's place among the scalars that each worker has one of, and how many places there are."""
        return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)

    @abstractmethod
    def close_round(self, *, finished: bool) -> bool:
        """Ends the round; True once a reduction has landed that every worker sent with `finished`."""

    def signature(self) -> Any:
        """What must be equal on all workers, compared at construction."""
        return f"tau={self.tau}"

    def settings(self) -> Any:
        """What must be equal on all workers in every round, compared when the round's reduction lands."""
        return self.tau

    def arrives(self) -> bool:
        """Whether what is in flight is to be merged here, in mid-round."""
        return False

    def merge(self, *, finished: bool = False) -> Landing:
        """Receives what is in flight; a method that merges in mid-round also uses it here."""
        return self.receive(finished=finished)

    def agreed_size(self, size: Tensor) -> Tensor:
        """Not finite where that of any worker is not that has to judge alike. size: of what this worker sends, 0-d."""
        return size

    @property
    def weight(self) -> float:
        """Of what this worker is about to send: 1, or its local steps where workers take different numbers of them."""
        return float(self.local_steps) if self.pace else 1.0

    def weigh(self) -> None:
        """Leaves out what is not sound, and then starts anew."""
        self.guard.judge(size_of(self.buckets), self.local_steps if self.differences else 0)
        self.guard.weigh(self.buckets, self.weight)
        self.was_left_out(self.guard.left_out)

    def was_left_out(self, where: Tensor) -> None:
        """Where that holds, 0-d, this worker has to start anew; a method does so where a landing does not."""
        if self.on_left_out is not None and (read_blocks(where) or where):
            self.on_left_out(where)

    def begin_round(self, number: int) -> None:  # noqa: B027
        """For settings that change from round to round. number: of the round, from 0."""

    def send(self, *, finished: bool) -> None:
        """Launches the reduction of what the payloads hold, of the buffers' values, and of the scalars."""
        for bucket, own in zip(self.buckets, self._own_buffers, strict=True):
            copy(bucket.buffer_views, own)
        self.scalars.set("finished", float(finished))
        self.scalars.set("steps", float(self.local_steps))
        self.weigh()
        turn, clock = self.turn(), self._clock
        self._agreement.tell(self.settings(), self.replicas, turn, clock.stats, clock.before)
        self.sent_tau = self._closing_tau
        self.growth = self.sent_tau / self._moved_tau
        self.background.launch(self.stages())
        self.local_steps = 0

    @property
    def everybody(self) -> int:
        """The number of all processes over which scalars are averaged."""
        return self.background.world_size

    def turn(self) -> int | None:
        """Which comparison of this worker's replicas it is, from 0; None where others' are compared in this round. Of
        workers with the same replicas all or none have a turn."""
        return self.rounds

    def stages(self) -> Iterator[Stage]:
        """What is launched."""
        yield from self._agreement.repair(self.state.shared())
        yield from self.reducer.stages(self.background.group, self.background.launched)

    def receive(self, *, finished: bool) -> Landing:
        """Waits for what is in flight and notes what that cost. The model's buffers become their means.

        The payloads hold what landed; `scale` turns it into means, in a pass that their owner makes anyway.
        """
        self.background.wait(self.hand_over)
        self.stats.round = self.background.launched
        self.stats.exposed_seconds = self.background.exposed
        self.stats.allreduce_seconds = self.background.seconds
        self.stats.bytes_sent = self.background.bytes_sent
        self.scale = self.guard.land(1.0 if self.differences else float("nan"))
        for bucket in self.buckets:
            rescale(bucket.values, self.scale)
        self.scalars.place.mul_(self.reducer.scale)
        self.stats.drifted = float(not self._agreement.hear(self.settings()))
        self.stats.left_out = self.guard.count
        last = finished and self.scalars["finished"].item() > 1 - 1e-6  # one over the workers may be rounded
        empty = last and self.scalars["steps"].item() == 0.0
        self._moved_tau = self._moved_tau if empty else self.sent_tau
        for bucket in self.buckets if not empty else []:  # an empty round carries older values
            copy_where(self.scalars["weight"] > 0, bucket.buffers, bucket.buffer_views)
        return Landing(last, empty)

    # -- of its own -----------------------------------------------------------------------------------------

    def _is_late(self) -> bool:
        """Whether what is in flight does not come within `skip_after` seconds, or is not there while tau auto tries."""
        patience = 0.0 if self.tuner and self.tuner.free else self.skip_after
        if patience is None or not self.background.in_flight:
            return False
        return not self.background.lands_within(patience)

    def _start_of_each(self) -> list[Tensor] | None:
        """Where the round began, a tensor a parameter; None: not known."""
        if self.starts:
            return of_each(self.params, self.buckets, self.starts)
        return None if self.state else self.params  # nothing is kept that could pull anywhere

    @torch.inference_mode(False)  # whose tensors, kept here, could not be written to later
    @torch.no_grad()
    def _boundary(self, *, finished: bool) -> bool:
        """close_round, measured, with what every method does around it."""
        self.background.check_alive()  # before a method takes partial sums for what it keeps there
        with self._clock.boundary(self.tau, self.local_steps):
            for own, bucket in zip(self._own_buffers, self.buckets, strict=True):
                copy(own, bucket.buffers)  # what this worker sends, whatever lands in the meantime
            self.skipped = self.tau + self._lead - self.own_tau
            self._closing_tau = self.tau
            everyone = self.close_round(finished=finished)
            self._agreement.follow()
            if self.tuner:
                self.tau = self.tau if self.tuner.given else self.tuner.tau
                self._lead = self.tuner.lead()
            self.begin_round(self.rounds)
            self._refresh_model()
            self._watch.begin()
            self._spans = 1
        return everyone

    @torch.inference_mode(False)
    @torch.no_grad()
    def _merge_early(self) -> None:
        """`merge` in mid-round."""
        with self._clock.early_merge(self.local_steps):
            self.merge()
            self._refresh_model()
            self._watch.skip()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _synchronise(self, *, finished: bool) -> bool:
        """One of the first steps: the mean of the parameters and buffers for all, from which everything starts.

        A worker that is in finish() takes part in the others'. True once all are there: then it was no step.
        """
        for bucket in self.buckets:
            bucket.flatten(bucket.payload)
            copy(bucket.buffer_views, bucket.buffers)
            bucket.scalars.zero_()
        self.scalars.set("finished", float(finished))
        self.guard.judge(self.agreed_size(size_of(self.buckets)), 0)
        self.guard.weigh(self.buckets)
        left_out = self.guard.left_out.clone()
        self.background.sum([bucket.flat for bucket in self.buckets])
        self.guard.hear(self.scalars["left_out"].view(-1).tolist(), self.rounds)
        scale = self.guard.land(1.0)
        for bucket in self.buckets:
            rescale(bucket.flat[: bucket.padded + len(bucket.values)], scale)
            copy([*bucket.params, *bucket.buffers], [*bucket.payload_views, *bucket.buffer_views])
        self.was_left_out(left_out)
        everyone = finished and self.scalars["finished"].item() > self.background.world_size - 0.5
        self.sync_steps -= not everyone
        self._start_from_params()
        return everyone

    @torch.no_grad()
    def _refresh_model(self) -> None:
        """The model follows its masters."""
        copy(self._model_params, self.params)
