"""CO2 with L-GreCo, on real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2Config, UserError, make_method
from core.elastic.joining import check_elastic
from core.testing import run_distributed
from tests.core.test_gradient_wire import LGRECO, net, step
from tests.problems import flat

CO2S = {
    "paper": {},
    "keep": {"merge": "keep", "delay": "auto", "gap": "none", "outer_momentum": 0.0},
    "mix": {"merge": "mix", "delay": 1, "gap": "norm"},
    "auto": {"tau": "auto", "tau_max": 4},
    "delayed": {},
}


def made(config: CO2Config, name: str = "co2") -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    model = net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), make_method(name, model, co2=config, timeout=30.0)[1]


def go(run: tuple[nn.Sequential, torch.optim.Optimizer, Any], rank: int, steps: range, bad: Any = None) -> Any:
    """Local steps; the method. bad: the rank and the step after which parameters are no numbers."""
    model, optimizer, co2 = run
    for number in steps:
        step(model, optimizer, rank, number)
        if (rank, number) == bad:
            model[3].weight.data[2:4] = float("nan")
        co2.step()
    return co2


def ended(run: tuple[nn.Sequential, torch.optim.Optimizer, Any]) -> tuple[Tensor, list[str]]:
    """Parameters, and the last choices."""
    run[2].finish()
    seen = flat(run[0].parameters()), [str(c) for c in run[2].reducer.chosen]
    run[2].close()
    return seen


def co2_trained(rank: int, world_size: int) -> list[tuple[str, Tensor, list[str]]]:
    seen = []
    for name, settings in CO2S.items():
        for wire in LGRECO.values() if name == "paper" else [LGRECO["rank2"]]:
            config = CO2Config(**({"tau": 2, "outer_lr": 0.7} | settings), wire=wire)
            run = made(config, "delayed" if name == "delayed" else "co2")
            go(run, rank, range(24 + rank))  # they end at different steps
            seen.append((f"{name} {wire.like}", *ended(run)))
    return seen


def test_co2_with_every_rule():
    first, second = run_distributed(co2_trained, 2, timeout=120)
    for (name, ours, chosen), (_, others, theirs) in zip(first, second, strict=True):
        assert torch.equal(ours, others) and ours.isfinite().all() and chosen == theirs, name
    assert len({tuple(chosen) for _, _, chosen in first}) > 2


def co2_poisoned(rank: int, world_size: int) -> list[tuple[int, Tensor, list[str]]]:
    """A worker's parameters are no numbers in the second round, which decides."""
    runs = [made(CO2Config(tau=2, wire=LGRECO[like])) for like in ("int4", "rank2", "top0.05")]
    return [(go(run, rank, range(14), bad=(1, 3)).reducer.allocation.number, *ended(run)) for run in runs]


def test_one_workers_nan_reaches_nobody():
    for (number, ours, chosen), (_, others, theirs) in zip(*run_distributed(co2_poisoned, 2, timeout=120), strict=True):
        assert torch.equal(ours, others) and ours.isfinite().all() and chosen == theirs and number > 2


def interrupted(rank: int, world_size: int) -> list[list[Tensor]]:
    seen = []
    for like in ("int4", "rank2"):
        first, second = (made(CO2Config(tau=2, wire=LGRECO[like])) for _ in range(2))
        go(first, rank, range(8))
        for to, saved in zip(second, [part.state_dict() for part in first], strict=True):
            to.load_state_dict(saved)
        for run in (first, second):
            go(run, rank, range(8, 20))
        seen.append([ended(run)[0] for run in (first, second)])
    return seen


def test_co2_resumes_with_its_allocation():
    for result in run_distributed(interrupted, 2):
        for unbroken, resumed_one in result:
            assert torch.equal(unbroken, resumed_one)


def test_workers_that_come_and_go_are_refused():
    with pytest.raises(UserError, match="^elastic does not go with wire.format='lgreco': leave it out$"):
        check_elastic(CO2Config(tau=2, wire=LGRECO["int4"]))


def test_shared_outer_state_is_refused():
    for key in ("shard", "offload"):
        with pytest.raises(UserError, match="wire.format='lgreco' needs unshared outer state"):
            make_method("co2", net(), co2=CO2Config(tau=2, wire=LGRECO["int4"]), **{key: True})
