"""Small real models that stand in for large ones: each layer takes as long as on a device of its own.

Sixteen workers cannot compute for real on two cores. So the models are small, their forward, backward and optimiser
step are real, and each layer then waits until its deadline. Gradients become ready one layer after the other, spread
over the backward pass, so that a method which overlaps its all-reduces with it (DistributedDataParallel) does so here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.methods import Method
from core.rounds import Rounds

# -- pacing -----------------------------------------------------------------------------------------------------

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


# -- the model of bench.scaling -----------------------------------------------------------------------------------

# Small enough that sixteen workers fit on two cores: with twice as many parameters they do not. Two layers fill the
# first bucket of DistributedDataParallel, 1 MiB; so it has two, and only the first can cross under the backward pass.
LAYERS = 4
WIDTH = 364
PARAMS = LAYERS * (WIDTH + 1) * WIDTH  # 531,440
BYTES = 4 * PARAMS  # float32
CLASSES = 10
LEARNING_RATE = 0.05


class StandIn(nn.Module):
    """LAYERS equal linear layers with ReLU between; the first ten outputs of the last are the digits' logits."""

    def __init__(self, pacer: Pacer, width: int = WIDTH):
        super().__init__()
        parts = [0] * (LAYERS - 1) + [LAYERS]
        self.layers = nn.ModuleList(PacedLinear(width, width, pacer, n) for n in parts)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, width]; returns [batch, 10]."""
        for i, layer in enumerate(self.layers):
            x = layer(x.relu() if i else x)
        return x[:, :CLASSES]


def digits(width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits: x float32 [1797, width], 64 pixels in [0, 1] and zeros behind; labels int64 [1797]."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pixels = torch.tensor(x, dtype=torch.float32) / 16
    return nn.functional.pad(pixels, (0, width - pixels.shape[1])), torch.tensor(y, dtype=torch.int64)


@dataclass(frozen=True)
class Step:
    """One optimiser step, seconds: of the step itself; of communication that it waited for; of the outer step."""

    closed: bool
    compute: float
    wait: float
    boundary: float


class Trainer:
    """One worker's training loop over the stand-in, timed.

    model: what the method wants called (DistributedDataParallel or the StandIn itself); pacer: the StandIn's.
    """

    def __init__(
        self, model: nn.Module, method: Method, pacer: Pacer, data: tuple[Tensor, Tensor], batch: int, seed: int
    ):
        self.model, self.method, self.pacer = model, method, pacer
        self._x, self._y = data
        self._batch = batch
        self._random = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def restart(self) -> None:
        """After a pause, before the first step."""
        self.pacer.restart()
        self._ended_at = time.perf_counter()

    def step(self) -> Step:
        """One optimiser step. What it waited for, and the outer step, push the deadlines to come back.

        The outer step counts with its CPU time: on a device of its own a worker would not queue for a core. Such
        queueing is caught up like any noise of the stand-in, or makes the measurement late.
        """
        picked = torch.randint(len(self._y), (self._batch,), generator=self._random)
        nn.functional.cross_entropy(self.model(self._x[picked]), self._y[picked]).backward()
        backward_ended = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        cpu = time.thread_time()
        closed = self.method.step()
        boundary = time.thread_time() - cpu if closed else 0.0
        wait = float(self.method.stats.exposed_seconds) if closed else 0.0
        # DistributedDataParallel waits between the last gradient and the end of the backward pass
        held_up = wait + boundary if isinstance(self.method, Rounds) else backward_ended - self.pacer.passed_at
        self.pacer.stalled(held_up)
        now = time.perf_counter()
        compute, self._ended_at = now - self._ended_at - held_up, now
        return Step(closed, compute, wait, boundary)


# -- the model of bench.peers -------------------------------------------------------------------------------------

HIDDEN_LAYERS = 5
MLP_LAYERS = HIDDEN_LAYERS + 1
LR, MOMENTUM = 0.05, 0.9


def build_model(width: int, pacer: Pacer | None = None) -> nn.Sequential:
    """A perceptron of 8 x 8 pixels -> 10 logits with HIDDEN_LAYERS layers of `width`, He initialisation.

    pacer: gives every layer an equal part of the backward pass's time, from restart() on.
    """
    sizes = [64, *[width] * HIDDEN_LAYERS, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for number, shape in enumerate(zip(sizes[:-1], sizes[1:], strict=True), start=1):
        forward_parts = MLP_LAYERS if number == MLP_LAYERS else 0
        layer = PacedLinear(*shape, pacer, forward_parts) if pacer else nn.Linear(*shape)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(params: Any, lr: float = LR) -> torch.optim.Optimizer:
    """The inner optimiser of every method."""
    return torch.optim.SGD(params, lr=lr, momentum=MOMENTUM)
