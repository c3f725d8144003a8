"""Zeroth-order training behind the calls of the other methods: `measure` stands for a backward pass and its step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..stats import RoundStats
from ..zeroth import ZerothConfig, ZerothOrder
from ..zeroth.forward import Loss
from .registry import Entry, Given, Settings


class Zeroth:
    """ZerothOrder, each of whose steps is a round. lr: gives the learning rate. The rest: see ZerothOrder.

        loss = method.measure(lambda model: mean_loss(model, batch), count=len(batch))
        method.step()

    Attributes: stats, the exchange of scalars as a round's communication.
    """

    wire = None  # of gradients: there are none

    def __init__(self, model: nn.Module, config: ZerothConfig, *, lr: Callable[[], float], **options: Any):
        self.tau = 1
        self.rounds = 0
        self.stats = RoundStats()
        self.order = ZerothOrder(model, config, lr=lr(), **options)
        self.stop_agreed = self.save_agreed = False
        self._lr = lr
        self._asked = [0.0, 0.0]  # to stop, to save

    def measure(self, loss: Loss, count: float) -> Tensor:
        """One step of all workers; this worker's own loss, float64 0-d, of its data and its side. See ZerothOrder."""
        order = self.order
        order.lr, order.news = self._lr(), list(self._asked)
        self._asked[1] = 0.0
        order.step(loss, count)
        heard = order.heard or [0.0] * len(self._asked)  # with delay=1 nothing is heard at the first step
        self.stop_agreed |= heard[0] > 0
        self.save_agreed = heard[1] > 0
        return torch.tensor(order.own_loss, dtype=torch.float64)

    def step(self, *, last: bool = False) -> bool:  # noqa: ARG002
        """Call after every `measure`; always True. last: of no use here."""
        self.rounds += 1
        order = self.order
        self.stats = RoundStats(self.rounds, local_steps=1, bytes_sent=order.bytes_sent)
        self.stats.exposed_seconds, self.stats.allreduce_seconds = order.exposed_seconds, order.exchange_seconds
        return True

    def ask_to_stop(self) -> None:
        """See LocalMethod: `stop_agreed` becomes True on all workers after the same step."""
        self._asked[0] = 1.0

    def ask_to_save(self) -> None:
        """See LocalMethod: `save_agreed` is True on all workers after the same step."""
        self._asked[1] = 1.0

    def finish(self) -> None:
        """Applies all that is on its way."""
        self.order.finish()

    def snapshot(self, then: Callable[[dict[str, Any]], None]) -> None:
        """See LocalMethod; here at once."""
        then(self.state_dict())

    def hand_over(self) -> None:
        """See LocalMethod; nothing ever waits here."""

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "order": self.order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]
        self.order.load_state_dict(state["order"])

    def close(self) -> None:
        """Leaves the group; every worker must call it."""
        self.order.close()


def _make(given: Given) -> tuple[nn.Module, Zeroth]:
    raise UserError("method 'zo' takes the place of an optimiser: make a core.zeroth.ZerothOrder, and call its step")


ENTRY = Entry(
    "zo",
    _make,
    "optimizer",
    Settings("zeroth", ZerothConfig, "Of method zo."),
    takes=frozenset({"offload", "elastic"}),
)
