"""The part of a run that handles workers that come and go (see core/elastic/joining.py and core/elastic/launch.py).

The run has a fixed number of steps, and each worker's batch keeps its size. Samples come from one shuffle per epoch.
When the number of workers changes, the rest of the epoch is shared out again, from the next whole batch on. Only
samples of the round in which a worker was lost are used twice. An epoch misses the lost worker's last two rounds, and
less than one global batch per change.
"""

from __future__ import annotations

import functools
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from core.baselines.table import Method
from core.checkpoint import runs as checkpoint
from core.checkpoint import stored
from core.config import named
from core.elastic import elastic_co2
from core.elastic.allreduce import Script
from core.elastic.joining import ElasticCO2
from core.elastic.members import Members, Report, WorkersChanged
from core.errors import UserError
from core.groups import local_world_size
from core.local_update import LocalUpdateMethod
from training.data.samples import per_worker, steps_per_epoch
from training.folder.settings import settings
from training.loop.progress import Actions
from training.loop.run import Run
from training.recipe import Recipe
from training.start.workers import difference

T = TypeVar("T")


@dataclass(frozen=True)
class Deal:
    """The sharing of samples among workers from step `since` on.

    Attributes:
        number: Number of the generation. The latest one counts.
        since: First step.
        at: The step `since` gets the samples of step `at` of a run that always had `workers` workers.
        workers: Number of workers.
    """

    number: int
    since: int
    at: int
    workers: int

    def again(self, number: int, step: int, workers: int, samples: int, share: int) -> Deal:
        """Returns the sharing of the rest of the epoch among another number of workers.

        Args:
            number: Number of the new generation.
            step: First step.
            workers: New number of workers.
            samples: Number of training samples.
            share: Samples per worker and step.
        """
        epoch, done = divmod(self.at + step - self.since, steps_per_epoch(samples, share * self.workers))
        of_epoch = steps_per_epoch(samples, share * workers)
        done = -(-done * self.workers // workers)
        epoch, done = (epoch, done) if done < of_epoch else (epoch + 1, 0)
        return Deal(number, step, epoch * of_epoch + done, workers)


class Elastic(Run, Script):
    """A run of one elastic worker. Its rank synchronizes gradients with the other ranks of its island, if any.

    Attributes:
        drawn: Number of steps whose batches this worker has used or skipped.
    """

    method: ElasticCO2
    members: Members

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.share = per_worker(recipe.batch_size, self.world_size)
        self.drawn = self.samples = 0
        self.deal = Deal(0, 0, 0, self.world_size)
        self._nominal = self.world_size
        self._names: list[str] = []
        self._trains = False
        self._seconds = 0.0

    def _meet(self) -> None:
        """Connects to the launcher, and compares the recipe with the first worker's recipe."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        r = self.recipe
        self.members = Members.from_env(r.timeout)
        if (r.per_node or local_world_size()) != self.members.island:
            raise UserError(
                f"per_node={r.per_node} with elastic: give --per_node after the recipe's name, as --elastic, to "
                "training.launch"
            )
        mine = settings(r)
        first = json.loads(self.members.store.compare_set("settings", "", json.dumps(mine)))
        if verdict := difference(first, mine, self.rank):
            raise UserError(verdict)

    def _leave(self, failed: bool) -> None:
        """Does nothing: the other workers continue without this one, and a checkpoint is written at once."""

    def _make_method(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Method]:  # noqa: ARG002
        """Returns the model, and the method before it has joined the other workers."""
        r = self.recipe
        options: dict[str, Any] = {"timeout": r.timeout, "link": self.link, "buffers": list(model.buffers())}
        options["hooks"] = [self.requests, self.snapshots]
        self.method = elastic_co2(model.parameters(), named(r.co2), members=self.members, script=self, **options)
        return (DistributedDataParallel(model) if self.members.island > 1 else model), self.method

    def _begin(self, samples: int, epoch: int) -> float:
        """Joins the other workers and loads their state. Returns the seconds of training that led to it."""
        r, setting = self.recipe, "tau_max" if self.recipe.co2.tau == "auto" else "tau"
        tau, every = getattr(r.co2, setting), r.interval("eval_every", epoch)[0]
        if every <= tau:
            smaller = f" or a smaller --co2.{setting}" if tau > 1 else ""
            raise UserError(
                f"elastic with an evaluation every {every} steps and rounds of {tau}: workers join where nothing is "
                f"evaluated; give a larger --eval_every{smaller}"
            )
        self.samples = samples
        came_later = self.method.join(self._found)
        self.rounds.overlap.rounds += came_later  # it takes part in the round that it joins
        self._trains = True
        return self._seconds

    def batches(self, make: Callable[[Recipe, int, int, int, int], Iterator[T]]) -> Iterator[T]:
        """Yields this worker's batches, shared out anew whenever the workers change."""
        self.drawn, total = self.step, self.total
        while self.drawn < total:
            deal, place = self.deal, (self.rank, self.world_size)
            recipe = replace(self.recipe, batch_size=self.share * deal.workers)
            at = deal.at + self.drawn - deal.since
            for batch in make(recipe, *place, at, at + total - self.drawn):
                self.drawn += 1
                yield batch
                if self.deal is not deal:
                    break

    def _agree(self, due: Actions) -> Actions:
        """Returns `due`. All workers are at the same step, so it is the same on all of them."""
        return due

    def _sum(self, total: Tensor) -> Tensor:
        """See ElasticAllReduce.sum_of_all."""
        return self.method.allreduce.sum_of_all(total)

    def _stopped_by(self, number: int) -> int:
        """Returns the signal that stops the run. The launcher passes it on to all workers."""
        return number or signal.SIGTERM

    def _conclude(self, act: Callable[[], None]) -> None:
        """See ElasticCO2.end."""
        self.method.end(act)

    # -- state ------------------------------------------------------------------------------------------------

    def may_join(self) -> bool:
        return not self.evaluates(self.drawn)

    def give(self, method: LocalUpdateMethod) -> dict[str, Any]:
        """Returns the state that a newcomer needs and a checkpoint holds."""
        state = self.state_dict() | self.state_of_method(method.state_dict())
        self.rounds.read()
        totals = vars(self.rounds.overlap) | {"seconds": self.clock.seconds}
        return state | {"step": self.drawn, "total": self.total, "deal": asdict(self.deal), "totals": totals}

    def take(self, method: LocalUpdateMethod, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Continues from `state`. The optimizer's state is the sender's; this worker keeps its own random state."""
        self.load_state_dict(state)
        self.deal, self.drawn = Deal(**state["deal"]), state["step"]
        totals = {**state["totals"]}
        self.step, self._seconds = self.drawn, totals.pop("seconds")
        vars(self.rounds.overlap).update(totals)  # summary.json counts the whole run, whoever writes it

    @functools.cached_property
    def _saver(self) -> checkpoint.Saver:
        """Writes the checkpoints of the first worker, which writes for all."""
        return checkpoint.Saver(self.folder.checkpoints, 0, 1, self.folder.attempt, self.recipe.timeout)

    def _save(self) -> None:
        """Writes a checkpoint on the first worker, unless its model is not finite. Raises UserError if it cannot."""
        if self.rank > 0:
            return
        self._saver.start(self.drawn, stored.on_host(self.give(self.method)))
        self._saver.wait()

    def _found(self) -> None:
        """Starts the first worker afresh, or from the newest checkpoint, also after all workers were lost."""
        number, before = self.members.generation, None
        needs = self._needs | {"deal": dict, "totals": dict}
        newest = functools.partial(checkpoint.load_newest, self.folder.checkpoints, rank=0, alone=True, needs=needs)
        if (self.recipe.resume or number > 1) and (found := newest()):
            self.take(self.method, found[0])
            before = found[0].get("total")
            self.deal = self.deal.again(number, self.drawn, self.world_size, self.samples, self.share)
        self.folder.begin(self.step, self.total, before)

    # -- changes ----------------------------------------------------------------------------------------------

    def tell(self) -> Report:
        return {"step": self.drawn, "deal": asdict(self.deal)}

    def on_change(self, reports: list[Report | None]) -> None:
        """Adapts to a new generation."""
        members = self.members
        self.rank, self.world_size = members.rank * members.island + members.island_rank, members.size * members.island
        known = [r for r in reports if r is not None]
        self.deal = Deal(members.generation, 0, 0, self.world_size)
        if known:
            latest = max((Deal(**r["deal"]) for r in known), key=lambda deal: deal.number)
            step = min(r["step"] for r in known)
            self.deal = latest.again(members.generation, step, self.world_size, self.samples, self.share)
        if self.rank == 0 and not self.folder.writes:
            self.folder.lead(self.recipe, self._nominal, self.device, goes_on=members.generation > 1)
            if self._trains:
                self.folder.begin(self.step, self.total)  # drawn may be one more, for a step that is not logged yet
        if self._trains:
            pairs = ("lost", self._names, members.names), ("came", members.names, self._names)
            changes = [f"{', '.join(n for n in a if n not in b)} {what}" for what, a, b in pairs if {*a} - {*b}]
            self.folder.note(self.drawn, "workers", f"{members.size} workers: {'; '.join(changes) or 'the same ones'}")
        self._names = list(members.names)


def repeated(evaluate: Callable[..., T]) -> Callable[..., T]:
    """Repeats an evaluation from its start if a worker is lost during it. All workers take part in it."""

    @functools.wraps(evaluate)
    def whole(*args: Any, **kwargs: Any) -> T:
        while True:
            try:
                return evaluate(*args, **kwargs)
            except WorkersChanged:
                continue

    return whole
