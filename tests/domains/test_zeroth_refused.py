"""What zeroth-order training refuses, tells, and changes while it measures."""

import math
import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from core import CollectiveError, UserError
from core.testing import run_distributed
from language.zeroth import ZerothConfig, ZerothOrder
from language.zeroth.order import Place, digest
from tests.zeroth_net import SAMPLES, Net, batch, losses_of

# -- what is refused, and what is changed while it measures ---------------------------------------------------------


def frozen_but(part: str) -> Net:
    """Parameters that have it in their names are trained."""
    model = Net()
    for name, p in model.named_parameters():
        p.requires_grad_(part in name)
    return model


def test_a_step_leaves_modes_frozen_tensors_and_after_a_loss_that_fails_all_weights_as_they_were():
    model = Net().train()
    model.norm.eval()
    zo = ZerothOrder(model, lr=0.1)
    modes = []
    zo.step(lambda m: modes.append([x.training for x in m.modules()]) or 1.0, 1)
    assert not any(any(mode) for mode in modes) and model.drop.training and model.training and not model.norm.training
    model = Net()
    before, at = digest(list(model.parameters())), [p.data_ptr() for p in model.parameters()]
    zo = ZerothOrder(model, lr=0.1)
    with pytest.raises(ZeroDivisionError):
        zo.step(lambda m: 1 / 0, 1)
    assert digest(list(model.parameters())) == before and [p.data_ptr() for p in model.parameters()] == at
    model = frozen_but("back.")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zo = ZerothOrder(model, lr=0.1)
    zo.step(lambda m: losses_of(m, batch(0)).mean(), SAMPLES)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"back.weight", "back.bias"}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ZerothConfig(eps=0.0), "eps=0.0: give a number above 0"),
        (lambda: ZerothConfig(eps=math.nan), "eps=nan"),
        (lambda: ZerothConfig(eps="1e-3"), "eps='1e-3'"),  # pyright: ignore[reportArgumentType]
        (lambda: ZerothConfig(weight_decay="0"), "weight_decay='0'"),  # pyright: ignore[reportArgumentType]
        (lambda: ZerothConfig(weight_decay=-1.0), "weight_decay=-1.0"),
        (lambda: ZerothConfig(seed=-1), "seed=-1"),
        (lambda: ZerothOrder(Net(), ZerothConfig(pairs=True), lr=0.1), "pairs=True with 1 worker: a pair is two"),
        (lambda: Place.make(0, 3, ZerothConfig(pairs=True)), "pairs=True with 3 workers: a pair is two, start an even"),
        (
            lambda: Place.make(0, 2, ZerothConfig()).combine([[1.0, 0.0, 2.0], [0.0, 1.0, 3.0]]),
            "rank 0 had 2 samples and rank 1 3: a pair takes the same batch",
        ),
        (lambda: ZerothOrder(Net().requires_grad_(False), lr=0.1), "nothing to train"),
        (lambda: ZerothOrder(Net(), lr=math.inf).step(lambda m: 1.0, 1), "lr=inf: give a finite number"),
        (lambda: ZerothOrder(Net(), lr=0.1).step(lambda m: 1.0, -1), "count=-1"),
        (lambda: ZerothOrder(Net(), lr=0.1).step(lambda m: torch.ones(2), 1), r"the loss has shape \(2,\)"),
    ],
)
def test_mistakes_are_told_in_one_line(build: Callable, message: str):
    with pytest.raises(UserError, match=message) as found:
        build()
    assert "\n" not in str(found.value)


def test_two_neighbours_take_the_sides_of_one_share_of_the_data():
    places = [Place.make(rank, 4, ZerothConfig()) for rank in range(4)]
    assert [(p.data_rank, *p.signs) for p in places] == [(0, 1), (0, -1), (1, 1), (1, -1)]
    assert {p.data_workers for p in places} == {2}


DIFFERENCES = {
    "seed": "seed=0",
    "frozen": "5 tensors, against 3",
    "dtype": "'torch.float64'), against ((",
    "device": "z drawn on cpu (with rng='host' all draw alike), against z drawn on a GPU",
}


def differing(rank: int, world_size: int) -> list[str]:
    """What is said where the workers differ in each of DIFFERENCES."""
    said = []
    for what in DIFFERENCES:
        config = ZerothConfig(seed=rank if what == "seed" else 0)
        model = frozen_but("weight") if what == "frozen" and rank else Net()
        model = model.bfloat16() if what == "dtype" and rank else model
        kind = "a GPU" if what == "device" and rank else "cpu"
        with mock.patch("language.zeroth.order.kind_of", lambda device, kind=kind: kind):
            with pytest.raises(UserError) as told:
                ZerothOrder(model, config, lr=0.1, timeout=60)
            said.append(str(told.value))
    return said


def test_workers_that_differ_are_refused():
    for said in run_distributed(differing, 2):
        for message, text in zip(DIFFERENCES.values(), said, strict=True):
            assert text.startswith("workers differ: rank 0 has") and message in text and text.endswith("of rank 1")


def test_nobody_trains_alone_where_others_were_started(monkeypatch: pytest.MonkeyPatch):
    """But a list may be replayed."""
    zo, other = ZerothOrder(Net(), lr=0.1), ZerothOrder(Net(), lr=0.1)
    zo.step(lambda m: 1.0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    other.replay(zo.log)
    with pytest.raises(UserError, match="WORLD_SIZE=2, but torch.distributed is not initialised"):
        zo.step(lambda m: 1.0, 1)


def one_leaves(rank: int, world_size: int) -> str:
    zo = ZerothOrder(Net(), lr=0.1, timeout=3)
    if rank == 1:
        os._exit(0)
    try:
        zo.step(lambda m: 1.0, 1)
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_a_worker_that_is_gone_is_named():
    text = run_distributed(one_leaves, 2, expect_death=(1,))[0]
    assert text.startswith("rank 0: the scalars of step 0 did not come; no answer from rank 1")
