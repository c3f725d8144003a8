"""CO2 with L-GreCo, on real processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core import CO2Config, UserError, make_method
from core.elastic.joining import check_elastic
from core.testing import run_distributed
from tests.core.test_gradient_wire import LGRECO, net, step
from tests.problems import flat

CO2S = {
    "paper": {},
    "keep": {"merge": "keep", "delay": "auto", "gap": "none", "outer_momentum": 0.0},
    "mix": {"merge": "mix", "delay": 1, "gap": "norm"},
    "inner": {"gap": "inner"},
    "auto": {"tau": "auto", "tau_max": 4},
    "by speed": {"steps": "by_speed", "tau": 3},
    "late": {"merge": "keep", "gap": "none"},
    "delayed": {},
}


def co2_trained(rank: int, world_size: int) -> list[tuple[str, Tensor, list[str], list[Tensor]]]:
    """By (setting, wire): parameters, the last choices; and, uninterrupted and resumed, parameters again."""
    seen = []
    for name, settings in CO2S.items():
        for wire in LGRECO.values() if name == "paper" else [LGRECO["rank2"]]:
            config = CO2Config(**({"tau": 2, "outer_lr": 0.7} | settings), wire=wire)
            model = net()
            _, co2 = make_method("delayed" if name == "delayed" else "co2", model, co2=config, timeout=30.0)
            co2.pacing.skip_after = 1e-3 if name == "late" else None
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(24 + rank):  # they end at different steps
                step(model, optimizer, rank, number)
                co2.step()
            co2.finish()
            seen.append((f"{name} {wire.like}", flat(model.parameters()), [str(c) for c in co2.reducer.chosen]))
            co2.close()
    return seen


def test_co2_with_every_rule():
    first, second = run_distributed(co2_trained, 2, timeout=120)
    for (name, ours, chosen), (_, others, theirs) in zip(first, second, strict=True):
        assert torch.equal(ours, others) and ours.isfinite().all() and chosen == theirs, name
    assert len({tuple(chosen) for _, _, chosen in first}) > 2


def co2_poisoned(rank: int, world_size: int) -> list[tuple[Tensor, list[str], int]]:
    """A worker's parameters are no numbers in the second round, which decides."""
    seen = []
    for like in ("int4", "rank2", "top0.05"):
        model = net()
        _, co2 = make_method("co2", model, co2=CO2Config(tau=2, wire=LGRECO[like]), timeout=30.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(14):
            step(model, optimizer, rank, number)
            if (rank, number) == (1, 3):
                model[3].weight.data[2:4] = float("nan")
            co2.step()
        decided = co2.reducer.allocation
        co2.finish()
        seen.append((flat(model.parameters()), [str(c) for c in co2.reducer.chosen], decided.number))
        co2.close()
    return seen


def test_one_workers_nan_reaches_nobody():
    for (ours, chosen, number), (others, theirs, _) in zip(*run_distributed(co2_poisoned, 2, timeout=120), strict=True):
        assert torch.equal(ours, others) and ours.isfinite().all() and chosen == theirs and number > 2


def interrupted(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    seen = []
    for like in ("int4", "rank2"):
        runs = []
        for _ in range(2):
            model = net()
            _, co2 = make_method("co2", model, co2=CO2Config(tau=2, wire=LGRECO[like]), timeout=30.0)
            runs.append((model, co2, torch.optim.SGD(model.parameters(), lr=0.1)))
        (model, co2, optimizer), second = runs
        for number in range(8):
            step(model, optimizer, rank, number)
            co2.step()
        state = co2.state_dict()
        second[0].load_state_dict(model.state_dict())
        second[1].load_state_dict(state)
        for each in runs:
            for number in range(8, 20):
                step(each[0], each[2], rank, number)
                each[1].step()
            each[1].finish()
        seen.append((flat(model.parameters()), flat(second[0].parameters())))
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
