"""What a worker continues from when a mean has landed, and when: on real processes against the specification."""

import contextlib
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config
from core.methods import LocalSGD, OverlapLocalSGD
from core.outer import ChunkedBoundary
from core.testing import run_distributed
from tests import problems
from tests.core.test_co2 import STEPS
from tests.problems import Settings, SlowLink, assert_traces_equal, check_grid, flat, sgd_step, train_reference

BASE = Settings(tau=4, outer_momentum=0.3, outer_lr=0.6, clip=0.1)
MERGES: list[dict[str, Any]] = [
    {"merge": "mix"},
    {"merge": "mix", "mix": 0.2, "delay": 1},
    {"merge": "mix", "delay": 3},
    {"merge": "mix", "delay": 4},
    {"merge": "keep"},
    {"merge": "keep", "delay": 1},
    {"merge": "keep", "delay": 3},
    {"merge": "mix", "mix": 1.0},
]
BLOCKING: list[dict[str, Any]] = [{"delay": 0}, {"delay": 0, "merge": "mix"}, {"delay": 0, "merge": "keep"}]


def grid() -> list[Settings]:
    """Every merge and delay with every penalty that goes with it, with and without momentum and clipping."""
    configs = [replace(BASE, gap="none", **blocking) for blocking in BLOCKING]
    for merge in MERGES:
        for gap in ("elementwise", "norm", "none"):
            late = replace(BASE, gap=gap, allow_unstable=True, **merge)
            configs += [late, replace(late, outer_momentum=0.0, outer_lr=1.0, clip=None)]
    return configs


CORNERS = grid()[:3] + grid()[3::5]  # every merge, delay and penalty, with and without momentum
GRIDS = [pytest.param(CORNERS, id="corners"), pytest.param(grid(), id="whole", marks=pytest.mark.slow)]


@pytest.mark.parametrize("configs", GRIDS)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_the_reference_round_by_round(world_size: int, configs: list[Settings]):
    check_grid(world_size, configs, STEPS + 3)


def arriving(rank: int, world_size: int, merge: str) -> dict[str, Any]:
    """Rank 1's steps take longer, so that each worker merges after another number of its own steps."""
    params = problems.odd_parameters()
    co2 = Settings(tau=6, merge=merge, delay="auto", gap="none").build(params)
    outers, merged = [], []
    for step in range(42):
        time.sleep(0.004 + 0.004 * rank)
        sgd_step(params, rank, step)
        if co2.step():
            outers.append(co2._x[0].clone())
            merged.append(co2.stats.merged_after)
    co2.finish()
    return {"outers": outers, "merged": merged, "end": flat(params), "drifted": co2.stats.drifted}


@pytest.mark.parametrize("merge", ["mix", "keep"])
def test_replicas_stay_equal_though_each_worker_merges_when_its_own_copy_lands(merge: str):
    """The outer iterate follows the means alone, whenever they are merged; workers need not agree on when."""
    zero, one = run_distributed(arriving, 2, merge)
    assert all(torch.equal(a, b) for a, b in zip(zero["outers"], one["outers"], strict=True))
    assert torch.equal(zero["end"], one["end"]) and not zero["drifted"]
    assert min(zero["merged"][1:] + one["merged"][1:]) < 6, "nothing was merged before the boundary"


def evaluating(rank: int, world_size: int) -> dict[str, Any]:
    """What shared_model gives at every boundary, and the model before and after it."""
    late = {"gap": "none", "delay": "auto"}
    methods = {
        "keep": lambda p: replace(BASE, merge="keep", **late).build(p),
        "mix": lambda p: replace(BASE, merge="mix", **late).build(p),
        "overlap_local": lambda p: OverlapLocalSGD(p, BASE.tau),
        "local": lambda p: LocalSGD(p, BASE.tau),
    }
    found: dict[str, Any] = {name: [] for name in methods}
    for name, build in methods.items():
        params = problems.odd_parameters()
        method = build(params)
        for step in range(STEPS + 3):
            sgd_step(params, rank, step)
            if method.step():
                before = flat(params)
                with method.shared_model() as equal:
                    found[name].append((equal, before, flat(params)))
                found[name][-1] += (flat(params),)
        method.finish()
        with method.shared_model() as equal:
            found[name].append((equal, flat(params)))
    return found


