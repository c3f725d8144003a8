"""Methods that average gradients after every step, hidden one step or half of one late: rows of bench/peers that no
package carries. Each stands where the loop has its optimiser, and equals the rule of bench/search/methods.py."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.optim import Optimizer

from core import flat
from core.reducer import Reducer
from core.testing.link import Link, flight_over


class LateGradients(ABC):
    """An optimiser whose gradients are the workers' means, which cross the network while the next ones are computed.

    inner: the optimiser that takes the steps; its parameters are equal on all workers. steps: of the whole training,
    whose last gradients would never be used and so are not sent. timeout: see Flight. link: an emulated slow one.
    Attributes: rounds, means that have landed; sent, bytes that this worker has sent for them.
    """

    def __init__(self, inner: Optimizer, steps: int, *, timeout: float, link: Link | None):
        self.inner, self.left = inner, steps
        self.zero_grad = inner.zero_grad
        self.buckets = flat.make_buckets([p for group in inner.param_groups for p in group["params"]], [], 0)
        self.params = [p for bucket in self.buckets for p in bucket.params]
        self.flight = flight_over(link)(self.buckets[0].flat.device, timeout=timeout)
        self.reducer = Reducer([bucket.flat for bucket in self.buckets], self.flight.world_size)
        self.rounds = self.sent = 0

    @abstractmethod
    def step(self) -> None:
        """Follows every backward pass."""

    @torch.no_grad()
    def launch(self) -> None:
        """Sends this worker's gradients."""
        for bucket in self.buckets:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.params]
            flat.copy(bucket.payload_views, gradients)
        background = self.flight
        background.launch(self.reducer.stages(background.group, background.launched + 1))

    @torch.no_grad()
    def land(self) -> list[Tensor] | None:
        """The mean of what was sent last, a tensor a parameter; None: nothing was."""
        if not self.flight.in_flight:
            return None
        self.flight.wait()
        self.rounds, self.sent = self.rounds + 1, self.sent + self.flight.bytes_sent
        return [view * self.reducer.scale for bucket in self.buckets for view in bucket.payload_views]

    def apply(self, gradients: list[Tensor]) -> None:
        """A step of the inner optimiser with these."""
        for p, gradient in zip(self.params, gradients, strict=True):
            p.grad = gradient
        self.inner.step()


class DPU(LateGradients):
    """DDP one step late (delayed parameter update, ZeRO-Offload, arXiv 2101.06840): the mean of a step's gradients is
    applied after the next ones are computed. The first step moves nothing."""

    def step(self) -> None:
        late = self.land()
        self.left -= 1
        if self.left:
            self.launch()
        if late is not None:
            self.apply(late)


class ACCO(LateGradients):
    """ACCO (arXiv 2406.02613; the rule as in the authors' release, without its warm-up and its sharded optimiser).

    step() follows each half of a batch. While the mean of the second halves' gradients is on its way, the first halves'
    are computed at the parameters x; then it leads to an estimate e one step ahead of x, where the second halves' are
    computed while the first halves' mean is on its way; then both together move x and the optimiser's state, which the
    estimate does not change. In the first step there is no estimate.
    """

    def __init__(self, inner: Optimizer, steps: int, *, timeout: float, link: Link | None):
        super().__init__(inner, steps, timeout=timeout, link=link)
        self.second = False  # whether the second half comes next
        self.ahead: list[Tensor] | None = None

    def step(self) -> None:
        self._second_half() if self.second else self._first_half()
        self.second = not self.second

    def _first_half(self) -> None:
        self.ahead = self.land()
        self.launch()
        self.start = [p.detach().clone() for p in self.params], copy.deepcopy(self.inner.state_dict())
        if self.ahead is not None:
            self.apply(self.ahead)

    def _second_half(self) -> None:
        mean = self.land()
        assert mean is not None
        self.left -= 1
        if self.left:
            self.launch()
        params, state = self.start
        with torch.no_grad():
            flat.copy(self.params, params)
        self.inner.load_state_dict(state)
        if self.ahead is not None:
            mean = [(first + second) / 2 for first, second in zip(mean, self.ahead, strict=True)]
        self.apply(mean)
