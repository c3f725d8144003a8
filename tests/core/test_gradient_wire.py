"""ddp with its gradients in a narrow wire format, on real processes; and CO2 with L-GreCo."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2Config, LGrecoConfig, UserError, WireConfig, make_method
from core.testing import run_distributed
from tests.problems import flat
from training.sampling import generator

LGRECO = {
    "int4": WireConfig("lgreco", like="int4", lgreco=LGrecoConfig(every=3, time_share=1.0, first=2)),
    "rank2": WireConfig("lgreco", like="rank2", lgreco=LGrecoConfig("any", every=3, time_share=1.0, first=2)),
    "top0.05": WireConfig("lgreco", like="top0.05", lgreco=LGrecoConfig(every=3, time_share=1.0, first=2)),
    "uniform": WireConfig("lgreco", like="rank2", lgreco=LGrecoConfig(rule="uniform")),
}
WIRES = {"float32": WireConfig(), "int8": WireConfig("int8"), **LGRECO}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    layers = nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)
    return nn.Sequential(*layers).to(dtype)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int, poison: bool = False) -> float:
    draw = generator(rank, number)
    x = torch.randn(16, 12, generator=draw)
    y = (x[:, :3] * 3 + torch.randn(16, 3, generator=draw) * 0.1).argmax(1)
    dtype = next(model.parameters()).dtype
    loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
    (loss * float("nan") if poison else loss).backward()
    if not poison:
        optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(
    rank: int, world_size: int, name: str, steps: int = 40, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    model = net(dtype)
    wrapped, method = make_method("ddp", model, ddp_wire=WIRES[name], timeout=30.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses, sent = [], 0
    for number in range(steps):
        losses.append(step(wrapped, optimizer, rank, number, poison=number == 5))
        method.step()
        sent += method.stats.bytes_sent
    seconds = method.stats.allreduce_seconds
    method.finish()
    wire = method.wire
    chosen = [str(c) for c in wire.reducer.chosen] if wire is not None and hasattr(wire.reducer, "chosen") else []
    method.close()
    return {
        "flat": flat(model.parameters()),
        "loss": sum(losses[-10:]) / 10,
        "sent": sent,
        "chosen": chosen,
        "seconds": seconds,
    }


def every_wire(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    return {name: trained(rank, world_size, name) for name in WIRES}


def test_ddp_trains_with_every_wire():
    """Workers stay equal, bit for bit, a poisoned step is forgotten, fewer bytes, and about the loss of float32."""
    results = run_distributed(every_wire, 2, timeout=120)
    for name in WIRES:
        ours = results[0][name]
        assert torch.equal(ours["flat"], results[1][name]["flat"]) and ours["flat"].isfinite().all(), name
        assert ours["loss"] < results[0]["float32"]["loss"] + 0.3 and ours["seconds"] > 0, name
        assert name == "float32" or ours["sent"] < 0.6 * results[0]["float32"]["sent"], name
    assert len(set(results[0]["rank2"]["chosen"])) > 1


def test_ddp_in_16_bits():
    for result in run_distributed(trained, 2, "int4", 12, torch.bfloat16):
        assert result["flat"].isfinite().all()


def resumed(rank: int, world_size: int, name: str) -> tuple[Tensor, Tensor, list[str]]:
    def build() -> Any:
        model = net()
        wrapped, method = make_method("ddp", model, ddp_wire=WIRES[name], timeout=30.0)
        return model, wrapped, method, torch.optim.SGD(model.parameters(), lr=0.2)

    first, second = build(), build()
    for number in range(6):
        step(first[1], first[3], rank, number)
        first[2].step()
    file = io.BytesIO()
    torch.save([first[0].state_dict(), first[2].state_dict()], file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second[0].load_state_dict(state[0])
    second[2].load_state_dict(state[1])
    for run in (first, second):
        for number in range(6, 12):
            step(run[1], run[3], rank, number)
            run[2].step()
    _, other = make_method("ddp", net(), ddp_wire=WIRES["int8"], timeout=30.0)
    refusals = []
    for saved in (state[1], {"rounds": 3}):
        with pytest.raises(UserError) as caught:
            other.load_state_dict(saved)
        refusals.append(str(caught.value))
    return flat(first[0].parameters()), flat(second[0].parameters()), refusals


def test_ddp_resumes_with_its_allocation():
    for ours, resumed_ones, refusals in run_distributed(resumed, 2, "rank2"):
        assert torch.equal(ours, resumed_ones)
        assert "another format" in refusals[0] and "sent as float32: resume without ddp_wire" in refusals[1]


def other_shapes(rank: int, world_size: int) -> str:
    with pytest.raises(UserError) as caught:
        make_method("ddp", nn.Linear(4, 40 + rank), ddp_wire=WIRES["int4"], timeout=30.0)
    return str(caught.value)


def test_workers_with_other_shapes_are_told():
    for text in run_distributed(other_shapes, 2):
        assert "workers differ" in text and "\n" not in text


@pytest.mark.parametrize("name", ["co2", "local", "slowmo"])
def test_ddp_wire_is_ddps(name: str):
    with pytest.raises(UserError, match="ddp_wire.format='int8' is method ddp's own"):
        make_method(name, net(), co2=CO2Config(tau=2), ddp_wire=WireConfig("int8"))


def test_ddp_has_no_tau_to_choose_a_wire_with():
    with pytest.raises(UserError, match="ddp_wire.format='auto' is chosen together with tau"):
        make_method("ddp", net(), ddp_wire=WireConfig("auto"))


# -- CO2 --------------------------------------------------------------------------------------------------------

CO2S = {
    "paper": {},
    "keep": {"merge": "keep", "delay": "auto", "gap": "none", "outer_momentum": 0.0},
    "mix": {"merge": "mix", "delay": 1, "gap": "norm"},
    "inner": {"gap": "inner"},
    "auto": {"tau": "auto", "tau_max": 4},
}


def co2_trained(rank: int, world_size: int) -> list[tuple[str, Tensor, list[str], list[Tensor]]]:
    """By (setting, wire): parameters, the last choices; and, uninterrupted and resumed, parameters again."""
    seen = []
    for name, settings in CO2S.items():
        for wire in LGRECO.values() if name == "paper" else [LGRECO["rank2"]]:
            config = CO2Config(**({"tau": 2, "outer_lr": 0.7} | settings), wire=wire)
            model = net()
            _, co2 = make_method("co2", model, co2=config, timeout=30.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(24 + rank):  # they end at different steps
                step(model, optimizer, rank, number)
                co2.step()
            co2.finish()
            seen.append((f"{name} {wire.like}", flat(model.parameters()), [str(c) for c in co2.reducer.chosen]))
            co2.close()
    return seen


def test_co2_with_every_merge_rule():
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


def test_shared_outer_state_is_refused():
    for key in ("shard", "offload"):
        with pytest.raises(UserError, match="wire.format='lgreco' needs unshared outer state"):
            make_method("co2", net(), co2=CO2Config(tau=2, wire=LGRECO["int4"]), **{key: True})
