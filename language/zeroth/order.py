"""Zeroth-order training: MeZO's step (arXiv 2305.17333) by many workers, each of whom measures a part of it.

    zo = ZerothOrder(model, ZerothConfig(eps=1e-3), lr=1e-6)
    for batch in loader:                                # dealt out by zo.data_rank and zo.data_workers
        zo.step(lambda model: loss(model, batch), count=len(batch))
        zo.flush()                                      # only before an evaluation or a checkpoint
    zo.finish()

A step t, with z of (seed, t) alone:

    1  l+, l-  =  loss at W + eps z, loss at W - eps z          on scratch copies: W is not touched
    2  all workers learn every worker's losses and samples       exchange: 24 bytes, in one hop
    3  g = (mean l+ - mean l-) / (2 eps)                         summed in rank order, so with the same bits everywhere
    4  W <- W - lr (g z + weight_decay W)

There is no backward pass, no gradient and no state of an optimiser, and the list of all g is the whole run (ScalarLog).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.errors import DivergedError, UserError
from core.flat import check_group
from core.groups import broadcast, compare, leave_group
from core.rounds import Loop
from core.testing.link import Link

from .exchange import Place, ZerothConfig, exchange, own_group
from .replay import ScalarLog, Update
from .weights import Weights, kind_of

PATIENCE = 10  # steps in a row that may be dropped

Loss = Callable[[nn.Module], Tensor | float]


class Forward(Protocol):
    """How losses at perturbed weights are measured, and where the weights lie meanwhile."""

    pending: list[Update]
    share: dist.ProcessGroup | None  # with whom this worker must make equally many passes

    def losses(self, loss: Loss, step: int, signs: tuple[int, ...]) -> list[Tensor | float]: ...
    def apply(self, update: Update) -> None: ...
    def flush(self) -> None: ...
    def inference(self) -> contextlib.AbstractContextManager[None]: ...


class ScratchCopy:
    """All weights on their device, and one copy of them, which is perturbed; updates at once."""

    def __init__(self, model: nn.Module, weights: Weights):
        self._model, self._weights = model, weights
        self._scratch = [torch.empty_like(p, requires_grad=False) for p in weights.params]
        self.pending: list[Update] = []  # always empty
        self.share: dist.ProcessGroup | None = None

    def losses(self, loss: Loss, step: int, signs: tuple[int, ...]) -> list[Tensor | float]:
        """loss(model) at W + sign eps z for each sign."""
        found = []
        live = [p.data for p in self._weights.params]
        for sign in signs:
            for i, (w, scratch) in enumerate(zip(live, self._scratch, strict=True)):
                self._weights.perturb(i, w, scratch, step, sign)
            try:
                for p, scratch in zip(self._weights.params, self._scratch, strict=True):
                    p.data = scratch
                found.append(loss(self._model))
            finally:
                for p, w in zip(self._weights.params, live, strict=True):
                    p.data = w
        return found

    def apply(self, update: Update) -> None:
        for i, p in enumerate(self._weights.params):
            self._weights.update(i, p.data, update)

    def flush(self) -> None:
        """Nothing is put off here."""

    def inference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be called, at W: as ever, here."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode, and autocast keeps no weights; after it as it was."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        with weights_uncached():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def weights_uncached() -> Iterator[None]:
    """Inside, autocast casts a weight whenever it is used: what it keeps goes by the parameter, whose data change."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. loss: the mean over samples and both sides. g: the projected gradient. dropped: a loss was
    not finite on some worker; nobody changed a weight."""

    step: int
    loss: float
    g: float
    dropped: bool


class ZerothOrder(Loop):
    """Trains a model by its losses alone; see the module's text.

    Args:
        model: in its final dtype and on its device; rank 0's tensors are taken where workers differ. Trains what
            requires a gradient, in eval mode: dropout would make the two losses of a step incomparable.
        lr: the learning rate, which a schedule may set before each step.
        timeout: seconds until a missing worker is an error.
        link: an emulated slow link.
        make_forward: how to hold the weights: ScratchCopy, or blocks.BlockStream.

    Attributes: log, the ScalarLog; place, what this worker measures; news, numbers that a worker sends along, equally
    many on all, and heard, their sums. Of the last step: own_loss, this worker's; bytes_sent and exposed_seconds of the
    exchange.
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
        self._timeout, self._link = timeout, link
        rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.place = Place.make(rank, workers, self.config)
        self.group = own_group(timeout) if workers > 1 else None
        self.weights = Weights(model, self.config)
        self._forward = make_forward(model, self.weights)  # says where z is drawn, so before the workers compare
        if self.group is not None:
            self._meet(self.group)
        self.log = ScalarLog(self.config.seed, self.config.weight_decay)
        self.news: list[float] = []
        self.heard: list[float] = []
        self._dropped = 0  # steps in a row
        self.own_loss = math.nan
        self.bytes_sent, self.exposed_seconds = 0, 0.0

    def _meet(self, group: dist.ProcessGroup) -> None:
        """Compares settings and shapes with the other workers'; takes rank 0's tensors where any differ."""
        drawn = f"z drawn on {kind_of(self.weights.noise.device)} (with rng='host' all draw alike)"
        names = [f"{name} {tuple(p.shape)}" for name, p in zip(self.weights.names, self.weights.params, strict=True)]
        tensors = [*self.model.parameters(), *self.model.buffers()]
        compare((str(self.config), drawn, f"{len(names)} tensors", *names), tensors, group)
        broadcast([t.data for t in tensors], group, torch.device("cpu"))

    @property
    def steps(self) -> int:
        """How many have been taken."""
        return len(self.log)

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

        loss: called with the model, perhaps twice; returns the mean over this worker's samples. count: these samples,
        which weigh the mean over workers; 0: none.
        """
        if self.group is None:
            check_group()
        if not (math.isfinite(self.lr) and self.lr >= 0):
            raise UserError(f"lr={self.lr}: give a finite number, 0 or more")
        if not (math.isfinite(count) and count >= 0):
            raise UserError(f"count={count}: give how many samples the loss is the mean of")
        number, signs = self.steps, self.place.signs
        with evaluating(self.model):
            sides = self._measure(loss, count, number, signs)
        self.own_loss = sum(sides) / (len(signs) * count) if count else math.nan
        row = [*sides, float(count)]
        rows, self.bytes_sent, self.exposed_seconds = exchange([*row, *self.news], number, self.group, self._link)
        plus, minus = self.place.combine(rows)
        self.heard = [math.fsum(numbers) for numbers in zip(*(r[len(row) :] for r in rows), strict=True)]
        update = Update(number, self.lr, (plus - minus) / (2 * self.config.eps))
        self._forward.apply(update)
        self.log.append(update)
        self._dropped = self._dropped + 1 if update.dropped else 0
        if self._dropped == 1 and self.place.rank == 0:
            warnings.warn(f"step {number} is dropped: a loss is not finite on some worker", stacklevel=3)
        if self._dropped >= PATIENCE:
            raise DivergedError(
                f"the losses of {PATIENCE} steps up to step {number} are not finite: lower the learning rate, or "
                "look at the data"
            )
        return StepResult(number, (plus + minus) / 2, update.g, update.dropped)

    def _measure(self, loss: Loss, count: float, step: int, signs: tuple[int, ...]) -> list[float]:
        """The losses of this worker's samples, summed, at each side: 0 where another worker measures it."""
        sides = [0.0, 0.0]
        if not count and self._forward.share is not None:
            raise UserError("count=0: a worker that shares uploads measures at every step; give each some samples")
        if count:
            for sign, value in zip(signs, self._forward.losses(loss, step, signs), strict=True):
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise UserError(f"the loss has shape {tuple(value.shape)}: return the mean over the samples, 0-d")
                sides[(1 - sign) // 2] = float(value) * count
        return sides

    @torch.no_grad()
    def flush(self) -> None:
        """Applies updates that wait for a block's next upload, for an evaluation. It changes no later step."""
        self._forward.flush()

    def inference(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model may be called with every update, as for an evaluation."""
        return self._forward.inference()

    def finish(self) -> None:
        """At the end: applies every update."""
        self.flush()

    def close(self) -> None:
        """Leaves the group; every worker must call it."""
        if self.group is not None:
            leave_group(self.group, self._timeout)
            self.group = None

    # -- checkpoints and replay -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All but the model's weights, the same on all workers. Save the weights at the same moment."""
        return {
            "config": self._lasting(),
            "pending": [tuple(update) for update in self._forward.pending],
            "log": self.log.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the weights that were saved with it are in the model."""
        here = self._lasting()
        if changed := [f"{k}={v!r}, here {here[k]!r}" for k, v in state["config"].items() if here[k] != v]:
            raise UserError(f"the checkpoint has {', '.join(changed)}: resume with its settings")
        self.log = ScalarLog.from_state(state["log"])
        for update in state["pending"]:
            self._forward.apply(Update(*update))

    def _lasting(self) -> dict[str, Any]:
        """The settings that a resumed run must share; pairs and rng may change."""
        return asdict(self.config) | {"pairs": None, "rng": None}

    @torch.no_grad()
    def replay(self, log: ScalarLog) -> None:
        """Takes the steps that `log` has beyond this object's own, bit for bit, without data and other workers.

        UserError where the log is of other settings or another run.
        """
        for update in log.beyond(self.log):
            self._forward.apply(update)
            self.log.append(update)
        dropped = takewhile(lambda update: update.dropped, reversed(self.log.updates()))
        self._dropped = len([*dropped])
        self.flush()
