"""Zeroth-order training behind the calls of the other methods: `measure` stands for a backward pass and its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from core.loop import Loop
from core.riders import Rider
from core.robust.requests import Requests
from core.stats import RoundStats
from .config import ZerothConfig
from .forward import Loss
from .order import ZerothOrder


class Zeroth(Loop):
    """ZerothOrder, each of whose steps is a round. lr: gives the learning rate. riders: Requests, if any, are heard of
    at every step. The rest: see ZerothOrder.

        loss = method.measure(lambda model: mean_loss(model, batch), count=len(batch))
        method.step()

    Attributes: stats, the exchange of scalars as a round's communication.
    """

    wire = None  # of gradients: there are none

    def __init__(
        self,
        model: nn.Module,
        config: ZerothConfig,
        *,
        lr: Callable[[], float],
        riders: Sequence[Rider] = (),
        **options: Any,
    ):
        self.tau = 1
        self.rounds = 0
        self.stats = RoundStats()
        self.order = ZerothOrder(model, config, lr=lr(), **options)
        self._lr = lr
        self._requests = next((rider for rider in riders if isinstance(rider, Requests)), Requests())

    def measure(self, loss: Loss, count: float) -> Tensor:
        """One step of all workers; this worker's own loss, float64 0-d, of its data and its side. See ZerothOrder."""
        order = self.order
        order.lr, order.news = self._lr(), [*self._requests.take(), *self.more_news()]
        order.step(loss, count)
        heard = order.heard or [0.0] * len(order.news)  # with delay=1 nothing is heard at the first step
        self._requests.heard(heard[: len(self._requests.shared)])
        self._requests.end()
        return torch.tensor(order.own_loss, dtype=torch.float64)

    def more_news(self) -> list[float]:
        """Numbers of this worker that are summed beside its requests."""
        return []

    def step(self, *, last: bool = False) -> bool:  # noqa: ARG002
        """Call after every `measure`; always True. last: of no use here."""
        self.rounds += 1
        order = self.order
        self.stats = RoundStats(self.rounds, local_steps=1, bytes_sent=order.bytes_sent)
        self.stats.exposed_seconds, self.stats.allreduce_seconds = order.exposed_seconds, order.exchange_seconds
        return True

    def finish(self) -> None:
        """Applies all updates that are on their way."""
        self.order.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "order": self.order.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]
        self.order.load_state_dict(state["order"])

    def close(self) -> None:
        """Leaves the group; every worker must call it."""
        self.order.close()
