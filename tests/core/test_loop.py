"""What a loop, or another framework's callbacks, ask of a method besides step(): at_boundary, settle, the block."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core import CO2, CO2Config, CollectiveError, LocalSGD, OverlapLocalSGD, ShardedCO2, make_method
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from language.zeroth import ZerothOrder
from tests import problems
from tests.problems import flat, sgd_step, take_steps

TAU, STEPS = 3, 11
PAPERS = CO2Config(tau=TAU, outer_momentum=0.5)
KEEP = replace(CO2Config.recommended(2), tau=TAU)
LATE = replace(KEEP, delay=2)  # merged so many steps after the boundary, where workers therefore differ
METHODS: dict[str, Callable[..., Any]] = {
    "the paper's": lambda params: CO2(params, PAPERS),
    "as recommended": lambda params: CO2(params, KEEP),
    "merged later": lambda params: CO2(params, LATE),
    "shared by all": lambda params: ShardedCO2(params, PAPERS, shard=True),
    "local": lambda params: LocalSGD(params, TAU),
    "overlap": lambda params: OverlapLocalSGD(params, TAU),
}


def asked(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """at_boundary and the closing of rounds after each step; what settle() says at a boundary, and the model then."""
    params = problems.odd_parameters()
    with METHODS[name](params) as method:
        before, told, models = method.at_boundary, [], []
        for step in range(STEPS):
            sgd_step(params, rank, step)
            closed = method.step()
            told.append((closed, method.at_boundary))
            models.append((method.settle(), flat(params)))
    end = flat(params)
    return {"before": before, "told": told, "models": models, "end": end, "closed": method.flight.group is None}


@pytest.mark.parametrize("name", METHODS)
def test_a_boundary_is_where_a_round_has_closed_and_settle_says_whether_the_model_is_one(name: str):
    zero, one = run_distributed(asked, 2, name)
    assert zero["before"] is one["before"] is True
    assert zero["told"] == one["told"] == [(s % TAU == TAU - 1,) * 2 for s in range(STEPS)]
    for (alike, a), (theirs, b) in zip(zero["models"], one["models"], strict=True):
        assert alike is theirs is torch.equal(a, b)
    at_boundaries = [alike for alike, _ in zero["models"][TAU - 1 :: TAU]]
    assert all(at_boundaries) is (name not in ("merged later", "overlap"))
    assert torch.equal(zero["end"], one["end"]) and zero["closed"]


def like_a_plain_loop(rank: int, world_size: int) -> list[Tensor]:
    ends = []
    for in_block in (True, False):
        params = problems.odd_parameters()
        co2 = CO2(params, PAPERS)
        if in_block:
            with co2 as given:
                assert given is co2
                take_steps(co2, params, rank, range(STEPS))
        else:
            problems.train_with(co2, params, rank, STEPS)
        ends.append(flat(params))
    return ends


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_block_ends_as_finish_and_close_do(workers: int):
    ends = run_distributed(like_a_plain_loop, workers)
    assert all(torch.equal(end, ends[0][0]) for pair in ends for end in pair)


def test_without_a_process_group_too():
    model = problems.small_net()
    with CO2(model.parameters(), PAPERS) as co2:
        take_steps(co2, model.parameters(), 0, range(STEPS))
        assert not co2.at_boundary and not co2.settle()
    assert co2.at_boundary and co2.settle()


class Mistaken(Exception):
    """The user's own error."""


BROKEN = {"in nodes": lambda params: ShardedCO2(params, PAPERS, mesh=node_mesh("cpu", 2))}


def broken_off(rank: int, world_size: int, name: str, raises_at: int) -> dict[str, Any]:
    """The last worker's loop fails, and its process lives on."""
    params = problems.odd_parameters()
    found: dict[str, Any] = {}
    began = time.monotonic()
    try:
        with (BROKEN | METHODS)[name](params) as method:
            for step in range(STEPS):
                if step == raises_at and rank == world_size - 1:
                    raise Mistaken
                sgd_step(params, rank // 2 if name == "in nodes" else rank, step)
                method.step()
    except (Mistaken, CollectiveError) as error:
        found = {"error": type(error).__name__, "text": str(error)}
    found["seconds"] = time.monotonic() - began
    dist.barrier()  # over the default group, which is the user's
    return found


@pytest.mark.parametrize(
    ("name", "raises_at", "workers"),
    [
        pytest.param("the paper's", 4, 2, marks=pytest.mark.slow),
        ("the paper's", 1, 4),
        ("as recommended", 5, 2),
        pytest.param("in nodes", 4, 4, marks=pytest.mark.slow),
    ],
)
def test_an_exception_in_the_block_keeps_nobody_waiting(name: str, raises_at: int, workers: int):
    """Before the first reduction, and while one is in flight. Others end long before the timeout of 600 s."""
    *others, last = run_distributed(broken_off, workers, name, raises_at)
    assert last["error"] == "Mistaken" and last["seconds"] < 10
    for other in others:
        assert other["error"] == "CollectiveError" and other["seconds"] < 20, other
        assert name == "in nodes" or f"no answer from rank {workers - 1}" in other["text"], other


def after_leaving(rank: int, world_size: int) -> str:
    params = problems.odd_parameters()
    try:
        with CO2(params, PAPERS) as co2:
            raise Mistaken
    except Mistaken:
        pass
    try:
        for _ in range(TAU):
            co2.step()
    except CollectiveError as error:
        return str(error)
    return ""


def test_who_has_left_cannot_go_on_with_the_same_object():
    for text in run_distributed(after_leaving, 2):
        assert text == "this worker has left the others after an exception: make a new object to train on"


def each_step(rank: int, world_size: int) -> list[Any]:
    """DDP, and training without gradients: every step is a boundary of one model."""
    net = problems.small_net()
    data = problems.batch(rank, 0)
    told: list[Any] = []
    model, ddp = make_method("ddp", net, lr=lambda: 0.1)
    with ddp:
        problems.loss(model, data).backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(p.grad, alpha=0.1)
        told.append((ddp.step(), ddp.at_boundary, ddp.settle(), flat(net.parameters())))
    with ZerothOrder(nn.Sequential(nn.Linear(6, 3)).double(), lr=0.1) as zo:
        zo.step(lambda m: problems.loss(m, data), 4)
        told.append((True, zo.at_boundary, zo.settle(), flat(zo.model.parameters())))
    return told


def test_methods_whose_every_step_is_a_round():
    zero, one = run_distributed(each_step, 2)
    for (*told, a), (*theirs, b) in zip(zero, one, strict=True):
        assert told == theirs == [True] * 3 and torch.equal(a, b)
