"""Buffers that are not finite from the start, as a causal mask of -inf, and buffers that become so."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config, DivergedError, LocalSGD, SlowMo, load, save
from core.methods import DDP, DiLoCo, OverlapLocalSGD
from core.placement import node_mesh
from core.testing import run_distributed
from tests.on_ranks import on_ranks

INF, NAN = math.inf, math.nan


def causal() -> Tensor:
    return torch.triu(torch.full((4, 4), -INF), 1)


CONSTANTS: dict[str, Callable[[], Tensor]] = {
    "causal": causal,
    "half": lambda: causal().half(),
    "bfloat16": lambda: causal().bfloat16(),
    "double": lambda: causal().double(),
    "nan": lambda: torch.full((3,), NAN),
    "both infinities": lambda: torch.tensor([INF, -INF, 0.1, NAN]),
    "scalar": lambda: torch.tensor(-INF),
    "complex": lambda: torch.tensor([complex(INF, 0.3), complex(0.1, NAN)]),
    "float8": lambda: torch.tensor([0.5, NAN]).to(torch.float8_e5m2),
    "not contiguous": lambda: causal().t(),
    "finfo.min": lambda: torch.triu(torch.full((4, 4), torch.finfo(torch.float32).min), 1),
    "thirds": lambda: torch.tensor([0.1, 1 / 3, 1e-30, 3e38]),  # whose sum over three workers is rounded, or overflows
}
PLAIN = {name: c for name, c in CONSTANTS.items() if name not in ("complex", "float8")}


def masked(constants: dict[str, Callable[[], Tensor]] = CONSTANTS) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    for name, make in constants.items():
        net.register_buffer("of " + name.replace(".", " "), make())
    return net


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def make(kind: str, net: nn.Module) -> Any:
    given: dict[str, Any] = {"buffers": net.buffers()}
    params = net.parameters()
    return {
        "co2": lambda: CO2(params, CO2Config(tau=2), **given),
        "keep_local": lambda: CO2(params, CO2Config(tau=2, merge="keep_local", outer_momentum=0.0), **given),
        "int4": lambda: CO2(params, CO2Config.recommended(3, 100, tau=2), **given),
        "diloco": lambda: DiLoCo(params, 2, **given),
        "local": lambda: LocalSGD(params, 2, **given),
        "slowmo": lambda: SlowMo(params, 2, **given),
        "overlap": lambda: OverlapLocalSGD(params, 2, **given),
        "sharded": lambda: CO2(params, CO2Config(tau=2), shard=True, **given),
        "ddp": lambda: DDP(net),
    }[kind]()


KINDS = ("co2", "keep_local", "int4", "diloco", "local", "slowmo", "overlap", "sharded", "ddp")


def constants_stay(rank: int, world_size: int) -> list[str]:
    """The names of methods and buffers that are not as they began, bit for bit."""
    found = []
    for kind in KINDS:
        net = masked(PLAIN if kind == "ddp" else CONSTANTS)  # DDP itself cannot hold all of them
        method = make(kind, net)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        torch.manual_seed(rank)
        for _ in range(5):
            step(getattr(method, "model", net), optimizer)
            method.step()
        method.finish()
        found += [f"{kind}: parameters" for p in net.parameters() if not p.isfinite().all()]
        for name, constant in CONSTANTS.items():
            if hasattr(net, "of " + name.replace(".", " ")):
                bits = [
                    t.contiguous().view(-1).view(torch.uint8)
                    for t in (net.get_buffer("of " + name.replace(".", " ")), constant())
                ]
                found += [] if torch.equal(*bits) else [f"{kind}: {name}"]
        method.close()
    return found


def test_buffers_that_nobody_changes_keep_their_bits_finite_or_not():
    assert run_distributed(constants_stay, 3, timeout=120) == [[]] * 3


def named(rank: int, world_size: int, who: str, kind: str) -> list[str]:
    """The error of a buffer that turns NaN on one worker, or on all of them, and the warnings before it."""
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    net.register_buffer("mask", causal())
    method = make(kind, net)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            for _ in range(40):
                step(net, optimizer)
                if who == "all" or rank == 1:
                    net[1].running_var[0] = NAN
                method.step()
        except DivergedError as error:
            return [str(error), *(str(w.message) for w in told)]
    return ["no error"]


@pytest.mark.parametrize("kind", ["co2", "local", "sharded"])
def test_a_buffer_that_turns_nan_on_all_workers_is_named(kind: str):
    for error, *_ in run_distributed(named, 2, "all", kind):
        assert "not finite; buffer 2 (running_var of a BatchNorm1d), of shape [2]: lower" in error


@pytest.mark.parametrize("kind", ["co2", "slowmo", "overlap"])
def test_a_buffer_that_turns_nan_on_one_worker_is_named_on_all(kind: str):
    first, second = run_distributed(named, 2, "one", kind)
    assert first[0] == second[0]
    assert first[0].startswith("rank 1 is excluded") and "buffer 2 (running_var of a BatchNorm1d)" in first[0]
    assert any("not finite, buffer 2 (running_var" in told for told in first[1:])


def late_fill(rank: int, world_size: int) -> dict[str, list[float]]:
    """Buffers that begin as infinite or NaN and are filled later, such as an observer's minimum and maximum."""
    net = nn.Linear(4, 2)
    for name, start in (("low", INF), ("high", -INF), ("cache", NAN), ("one", 1.0), ("count", 0.0)):
        net.register_buffer(name, torch.full((2,), start))
    method = CO2(net.parameters(), CO2Config(tau=2), buffers=net.buffers())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for number in range(6):
        step(net, optimizer)
        if number >= 2:
            net.low.fill_(-1.0 - rank), net.high.fill_(3.0 + rank), net.cache.fill_(7.0 * rank)
        if rank == 1:
            net.one.fill_(4.0)
        net.count.add_(1.0)
        method.step()
    method.finish()
    return {name: b.tolist() for name, b in net.named_buffers()}


def test_buffers_that_are_filled_later_become_their_mean():
    both = run_distributed(late_fill, 2)
    assert both[0] == both[1]
    assert both[0]["low"] == [-1.5] * 2 and both[0]["high"] == [3.5] * 2 and both[0]["cache"] == [3.5] * 2
    assert both[0]["one"][0] > 1.0 and both[0]["count"][0] > 0.0


def test_a_checkpoint_is_written_of_a_model_with_a_mask(tmp_path: Path):
    net = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    net.register_buffer("mask", causal())
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    method = CO2(net.parameters(), CO2Config(tau=1), buffers=net.buffers())
    step(net, optimizer)
    method.step()
    assert save(tmp_path, net, optimizer, method, step=1)
    assert load(tmp_path, net, optimizer, method) == 1
    net[1].running_var[0] = NAN
    assert not save(tmp_path, net, optimizer, method, step=2)
    net[1].running_var[0], net.mask[0, 0] = 1.0, INF
    assert not save(tmp_path, net, optimizer, method, step=2)


@on_ranks(2)
def test_constants_stay_on_a_mesh_of_one_node(rank: int):
    """The sum is over the node's workers, too."""
    net = masked({name: CONSTANTS[name] for name in ("finfo.min", "thirds")})
    before = [b.clone() for b in net.buffers()]
    co2 = CO2(net.parameters(), CO2Config(tau=2), mesh=node_mesh("cpu", 2), buffers=net.buffers())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(8):
        step(net, optimizer)
        co2.step()
    co2.finish()
    assert all(torch.equal(b, c) for b, c in zip(net.buffers(), before, strict=True))
