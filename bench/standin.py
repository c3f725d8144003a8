"""Stand-ins of bench.time_to_loss: a small model, and steps that take as long as on a device of their own.

Several workers share few cores. So the model's forward pass, backward pass and optimizer step are real, and each layer
then waits until its deadline. Gradients become ready one layer after the other, spread over the backward pass. So a
method that overlaps its all-reduces with the backward pass (DistributedDataParallel) does so here.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Pacer:
    """The deadlines of a worker's step, which takes `step_seconds`. A part that ends late shortens the next wait.

    clock, sleep: for tests.
    """

    def __init__(
        self,
        step_seconds: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.step_seconds, self._clock, self._sleep = step_seconds, clock, sleep
        self.restart()

    def restart(self) -> None:
        """Begins a step."""
        self._deadline = self._clock()

    def wait(self, share: float) -> None:
        """Ends a share of the step. Returns at its deadline, or immediately if it has passed."""
        self._deadline += share * self.step_seconds
        if (rest := self._deadline - self._clock()) > 0:
            self._sleep(rest)


def pace(model: nn.Module, pacer: Pacer) -> None:
    """Stretches every step of the model, one third in the forward pass and two thirds in the backward pass.

    A layer's share of the backward pass is its share of the parameters. Its gradients are ready when its time has
    passed. So the layers' gradients become ready one after the other, as on a separate device.
    """
    numel = {m: sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()}
    total = sum(numel.values())

    def hold_back(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            share = 2 / 3 * numel[module] / total
            output.register_hook(lambda _: pacer.wait(share))  # runs before the layer's own backward

    for module in model.modules():
        if numel[module]:
            module.register_forward_hook(hold_back)
    model.register_forward_hook(lambda *_: pacer.wait(1 / 3))


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
