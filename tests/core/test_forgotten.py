"""Loops that train without the method's knowledge: each is warned of once, at its own line. A right loop never is."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from core import CO2, CO2Config
from core.baselines import LocalSGD
from tests.on_ranks import on_ranks

PAPER, KEEP = CO2Config.paper(2), CO2Config.recommended(steps=400, tau=4)


def loop(act: Callable[..., None], method: str = "co2") -> list[str]:
    """The texts of warnings of one worker's run. act(model, optimizer, co2, train) trains and calls step()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(act is not unfrozen)
    model.register_buffer("center", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trained = [p for p in model.parameters() if p.requires_grad]

    def train(optimizer: torch.optim.Optimizer, model: nn.Module = model) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        given = {"buffers": model.buffers()}
        co2 = CO2(trained, PAPER, **given) if method == "co2" else LocalSGD(trained, 2, **given)
        act(model, optimizer, co2, train)
        co2.finish()
        co2.close()
    assert {w.filename for w in found} <= {__file__}, "the user's line"
    return [str(w.message) for w in found]


def never(model, optimizer, co2, train):
    for _ in range(5):
        train(optimizer)


def one_step_behind(model, optimizer, co2, train):
    for step in range(5):
        train(optimizer)
        if step < 4:
            co2.step()


def tail_alone(model, optimizer, co2, train):
    for step in range(9):
        train(optimizer)
        if step < 4:
            co2.step()


def every_tau_steps(model, optimizer, co2, train):
    for step in range(12):
        train(optimizer)
        if step % 3 == 2:
            co2.step()


def before_the_optimizer(model, optimizer, co2, train):
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        co2.step()
        optimizer.step()


def a_layer_added(model, optimizer, co2, train):
    for step in range(12):
        if step == 7:
            model.append(layer := nn.Linear(2, 2))
            optimizer.add_param_group({"params": layer.parameters()})
        train(optimizer)
        co2.step()


def unfrozen(model, optimizer, co2, train):
    for step in range(12):
        model[0].requires_grad_(step >= 7)
        train(optimizer)
        co2.step()


WRONG = {
    never: "no call of step() has followed 5 optimizer steps since the last round of CO2",
    one_step_behind: "no call of step() has followed 1 optimizer step since the last round of CO2",
    tail_alone: "no call of step() has followed 5 optimizer steps since the last round of CO2",
    every_tau_steps: "3 optimizer steps came between two calls of CO2.step(), which counts one, so a round has 6 steps",
    before_the_optimizer: "CO2.step() comes before optimizer.step()",
    a_layer_added: "an optimizer trains 2 parameters that no method averages, the first of shape [2, 2]",
    unfrozen: "an optimizer trains 2 parameters that no method averages, the first of shape [4, 4]",
}


@pytest.mark.parametrize("act", WRONG, ids=lambda act: act.__name__)
def test_it_is_warned_of(act: Callable[..., None]):
    found = loop(act)
    assert len([text for text in found if WRONG[act] in text]) == 1, found
    assert len(found) == 1 or act is not before_the_optimizer, "finish() does not tell it again"


def right(model, optimizer, co2, train):
    for step in range(30):
        train(optimizer)
        model.center.add_(0.1)
        model.cache = model.cache + 0.1
        if step % 7 != 5:  # else a GradScaler has skipped the step
            co2.step(last=step == 29)
        else:
            co2.step()


def hand_written(model, optimizer, co2, train):
    for _ in range(20):
        model(torch.randn(8, 4)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        co2.step()


def two_optimizers(model, optimizer, co2, train):
    """One of which steps more often, as a discriminator's does."""
    first, second = (torch.optim.SGD(layer.parameters(), 0.1) for layer in model)
    for _ in range(14):
        train(first)
        train(first)
        train(second)
        co2.step()


@pytest.mark.parametrize("method", ["co2", "local"])
@pytest.mark.parametrize("act", [right, hand_written, two_optimizers])
def test_a_right_loop_is_not(act: Callable[..., None], method: str):
    assert not loop(act, method)


@on_ranks(2)
def test_the_worker_that_never_calls_step_says_so(rank: int):
    def act(model, optimizer, co2, train):
        for _ in range(4):
            train(optimizer)
            if rank == 0:
                co2.step()

    told = loop(act)
    assert any("4 optimizer steps" in text for text in told) if rank else not told


@pytest.mark.parametrize("steps", [3, 5])  # in a round, and at its end
@pytest.mark.parametrize("method", ["paper", "keep_local", "local"])
@on_ranks(2)
def test_steps_that_step_did_not_count_are_averaged(rank: int, method: str, steps: int):
    """As if step() had followed them in a longer round."""
    ends = []
    for counted in (True, False):
        p = nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([p], 0.1)
        with warnings.catch_warnings(action="ignore"):
            co2: Any = LocalSGD([p], 4) if method == "local" else CO2([p], PAPER if method == "paper" else KEEP)
            for _ in range(steps):
                p.grad = torch.full((3,), 1.0 + rank)
                optimizer.step()
                if counted:
                    co2.local_steps += 1
            co2.finish()
        co2.close()
        ends.append(p.detach().clone())
    assert torch.equal(*ends) and torch.allclose(ends[0], torch.full((3,), -0.15 * steps)), ends


@on_ranks(2)
def test_an_average_whose_tensors_are_replaced_is_told(rank: int):  # noqa: ARG001
    """An EMA whose tensors the loop replaces: those that were given stay as they were."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        co2 = CO2(model.parameters(), PAPER, average=[*average.values()])
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            average = {name: 0.9 * average[name] + 0.1 * p.detach() for name, p in model.named_parameters()}
            co2.step()
        co2.finish()
        co2.close()
    assert any("none of the 2 tensors has changed in training" in str(w.message) for w in found)


@pytest.mark.parametrize("config", [PAPER, CO2Config.recommended(steps=400, tau=2)], ids=["paper", "recommended"])
@pytest.mark.parametrize("loaded", [True, False])
def test_best_weights_that_the_end_of_the_block_replaces_are_told(config: CO2Config, loaded: bool):
    model = nn.Linear(40, 20)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with CO2(model.parameters(), config) as co2:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 40)).square().mean().backward()
                optimizer.step()
                co2.step()
                with co2.averaged_model():
                    best = {name: 0.95 * t for name, t in model.state_dict().items()}
            if loaded:
                model.load_state_dict(best)
    assert len([w for w in found if "finish() and the end of a with block pull them back" in str(w.message)]) == loaded
