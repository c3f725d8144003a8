"""CO2 and every merge on real processes against the executable specification, and what each setting does."""

import contextlib
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config
from core.baselines import LocalSGD, OverlapLocalSGD, SlowMo
from core.testing import run_distributed
from core.testing.reference import Reference
from tests import problems
from tests.core.test_fragments import config as fragments_config
from tests.core.test_resume import MERGES
from tests.imports import ROOT
from tests.on_ranks import alike, on_ranks, total_world_size
from tests.problems import (
    Settings,
    SlowLink,
    assert_traces_equal,
    check_grid,
    flat,
    sgd_step,
    take_steps,
    trace_of,
    train_co2,
    train_reference,
    wait_for,
)

STEPS = 11  # tau = 4 does not divide it
CLIPS: tuple[dict[str, Any], ...] = ({"clip": None}, {"clip": 0.15}, {"clip": 0.6})
OUTER = ((0.5, 1.0), (0.0, 1.0), (0.3, 0.6))


def grid() -> list[Settings]:
    configs = []
    for (beta, alpha), clip, tau in product(OUTER, CLIPS, (1, 4)):
        base = Settings(tau=tau, outer_momentum=beta, outer_lr=alpha, **clip)
        configs += [replace(base, gap=gap, allow_unstable=True) for gap in ("elementwise", "norm", "none")]
        configs.append(replace(base, gap="none", delay=0))
    return configs


def test_a_method_has_the_names_of_its_page_for_loops_and_for_hooks():
    page = (ROOT / "docs/loop.md").read_text()
    told = {*re.findall(r"\bco2\.(\w+)", page), *", ".join(re.findall(r"members: \[(.*)\]", page)[:2]).split(", ")}
    names = {name for name in dir(problems.bare_co2([nn.Parameter(torch.ones(3))])) if not name.startswith("_")}
    table = page.partition("## For authors of hooks")[2].partition("## Reference")[0]
    of_hooks = {*re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*)", table, re.MULTILINE)))}
    assert names >= {"step", "finish", "on_excluded", "resync", "state_dict"}
    assert names - told == of_hooks


def test_one_worker_in_and_out_of_a_process_group():
    configs = [replace(c, clip=0.4) for c in grid()[:5]]
    x = flat(problems.odd_parameters())
    for c, inside in zip(configs, run_distributed(problems.train_grid, 1, configs, STEPS, 1 << 18)[0], strict=True):
        assert_traces_equal(inside, problems.train_reference(c, 1, STEPS, x))
        assert_traces_equal(train_co2(problems.odd_parameters(), 0, STEPS, c), inside, 0.0)


NET = CO2Config(tau=3, outer_momentum=0.4, outer_lr=0.9, clip=0.05)


def inner(model: nn.Module, name: str) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)


def optimizer_step(model: nn.Module, optimizer: Any, schedule: Any, worker: int, step: int) -> None:
    problems.loss(model, problems.batch(worker, step)).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()


def train_net(rank: int, name: str) -> list[Tensor]:
    model = problems.small_net()
    optimizer, schedule = inner(model, name)
    co2 = CO2(model.parameters(), NET)
    go = partial(optimizer_step, model, optimizer, schedule, rank)
    return trace_of(co2, go, lambda: flat(model.parameters()), 20)


def train_net_in_one_process(world_size: int, name: str) -> list[Tensor]:
    models = [problems.small_net() for _ in range(world_size)]
    inners = [inner(m, name) for m in models]
    rows = torch.stack([flat(m.parameters()) for m in models])
    ref = Reference(rows, NET.tau, NET.outer_lr, NET.outer_momentum, NET.gap, NET.clip)
    for step in range(20):
        for worker, (model, pair) in enumerate(zip(models, inners, strict=True)):
            optimizer_step(model, *pair, worker, step)
            rows[worker] = flat(model.parameters())
        if ref.local_step():
            for model, row in zip(models, rows, strict=True):
                nn.utils.vector_to_parameters(row, model.parameters())
    rounds = ref.outer[1:]
    ref.finish()
    return [*rounds, ref.x[0].clone()]


@on_ranks(2)
def test_momentum_and_a_decaying_schedule(rank: int):
    for name in ("sgd", "adamw"):
        assert_traces_equal(train_net(rank, name), train_net_in_one_process(2, name))


