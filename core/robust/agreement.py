"""What workers tell each other with every reduction beside its payload: settings and replicas that should be equal, as
checksums of a few bits; whether to stop; and their times, for tau, wire and delay auto.

Workers exchange differences only, so nothing brings replicas together again that have drifted apart: machines with
another number of threads, or of another kind, add in another order, and round otherwise in the last bit.

Each worker sends a checksum c and c^2. All workers have the same c exactly if n sum(c^2) = (sum c)^2, which all of them
find alike, for all got the same sums. The sums are exact in float32, since a checksum has few bits: a difference is
overlooked once in 2^bits times, and seen in one of the next rounds, if it lasts.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..adaptive.pace import Pace
from ..adaptive.tau import NUMBERS, TauDecision, TauTuner
from ..errors import UserError
from ..flat import Scalars
from ..flight import Flight
from ..groups import Stage, send_first
from ..stats import Late, RoundStats
from .guard import Guard

PARTS = 16  # a round looks at one part of so many: a quarter of a byte read a parameter
REPAIR_EVERY = 100  # rounds, at least, between two exact broadcasts: 2 % of the bytes of CO2


def checksum_of(settings: Any, workers: int) -> int:
    """c of any settings that print alike on all workers."""
    return zlib.crc32(repr(settings).encode()) % (1 << bits(workers))


def checksum(flats: Sequence[Tensor], number: int, workers: int) -> Tensor:
    """c, 0-d on the device of the first, of part `number` modulo PARTS of each 1-d float32 or float64 tensor.

    Integers are added, for which the order does not matter.
    """
    parts = [flat.view(torch.int32).tensor_split(PARTS)[number % PARTS] for flat in flats]
    sums = [part.sum(dtype=torch.int64).to(flats[0].device) for part in parts]
    return torch.stack(sums).sum() & ((1 << bits(workers)) - 1)


def agree(sums: Sequence[float], workers: int) -> bool:
    """Whether all workers sent the same pair; sums: [2], over the workers."""
    return round(workers * round(sums[1])) == round(sums[0]) ** 2


def bits(workers: int) -> int:
    """Of a checksum: as many as leave the sum of the squares below 2^20, and at least one."""
    return max(1, (20 - (workers - 1).bit_length()) // 2)


class Agreement:
    """Tells this worker's part before a launch, and hears everybody's from what has landed.

    All workers hear the same sums, of the same round. What is heard takes effect in `follow`, at the round's end, for
    in mid-round each worker hears it after other steps. scalars: with the places of `sizes`. everybody: over how many
    processes they are summed. tuner, pace: see Averaging, or None. guard: hears who was left out.

    Attributes: stop, whether a worker has asked for it; save, whether one has asked for a checkpoint, until the next
    boundary; tau_decision, taken by the tuner at the last boundary.
    """

    def __init__(
        self,
        scalars: Scalars,
        background: Flight,
        everybody: int,
        tuner: TauTuner | None,
        pace: Pace | None,
        guard: Guard,
    ):
        self.scalars, self.flight, self.everybody = scalars, background, everybody
        self.tuner, self.pace, self.guard = tuner, pace, guard
        self.tau_decision: TauDecision | None = None
        self._decided: TauDecision | None = None  # heard, and told from the round's end on
        self.most: int | None = None  # workers that may ever be, where their number changes; None: it does not
        self.forget_repair()
        self.save = self._save_asked = self._save_heard = False
        self.forget_stop()

    @staticmethod
    def sizes(workers: int, tuner: TauTuner | None, pace: bool) -> dict[str, int]:
        """The scalars that every method has, and how many numbers each stands for; those of each worker come last."""
        known = {"finished": 1, "steps": 1, "stop": 1, "save": 1, "settings": 2, "replicas": 2} | Guard.sizes(workers)
        known |= Pace.sizes(workers) if pace else {}
        return known | ({"times": NUMBERS * workers} if tuner else {})

    def ask_to_stop(self) -> None:
        self._asked = True

    def ask_to_save(self) -> None:
        self._save_asked = True

    def forget_stop(self) -> None:
        """Nobody has asked; what a GPU still holds of the last round is not heard, either."""
        self.stop = self._asked = self._stop_heard = False
        self.forget_landed()

    def forget_landed(self) -> None:
        """What a GPU still holds of the last round is of no run that goes on."""
        self._late = Late()

    def forget_repair(self) -> None:
        """As if replicas had never differed; every worker must call it at the same point."""
        self._repair, self._repaired = False, -REPAIR_EVERY

    def tell(
        self, settings: Any, replicas: Sequence[Tensor], turn: int | None, stats: RoundStats, before: RoundStats
    ) -> None:
        """Writes the scalars. turn: which comparison of the replicas it is; None: others' are compared. stats, before:
        of the round that closes, and of the one before."""
        workers = self.most or self.flight.world_size
        self.scalars.set("stop", float(self._asked))
        self.scalars.set("save", float(self._save_asked))
        self._save_asked = False
        self.scalars.set_checksum("settings", checksum_of(settings, self.most or self.everybody))
        compared = checksum(replicas, turn, workers) if replicas and turn is not None else 0
        self.scalars.set_checksum("replicas", compared)
        if self.tuner:
            self.tuner.tell(stats, before, self.flight.rank, self.scalars["times"])
        if self.pace:
            self.pace.tell(stats, before, self.scalars["step_seconds"])

    def hear(self, settings: Any) -> bool:
        """Reads what has landed; whether the replicas were equal. UserError where settings differ, this worker's being
        `settings`; DivergedError as the guard says. On a GPU it is what landed a round ago: the host waits for nothing.
        """
        number = self.flight.launched
        now = number - 1, self.everybody, self.flight.world_size
        numbers = self._late.exchange(self.scalars.place * self.everybody, now)
        if numbers is None:
            return True
        sums, (of_round, everybody, workers) = self.scalars.named(numbers), self._late.of
        if self.tuner:
            times = sums["times"]
            self._decided = self.tuner.hear(number, *(times[i::NUMBERS] for i in range(NUMBERS)))
        if self.pace:
            self.pace.hear(sums["step_seconds"])
        self._stop_heard |= sums["stop"][0] > 0.5
        self._save_heard |= sums["save"][0] > 0.5
        if not agree(sums["settings"], everybody):
            raise UserError(
                f"workers differ in their settings in round {of_round}, where this one has {settings}: "
                "a schedule must give all of them the same, from the round's number alone"
            )
        self.guard.hear([verdict * workers / everybody for verdict in sums["left_out"]], of_round, workers)
        equal = agree(sums["replicas"], workers)
        if not equal:
            self._repair = number - self._repaired >= REPAIR_EVERY
            if self._repair and self._repaired < 0 and self.flight.rank == 0:
                warnings.warn(
                    f"the workers' outer state was not the same in round {of_round}, as on unlike machines: "
                    f"rank 0's is sent to all, at most once in {REPAIR_EVERY} rounds",
                    stacklevel=2,
                )
        return equal

    def follow(self) -> None:
        """A round has ended."""
        self.tau_decision, self._decided = self._decided, None
        if self.pace:
            self.pace.follow()
        self.stop |= self._stop_heard
        self.save, self._save_heard = self._save_heard, False

    def loaded(self, *, of_others: bool) -> None:
        """A checkpoint's scalars are in place: forgets requests, which the run that wrote it has met, that workers were
        in finish(), for another may train on, and of another number of workers what only as many could agree on, and
        what each of them told of itself."""
        self.forget_landed()
        of_each = ("settings", "replicas", "left_out", "step_seconds", "times")
        for name in ("stop", "save", "finished", *(of_each if of_others else ())):
            if name in self.scalars.sizes:
                self.scalars[name].zero_()

    def repair(self, shared: Sequence[Tensor]) -> Iterator[Stage]:
        """The first worker's state for all, where replicas were found to differ. shared: what of it should be equal."""
        if self._repair and self.flight.group is not None:
            self._repair, self._repaired = False, self.flight.launched
            yield send_first(shared, self.flight.group)
