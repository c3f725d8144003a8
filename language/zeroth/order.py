"""Zeroth-order training: MeZO's step (arXiv 2305.17333) by many workers, each of whom measures a part of it.

    zo = ZerothOrder(model, ZerothConfig(eps=1e-3), lr=1e-6)
    for batch in loader:                                # dealt out by zo.data_rank and zo.data_workers
        zo.step(lambda model: loss(model, batch), count=len(batch))
        zo.flush()                                      # only before an evaluation or a checkpoint
    zo.finish()

A step t, with z of (seed, t) alone:

    1  l+, l-  =  loss at W + eps z, loss at W - eps z          on scratch copies: W is not touched
    2  all workers learn every worker's losses and samples       Exchange: 24 bytes, in one hop
    3  g = (mean l+ - mean l-) / (2 eps)                         summed in rank order, so with the same bits everywhere
    4  W <- W - lr (g z + weight_decay W)                        one mean over directions of g z

There is no backward pass, no gradient and no state of an optimiser, and the list of all g is the whole run (ScalarLog).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.checks import check_group
from core.errors import DivergedError, UserError
from core.groups import broadcast, compare, leave_group
from core.loop import Loop
from core.testing.link import Link
from .config import ZerothConfig
from .exchange import NUMBERS, Exchange, Place, own_group
from .forward import Forward, Loss, ScratchCopy, evaluating, refuse_batch_norm
from .noise import kind_of
from .replay import ScalarLog, Update
from .weights import Weights

PATIENCE = 10  # steps in a row that may be dropped


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step: of the one just measured, or with delay=1 of the one before.

    step: -1 where nothing is known yet. loss: the mean over samples, both sides and directions. g: the projected
    gradient of each direction. dropped: a loss was not finite on some worker; nobody changed a weight.
    """

    step: int
    loss: float
    g: tuple[float, ...]
    dropped: bool


class _Sent(NamedTuple):
    """A measured step whose scalars may still be on their way. lr: the rate at which it was measured."""

    step: int
    lr: float
    exchange: Exchange


class _Known(NamedTuple):
    """A measured step whose scalars are here. loss: as in StepResult."""

    update: Update
    loss: float


