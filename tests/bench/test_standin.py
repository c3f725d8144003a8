"""The stand-in's pacing: when a step's gradients are ready, and what late parts do."""

import pytest
import torch
from torch import nn

from bench.standin import Pacer, pace


class Clock:
    """Time that passes only when told, and sleeps that overshoot."""

    def __init__(self, overshoot: float = 0.0):
        self.now, self.overshoot = 100.0, overshoot

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.overshoot


def test_sleeps_do_not_add_up_and_a_late_part_shortens_the_next_wait():
    clock = Clock(overshoot=0.01)
    pacer = Pacer(1.2, clock, clock.sleep)
    for _ in range(6):
        pacer.wait(1 / 6)
    assert clock.now == pytest.approx(101.2 + 0.01)
    clock.overshoot, clock.now = 0.0, 110.0
    pacer.restart()
    clock.now += 0.5  # later than the first deadline, 110.4
    pacer.wait(1 / 3)
    assert clock.now == 110.5
    pacer.wait(2 / 3)
    assert clock.now == pytest.approx(111.2)


def test_gradients_become_ready_one_layer_after_the_other_by_their_parameters_and_are_right():
    """A step of 1.2 s: the forward pass ends at 0.4 s; of 0.8 s the last layer, with 24 of 32 parameters, has 0.6."""
    clock, x = Clock(), torch.randn(5, 2)
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.ReLU(inplace=True), nn.Linear(4, 6, bias=False))
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), weights)
    pace(model, Pacer(1.2, clock, clock.sleep))
    ready: list[float] = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: ready.append(clock.now - 100))
    model(x).square().sum().backward()
    assert ready == pytest.approx([0.4 + 0.75 * 0.8, 1.2])
    torch.testing.assert_close([weight.grad for weight in weights], list(expected))