def three_dtypes() -> list[nn.Parameter]:
    """float64, float32 and bfloat16 in turn, each of another size of numbers."""
    kinds = ((torch.float64, 1.0), (torch.float32, 3.0), (torch.bfloat16, 0.5))
    return [nn.Parameter(torch.linspace(-s, s, n).to(dtype)) for n in (3, 5) for dtype, s in kinds]


def check_dtypes(rank: int, config: Settings, float64: float, float32: float, bfloat16: float) -> None:
    """They train as one float64 model does, within a tolerance for each dtype."""
    tolerance = {torch.float64: float64, torch.float32: float32, torch.bfloat16: bfloat16}
    allowed = torch.cat([torch.full((p.numel(),), tolerance[p.dtype]).double() for p in three_dtypes()])
    expected = problems.train_reference(config, 2, 6, flat(three_dtypes()), rank)
    for ours, want in zip(train_co2(three_dtypes(), rank, 6, config), expected, strict=True):
        assert ((ours - want).abs() <= allowed * (1 + want.abs())).all()


@on_ranks(2)
def test_several_dtypes_in_one_model(rank: int):
    """Without a gap the dtypes are independent; else bfloat16's rounding is in the norms."""
    paper = Settings(tau=2, outer_momentum=0.3, outer_lr=0.6, clip=0.2)
    for gap, float64, float32 in (("none", 1e-12, 1e-6), ("elementwise", 3e-3, 3e-3), ("norm", 3e-3, 3e-3)):
        check_dtypes(rank, replace(paper, gap=gap), float64, float32, 0.02)
    for changes in WIDE:
        late = replace(LATE, tau=2 + (changes.get("delay") == 2), gap="none", allow_unstable=True)
        check_dtypes(rank, replace(late, **changes), 1e-12, 1e-6, 0.03)


@on_ranks(3)
def test_steps_below_the_precision_of_bf16_add_up(rank: int):
    """Only worker 0 moves, by 1/256 a round: the mean, 1/768, is below bfloat16's spacing at 1."""
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    co2 = Settings(tau=1, outer_momentum=0.0, outer_lr=1.0, gap="none", clip=None, delay=0).build([p])
    values = []
    for _ in range(6):
        with torch.no_grad():
            p.sub_((rank == 0) / 256)
        co2.step()
        values.append(p.item())
    assert (values[2], values[5]) == (1 - 1 / 256, 1 - 2 / 256)


@on_ranks(2)
def test_a_slow_peer_delays_nobody_and_live_parameters_stay_untouched(rank: int, tmp_path: Path):
    """Rank 1 arrives at its second boundary only after rank 0 has gone three local steps past it."""
    gate, params = tmp_path / "gate", problems.odd_parameters()
    co2 = CO2(params, CO2Config(tau=4))
    for step in range(4):
        sgd_step(params, rank, step)
        if rank == 1 and step == 3:
            wait_for(gate)
        co2.step()
    seen = []
    for step in range(4, 7):  # local steps go on under the all-reduce
        sgd_step(params, rank, step)
        assert co2.step() is False
        seen.append(co2.allreduce.done())
    before = [p.detach().clone() for p in params]
    if rank == 0:
        assert not any(seen), "the peer has not launched, yet the mean is there"
        gate.touch()
    until = time.monotonic() + 30
    while not co2.allreduce.done():
        assert time.monotonic() < until
    assert all(map(torch.equal, params, before)) and not torch.equal(flat(params), flat(problems.odd_parameters()))
    sgd_step(params, rank, 7)
    assert co2.step()
    co2.finish()
    live = {t.untyped_storage().data_ptr() for t in [*co2.params, *co2._buffers] if t.numel()}
    written = {b.flat.untyped_storage().data_ptr() for b in co2.buckets}
    assert not live & written, "a flat buffer that a collective writes shares memory with a live tensor"


def nesterov_grid() -> list[Settings]:
    """Every penalty with every clip, both momenta, tau 1 and 4; and without delay."""
    configs = []
    for i, (beta, alpha) in enumerate(OUTER):
        for j, clip in enumerate(CLIPS):
            tau = (1, 4)[(i + j) % 2]
            base = Settings(tau=tau, outer_momentum=beta, outer_lr=alpha, allow_unstable=True, nesterov=True, **clip)
            configs += [replace(base, gap=gap) for gap in ("elementwise", "norm", "none")]
            configs.append(replace(base, gap="none", delay=0))
    return configs