class ZerothOrder(Loop):
    """Trains a model by its losses alone; see the module's text.

    model: the same on all workers; where its tensors differ at the start, rank 0's are taken. Convert it (dtype,
    device) before. What requires a gradient is trained. It is evaluated in eval mode: dropout would make the two losses
    of a step incomparable. lr: the learning rate, which a schedule may set before each step. timeout: seconds until a
    missing worker is an error. link: an emulated slow one. make_forward: another way than ScratchCopy to hold the
    weights, such as blocks.BlockStream.

    Attributes: steps, taken so far; log, the ScalarLog; place, what this worker measures; news, numbers that a worker
    sends along with its losses, equally many on all, and heard, their sums over the workers, of the step whose scalars
    came last; own_loss, the last step's on this worker's data, at its sides and directions; bytes_sent, of the last
    step; exchange_seconds and exposed_seconds, of the exchange that landed in it: its own time, and how long the step
    waited for it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ZerothConfig | None = None,
        *,
        lr: float,
        timeout: float = 600.0,
        link: Link | None = None,
        make_forward: Callable[[nn.Module, Weights], Forward] = ScratchCopy,
    ):
        self.model, self.config, self.lr = model, config or ZerothConfig(), lr
        refuse_batch_norm(model)
        self._timeout, self._link = timeout, link
        rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.place = Place.make(rank, workers, self.config)
        self.group = own_group(timeout) if workers > 1 else None
        self.weights = Weights(model, self.config, warns=rank == 0)
        self._forward = make_forward(model, self.weights)  # says where z is drawn, so before the workers compare
        if self.group is not None:
            self._meet(self.group)
        self.steps = 0
        self.log = ScalarLog(self.config.seed, self.config.directions, self.config.weight_decay)
        self.news: list[float] = []
        self.heard: list[float] = []
        self._unapplied: list[_Sent | _Known] = []  # measured steps, at most `delay` of them between two calls of step
        self._dropped = 0  # steps in a row
        self.own_loss = math.nan
        self.bytes_sent, self.exposed_seconds, self.exchange_seconds = 0, 0.0, 0.0

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Compares settings and shapes with the other workers'; takes rank 0's tensors where any differ."""
        drawn = f"z drawn on {kind_of(self.weights.noise.device)} (with rng='host' all draw alike)"
        names = [f"{name} {tuple(p.shape)}" for name, p in zip(self.weights.names, self.weights.params, strict=True)]
        tensors = [*self.model.parameters(), *self.model.buffers()]
        compare((str(self.config), drawn, f"{len(names)} tensors", *names), tensors, group)
        broadcast([t.data for t in tensors], group, torch.device("cpu"))

    @property
    def data_rank(self) -> int:
        """Which part of the data this worker takes, of data_workers."""
        return self.place.data_rank

    @property
    def data_workers(self) -> int:
        """Both workers of a pair take the same part."""
        return self.place.data_workers

    @torch.no_grad()
    def step(self, loss: Loss, count: float) -> StepResult:
        """One step of all workers.

        loss: called with the model, perhaps twice; returns the mean over this worker's samples, 0-d or a float; it
        need not be differentiable. count: these samples, which weigh the mean over workers; 0: none.
        """
        if self.group is None:
            check_group()
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: give a finite number, 0 or more")
        if not (math.isfinite(count) and count >= 0):
            raise UserError(f"count={count}: give how many samples the loss is the mean of")
        with evaluating(self.model):
            row = [number for j in self.place.mine for number in self._measure(loss, count, self.steps, j)]
        measured = len(self.place.signs) * len(self.place.mine) * count
        self.own_loss = sum(n for i, n in enumerate(row) if i % NUMBERS < 2) / measured if measured else math.nan
        sending = Exchange([*row, *self.news], self.group, self._link)
        self.bytes_sent, self.exposed_seconds, self.exchange_seconds = sending.bytes_sent, 0.0, 0.0
        self._unapplied.append(_Sent(self.steps, self.lr, sending))
        self.steps += 1
        waits = len(self._unapplied) <= self.config.delay
        return StepResult(-1, math.nan, (), False) if waits else self._apply(*self._land())

    def _measure(self, loss: Loss, count: float, step: int, direction: int) -> list[float]:
        """This worker's numbers of one direction: the samples' losses, summed, at each side (0 where another worker
        measures it), and how many samples."""
        sides = [0.0, 0.0]
        if not count and self._forward.share is not None:
            raise UserError("count=0: a worker that shares uploads measures at every step; give each some samples")
        if count:
            signs = self.place.signs
            for sign, value in zip(signs, self._forward.losses(loss, step, direction, signs), strict=True):
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise UserError(f"the loss has shape {tuple(value.shape)}: return the mean over the samples, 0-d")
                sides[(1 - sign) // 2] = float(value) * count
        return [*sides, float(count)]

    def _land(self) -> _Known:
        """The update of the oldest step that is not applied yet, and its loss, once all of its scalars are here."""
        oldest = self._unapplied.pop(0)
        if isinstance(oldest, _Known):
            return oldest
        exchange = oldest.exchange
        rows = exchange.wait(oldest.step)
        self.exposed_seconds, self.exchange_seconds = exchange.exposed_seconds, exchange.landed - exchange.started
        plus, minus = self.place.combine(rows)
        own = len(rows[0]) - len(self.news)
        self.heard = [math.fsum(numbers) for numbers in zip(*(row[own:] for row in rows), strict=True)]
        g = tuple((p - m) / (2 * self.config.eps) for p, m in zip(plus, minus, strict=True))
        return _Known(Update(oldest.step, oldest.lr, g), (sum(plus) + sum(minus)) / (2 * len(g)))

    def _apply(self, update: Update, loss: float) -> StepResult:
        self._forward.apply(update)
        self.log.append(update)
        self.weights.warn()
        self._dropped = self._dropped + 1 if update.dropped else 0
        if self._dropped == 1 and self.place.rank == 0:
            warnings.warn(f"step {update.step} is dropped: a loss is not finite on some worker", stacklevel=3)
        if self._dropped >= PATIENCE:
            raise DivergedError(
                f"the losses of {PATIENCE} steps up to step {update.step} are not finite: lower the learning rate, or "
                "look at the data"
            )
        return StepResult(update.step, loss, update.g, update.dropped)

    @torch.no_grad()
    def flush(self) -> None:
        """Applies updates that were put off until a block is next uploaded; for an evaluation or a checkpoint.

        It changes no later step. With delay=1 the weights stay a step behind; `finish` ends that.
        """
        self._forward.flush()

    def inference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be called, as for an evaluation: after a `flush`, and its blocks pass through the
        device where BlockStream holds them."""
        return self._forward.inference()

    @torch.no_grad()
    def finish(self) -> StepResult | None:
        """At the end: applies every update that is known or on its way; with delay=1 returns the last step's result."""
        result = self._apply(*self._land()) if self._unapplied else None
        self.flush()
        return result

    def close(self) -> None:
        """Leaves the group; every worker must call it."""
        self._unapplied.clear()
        if self.group is not None:
            leave_group(self.group, self._timeout)
            self.group = None

    # -- checkpoints and replay -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but the model's weights, the same on all workers: it waits for scalars in flight. Save the weights as
        they are at this moment: with or without `flush`, the resumed run is the unbroken one."""
        known = self._land() if self._unapplied else None
        self._unapplied = [known] if known is not None else []
        return {
            "config": asdict(self.config) | {"pairs": None, "rng": None},  # these two may change
            "steps": self.steps,
            "pending": [tuple(update) for update in self._forward.pending],
            "known": [tuple(known.update), known.loss] if known is not None else None,
            "log": self.log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights that were saved with it are in the model."""
        here = asdict(self.config) | {"pairs": None, "rng": None}
        if changed := [f"{k}={v!r}, here {here[k]!r}" for k, v in state["config"].items() if here[k] != v]:
            raise UserError(f"the checkpoint has {', '.join(changed)}: resume with its settings")
        self.steps = int(state["steps"])
        self.log = ScalarLog.from_state(state["log"])
        self._unapplied.clear()
        if state["known"] is not None:
            (step, lr, g), loss = state["known"]
            self._unapplied.append(_Known(Update(step, lr, tuple(g)), loss))
        for step, lr, g in state["pending"]:
            self._forward.apply(Update(step, lr, tuple(g)))

    def save_scalars(self, path: str | Path) -> None:
        """The run so far as its list of scalars: 8 bytes a step and direction, and a line of text."""
        self.log.save(path)

    @torch.no_grad()
    def replay(self, log: ScalarLog) -> None:
        """Takes the steps that `log` has beyond this object's own: from the initial weights, all; bit for bit.

        Alone, without the other workers and without data. UserError where the log is of other settings or another run.
        """
        if self._unapplied:
            raise UserError(f"step {self.steps - 1} is still in flight: replay before the first step, or call finish()")
        self.adopt(log.beyond(self.log))

    @torch.no_grad()
    def adopt(self, updates: Sequence[Update]) -> None:
        """Takes the next steps as other workers know them, in place of what this one has in flight."""
        self._unapplied.clear()
        for update in updates:
            self._forward.apply(update)
            self.log.append(update)
        self.steps, self._dropped = len(self.log), self.log.dropped_at_its_end()
        self.flush()
