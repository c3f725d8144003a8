"""Baselines against one-process formulas; optimizers, mixed precision and parts of a model under CO2."""

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from core import CO2, CO2Config, CompressionConfig, DivergedError, make_method
from core.baselines.local import DiLoCoConfig, OverlapLocalConfig, SlowMoConfig
from core.testing import run_distributed
from tests import problems
from tests.core.test_loops import net
from tests.imports import ROOT
from tests.on_ranks import alike, on_ranks
from tests.problems import LR, Settings, assert_traces_equal, batch, flat, gradient, loss, run_cases, take_steps, train

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
        "slowmo lr": ("slowmo", {"lr": lambda: schedule(next(boundaries))}),
        "slowmo constant lr": ("slowmo", {"lr": lambda: 0.05}),
        "overlap": ("overlap_local", {}),
        "overlap pull": ("overlap_local", {"overlap_local": OverlapLocalConfig(pull=0.4)}),
        "overlap momentum": ("overlap_local", {"overlap_local": OverlapLocalConfig(anchor_momentum=0.2)}),
    }
    for key, beta, alpha in (("co2", 0.5, 1.0), ("co2 .3 .8", 0.3, 0.8), ("co2 0 1", 0.0, 1.0)):
        blocking = Settings(TAU, outer_momentum=beta, outer_lr=alpha, gap="none", clip=None, delay=0)
        runs[key] = "co2", {"co2": blocking.co2}
    for key, beta in (("co2 int4", 0.5), ("co2 0 1 int4", 0.0)):
        runs[key] = (
            "co2",
            {"co2": Settings(TAU, outer_momentum=beta, gap="none", clip=None, delay=0, compression="int4").co2},
        )
    for key, own in (("diloco", DiLoCoConfig()), ("diloco .5 .4", DiLoCoConfig(0.5, 0.4))):
        blocking = Settings(
            TAU, own.outer_lr, own.outer_momentum, "none", clip=None, delay=0, nesterov=True, allow_unstable=True
        )
        runs |= {key: ("diloco", {"diloco": own}), f"co2 {key}": ("co2", {"co2": blocking.co2})}
    for key in ("local", "slowmo"):
        runs[f"{key} int4"] = key, {"co2": CO2Config(TAU, compression=CompressionConfig("int4"))}
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


@pytest.mark.parametrize("key", ["diloco", "diloco .5 .4"])
def test_with_nesterov_it_is_diloco(traces: Any, key: str):
    for of_rank in traces:
        assert_traces_equal(of_rank[key], of_rank[f"co2 {key}"], 1e-12)


def test_beta_0_alpha_1_is_then_local_sgd(traces: Any):
    for of_rank in traces:
        assert_traces_equal(of_rank["co2 0 1"], of_rank["local"], 1e-12)
        assert all(map(torch.equal, of_rank["co2 0 1 int4"], of_rank["local int4"]))


def test_a_narrow_format_changes_a_baseline_by_what_it_rounds(traces: Any):
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


@pytest.mark.parametrize("key", ["local", "slowmo", "diloco", "co2", "local int4", "slowmo int4"])
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


@on_ranks(2)
def test_ddp_equals_one_process_with_the_joint_batch(rank: int):
    alone, model = problems.small_net(), problems.small_net(seed=rank)  # DDP broadcasts rank 0's
    wrapped, method = make_method("ddp", model)
    for each, of in ((wrapped, [rank]), (alone, [0, 1])):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            inputs, labels = zip(*(problems.batch(worker, step) for worker in of), strict=True)
            problems.loss(each, (torch.cat(inputs), torch.cat(labels))).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert each is alone or method.step() is True
    method.finish()
    want = flat(alone.parameters())
    torch.testing.assert_close(flat(model.parameters()), want, rtol=1e-12, atol=1e-12)
    assert method.stats.bytes_sent == 8 * len(want)  # a ring of two sends every gradient once


WORKERS, LONG = 2, 60
Build = Callable[[nn.Module], list[Optimizer]]


def one(kind: Callable[..., Optimizer], **settings: Any) -> Build:
    return lambda model: [kind(model.parameters(), **settings)]


