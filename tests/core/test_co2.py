"""CO2 on real processes against the executable specification, and what each setting does."""

import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2, CO2Config
from core.testing import run_distributed
from tests import problems
from tests.problems import Settings, assert_traces_equal, check_grid, flat, sgd_step, trace_of, train_co2, wait_for
from tests.reference import Reference

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


CORNERS = grid()[::7]  # every value of every setting
GRIDS = [pytest.param(CORNERS, id="corners"), pytest.param(grid(), id="whole", marks=pytest.mark.slow)]


@pytest.mark.parametrize("configs", GRIDS)
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_equals_the_reference_round_by_round(world_size: int, configs: list[Settings]):
    check_grid(world_size, configs, STEPS)


def test_one_worker_in_and_out_of_a_process_group():
    configs = [replace(c, clip=0.4) for c in grid()[:5]]
    x = flat(problems.odd_parameters())
    for c, inside in zip(configs, run_distributed(problems.train_grid, 1, configs, STEPS, 1 << 18)[0], strict=True):
        assert_traces_equal(inside, problems.train_reference(c, 1, STEPS, x))
        assert_traces_equal(train_co2(problems.odd_parameters(), 0, STEPS, c), inside, 0.0)


# -- a real inner optimiser -----------------------------------------------------------------------------------

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


def train_nets(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    return {name: train_net(rank, name) for name in ("sgd", "adamw")}


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


def test_momentum_and_a_decaying_schedule():
    """The inner optimiser's state is kept across rounds and stays local."""
    results = run_distributed(train_nets, 2)
    for name in ("sgd", "adamw"):
        expected = train_net_in_one_process(2, name)
        for result in results:
            assert_traces_equal(result[name], expected)


# -- dtypes ---------------------------------------------------------------------------------------------------


def three_dtypes() -> list[nn.Parameter]:
    """float64, float32 and bfloat16 in turn, each of another size of numbers."""
    kinds = ((torch.float64, 1.0), (torch.float32, 3.0), (torch.bfloat16, 0.5))
    return [nn.Parameter(torch.linspace(-s, s, n).to(dtype)) for n in (3, 5) for dtype, s in kinds]


def train_dtypes(rank: int, world_size: int, config: Settings) -> list[Tensor]:
    return train_co2(three_dtypes(), rank, 6, config)


def check_dtypes(config: Settings, float64: float, float32: float, bfloat16: float) -> None:
    """They train as one float64 model does, within a tolerance for each dtype."""
    tolerance = {torch.float64: float64, torch.float32: float32, torch.bfloat16: bfloat16}
    allowed = torch.cat([torch.full((p.numel(),), tolerance[p.dtype]).double() for p in three_dtypes()])
    for rank, result in enumerate(run_distributed(train_dtypes, 2, config)):
        expected = problems.train_reference(config, 2, 6, flat(three_dtypes()), rank)
        for ours, want in zip(result, expected, strict=True):
            assert ((ours - want).abs() <= allowed * (1 + want.abs())).all()


@pytest.mark.parametrize(
    ("gap", "float64", "float32"), [("none", 1e-12, 1e-6), ("elementwise", 3e-3, 3e-3), ("norm", 3e-3, 3e-3)]
)
def test_several_dtypes_in_one_model(gap: Any, float64: float, float32: float):
    """Without a gap the dtypes are independent; else bfloat16's rounding is in the norms."""
    check_dtypes(Settings(tau=2, outer_momentum=0.3, outer_lr=0.6, gap=gap, clip=0.2), float64, float32, 0.02)


def small_steps_in_bf16(rank: int, world_size: int, dtype: torch.dtype) -> list[float]:
    """Only worker 0 moves, by 1/256 a round: the mean, 1/768, is below bfloat16's spacing at 1."""
    p = nn.Parameter(torch.ones(1, dtype=dtype))
    co2 = Settings(tau=1, outer_momentum=0.0, outer_lr=1.0, gap="none", clip=None, delay=0).build([p])
    values = []
    for _ in range(6):
        with torch.no_grad():
            p.sub_((rank == 0) / 256)
        co2.step()
        values.append(p.item())
    return values


def test_steps_below_the_precision_of_bf16_add_up():
    values = run_distributed(small_steps_in_bf16, 3, torch.bfloat16)[0]
    assert values[2] == 1 - 1 / 256
    assert values[5] == 1 - 2 / 256


# -- every setting --------------------------------------------------------------------------------------------

BASE = Settings(tau=2, outer_momentum=0.4, outer_lr=0.5, clip=0.1)
VARIANTS = {
    "tau": {"tau": 3},
    "outer_lr": {"outer_lr": 0.4},
    "outer_momentum": {"outer_momentum": 0.3},
    "gap=norm": {"gap": "norm"},
    "gap=none": {"gap": "none"},
    "clip": {"clip": 0.2},
    "no clip": {"clip": None},
    "delay": {"gap": "none", "delay": 0},
    "merge": {"merge": "mix"},
    "mix": {"merge": "mix", "mix": 0.8},
    "merged on arrival": {"merge": "mix", "delay": 1},
    "keep": {"merge": "keep"},
    "nesterov": {"nesterov": True},
    "nesterov without delay": {"gap": "none", "delay": 0, "nesterov": True},
    "wire": {"wire": "int8"},
    "error_feedback": {"wire": "int8", "error_feedback": False},
}


def final_of(rank: int, world_size: int, configs: list[Settings]) -> list[Tensor]:
    return [train_co2(problems.odd_parameters(), rank, 12, c)[-1] for c in configs]


def test_each_setting_changes_the_result():
    """All settings give pairwise different parameters, so none falls back to another."""
    names = ["base", *VARIANTS]
    finals = run_distributed(final_of, 2, [BASE, *(replace(BASE, **v) for v in VARIANTS.values())])[0]
    for i, a in enumerate(finals):
        for j in range(i):
            assert (a - finals[j]).abs().max() > 1e-4, f"{names[i]} and {names[j]} gave the same parameters"


def test_every_config_field_is_tested_above():
    varied = {key for v in VARIANTS.values() for key in v}
    assert varied == set(Settings.__dataclass_fields__) - {"allow_unstable", "tau_max"}
    # only permits; bounds tau="auto", see test_tau.py


# -- hidden communication -------------------------------------------------------------------------------------


def hidden_round(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Rank 1 arrives at its second boundary only after rank 0 has gone three local steps past it."""
    gate = Path(folder, "gate")
    params = problems.odd_parameters()
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
        seen.append(co2.flight.done())
    before = [p.detach().clone() for p in params]
    if rank == 0:
        assert not any(seen), "the peer has not launched, yet the mean is there"
        gate.touch()
    until = time.monotonic() + 30
    while not co2.flight.done():
        assert time.monotonic() < until
    untouched = all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    moved = not torch.equal(flat(params), flat(problems.odd_parameters()))
    sgd_step(params, rank, 7)
    closed = co2.step()
    co2.finish()
    return {"untouched": untouched, "moved": moved, "closed": closed, "aliases": aliases(co2)}


def aliases(co2: CO2) -> bool:
    """Whether a flat buffer that a collective writes shares memory with a live tensor."""
    live = {t.untyped_storage().data_ptr() for t in [*co2.params, *co2.buffers] if t.numel()}
    return any(b.flat.untyped_storage().data_ptr() in live for b in co2.buckets)


def test_a_slow_peer_delays_nobody_and_live_parameters_stay_untouched(tmp_path: Path):
    for result in run_distributed(hidden_round, 2, str(tmp_path)):
        assert result == {"untouched": True, "moved": True, "closed": True, "aliases": False}
