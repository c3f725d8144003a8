"""Method zo of the train scripts: zeroth-order training with the same calls as the other methods."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from core.baselines.table import MethodArgs, MethodSpec, Settings, register
from core.errors import UserError
from core.hooks import Requests
from core.local_update import Loop
from core.stats import RoundStats
from training.optim import lent_rate

from .blocks import BlockStream
from .order import Loss, ZerothConfig, ZerothOrder

if TYPE_CHECKING:
    from training.loop.run import Run


class Zeroth(Loop):
    """ZerothOrder as a method, where each step is a round. `measure` replaces a backward pass and an optimizer step.

        loss = method.measure(lambda model: mean_loss(model, batch), count=len(batch))
        method.step()

    Args:
        model: See ZerothOrder.
        config: The settings.
        lr: Returns the learning rate of the next step.
        requests: A hook whose numbers travel with the losses.
        **options: More arguments of ZerothOrder.

    Attributes:
        stats: Statistics that report the exchange of scalars as a round's communication.
    """

    compression = None  # there are no gradients to compress

    def __init__(
        self,
        model: nn.Module,
        config: ZerothConfig,
        *,
        lr: Callable[[], float],
        requests: Requests | None = None,
        **options: Any,
    ):
        self.tau = 1
        self.rounds = 0
        self.stats = RoundStats()
        self.order = ZerothOrder(model, config, lr=lr(), **options)
        self._lr, self._requests = lr, requests or Requests()

    def measure(self, loss: Loss, count: float) -> Tensor:
        """One step of all workers, as ZerothOrder.step. Returns this worker's own loss, float64 0-d."""
        order = self.order
        order.lr, order.news = self._lr(), self._requests.take()
        order.step(loss, count)
        self._requests.receive(order.heard)
        self._requests.grant()
        return torch.tensor(order.own_loss, dtype=torch.float64)

    def step(self, *, last: bool = False) -> bool:  # noqa: ARG002
        """Counts a round. Call it after every `measure`. Always returns True, and ignores `last`."""
        self.rounds += 1
        order = self.order
        self.stats = RoundStats(self.rounds, local_steps=1, bytes_sent=order.bytes_sent)
        self.stats.exposed_seconds = self.stats.allreduce_seconds = order.exposed_seconds
        return True

    def sync_for_eval(self) -> bool:
        """Applies the deferred updates."""
        self.order.flush()
        return True

    @contextlib.contextmanager
    def averaged_model(self) -> Iterator[bool]:
        with self.order.inference():
            yield True

    def finish(self) -> None:
        self.order.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "order": self.order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]
        self.order.load_state_dict(state["order"])

    def close(self) -> None:
        """Leaves the process group. Every worker must call it."""
        self.order.close()

    def dealing(self, make: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Wraps a function for Run.batches so that both workers of a pair get the same data."""
        place = self.order.data_rank, self.order.data_workers
        return lambda recipe, rank, workers, start, total: make(recipe, *place, start, total)


def of_run(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[nn.Module]) -> Zeroth:
    """The method of a run, with the learning rate of `optimizer`.

    Args:
        run: The run, with its recipe.
        model: The model.
        optimizer: Lends its learning rate.
        blocks: The model's blocks in the order of calls, for offload.

    Raises:
        UserError: If the recipe asks for offload and there are no blocks.
    """
    r = run.recipe
    options: dict[str, Any] = {"lr": lent_rate(optimizer), "timeout": r.timeout, "link": run.link}
    if r.offload:
        if not blocks:
            raise UserError("offload: the model has no list of blocks that could be uploaded one by one: leave it out")
        options["make_forward"] = functools.partial(BlockStream, blocks=blocks, device=run.device)
    return Zeroth(model, r.zeroth, requests=run.requests, **options)


def _make(given: MethodArgs) -> NoReturn:
    raise UserError("method 'zo' takes the place of an optimiser: make a ZerothOrder, and call its step")


ENTRY = MethodSpec(
    "zo", _make, "optimizer", Settings("zeroth", ZerothConfig, "Settings of method zo."), takes=frozenset({"offload"})
)
register(ENTRY)