def test_an_evaluation_sees_one_model_where_the_method_has_one():
    zero, one = run_distributed(evaluating, 2)
    for name in zero:
        *rounds, (equal, end) = zero[name]
        assert torch.equal(end, one[name][-1][1]) and equal, name
        for (told, before, inside, after), (_, other, others_inside, _) in zip(rounds, one[name][:-1], strict=True):
            assert told is (name != "mix") and torch.equal(inside, others_inside) is told, name
            assert torch.equal(after, before) or name == "keep", f"{name}: an evaluation changed the training"
            if name == "overlap_local":
                torch.testing.assert_close(inside, (before + other) / 2, rtol=1e-12, atol=1e-12)
    # what is merged as soon as it is sent is not late: the specification's blocking rounds
    blocking = train_reference(
        replace(BASE, gap="none", merge="keep", delay=0), 2, STEPS + 3, flat(problems.odd_parameters())
    )
    assert_traces_equal([after for *_, after in zero["keep"][:-1]] + [zero["keep"][-1][1]], blocking)


def asked_at_every_step(rank: int, world_size: int) -> dict[str, list[tuple[bool, Tensor]]]:
    """Whether shared_model says that the model is shared, and the model."""
    at_once = {"merge": "mix", "delay": 0, "gap": "none"}
    methods = {
        "outer": lambda p: BASE.build(p),
        "mix at once": lambda p: replace(BASE, **at_once).build(p),
        "local": lambda p: LocalSGD(p, BASE.tau),
    }
    found: dict[str, list[tuple[bool, Tensor]]] = {}
    for name, build in methods.items():
        params = problems.odd_parameters()
        method, rows = build(params), []
        for step in range(STEPS):
            sgd_step(params, rank, step)
            method.step()
            with method.shared_model() as equal:
                rows.append((equal, flat(params)))
        method.finish()
        with method.shared_model() as equal:
            found[name] = [*rows, (equal, flat(params))]
    return found


def test_a_model_of_its_own_is_not_called_shared():
    """In mid-round, and where a boundary mixes at once."""
    zero, one = run_distributed(asked_at_every_step, 2)
    for name in zero:
        told = [(a, b) for (a, _), (b, _) in zip(zero[name], one[name], strict=True)]
        alike = [torch.equal(a, b) for (_, a), (_, b) in zip(zero[name], one[name], strict=True)]
        assert told == [(same, same) for same in alike], name
        assert not any(any(pair) and not same for pair, same in zip(told, alike, strict=True)), name
        assert told[-1] == (True, True) and not any(any(pair) for pair in told[:3]), name


def lent(rank: int, world_size: int) -> dict[str, Any]:
    """Overlap-Local-SGD, evaluated under inference_mode by a loop of torch's optimiser, over a link of 0.2 s."""
    net = problems.small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    method = OverlapLocalSGD(net.parameters(), 3, link=SlowLink(0.2))
    with warnings.catch_warnings(record=True, action="always") as caught:
        for step in range(6):
            optimizer.zero_grad()
            problems.loss(net, problems.batch(rank, step)).backward()
            optimizer.step()
            if method.step() and step == 2:
                before = flat(net.parameters())
                with contextlib.suppress(KeyError), torch.inference_mode(), method.shared_model():
                    inside = flat(net.parameters())
                    raise KeyError
                after = flat(net.parameters())
    stats = method.stats.as_dict()
    method.finish()
    told = [str(w.message) for w in caught]
    return {"told": told, "stats": stats, "before": before, "inside": inside, "after": after}


def test_what_overlap_local_sgd_lends_it_takes_back():
    """Also after an exception; it does not pass for weights that the user loaded, and the waiting is accounted for: tau
    auto takes what of a boundary and a merge is not exposed for the boundary's own work."""
    zero, one = run_distributed(lent, 2)
    assert torch.equal(zero["inside"], one["inside"]) and not torch.equal(zero["inside"], zero["before"])
    for worker in (zero, one):
        assert torch.equal(worker["after"], worker["before"]) and not worker["told"]
        stats = worker["stats"]
        assert min(stats["merge_seconds"], stats["exposed_seconds"]) > 0.1 and stats["merged_after"] == 3


def test_merges_run_in_the_fast_pass_and_only_keep_holds_another_copy():
    for merge in ("outer", "mix", "keep"):
        co2 = replace(BASE, merge=merge).build(problems.odd_parameters())
        assert all(isinstance(b, ChunkedBoundary) for b in co2._boundaries)
        assert set(co2.state) - {"outer_iterate", "outer_momentum"} == ({"sent"} if merge == "keep" else set())


@pytest.mark.parametrize(("workers", "beta"), [(1, 0.0), (16, 0.0), (17, 0.2), (64, 0.5), (65, 0.6)])
def test_what_is_recommended_is_accepted_and_follows_the_number_of_workers(workers: int, beta: float):
    config = CO2Config.recommended(workers, steps=480)
    assert (config.outer_momentum, config.tau, config.tau_max) == (beta, "auto", 24)
    assert replace(config, tau=24).tau == 24
    CO2([nn.Parameter(torch.ones(2))], config).finish()
