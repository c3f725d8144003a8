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
import ctypes
import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import check_group
from ..errors import DivergedError, UserError
from ..flight import Link
from ..groups import broadcast, compare, leave_group, new_group, of_all
from ..robust import peers
from .config import ZerothConfig
from .exchange import NUMBERS, Exchange, Place
from .forward import Forward, Loss, ScratchCopy, evaluating, refuse_batch_norm
from .replay import ScalarLog, Update
from .weights import Chosen, Weights

PATIENCE = 10  # steps in a row that may be dropped
_PIECE = 1 << 24  # bytes that are hashed at a time


@dataclass(frozen=True)
class StepResult:
    """What is known after a step: of this one, or with delay=1 of the one before.

    step: -1 where nothing is known yet. loss: the mean over samples, both sides and directions. g: the projected
    gradient of each direction. dropped: a loss was not finite on some worker; nobody changed a weight.
    """

    step: int
    loss: float
    g: tuple[float, ...]
    dropped: bool


class ZerothOrder:
    """Trains a model by its losses alone; see the module's text.

    model: the same on all workers; where its tensors differ at the start, rank 0's are taken. Convert it (dtype,
    device) before. It is evaluated in eval mode: dropout would make the two losses of a step incomparable. lr: the
    learning rate, which a schedule may set before each step. trainable: says by name and parameter what is trained
    (LoRA, a head alone); None: what requires a gradient. group: the workers (None: all). timeout: seconds until a
    missing worker is an error. link: an emulated slow one. make_forward: another way than ScratchCopy to hold the
    weights, such as blocks.BlockStream. alone: whether to begin alone where others were started, see ElasticZeroth.

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
        group: dist.ProcessGroup | None = None,
        trainable: Chosen | None = None,
        timeout: float = 600.0,
        link: Link | None = None,
        make_forward: Callable[[nn.Module, Weights], Forward] = ScratchCopy,
        alone: bool = False,
    ):
        if not alone:
            check_group()
        self.model, self.config, self.lr = model, config or ZerothConfig(), lr
        refuse_batch_norm(model)
        self._timeout, self._link = timeout, link
        self._take_place(group)
        self.weights = Weights(model, self.config, trainable, tells=self.place.rank == 0)
        self._forward = make_forward(model, self.weights)  # says where z is drawn, so before the workers compare
        if self.group is not None:
            peers.meet(self.group)
            self._meet(self.group)
        self.steps = 0
        self.log = ScalarLog(self.config.seed, self.config.directions, self.config.weight_decay)
        self.news: list[float] = []
        self.heard: list[float] = []
        self._in_flight: Exchange | None = None  # of the step before, with delay=1
        self._measured: tuple[int, float] = (0, 0.0)  # that step, and its learning rate
        self._known: tuple[Update, float] | None = None  # a step that has landed but is not applied; its loss
        self._dropped = 0  # steps in a row
        self.own_loss = math.nan
        self.bytes_sent, self.exposed_seconds, self.exchange_seconds = 0, 0.0, 0.0

    def _take_place(self, group: dist.ProcessGroup | None) -> None:
        """Among the workers of `group`, and in a group of their own."""
        rank, workers = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
        self.place = Place.make(rank, workers, self.config)
        self.group = new_group(group, self._timeout, torch.device("cpu"), backend="gloo") if workers > 1 else None

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Settings and shapes agree, and so do all tensors from here on."""
        drawn = f"z drawn on {kind_of(self.weights.noise.device)} (with rng='host' all draw alike)"
        names = [f"{name} {tuple(p.shape)}" for name, p in zip(self.weights.names, self.weights.params, strict=True)]
        compare((str(self.config), drawn, names), [], group)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if len(set(of_all(digest(tensors), group))) > 1:
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
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: give a finite number, 0 or more")
        if not (math.isfinite(count) and count >= 0):
            raise UserError(f"count={count}: give how many samples the loss is the mean of")
        step, rate = self.steps, self.lr
        with evaluating(self.model):
            row = [number for j in self.place.mine for number in self._measure(loss, count, step, j)]
        measured = len(self.place.signs) * len(self.place.mine) * count
        self.own_loss = sum(n for i, n in enumerate(row) if i % NUMBERS < 2) / measured if measured else math.nan
        sending = Exchange([*row, *self.news], self.group, self._link)
        self.bytes_sent, self.exposed_seconds, self.exchange_seconds = sending.bytes_sent, 0.0, 0.0
        self.steps += 1
        if not self.config.delay:
            return self._apply(*self._land(sending, step, rate))
        result = self._drain() or StepResult(-1, math.nan, (), False)
        self._in_flight, self._measured = sending, (step, rate)
        return result

    def _measure(self, loss: Loss, count: float, step: int, direction: int) -> list[float]:
        """What is sent of one direction."""
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

    def _land(self, exchange: Exchange, step: int, rate: float) -> tuple[Update, float]:
        """The step's update, and its loss, once all scalars are here."""
        rows = exchange.wait(step)
        self.exposed_seconds, self.exchange_seconds = exchange.exposed_seconds, exchange.landed - exchange.started
        plus, minus = self.place.combine(rows)
        own = len(rows[0]) - len(self.news)
        self.heard = [math.fsum(numbers) for numbers in zip(*(row[own:] for row in rows), strict=True)]
        g = tuple((p - m) / (2 * self.config.eps) for p, m in zip(plus, minus, strict=True))
        return Update(step, rate, g), (sum(plus) + sum(minus)) / (2 * len(g))

    def _apply(self, update: Update, loss: float) -> StepResult:
        self._forward.apply(update)
        self.log.append(update)
        self.weights.tell()
        self._dropped = self._dropped + 1 if update.dropped else 0
        if self._dropped == 1 and self.place.rank == 0:
            warnings.warn(f"step {update.step} is dropped: a loss is not finite on some worker", stacklevel=3)
        if self._dropped >= PATIENCE:
            raise DivergedError(
                f"the losses of {PATIENCE} steps up to step {update.step} are not finite: lower the learning rate, or "
                "look at the data"
            )
        return StepResult(update.step, loss, update.g, update.dropped)

    def _arrive(self) -> None:
        """Waits for the exchange in flight, if there is one; its step is applied later."""
        if self._in_flight is not None:
            self._known = self._land(self._in_flight, *self._measured)
            self._in_flight = None

    def _drain(self) -> StepResult | None:
        """Applies the step whose scalars are in flight, or have come."""
        self._arrive()
        known, self._known = self._known, None
        return self._apply(*known) if known is not None else None

    @torch.no_grad()
    def flush(self) -> None:
        """Applies what was put off until a block is next uploaded; call it before an evaluation or a checkpoint.

        It changes no later step. With delay=1 the weights stay a step behind; `finish` ends that.
        """
        self._forward.flush()

    def inference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be called, as for an evaluation: after a `flush`, and its blocks pass through the
        device where BlockStream holds them."""
        return self._forward.inference()

    @torch.no_grad()
    def finish(self) -> StepResult | None:
        """At the end: applies all that is known or on its way. What is returned is the last step's, with delay=1."""
        result = self._drain()
        self.flush()
        return result

    def close(self) -> None:
        """Leaves the group; every worker must call it."""
        self._in_flight = None
        if self.group is not None:
            leave_group(self.group, self._timeout)
            self.group = None

    # -- workers that come and go ---------------------------------------------------------------------------

    @torch.no_grad()
    def regroup(self, group: dist.ProcessGroup | None = None) -> None:
        """Goes on among the workers of `group` (None: all) at a step boundary; every one of them must call it.

        One that comes has made its own ZerothOrder of the initial weights, alone, and may have replayed the list so
        far; it is sent the list, 8 bytes a step and direction, and replays what it lacks. One that goes calls close().
        What is in flight is applied first; call finish() and close() yourself where torch.distributed is begun anew in
        between. The data must be dealt out anew. UserError on all where a worker's list is of another run.
        """
        if self._forward.share is not None:
            raise UserError("workers that share uploads stay together: save, and resume with the new workers")
        self.finish()
        self.close()
        self._take_place(group)
        if self.group is not None:
            peers.meet(self.group)
            self._catch_up(self.group)
            self._meet(self.group)

    def _catch_up(self, group: dist.ProcessGroup) -> None:
        """Replays what the worker with the longest list has beyond one's own."""
        steps = of_all(self.steps, group)
        longest = steps.index(max(steps))
        box = [self.log.state_dict() if self.place.rank == longest else None]
        dist.broadcast_object_list(box, group_src=longest, group=group)
        try:
            self.replay(ScalarLog.from_state(box[0]))  # pyright: ignore[reportArgumentType]
            refused = ""
        except UserError as error:
            refused = str(error)
        for rank, reason in enumerate(of_all(refused, group)):
            if reason:
                raise UserError(f"rank {rank} cannot join: {reason}")

    # -- checkpoints and replay -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but the model's weights, the same on all workers: it waits for scalars in flight. Save the weights as
        they are at this moment: with or without `flush`, the resumed run is the unbroken one."""
        self._arrive()
        return {
            "config": asdict(self.config) | {"pairs": None, "rng": None},  # these two may change
            "steps": self.steps,
            "pending": [tuple(update) for update in self._forward.pending],
            "known": [tuple(self._known[0]), self._known[1]] if self._known else None,
            "log": self.log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights that were saved with it are in the model."""
        here = asdict(self.config) | {"pairs": None, "rng": None}
        if changed := [f"{k}={v!r}, here {here[k]!r}" for k, v in state["config"].items() if here[k] != v]:
            raise UserError(f"the checkpoint has {', '.join(changed)}: resume with its settings")
        self.steps = int(state["steps"])
        self.log = ScalarLog.from_state(state["log"])
        self._in_flight, self._known = None, None
        if state["known"] is not None:
            (step, lr, g), loss = state["known"]
            self._known = Update(step, lr, tuple(g)), loss
        for step, lr, g in state["pending"]:
            self._forward.apply(Update(step, lr, tuple(g)))

    def save_scalars(self, path: str | Path) -> None:
        """The run so far as its list of scalars: 8 bytes a step and direction, and a line of text."""
        self.log.save(path)

    @torch.no_grad()
    def replay(self, log: ScalarLog) -> None:
        """Takes the steps that `log` has beyond this object's own: from the initial weights, all; bit for bit.

        Alone, without the other workers and without data. UserError where the log is of other settings.
        """
        for name in ("seed", "directions", "weight_decay"):
            if (theirs := getattr(log, name)) != (ours := getattr(self.config, name)):
                raise UserError(
                    f"the scalars are of {name}={theirs!r}, here it is {ours!r}: replay with their settings"
                )
        if self.steps != len(self.log):
            raise UserError(f"step {self.steps - 1} is still in flight: replay before the first step, or call finish()")
        if not log.begins_with(self.log):
            raise UserError("the scalars are of another run than this one: replay from its initial weights")
        self.adopt(log.updates(self.steps))

    @torch.no_grad()
    def adopt(self, updates: Sequence[Update]) -> None:
        """Takes the next steps as other workers know them, in place of what this one has in flight."""
        self._in_flight, self._known = None, None
        for update in updates:
            self._forward.apply(update)
            self.log.append(update)
        self.steps, self._dropped = len(self.log), self.log.dropped_at_its_end()
        self.flush()


def kind_of(device: torch.device) -> str:
    """Devices of one kind draw the same numbers."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def digest(tensors: list[Tensor]) -> str:
    """SHA-256 of the tensors' bytes in order."""
    found = hashlib.sha256()
    for t in tensors:
        flat = t.detach().cpu().contiguous()
        for at in range(0, flat.nbytes, _PIECE):
            size = min(_PIECE, flat.nbytes - at)
            found.update((ctypes.c_char * size).from_address(flat.data_ptr() + at))
    return found.hexdigest()
