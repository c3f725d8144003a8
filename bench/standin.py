"""Small real models in place of large ones: each layer takes as long as on its own device.

Sixteen workers cannot compute for real on two cores. So the models are small. Their forward pass, backward pass
and optimizer step are real, and each layer then waits until its deadline. Gradients become ready one layer after the
other, spread over the backward pass. So a method that overlaps its all-reduces with the backward pass
(DistributedDataParallel) does so here.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from core.baselines.table import Method
from core.local_update import LocalUpdateMethod

# -- pacing -----------------------------------------------------------------------------------------------------

PATIENCE = 4


class Pacer:
    """The deadlines of one worker's layers.

    A step of `step_seconds` has 3 `layers` equal parts: one for each layer's forward pass and two for its backward
    pass, in proportion to floating point operations. Deadlines are absolute. A part that ends late shortens the next
    wait, so that noise does not add up. Lateness beyond PATIENCE steps is not caught up. clock, sleep: for tests.
    """

    def __init__(
        self,
        step_seconds: float,
        layers: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.step_seconds, self.layers = step_seconds, layers
        self.part = step_seconds / (3 * layers)
        self._clock, self._sleep = clock, sleep
        self.restart()

    def restart(self) -> None:
        """Lets the next part begin now."""
        self.passed_at = self._deadline = self._clock()

    def wait(self, parts: float) -> None:
        """Ends the work of `parts` parts. Returns at their deadline, or immediately if it has passed."""
        now = self._clock()
        self._deadline = max(self._deadline + parts * self.part, now - PATIENCE * self.step_seconds)
        if now < self._deadline:
            self._sleep(self._deadline - now)
        self.passed_at = self._clock()

    def stalled(self, seconds: float) -> None:
        """Moves all later deadlines by `seconds` in which the worker was held up, so that it does not catch up."""
        self._deadline += seconds


def pace(model: nn.Module, pacer: Pacer) -> None:
    """Stretches every step of the model, one third in the forward pass and two thirds in the backward pass.

    A layer's share of the backward pass is its share of the parameters. Its gradients are ready when its time has
    passed. So the layers' gradients become ready one after the other, as on a separate device.
    """
    numel = {m: sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()}
    total = sum(numel.values())

    def hold_back(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            parts = 2 * pacer.layers * numel[module] / total
            output.register_hook(lambda _: pacer.wait(parts))  # runs before the layer's own backward

    for module in model.modules():
        if numel[module]:
            module.register_forward_hook(hold_back)
    model.register_forward_hook(lambda *_: pacer.wait(pacer.layers))


# -- the model of bench.scaling -----------------------------------------------------------------------------------

# Small enough that sixteen workers fit on two cores: with twice as many parameters they do not. Two layers fill the
# first bucket of DistributedDataParallel, 1 MiB. So it has two, and only the first can cross during the backward pass.
LAYERS = 4
WIDTH = 364
PARAMS = LAYERS * (WIDTH + 1) * WIDTH  # 531,440
BYTES = 4 * PARAMS  # float32
CLASSES = 10
LEARNING_RATE = 0.05


class StandIn(nn.Module):
    """LAYERS equal linear layers with ReLU between them. The first ten outputs of the last layer are the logits."""

    def __init__(self, pacer: Pacer, width: int = WIDTH):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        pace(self, pacer)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> logits [batch, 10]."""
        for i, layer in enumerate(self.layers):
            x = layer(x.relu() if i else x)
        return x[:, :CLASSES]


def digits(width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits.

    Returns:
        Images, float32 [1797, width], with 64 pixels in [0, 1] and then zeros, and labels, int64 [1797].
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pixels = torch.tensor(x, dtype=torch.float32) / 16
    return nn.functional.pad(pixels, (0, width - pixels.shape[1])), torch.tensor(y, dtype=torch.int64)


@dataclass(frozen=True)
class Step:
    """The seconds of one optimizer step.

    Attributes:
        closed: Whether it closes a round.
        compute: Seconds of the step itself.
        wait: Seconds in which it waited for communication.
        boundary: Seconds of the outer step.
    """

    closed: bool
    compute: float
    wait: float
    boundary: float


class Trainer:
    """One worker's timed training loop over the stand-in.

    Args:
        model: The module that the loop calls: DistributedDataParallel or the StandIn itself.
        method: Its step() follows every optimizer step.
        pacer: The StandIn's.
        data: Inputs and labels.
        batch: Samples in a step.
        seed: Sets the samples' order.
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
        """Takes one optimizer step, and times it.

        Waiting and the outer step postpone all later deadlines. The outer step counts with its CPU time, because a
        worker on its own device would not queue for a core. The worker catches up such queueing like any other noise,
        or the measurement is late.
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
        held_up = (
            wait + boundary if isinstance(self.method, LocalUpdateMethod) else backward_ended - self.pacer.passed_at
        )
        self.pacer.stalled(held_up)
        now = time.perf_counter()
        compute, self._ended_at = now - self._ended_at - held_up, now
        return Step(closed, compute, wait, boundary)


# -- the perceptron of bench.time_to_loss -----------------------------------------------------------------------


def build_model(width: int) -> nn.Sequential:
    """A perceptron from 8 x 8 pixels to 10 logits, with five hidden layers of `width` and He initialization."""
    sizes = [64, *[width] * 5, 10]
    layers: list[nn.Module] = [nn.Flatten()]
    for shape in itertools.pairwise(sizes):
        layer = nn.Linear(*shape)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])
