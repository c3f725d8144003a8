"""bench.loss: its workers in one process, against the same training on real ones."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bench.loss.__main__ import Plan, parse, train
from bench.loss.tasks import Batch, Inner, Task, cosine
from core import CO2Config, CompressionConfig, make_method
from core.testing import run_distributed
from tests.problems import batch, small_net

WORKERS, TAU, STEPS, LR = 3, 4, 14, 0.1
INNERS = {"sgd": Inner("sgd", LR), "adamw": Inner("adamw", LR, clip=0.5)}
NO_GAP: dict[str, Any] = {"tau": TAU, "gap": "none", "clip": None}
CLIPPED = NO_GAP | {"clip": 1.0}
INT4, INT8 = CompressionConfig("int4"), CompressionConfig("int8")
LATE: dict[str, Any] = CLIPPED | {"merge": "keep_local"}
# what bench.loss calls a method, and how core makes it
PAIRS: dict[str, tuple[str, CO2Config]] = {
    "co2": ("co2", CO2Config(TAU)),
    "co2:beta=0,gap=norm,phi=0.1": ("co2", CO2Config(TAU, outer_momentum=0.0, gap="norm", clip=0.1)),
    "co2:merge=keep_local,gap=none,beta=0.2,alpha=0.5,phi=none": (
        "co2",
        CO2Config(**NO_GAP, outer_momentum=0.2, outer_lr=0.5, merge="keep_local"),
    ),
    "co2:merge=keep_local,gap=none,beta=0.3,delay=3": ("co2", CO2Config(**LATE, outer_momentum=0.3, delay=3)),
    "co2:merge=keep_local,gap=none,beta=0,delay=1,compression=int4": (
        "co2",
        CO2Config(**LATE, outer_momentum=0.0, delay=1, compression=INT4),
    ),
    "co2:merge=keep_local,gap=none,alpha=0.7,nesterov=true,delay=1,compression=int4": (
        "co2",
        CO2Config(**LATE, outer_lr=0.7, nesterov=True, delay=1, compression=INT4),
    ),
    "fragments:fragments=2,delay=1,beta=0.3": ("co2", CO2Config(**LATE, outer_momentum=0.3, delay=1, fragments=2)),
    "fragments:fragments=3,delay=0,compression=int4": (
        "co2",
        CO2Config(**LATE, outer_momentum=0.0, delay=0, fragments=3, compression=INT4),
    ),
    "fragments:fragments=4,delay=1,compression=int4": (
        "co2",
        CO2Config(**LATE, outer_momentum=0.0, delay=1, fragments=4, compression=INT4),
    ),
    "co2:compression=int8": ("co2", CO2Config(TAU, compression=INT8)),
    "diloco": ("diloco", CO2Config(TAU)),
    "local": ("local", CO2Config(TAU)),
    "ddp": ("ddp", CO2Config(TAU)),
    "local:compression=int4": ("local", CO2Config(TAU, compression=INT4)),
    "diloco:beta=0.9,compression=int4": ("diloco", CO2Config(TAU, compression=INT4)),
}


def draw(seed: int, step: int, workers: int, size: int) -> Batch:
    inputs, labels = zip(*(batch(worker, step, size) for worker in range(workers)), strict=True)
    return torch.stack(inputs), torch.stack(labels)


def stacked(name: str, inner: Inner) -> torch.Tensor:
    """The end, [n], of bench.loss's own training."""
    task = Task(small_net, nn.functional.cross_entropy, draw, {}, inner, batch=4)
    plan = Plan("tiny", parse(name)[0], LR, WORKERS, 4, STEPS, TAU, 0, "test")
    _, method = train(task, plan)
    method.finish()
    assert (method.x == method.x[0]).all(), "all workers end alike"
    return method.x[0]


def on_ranks(rank: int, world_size: int, cases: list[tuple[str, str]]) -> dict[tuple[str, str], torch.Tensor]:
    return {(name, inner): on_rank(rank, PAIRS[name], INNERS[inner]) for name, inner in cases}


def on_rank(rank: int, pair: tuple[str, CO2Config], inner: Inner) -> torch.Tensor:
    """The same with a model, torch's optimisers and a method of core, on one of the workers."""
    name, config = pair
    net, rate = small_net(), [LR]
    model, method = make_method(name, net, lr=lambda: rate[0], co2=config)
    train_on_rank(rank, model, inner, method.step, rate)
    method.finish()
    method.close()
    return nn.utils.parameters_to_vector(net.parameters()).detach()


def train_on_rank(rank: int, model: nn.Module, inner: Inner, after_step: Callable[[], Any], rate: list[float]) -> None:
    """rate: holds the learning rate of the step."""
    if inner.name == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), LR, momentum=inner.momentum)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), LR, betas=inner.betas, weight_decay=inner.weight_decay)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate[0] = LR * cosine(step, STEPS)
        inputs, labels = batch(rank, step)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), inner.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        after_step()


# A fast corner: each optimizer, and one case of each kind; and the whole
CORNER = [
    *(("co2", "adamw"), ("co2:merge=keep_local,gap=none,beta=0,delay=1,compression=int4", "sgd"), ("ddp", "adamw")),
    *(("fragments:fragments=2,delay=1,beta=0.3", "adamw"), ("fragments:fragments=4,delay=1,compression=int4", "sgd")),
    *(("local:compression=int4", "adamw"), ("diloco:beta=0.9,compression=int4", "sgd")),
]
WHOLE = [(name, inner) for name in PAIRS for inner in INNERS]


@pytest.mark.parametrize("cases", [CORNER, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["corner", "whole"])
def test_one_process_equals_real_processes(cases: list[tuple[str, str]]):
    for ends in run_distributed(on_ranks, WORKERS, cases):
        for (name, inner), end in ends.items():
            expected = stacked(name, INNERS[inner])
            torch.testing.assert_close(end, expected, rtol=1e-9, atol=1e-9, msg=f"{name}, {inner}")
