"""Local-SGD, SlowMo, Overlap-Local-SGD and DDP against plain one-process formulas, and against CO2."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import CO2Config, DivergedError, WireConfig, make_method
from core.methods import OverlapLocalConfig, SlowMoConfig
from core.testing import run_distributed
from tests import problems
from tests.problems import LR, Settings, assert_traces_equal, flat, gradient, take_steps, train

TAU, STEPS = 3, 11


def start(world_size: int) -> tuple[Tensor, Tensor]:
    """All workers' parameters, [workers, n], and the workers' numbers, [workers, 1]."""
    rows = flat(problems.odd_parameters()).expand(world_size, -1).clone()
    return rows, torch.arange(world_size, dtype=torch.float64)[:, None]


def local_steps(rows: Tensor, workers: Tensor, steps: range) -> None:
    for step in steps:
        rows -= LR * gradient(rows, workers, step)


def rounds() -> list[range]:
    """The steps of each full round, and those left over for finish()."""
    return [range(s, min(s + TAU, STEPS)) for s in range(0, STEPS, TAU)]


def schedule(boundary: int) -> float:
    return 0.3 / (1 + boundary)


def slowmo_by_hand(world_size: int, config: SlowMoConfig) -> list[Tensor]:
    """u <- beta u + (x - mean) / gamma; x <- x - alpha gamma u, with gamma falling from boundary to boundary."""
    rows, workers = start(world_size)
    x, u, trace = rows[0].clone(), torch.zeros_like(rows[0]), []
    for t, steps in enumerate(rounds()):
        local_steps(rows, workers, steps)
        u = config.outer_momentum * u + (x - rows.mean(0)) / schedule(t)
        x = x - config.outer_lr * schedule(t) * u
        rows = x.expand_as(rows).clone()
        trace.append(x)
    return trace


def overlap_by_hand(world_size: int, config: OverlapLocalConfig) -> list[list[Tensor]]:
    """The anchor takes the mean of the pulled models one round late; finish() leaves the mean of the pulled models."""
    rows, workers = start(world_size)
    z, v, mean = rows[0].clone(), torch.zeros_like(rows[0]), None
    traces: list[list[Tensor]] = [[] for _ in range(world_size)]
    for steps in rounds():
        local_steps(rows, workers, steps)
        if mean is not None:
            v = config.anchor_momentum * v + (mean - z)
            z = z + v
        rows = rows - config.pull * (rows - z)
        mean = rows.mean(0)
        for trace, row in zip(traces, rows, strict=True):
            trace.append(row.clone() if len(steps) == TAU else mean)
    return traces


def train_all(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    """Every trace that the tests below look at, in one launch."""
    boundaries = iter(range(100))
    runs: dict[str, tuple[str, dict[str, Any]]] = {
        "local": ("local", {}),
        "slowmo": ("slowmo", {}),
        "slowmo .3 .8": ("slowmo", {"slowmo": SlowMoConfig(outer_momentum=0.3, outer_lr=0.8)}),
        "slowmo 0 1": ("slowmo", {"slowmo": SlowMoConfig(outer_momentum=0.0)}),
        "slowmo alpha": ("slowmo", {"slowmo": SlowMoConfig(outer_lr=0.8)}),
        "slowmo lr": ("slowmo", {"lr": lambda: schedule(next(boundaries))}),
        "slowmo constant lr": ("slowmo", {"lr": lambda: 0.05}),
        "overlap": ("overlap_local", {}),
        "overlap pull": ("overlap_local", {"overlap_local": OverlapLocalConfig(pull=0.4)}),
        "overlap momentum": ("overlap_local", {"overlap_local": OverlapLocalConfig(anchor_momentum=0.2)}),
    }
    for key, beta, alpha in (("co2", 0.5, 1.0), ("co2 .3 .8", 0.3, 0.8), ("co2 0 1", 0.0, 1.0)):
        blocking = Settings(TAU, outer_momentum=beta, outer_lr=alpha, gap="none", clip=None, delay=0)
        runs[key] = "delayed", {"co2": blocking.co2, "delayed": blocking.delayed}
    for key, beta in (("co2 int4", 0.5), ("co2 0 1 int4", 0.0)):
        runs[key] = "co2", {"co2": Settings(TAU, outer_momentum=beta, gap="none", clip=None, delay=0, wire="int4").co2}
    for key in ("local", "slowmo"):
        runs[f"{key} int4"] = key, {"co2": CO2Config(TAU, wire=WireConfig("int4"))}
    common = {"co2": CO2Config(tau=TAU)}
    return {k: train(n, problems.odd_parameters(), rank, STEPS, **common | o) for k, (n, o) in runs.items()}


WORLD = 3


@pytest.fixture(scope="module")
def traces() -> list[dict[str, list[Tensor]]]:
    return run_distributed(train_all, WORLD)


@pytest.mark.parametrize("settings", ["", " .3 .8", " 0 1", " int4"])
def test_co2_without_delay_gap_and_clip_is_slowmo(traces: Any, settings: str):
    for of_rank in traces:
        assert_traces_equal(of_rank["co2" + settings], of_rank["slowmo" + settings], 1e-12)


def test_beta_0_alpha_1_is_then_local_sgd(traces: Any):
    for of_rank in traces:
        assert_traces_equal(of_rank["co2 0 1"], of_rank["local"], 1e-12)
        assert all(map(torch.equal, of_rank["co2 0 1 int4"], of_rank["local int4"]))


def test_a_narrow_wire_changes_a_baseline_by_what_it_rounds(traces: Any):
    for key in ("local", "slowmo"):
        wide, narrow = (traces[0][name][0] for name in (key, f"{key} int4"))
        assert 1e-6 < (wide - narrow).abs().max() < 0.1 * wide.abs().max(), key


def test_local_sgd_averages_the_parameters(traces: Any):
    rows, workers = start(WORLD)
    expected = []
    for steps in rounds():
        local_steps(rows, workers, steps)
        rows = rows.mean(0).expand_as(rows).clone()
        expected.append(rows[0].clone())
    for of_rank in traces:
        assert_traces_equal(of_rank["local"], expected)


def test_slowmo_with_a_decaying_learning_rate_follows_its_formula(traces: Any):
    for of_rank in traces:
        assert_traces_equal(of_rank["slowmo lr"], slowmo_by_hand(WORLD, SlowMoConfig()))
        assert_traces_equal(of_rank["slowmo constant lr"], of_rank["slowmo"])


@pytest.mark.parametrize(
    ("key", "settings"),
    [("overlap", {}), ("overlap pull", {"pull": 0.4}), ("overlap momentum", {"anchor_momentum": 0.2})],
)
def test_overlap_local_sgd_follows_its_formula(traces: Any, key: str, settings: dict[str, float]):
    expected = overlap_by_hand(WORLD, OverlapLocalConfig(**settings))
    for of_rank, want in zip(traces, expected, strict=True):
        assert_traces_equal(of_rank[key], want)


def test_each_setting_of_the_baselines_changes_the_result(traces: Any):
    for family in ("slowmo", "overlap"):
        finals = {k: t[-1] for k, t in traces[0].items() if k.startswith(family) and k != "slowmo constant lr"}
        keys = list(finals)
        for i, a in enumerate(keys):
            for b in keys[:i]:
                assert (finals[a] - finals[b]).abs().max() > 1e-4, f"{a} and {b} gave the same parameters"


@pytest.mark.parametrize("key", ["local", "slowmo", "co2", "local int4", "slowmo int4"])
def test_blocking_methods_agree_bit_for_bit_at_every_boundary(traces: Any, key: str):
    for of_rank in traces:
        assert all(torch.equal(a, b) for a, b in zip(of_rank[key], traces[0][key], strict=True))


def test_overlap_local_sgd_agrees_only_after_finish(traces: Any):
    assert not torch.equal(traces[0]["overlap"][0], traces[1]["overlap"][0])
    assert all(torch.equal(of_rank["overlap"][-1], traces[0]["overlap"][-1]) for of_rank in traces)


def test_slowmo_survives_a_schedule_that_ends_at_zero():
    p = nn.Parameter(torch.ones(2))
    _, method = make_method("slowmo", nn.ParameterList([p]), co2=CO2Config(tau=1), lr=lambda: 0.0)
    take_steps(method, [p], 0, range(3))
    assert torch.isfinite(p).all()


# -- DistributedDataParallel ----------------------------------------------------------------------------------


def train_ddp(rank: int, world_size: int) -> dict[str, Any]:
    model = problems.small_net(seed=rank)  # DDP broadcasts rank 0's
    wrapped, method = make_method("ddp", model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    closed = []
    for step in range(5):
        problems.loss(wrapped, problems.batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        closed.append(method.step())
    method.finish()
    return {"end": flat(model.parameters()), "closed": closed, "bytes": method.stats.bytes_sent}


@pytest.mark.parametrize("gpu", [False, True])
def test_ddp_goes_on_from_a_checkpoint_after_it_has_diverged(gpu: bool, monkeypatch: pytest.MonkeyPatch):
    """gpu: as there, numbers are heard one exchange later still."""
    monkeypatch.setattr("core.stats.read_blocks", lambda t: gpu)
    model = problems.small_net()
    _, method = make_method("ddp", model)
    weights = [p.detach().clone() for p in model.parameters()]
    state = method.state_dict()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(DivergedError, match="not finite"):
        for _ in range(50):
            method.step()
    with torch.no_grad():
        for p, kept in zip(model.parameters(), weights, strict=True):
            p.copy_(kept)
    method.load_state_dict(state)
    for _ in range(50):
        method.step()
    method.finish()


def test_ddp_equals_one_process_with_the_joint_batch():
    model = problems.small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        joint = [torch.cat(parts) for parts in zip(*(problems.batch(w, step) for w in range(2)), strict=True)]
        problems.loss(model, (joint[0], joint[1])).backward()
        optimizer.step()
        optimizer.zero_grad()
    want = flat(model.parameters())
    for result in run_distributed(train_ddp, 2):
        torch.testing.assert_close(result["end"], want, rtol=1e-12, atol=1e-12)
        assert result["closed"] == [True] * 5
        assert result["bytes"] == 8 * len(want)  # a ring of two sends every gradient once
