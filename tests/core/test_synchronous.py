"""Optimizers and modules that synchronize workers in every step, and step() where nothing was updated."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from core import CO2, CO2Config, UserError
from core.baselines import LocalSGD, SlowMo
from core.baselines.local import OverlapLocalSGD
from tests.on_ranks import on_ranks
from tests.problems import refusal


class Subclass(ZeroRedundancyOptimizer):
    """As others derive from it."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def told(net: nn.Module, method: Any, optimizer: Any, steps: int = 6) -> str:
    """The error, or the warnings, of some steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            for _ in range(steps):
                net(torch.randn(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                method.step()
        except UserError as error:
            method.leave()
            return f"UserError: {error}"
    method.finish()
    method.close()
    return " | ".join(str(w.message) for w in found if "synchron" not in str(w.message) and w.category is UserWarning)


@on_ranks(2)
def test_zero_is_refused_among_workers_and_no_other_optimizer(rank: int):
    alone = [dist.new_group([r]) for r in range(2)][rank]
    kinds: dict[str, Callable[[Any], Any]] = {
        "alone": lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, process_group=alone, lr=0.01),
        "plain": lambda p: torch.optim.AdamW(p, 0.01),
        "fused": lambda p: torch.optim.SGD(p, 0.01, fused=True),
        "zero": lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.01),
        "subclass": lambda p: Subclass(p, torch.optim.Adam, lr=0.01),
    }
    found = {}
    for kind, make in kinds.items():
        net = model()
        method = CO2(net.parameters(), CO2Config(tau=2))
        found[kind] = told(net, method, make([*net.parameters()]))
    assert found["plain"] == found["alone"] == found["fused"] == ""
    for kind, name in (("zero", "ZeroRedundancyOptimizer"), ("subclass", "Subclass")):
        assert found[kind].startswith(f"UserError: {name} shards the parameters over ranks [0, 1]"), found


@pytest.mark.parametrize("kind", ["trained", "alone", "evaluated", "not called"])
@on_ranks(2)
def test_syncbatchnorm_is_warned_of_once_where_it_waits_for_workers(rank: int, kind: str):
    alone = [dist.new_group([r]) for r in range(2)][rank]
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net, alone if kind == "alone" else None)
    net.train(kind != "evaluated")
    method = LocalSGD(net.parameters(), 1, buffers=net.buffers())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            if kind != "not called":
                with contextlib.suppress(ValueError):  # on a CPU torch refuses, after the hook
                    net(torch.randn(2, 4))
            method.step()
    method.finish()
    said = " | ".join(str(w.message) for w in found)
    assert said.count("SyncBatchNorm waits for 2 of these workers") == (kind == "trained"), said


@on_ranks(2)
def test_a_model_that_is_sharded_over_the_workers_is_refused_by_every_method(rank: int):  # noqa: ARG001
    for shard in (
        lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True),
        lambda net: fully_shard(net, mesh=init_device_mesh("cpu", (2,))),
    ):
        net = model()
        net = shard(net) or net
        for make in (
            lambda p: CO2(p, CO2Config(tau=2)),
            lambda p: LocalSGD(p, 2),
            lambda p: SlowMo(p, 2),
            lambda p: OverlapLocalSGD(p, 2),
        ):
            text = refusal(make, net.parameters())
            assert "over ranks [0, 1]" in text and "different shards would be averaged" in text


# -- step() more often than the optimizer -----------------------------------------------------------------------------


class ByData(torch.optim.Optimizer):
    """Writes what torch does not count."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(0.01 * p.grad.data)


class Swaps(torch.optim.Optimizer):
    """Gives each parameter another memory."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.data = p.data - 0.01 * p.grad


class NoOptimizer:
    """Of no class of torch's."""

    def __init__(self, params: Any, defaults: Any = None):
        self.params = [*params]

    def step(self) -> None:
        for p in self.params:
            p.data.sub_(0.01 * p.grad)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
    "foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "lr 0": lambda p: torch.optim.SGD(p, 0.0),
    "lr 0, fused": lambda p: torch.optim.SGD(p, 0.0, fused=True),
    "by data": lambda p: ByData(p, {}),
    "swaps": lambda p: Swaps(p, {}),
    "no optimizer": lambda p: NoOptimizer(p),
}


