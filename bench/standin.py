"""A small real model that stands in for a large one, and its timed training loop.

Sixteen workers cannot compute for real on two cores. So the model is small, its forward, backward and optimiser step
are real, and its layers are paced (bench/pace.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.pace import PacedLinear, Pacer
from core.methods import Method
from core.rounds import LocalMethod

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
        held_up = wait + boundary if isinstance(self.method, LocalMethod) else backward_ended - self.pacer.passed_at
        self.pacer.stalled(held_up)
        now = time.perf_counter()
        compute, self._ended_at = now - self._ended_at - held_up, now
        return Step(closed, compute, wait, boundary)
