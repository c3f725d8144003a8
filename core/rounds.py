"""What CO2 and its baselines share: local steps are counted, rounds close, and uneven workers end together."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .adaptive.pace import Pace
from .adaptive.tau import FLOAT32, TauDecision, TauTuner
from .averaging import Averaging, Landing
from .checks import check_frozen, check_tau
from .errors import UserError
from .flat import of_each
from .flight import Link
from .robust.watch import Watch, warn_of_ddp


class LocalMethod(Averaging):
    """Counts local steps and closes a round on every tau-th; subclasses say in `close_round` what closing means.

    params: the parameters to train together (frozen ones are broadcast once and then left alone). buffers: floating
    point buffers to average, such as BatchNorm's running statistics; integer ones are broadcast once. Both are
    broadcast from rank 0, so that every worker starts alike. Convert a model (dtype, device, memory format) before this
    object is made: what puts new tensors in their place is not seen. model_params: where `params` are the float32
    masters that an optimiser keeps of a 16-bit model, that model's parameters, in the same order: masters are averaged,
    and the model is refreshed from them at every boundary. group: the workers (None: all). timeout: seconds until a
    missing worker is an error. link: an emulated slow one.

    For subclasses: tau_max, tau_margin, wires: of tau auto, see TauTuner; one worker alone takes the last wire. waits:
    False where means are merged on arrival: then the workers tell each other their times (`tells_times`), see TauTuner.
    sync_steps: so many first steps after each of which all wait for the mean of the parameters. by_speed: whether
    slower workers take fewer steps, see Pace. scalars: name -> how many numbers of that name travel along, beside those
    that every method has. parts, on_host: see flat.Bucket. backend: of the communication, None for the group's.

    Attributes, beside Averaging's: skipped, local steps of the round that closed last which this worker has left out,
    being slower: its data and learning rate may then keep step with the others'. sent_tau, of the round whose reduction
    is in flight, or landed last; growth, that over the tau of the one before, for an outer momentum (see
    outer.carried). skip_after, to be set before the first step: seconds that a boundary waits for a mean (with delay
    auto once more in mid-round, see TauTuner.needed), None for as long as it takes. A round whose predecessor's mean
    does not come, as when a link is down, goes on for tau local steps more, and so on: nothing is thrown away, nor sent
    before it has come. Each worker decides by itself, for the outer state follows from the means alone, whenever they
    are merged. Workers come in unlike rounds to collectives of the caller's own: these go over groups.host_group.
    """

    tells_times = True  # whether the workers may tell each other their times, for which each has a place

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
        rank, workers = self.slot(group)
        number = None if tau == "auto" else tau
        self.wires = wires if workers > 1 else dict([*wires.items()][-1:])
        tuning = {"by_speed": by_speed, "given": number, "waits": waits or by_speed or workers == 1}
        on_arrival = not waits and workers > 1 and self.tells_times
        tuned = number is None or len(self.wires) > 1 or on_arrival
        tuner = TauTuner(tau_max, tau_margin, self.wires, **tuning) if tuned else None
        self.tau: int = tuner.tau if tuner else tau  # pyright: ignore[reportAttributeAccessIssue]
        check_tau(self.tau)
        self._closing_tau = self.sent_tau = self._moved_tau = self.tau
        self.growth = 1.0
        self._spans = 1  # of tau local steps each, that the round that runs has
        self._lead = 0  # steps that it has beyond that, see TauTuner
        self._ended: bool | None = None  # after step(last=True): whether all workers have ended
        self.sync_steps = sync_steps  # those that are left
        self.skip_after: float | None = None
        self.skipped = 0
        super().__init__(
            params,
            buffers,
            model_params,
            group=group,
            timeout=timeout,
            link=link,
            backend=backend,
            tuner=tuner,
            pace=Pace(rank, workers) if by_speed else None,
            scalars=scalars or {},
            parts=parts,
            on_host=on_host,
        )
        self.starts: list[Tensor] = []  # where rounds begin, a flat tensor a bucket; empty where that is not kept
        self.starts_roughly = False  # whether workers begin near there, and not there
        self._watch = Watch(self._trained, self.params, self._start_of_each, lambda: self.starts_roughly)
        self._watch.begin()
        self._looked = False  # for what else averages the parameters

    # -- for users ------------------------------------------------------------------------------------------

    def step(self, *, last: bool = False) -> bool:
        """Call after every optimiser step, also one that a GradScaler skipped: not from the optimiser's
        register_step_post_hook, which torch does not call then. True when a round closed: on all workers at the same
        step, but with skip_after, and while they are `apart`.

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
            self.flight.done()  # an error is known as soon as it can be
            if self.flight.in_flight and self.arrives() and not self._is_late():
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
        if not self.local_steps:  # else the optimiser's first step has looked
            self._watch.check(self._trained)
        while not self._ended:
            self._ended = self._synchronise(finished=True) if self.sync_steps else self._boundary(finished=True)
        self._ended = None
        self._agreement.forget_stop()

    def catch_up(self, rounds: int) -> None:
        """Closes rounds, waiting for each mean, until there are so many: the most of any worker, where `skip_after` has
        led them to one point in unlike rounds and a checkpoint needs them in one. Every worker must call it."""
        while self.rounds < rounds:
            self._boundary(finished=False)

    @contextlib.contextmanager
    def shared_model(self) -> Iterator[bool]:
        """For an evaluation at a boundary, or after finish(): in it the model is what all workers have in common, where
        the method can tell without another reduction; whether it is. Every worker must come to it.

        Where means are merged on arrival (`delay="auto"`, merge keep) the one that was just sent is waited for and
        merged, not with skip_after; Overlap-Local-SGD waits for the one in flight, and lends its mean. The time counts
        as exposed. Else workers that begin rounds apart evaluate each its own, whose loss is the greater; as all do
        in mid-round.
        """
        unlike_starts = self.starts_roughly or self.skip_after is not None  # who skips is in another round
        yield not (self.local_steps or (self.flight.in_flight and unlike_starts))

    @torch.no_grad()
    def resync(self) -> None:
        """Starts anew from the first worker's parameters as they are now; every worker must call it.

        Call it after weights were loaded into a model that this object already trains: else the next boundaries pull
        them back to where the old ones were. What is in flight is thrown away, and momenta are forgotten.
        """
        self._wanted = None
        self.flight.discard()
        self._begin_alike()
        self.local_steps, self._ended = 0, None
        self._start_from_params()

    def _start_from_params(self) -> None:
        super()._start_from_params()
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

    def state_dict(self) -> dict[str, Any]:
        """See Averaging. UserError while workers are `apart`, but after finish(): their states are of unlike steps."""
        if self.apart and self.rounds and (self.local_steps or self.flight.in_flight):
            raise UserError(
                f"state_dict() after round {self.rounds - 1}, which workers closed at unlike steps, as they do until "
                "tau auto has chosen: save at a boundary where apart is False, or after finish()"
            )
        return super().state_dict()

    def own_state(self) -> dict[str, Any]:
        """See Averaging."""
        return super().own_state() | {
            "sync_steps": self.sync_steps,
            "tau": self.tau,
            "lead": self._lead,
            "taus": (self.sent_tau, self._moved_tau),
        }

    def load_own_state(self, state: dict[str, Any]) -> None:
        """See Averaging."""
        super().load_own_state(state)
        self._ended, self.sync_steps = None, state["sync_steps"]
        if self.tuner and not self.tuner.given and state["tuner"]:
            self.tau, self._lead = self.tuner.tau, state.get("lead", 0)
        self.sent_tau, self._moved_tau = state.get("taus", (state["tau"], state["tau"]))
        self.growth = self.sent_tau / self._moved_tau
        self.begin_round(self.rounds)
        self._closing_tau = self.tau  # of a newcomer, who sends before a round of its own has closed
        self._spans = self.local_steps // self.own_tau + 1
        self._watch.skip()  # the model may be loaded after this

    # -- for subclasses -------------------------------------------------------------------------------------

    @abstractmethod
    def close_round(self, *, finished: bool) -> bool:
        """Ends the round; True once a reduction has landed that every worker sent with `finished`."""

    def begin_round(self, number: int) -> None:  # noqa: B027
        """For settings that change from round to round. number: of the round, from 0."""

    def arrives(self) -> bool:
        """Whether what is in flight is to be merged here, in mid-round."""
        return False

    def merge(self, *, finished: bool = False) -> Landing:
        """Receives what is in flight; a method that merges in mid-round also uses it here."""
        return self.receive(finished=finished)

    def signature(self) -> Any:
        return f"tau={self.tau}"

    def settings(self) -> Any:
        return self.tau

    def send(self, *, finished: bool) -> None:
        """See Averaging."""
        self.sent_tau = self._closing_tau
        self.growth = self.sent_tau / self._moved_tau
        super().send(finished=finished)

    def receive(self, *, finished: bool) -> Landing:
        """See Averaging."""
        landing = super().receive(finished=finished)
        self._moved_tau = self._moved_tau if landing.empty else self.sent_tau
        return landing

    # -- of its own -----------------------------------------------------------------------------------------

    def _is_late(self) -> bool:
        """Whether what is in flight does not come within `skip_after` seconds, or is not there while tau auto tries."""
        patience = 0.0 if self.tuner and self.tuner.free else self.skip_after
        if patience is None or not self.flight.in_flight:
            return False
        with self._clock.pause():
            return not self.flight.lands_within(patience)

    def _start_of_each(self) -> list[Tensor] | None:
        """Where the round began, a tensor a parameter; None: not known."""
        if self.starts:
            return of_each(self.params, self.buckets, self.starts)
        return None if self.state else self.params  # nothing is kept that could pull anywhere

    @torch.inference_mode(False)  # whose tensors, kept here, could not be written to later
    @torch.no_grad()
    def _boundary(self, *, finished: bool) -> bool:
        """close_round, measured, with what every method does around it."""
        self.flight.check_alive()  # before a method takes partial sums for what it keeps there
        if not self._looked:
            warn_of_ddp([*self._trained, *self._model_params], self.flight.group)
            self._looked = True
        with self._clock.boundary(self.tau, self.local_steps):
            self.keep_buffers()
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
        everyone = self.average_now(finished=finished)
        self.sync_steps -= not everyone
        self._start_from_params()
        return everyone