def accumulated(make: Callable[[Any], Any], micro: int, tau: int, *, first: bool, calls: int = 24) -> str:
    """The warnings of a loop that calls step() after every micro-batch. first: gradients are cleared first."""
    net = model()
    optimizer = make(net.parameters())
    method = CO2(net.parameters(), CO2Config(tau=tau))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(calls):
            if first and number % micro == 0:
                optimizer.zero_grad()
            net(torch.randn(2, 4)).square().mean().backward()
            if (number + 1) % micro == 0:
                optimizer.step()
                if not first:
                    optimizer.zero_grad()
            method.step()
    return " | ".join(str(w.message) for w in found if "step()" in str(w.message))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("micro, tau", [(2, 4), (2, 1), (3, 2), (4, 8), (8, 48)])
def test_step_after_each_micro_batch_is_warned_of_once(micro: int, tau: int, first: bool):
    for kind in ("SGD", "fused", "by data"):
        text = accumulated(OPTIMIZERS[kind], micro, tau, first=first)
        assert text.count("call it once after each optimizer.step(), not twice or") == 1, (kind, text)


@pytest.mark.parametrize("clears", ["before the second call", "at the next step"])
@pytest.mark.parametrize("calls, tau", [(2, 4), (2, 1), (3, 48)])
def test_several_calls_for_each_optimizer_step_are_warned_of_once(calls: int, tau: int, clears: str):
    net = model()
    optimizer, method = torch.optim.SGD(net.parameters(), 0.01), CO2(net.parameters(), CO2Config(tau=tau))
    with warnings.catch_warnings(record=True, action="always") as found:
        for _ in range(12):
            optimizer.zero_grad()
            net(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            for call in range(calls):
                if call and clears == "before the second call":
                    optimizer.zero_grad()
                method.step()
    said = " | ".join(str(w.message) for w in found)
    assert said.count("call it once after each optimizer.step(), not twice") == 1, said


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("tau", [1, 4])
def test_a_step_for_every_update_is_no_reason_to_warn(kind: str, tau: int):
    for first in (False, True):
        assert accumulated(OPTIMIZERS[kind], 1, tau, first=first) == ""


@pytest.mark.parametrize("skipped", [{0}, {0, 1}, {0, 1, 2, 3, 4}, {2, 5, 8}])
@pytest.mark.parametrize("first", [False, True])
def test_steps_that_a_scaler_skips_are_no_reason_to_warn(skipped: set[int], first: bool):
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=8.0)
    method = CO2(net.parameters(), CO2Config(tau=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(16):
            if first:
                optimizer.zero_grad()
            loss = net(torch.randn(2, 4)).square().mean()
            scaler.scale(loss * (float("inf") if number in skipped else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            if not first:
                optimizer.zero_grad()
            method.step()
        method.finish()


def test_parameters_without_gradients_are_no_reason_to_warn():
    net = model()
    method = CO2(net.parameters(), CO2Config(tau=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            for p in net.parameters():
                p.grad = torch.zeros_like(p)
            method.step()


@pytest.mark.parametrize("given", [False, True])
@on_ranks(2)
def test_statistics_that_are_not_averaged_are_warned_of_once(rank: int, given: bool):
    """BatchNorm's, with them as buffers and without. The first worker says it."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with warnings.catch_warnings(record=True, action="always") as told:
        co2 = CO2(net.parameters(), CO2Config.paper(2), buffers=net.buffers() if given else ())
        for _ in range(12):
            co2.step()
        co2.finish()
    co2.close()
    said = [str(w.message) for w in told if "BatchNorm" in str(w.message)]
    assert rank or len(said) == (not given) and all("give buffers=model.buffers()" in text for text in said), said


def test_closing_after_an_exception_hides_it_not():
    co2 = CO2([nn.Parameter(torch.ones(1))], CO2Config.paper(1))
    with pytest.raises(ValueError, match="my own"):
        try:
            co2.step()  # starts an all-reduce
            raise ValueError("my own")
        finally:
            co2.close()