def with_muon(model: nn.Module) -> list[Optimizer]:
    """Muon takes matrices only."""
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02)
    return [muon, torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=0.01)]


def of_timm(kind: str, lr: float) -> Build:
    def build(model: nn.Module) -> list[Optimizer]:
        import training.prepared  # noqa: F401, I001  before timm, which imports torchvision
        import timm.optim

        return [getattr(timm.optim, kind)(model.parameters(), lr=lr)]

    return build


OPTIMIZERS: dict[str, Build] = {
    "SGD": one(torch.optim.SGD, lr=0.02, momentum=0.9),
    "Adam": one(torch.optim.Adam, lr=0.01),
    "AdamW": one(torch.optim.AdamW, lr=0.01),
    "NAdam": one(torch.optim.NAdam, lr=0.01),
    "RAdam": one(torch.optim.RAdam, lr=0.02),
    "Adamax": one(torch.optim.Adamax, lr=0.02),
    "Adagrad": one(torch.optim.Adagrad, lr=0.05),
    "Adadelta": one(torch.optim.Adadelta, lr=1.0),
    "Adafactor": one(torch.optim.Adafactor, lr=0.05),
    "RMSprop": one(torch.optim.RMSprop, lr=0.003),
    "Rprop": one(torch.optim.Rprop, lr=0.003),
    "ASGD": one(torch.optim.ASGD, lr=0.1, t0=1e9),
    **({"Muon": with_muon} if hasattr(torch.optim, "Muon") else {}),  # not in torch 2.6
    "Lamb": of_timm("Lamb", 0.02),
    "Lion": of_timm("Lion", 0.005),
    "Adan": of_timm("Adan", 0.02),
    "Lars": of_timm("Lars", 0.03),
}


def quadratic_batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * rank + number))
    return inputs, inputs.square().sum(1, keepdim=True) / 4


def squared_error(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs) - targets).square().mean()


def held_out(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(squared_error(model, *quadratic_batch(number, 9))) for number in range(20)) / 20