LATE = Settings(tau=4, outer_momentum=0.3, outer_lr=0.6, clip=0.1)
MERGES_AND_DELAYS: list[dict[str, Any]] = [
    {"delay": 4},
    {"merge": "keep_local"},
    {"merge": "keep_local", "delay": 1},
    {"merge": "keep_local", "delay": 3},
    {"merge": "keep_local", "delay": 4},
]
BLOCKING: list[dict[str, Any]] = [{"delay": 0}, {"delay": 0, "merge": "keep_local"}]


def merge_grid() -> list[Settings]:
    """Every merge and delay with every penalty that goes with it, with and without momentum and clipping."""
    configs = [replace(LATE, gap="none", **blocking) for blocking in BLOCKING]
    for merge in MERGES_AND_DELAYS:
        for gap in ("elementwise", "norm", "none"):
            late = replace(LATE, gap=gap, allow_unstable=True, **merge)
            configs += [late, replace(late, outer_momentum=0.0, outer_lr=1.0, clip=None)]
    return configs


def nesterov_merges() -> list[Settings]:
    """Nesterov's step with every merge and delay, and every penalty that goes with it."""
    return [replace(c, nesterov=True, allow_unstable=True) for c in merge_grid() if c.outer_momentum]


GRIDS: dict[str, tuple[list[Settings], slice, int]] = {  # settings; the corners: every value of every one; the steps
    "late": (grid(), slice(None, None, 7), STEPS),
    "nesterov": (nesterov_grid(), slice(None, None, 4), STEPS),
    "blocking": (merge_grid()[:2], slice(None), STEPS + 3),
    "merges": (merge_grid()[2:], slice(None, None, 5), STEPS + 3),
    "nesterov merges": (nesterov_merges(), slice(None, None, 2), STEPS + 3),
}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["corners", "whole"])
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_equals_the_reference_round_by_round(world_size: int, whole: bool):
    """Each setting of a grid as a case of its own, so that each number of workers starts once."""
    for configs, corners, steps in GRIDS.values():
        check_grid(world_size, configs if whole else configs[corners], steps)


@on_ranks(2)
def test_replicas_stay_equal_though_each_worker_merges_when_its_own_copy_lands(rank: int):
    """Rank 1's steps take longer. The outer iterate follows the means alone, whenever they are merged."""
    params = problems.odd_parameters()
    co2 = Settings(tau=6, merge="keep_local", delay="auto", gap="none").build(params)
    outers, merged = [], []
    for step in range(42):
        time.sleep(0.004 + 0.004 * rank)
        sgd_step(params, rank, step)
        if co2.step():
            outers.append(co2._x[0].clone())
            merged.append(co2.stats.merged_after)
    co2.finish()
    assert alike(*outers, flat(params)) and not co2.stats.drifted
    assert min(sum(total_world_size(merged[1:]), [])) < 6, "nothing was merged before the boundary"


EVALUATED: dict[str, Callable[..., Any]] = {
    "keep_local": replace(LATE, merge="keep_local", gap="none", delay="auto").build,
    "overlap_local": partial(OverlapLocalSGD, tau=LATE.tau),
    "local": partial(LocalSGD, tau=LATE.tau),
}


@on_ranks(2)
def test_an_evaluation_sees_one_model_where_the_method_has_one(rank: int):
    for name, build in EVALUATED.items():
        params, trace = problems.odd_parameters(), []
        method = build(params)
        for step in range(STEPS + 3):
            sgd_step(params, rank, step)
            if method.step():
                before = flat(params)
                with method.averaged_model() as equal:
                    inside = flat(params)
                assert equal and alike(inside), name
                if name == "overlap_local":
                    torch.testing.assert_close(inside, sum(total_world_size(before)) / 2, rtol=1e-12, atol=1e-12)
                trace.append(flat(params))
                assert torch.equal(trace[-1], before) or name == "keep_local", f"{name}: it changed the training"
        method.finish()
        with method.averaged_model() as equal:
            trace.append(flat(params))
        assert equal and alike(trace[-1]), name
        if (
            name == "keep_local"
        ):  # what is merged as soon as it is sent is not late: the specification's blocking rounds
            blocking = replace(LATE, gap="none", merge="keep_local", delay=0)
            assert_traces_equal(trace, train_reference(blocking, 2, STEPS + 3, flat(problems.odd_parameters()), rank))


