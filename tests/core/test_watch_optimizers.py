"""Parameters that are trained and that no method averages: an error if none of the method's changes, else a warning."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from core import CO2, CO2Config, UserError
from core.baselines import LocalSGD


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def assign(net: nn.Module) -> nn.Module:
    net.load_state_dict({name: t.clone() for name, t in net.state_dict().items()}, assign=True)
    return net


def to_empty(net: nn.Module) -> nn.Module:
    return net.to("meta").to_empty(device="cpu")


def new_parameters(net: nn.Module) -> nn.Module:
    for layer in net.children():
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.bias = nn.Parameter(layer.bias.detach().clone())
    return net


def train(net: nn.Module, method: CO2 | LocalSGD, *optimizers: torch.optim.Optimizer, steps: int = 6) -> None:
    for step in range(steps):
        net(torch.full((2, 4), float(step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        method.step()
    method.finish()


@pytest.mark.parametrize("replace", [assign, copy.deepcopy, to_empty, new_parameters])
@pytest.mark.parametrize("make", [lambda p: CO2(p, CO2Config(tau=2)), lambda p: LocalSGD(p, 2)], ids=["co2", "local"])
def test_parameters_that_are_replaced_are_an_error_at_the_first_boundary(
    replace: Callable[[nn.Module], nn.Module], make: Callable[..., CO2]
):
    net = model()
    method = make(net.parameters())
    net = replace(net)
    with pytest.raises(UserError, match="the optimizer trains 4 parameters .* none of the 4 given to .* has changed"):
        train(net, method, torch.optim.SGD(net.parameters(), 0.01), steps=2)


def test_a_layer_that_only_the_second_optimizer_knows_is_a_warning():
    net = model()
    method = CO2(net[0].parameters(), CO2Config(tau=3))
    both = [torch.optim.SGD(layer.parameters(), 0.01) for layer in net]
    with pytest.warns(UserWarning, match=r"trains 2 parameters that no method averages, the first of shape \[1, 4\]"):
        train(net, method, *both)


def test_other_models_that_are_trained_after_the_first_rounds_are_a_warning():
    """No error: this model's own optimizer steps in that round, too, if behind theirs."""
    net, others = model(), [model(), model()]
    method, own = CO2(net.parameters(), CO2Config(tau=2)), torch.optim.SGD(net.parameters(), 0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step(net, own)
        method.step()
    for other in others:
        step(other, torch.optim.SGD(other.parameters(), 0.01))
    with pytest.warns(UserWarning, match="trains 8 parameters that no method averages"):
        for _ in range(2):
            step(net, own)
            method.step()


@pytest.mark.parametrize("tau", [1, 2])
def test_what_two_methods_train_together_and_frozen_layers_are_no_reason_to_warn(tau: int):
    net = model()
    methods = [CO2(layer.parameters(), CO2Config(tau=tau)) for layer in net]
    frozen = nn.Linear(4, 4).requires_grad_(False)
    optimizer = torch.optim.AdamW([*net.parameters(), *frozen.parameters()], 0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            net(torch.full((2, 4), float(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for method in methods:
                method.step()


def test_a_scaler_that_skips_its_first_steps_is_no_reason_to_raise():
    net = model()
    method = CO2(net.parameters(), CO2Config(tau=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            method.step()
