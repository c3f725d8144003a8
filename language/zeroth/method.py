"""Method zo of the train scripts: zeroth-order training behind the calls of the other methods."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from core.errors import UserError
from core.hooks import Requests
from core.local_update import Loop
from core.methods import MethodArgs, MethodSpec, Settings, register
from core.stats import RoundStats
from training.optim import lent_rate
from training.workers import make_mesh

from .blocks import BlockStream
from .order import Loss, ZerothConfig, ZerothOrder

if TYPE_CHECKING:
    from training.run import Run


class Zeroth(Loop):
    """ZerothOrder, each of whose steps is a round; `measure` stands for a backward pass and its step.

        loss = method.measure(lambda model: mean_loss(model, batch), count=len(batch))
        method.step()

    lr: gives the learning rate. The rest: see ZerothOrder. stats: the exchange of scalars as a round's communication.
    """

    compression = None  # of gradients: there are none

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
        """One step of all workers, see ZerothOrder; returns this worker's own loss, float64 0-d."""
        order = self.order
        order.lr, order.news = self._lr(), self._requests.take()
        order.step(loss, count)
        self._requests.receive(order.heard)
        self._requests.grant()
        return torch.tensor(order.own_loss, dtype=torch.float64)

    def step(self, *, last: bool = False) -> bool:  # noqa: ARG002
        """Call after every `measure`; always True. last: of no use here."""
        self.rounds += 1
        order = self.order
        self.stats = RoundStats(self.rounds, local_steps=1, bytes_sent=order.bytes_sent)
        self.stats.exposed_seconds = self.stats.allreduce_seconds = order.exposed_seconds
        return True

    def sync_for_eval(self) -> bool:
        """Applies the updates that were put off."""
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
        """Leaves the group; every worker must call it."""
        self.order.close()

    def dealing(self, make: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """make: see Run.batches. The same where the two workers of a pair take the same data."""
        place = self.order.data_rank, self.order.data_workers
        return lambda recipe, rank, workers, start, total: make(recipe, *place, start, total)


def of_run(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, blocks: Sequence[nn.Module]) -> Zeroth:
    """The method of a run, with the learning rate of `optimizer`. blocks: in the order of calls, for offload."""
    r = run.recipe
    options: dict[str, Any] = {"lr": lent_rate(optimizer), "timeout": r.timeout, "link": run.link}
    if r.offload:
        if not blocks:
            raise UserError("offload: the model has no list of blocks that could be uploaded one by one: leave it out")
        node = make_mesh(run.device, r.per_node, r.zero, r.timeout)
        share = node.get_group("shard") if node is not None else None
        options["make_forward"] = functools.partial(BlockStream, blocks=blocks, device=run.device, share=share)
    return Zeroth(model, r.zeroth, requests=run.requests, **options)


def _make(given: MethodArgs) -> NoReturn:
    raise UserError("method 'zo' takes the place of an optimiser: make a ZerothOrder, and call its step")


ENTRY = MethodSpec(
    "zo", _make, "optimizer", Settings("zeroth", ZerothConfig, "Of method zo."), takes=frozenset({"offload"})
)
register(ENTRY)