@on_ranks(2)
def test_what_overlap_local_sgd_lends_it_takes_back(rank: int):
    """Under inference_mode and after an exception, too; it does not pass for weights that the user loaded, and the
    waiting is accounted for: tau auto takes what of a boundary and a merge is not exposed for the boundary's work."""
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
                with contextlib.suppress(KeyError), torch.inference_mode(), method.averaged_model():
                    inside = flat(net.parameters())
                    raise KeyError
                assert torch.equal(flat(net.parameters()), before)
    stats = method.stats.as_dict()
    method.finish()
    assert alike(inside) and not alike(before) and not caught
    assert min(stats["merge_seconds"], stats["exposed_seconds"]) > 0.1 and stats["merged_after"] == 3


def test_what_is_recommended_is_accepted():
    config = CO2Config.recommended(steps=480)
    assert (config.outer_momentum, config.tau, config.tau_max) == (0, "auto", 24)
    assert replace(config, tau=24).tau == 24
    CO2([nn.Parameter(torch.ones(2))], config).finish()


WIDE = [changes for changes in MERGES[:5] if "compression" not in changes]
UNEVEN: dict[str, Callable[[list[Tensor]], Any]] = {
    str(changes): replace(LATE, tau=3, **changes).build
    for changes in ({}, *MERGES, {"merge": "keep_local", "delay": "auto"})
}
UNEVEN |= {kind.name: partial(kind, tau=3) for kind in (LocalSGD, SlowMo, OverlapLocalSGD)}
UNEVEN["shard"] = lambda params: CO2(params, replace(LATE, tau=3).co2, shard=True)
CUT: tuple[dict[str, Any], ...] = ({"fragments": 3}, {"fragments": 3, "delay": "auto"}, {"fragments": 6, "delay": 0})
UNEVEN |= {str(c): lambda params, c=c: CO2(params, fragments_config(outer_momentum=0.3, **c)) for c in CUT}


def uneven_twice(rank: int, build: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    params, seen = problems.odd_parameters(), []
    co2 = build(params)
    co2.finish()
    seen.append(flat(params))
    for steps in (range(5 + 2 * rank), range(0), range(20, 24 + rank)):
        take_steps(co2, params, rank, steps)
        co2.finish()
        seen.append(flat(params))
    co2.close()
    if isinstance(co2, CO2):  # whose state is this worker's share
        return [*seen, flat(params)]
    return [
        *seen,
        co2.anchors[0].clone() if co2.sends_differences else flat(params),
        *(f[0] for f in co2.state.values()),
    ]


@on_ranks(3)
def test_finish_leaves_equal_workers_however_uneven_and_training_goes_on(rank: int):
    ends = {name: uneven_twice(rank, build) for name, build in UNEVEN.items()}
    for name, seen in ends.items():
        untouched, first, again, second, x, *_ = seen
        assert alike(*seen), name
        for before, after in ((flat(problems.odd_parameters()), untouched), (first, again)):
            if name != "OverlapLocalSGD":  # whose every boundary pulls, one without a step, too
                torch.testing.assert_close(after, before, rtol=1e-15, atol=0)  # nothing to finish
        assert (first - untouched).abs().max() > 0.1 and (second - first).abs().max() > 0.01
        assert torch.equal(second, x)
    for shared, plain in zip(ends["shard"], ends["{}"], strict=False):
        torch.testing.assert_close(shared, plain, rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_without_momentum_nothing_is_left_over_after_finish(rank: int):
    """One object with finish() in the middle; and a new one from there on."""
    for changes in WIDE:
        config = replace(LATE, **{"tau": 3, "outer_momentum": 0.0, "clip": None, "gap": "none"} | changes)
        ends = []
        for anew in (False, True):
            params = problems.odd_parameters()
            co2 = config.build(params)
            for steps in (range(5), range(5, 10)):
                take_steps(co2, params, rank, steps)
                co2.finish()
                co2 = config.build(params) if anew else co2
            ends.append(flat(params))
        torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)
