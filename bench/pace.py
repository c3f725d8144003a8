"""The pacer of every measurement whose computing is a stand-in: layers that take as long as on a device of one's own.

The layers' forward and backward are real, and each then waits until its deadline. Gradients become ready one layer
after the other, spread over the backward pass, so that a method which overlaps its all-reduces with it
(DistributedDataParallel) does so here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

PATIENCE = 4


class Pacer:
    """The deadlines of one worker's layers.

    A step of `step_seconds` has 3 `layers` equal parts: one for each layer's forward, two for its backward, as the
    floating point operations are shared. Deadlines are absolute: a part that ends late shortens the wait of the next,
    so that noise does not add up. What is late by more than PATIENCE steps is given up. clock, sleep: for tests.
    """

    def __init__(
        self,
        step_seconds: float,
        layers: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.step_seconds = step_seconds
        self.part = step_seconds / (3 * layers)
        self._clock, self._sleep = clock, sleep
        self.restart()

    def restart(self) -> None:
        """The next part begins now."""
        self.passed_at = self._deadline = self._clock()

    def wait(self, parts: int) -> None:
        """Ends the work of `parts` parts: returns at their deadline, or at once when that has passed."""
        now = self._clock()
        self._deadline = max(self._deadline + parts * self.part, now - PATIENCE * self.step_seconds)
        if now < self._deadline:
            self._sleep(self._deadline - now)
        self.passed_at = self._clock()

    def stalled(self, seconds: float) -> None:
        """Moves the deadlines to come by `seconds` in which the worker was held up: they are not caught up."""
        self._deadline += seconds


class PacedLinear(nn.Linear):
    """A linear layer whose backward takes two of a step's parts, and whose forward takes `forward_parts`.

    A model waits once for its whole forward pass, in its last layer: nothing can be seen of the layers before, and
    every sleep costs CPU time.
    """

    def __init__(self, inputs: int, outputs: int, pacer: Pacer, forward_parts: int = 0):
        super().__init__(inputs, outputs)
        self.pacer, self.forward_parts = pacer, forward_parts

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, inputs]; returns [batch, outputs]."""
        return _PacedLinear.apply(x, self.weight, self.bias, self.pacer, self.forward_parts)  # pyright: ignore


class _PacedLinear(torch.autograd.Function):
    """x [batch, in] -> x W^T + b [batch, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pacer: Pacer, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pacer = pacer
        y = torch.addmm(bias, x, weight.t())
        if parts:
            pacer.wait(parts)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        grads = grad @ weight, grad.t() @ x, grad.sum(0)
        ctx.pacer.wait(2)
        return *grads, None, None