def descend(model: nn.Module, optimizers: Iterable[Optimizer], rank: int, after: Callable[[], Any]) -> None:
    for number in range(LONG):
        model.zero_grad()
        squared_error(model, *quadratic_batch(number, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
        after()


def trained(rank: int, world_size: int, names: Sequence[str]) -> dict[str, tuple[Tensor, float, float, float]]:
    """By optimizer: parameters after finish(), held-out loss before, with CO2, with DDP."""
    torch.manual_seed(0)
    start, found = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), {}
    for name in names:
        build = OPTIMIZERS[name]
        model, other = copy.deepcopy(start), copy.deepcopy(start)
        co2 = CO2(model.parameters(), CO2Config.recommended(steps=LONG, tau=3))
        descend(model, build(model), rank, co2.step)
        co2.finish()
        co2.close()
        descend(DistributedDataParallel(other), build(other), rank, lambda: None)
        ends = torch.cat([p.detach().flatten() for p in model.parameters()])
        found[name] = ends, held_out(start), held_out(model), held_out(other)
    return found


@pytest.mark.parametrize(
    "names",
    [OPTIMIZERS.keys() & {"SGD", "AdamW", "Muon"}, pytest.param((*OPTIMIZERS,), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_each_optimizer_trains_one_model_about_as_well_as_ddp(names: Sequence[str]):
    first, second = run_distributed(trained, WORKERS, sorted(names), timeout=240)
    for name, (ends, before, ours, ddp) in first.items():
        assert torch.equal(ends, second[name][0]), f"{name}: the workers' models differ"
        assert ours < 1.3 * ddp < 0.5 * before, (name, before, ours, ddp)


def test_the_page_names_what_is_tested():
    (table,) = re.findall(r"(?m)^\| optimizer \|.*\n(?:\|.*\n)+", (ROOT / "docs/from_ddp.md").read_text())
    yes = [row for row in table.splitlines()[2:] if row.split("|")[2].strip().startswith("yes")]
    assert sorted(name for row in yes for name in re.findall(r"`(\w+)`", row.split("|")[1])) == sorted(
        OPTIMIZERS | {"Muon": with_muon}
    )
    assert "| `ZeroRedundancyOptimizer` | no" in table


@on_ranks(2)
def test_adams_second_moments_may_be_averaged_as_buffers(rank: int):
    """Without delay they are, after each boundary, the mean of what they were before it."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(batch(rank, 99, 8)[0]).sum().backward()
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
    co2 = CO2(model.parameters(), CO2Config(tau=2, delay=0, gap="none", outer_momentum=0.0), buffers=moments)
    for step in range(4):
        optimizer.zero_grad()
        problems.loss(model, batch(rank, step, 8)).backward()
        optimizer.step()
        mean = problems.flat(moments) / 2
        torch.distributed.all_reduce(mean)
        if co2.step():
            ours = problems.flat(moments)
            assert alike(ours) and ours.abs().max() > 0
            torch.testing.assert_close(ours, mean, rtol=1e-12, atol=0)
    co2.finish()


CONFIG = CO2Config(tau=3, outer_momentum=0.3, clip=None)


def skipping(rank: int, world_size: int, scaled: bool) -> dict[str, Any]:
    """Rank 1's gradients overflow at steps 4, 5 and 9: its scaler skips those optimiser steps."""
    net = problems.small_net(torch.float32)
    co2, optimizer = CO2(net.parameters(), CONFIG), torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
    ends, skipped, closed, hooked = [], 0, [], list[int]()
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for step in range(18):
        overflow = rank == 1 and step in (4, 5, 9)
        if scaled or not overflow:
            value = loss(net, batch(rank, step, dtype=torch.float32)) * (float("inf") if overflow else 1.0)
            scaler.scale(value).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
        optimizer.zero_grad()
        if co2.step():
            closed.append(step)
            ends.append(flat(net.parameters()))
    co2.finish()
    ends.append(flat(net.parameters()))
    return {"ends": ends, "skipped": skipped, "closed": closed, "hooked": len(hooked)}


def test_a_skipped_step_does_not_desynchronise_rounds():
    """A skipped optimiser step is a local step without a change: as if that worker had no gradient there."""
    (one, two), (plain, _) = run_cases(skipping, 2, [(True,), (False,)])
    assert (one["skipped"], two["skipped"]) == (0, 3)
    assert (one["hooked"], two["hooked"]) == (18, 15), "torch calls an optimiser's hooks only where it has stepped"
    assert one["closed"] == two["closed"] == [2, 5, 8, 11, 14, 17]
    for a, b, c in zip(one["ends"], two["ends"], plain["ends"], strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)


def masters(rank: int, world_size: int, keep: bool, shard: bool) -> tuple[Tensor, Tensor]:
    """An optimiser that keeps float32 masters of a bfloat16 model, its steps far below bfloat16's precision."""
    model = [nn.Parameter(torch.ones(40, dtype=torch.bfloat16))]
    kept = [nn.Parameter(p.detach().float()) for p in model]
    config = CO2Config(tau=2, outer_momentum=0.0, clip=None, gap="norm")
    kind = partial(CO2, shard=True) if shard else CO2
    co2 = kind(kept, config, model_params=model) if keep else kind(model, config)
    for _ in range(40):
        with torch.no_grad():
            for p, m in zip(model, kept, strict=True):
                if keep:
                    p.copy_(m.sub_(2.0**-11 * (1 + rank)))
                else:
                    p.sub_(2.0**-11 * (1 + rank))
        co2.step()
    co2.finish()
    return flat(kept), flat(model)


def test_masters_are_what_is_averaged_and_the_model_follows():
    cases = [*product((True, False), (False, True))]
    for (keep, _), results in zip(cases, run_cases(masters, 2, cases), strict=True):
        for kept, model in results:
            if keep:
                assert (model == kept.to(torch.bfloat16).double()).all()
                assert (kept < 0.985).all()  # 40 steps of 1.5 x 2^-11, shortened by the penalty
            else:
                assert (model == 1.0).all()  # without masters every step rounds to nothing


@on_ranks(2)
def test_the_model_follows_its_masters_from_the_start(rank: int):
    model, masters = ([nn.Parameter(torch.full((2,), float(rank), dtype=d))] for d in (torch.bfloat16, torch.float32))
    CO2(masters, model_params=model)
    assert model[0][0].item() == 0.0
