"""Optimisers and schedules."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import language.model
from core import UserError
from core.checkpoints.named import load_optimizer, of_optimizer
from training.optim import OptimConfig, clip_gradients, lr_factor, make_optimizer, make_schedule


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))


def test_weight_decay_spares_biases_norms_and_what_a_model_or_a_recipe_names():
    optimizer = make_optimizer(model(), OptimConfig("sgd", lr=0.1, momentum=0.0, weight_decay=0.5))
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], [p.ndim for p in decayed["params"]]) == (0.5, [2])
    assert (spared["weight_decay"], [p.ndim for p in spared["params"]]) == (0.0, [1, 1, 1])
    net = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    net.no_weight_decay = lambda: {"1.*"}
    decayed, spared = make_optimizer(net, OptimConfig(weight_decay=0.5)).param_groups
    assert (decayed["params"], spared["params"]) == ([net[0].weight], [net[1].weight])
    (everything,) = make_optimizer(model(), OptimConfig(weight_decay=0.5, undecayed=())).param_groups
    assert everything["weight_decay"] == 0.5 and len(everything["params"]) == 4
    decayed, spared = make_optimizer(model(), OptimConfig(weight_decay=0.5, undecayed=("bias",))).param_groups
    assert [p.shape for p in spared["params"]] == [(3,), (3,)] and spared["weight_decay"] == 0.0
    assert len(decayed["params"]) == 2


def test_optimisers_are_fused_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch):
    taken = {}
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, lr, **k: taken.update(k))
    make_optimizer(model(), OptimConfig("adamw"))
    assert "fused" not in taken
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    make_optimizer(model(), OptimConfig("adamw"))
    assert taken["fused"]


def test_frozen_parameters_are_left_out():
    net = model()
    net[0].requires_grad_(False)
    assert sum(len(g["params"]) for g in make_optimizer(net, OptimConfig()).param_groups) == 2


@pytest.mark.parametrize(
    ("name", "cls"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_optimizer_by_name_takes_its_settings(name: str, cls: type):
    config = OptimConfig(name, lr=0.3, momentum=0.7, nesterov=True, betas=(0.8, 0.9), eps=1e-6)
    optimizer = make_optimizer(model(), config)
    assert type(optimizer) is cls and optimizer.defaults["lr"] == 0.3
    if name == "sgd":
        assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (0.7, True)
    else:
        assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.9), 1e-6)


def test_schedules_by_hand():
    config = OptimConfig(warmup_steps=4, min_lr_share=0.1)
    factors = [lr_factor(step, 104, config) for step in range(104)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[54] == pytest.approx(0.1 + 0.9 / 2)  # half way
    assert lr_factor(104, 104, config) == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(factors[4:], factors[5:], strict=False))
    config = OptimConfig(schedule="inverse_sqrt", warmup_steps=100)
    assert lr_factor(399, 1000, config) == pytest.approx(math.sqrt(100 / 400))
    assert lr_factor(99, 1000, config) == pytest.approx(100 / 101)
    assert lr_factor(900, 1000, OptimConfig(schedule="constant", warmup_steps=3)) == 1.0
    config = OptimConfig(schedule="poly", power=0.9, min_lr_share=0.1, warmup_steps=4)
    assert lr_factor(1, 14, config) == pytest.approx(2 / 5) and lr_factor(4, 14, config) == 1.0
    assert lr_factor(9, 14, config) == pytest.approx(0.1 + 0.9 * 0.5**0.9)
    assert lr_factor(14, 14, config) == pytest.approx(0.1)
    assert lr_factor(9, 14, replace(config, power=2.0)) == pytest.approx(0.1 + 0.9 * 0.25)
    config = OptimConfig(lr=2.0, warmup_steps=1)
    optimizer = make_optimizer(model(), config)
    schedule = make_schedule(optimizer, 11, config)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1.0, 2.0, 2.0 * 0.5 * (1 + math.cos(math.pi / 10))])


def test_gradient_clipping_is_a_knob():
    net = model()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    clip_gradients(net, OptimConfig())
    assert net[0].weight.grad.norm() == pytest.approx(math.sqrt(12))
    clip_gradients(net, OptimConfig(clip_grad_norm=0.5))
    assert math.sqrt(sum(p.grad.pow(2).sum().item() for p in net.parameters())) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [{"lr": 0.0}, {"warmup_steps": -1}, {"power": 0.0}, {"clip_grad_norm": 0.0}])
def test_bad_values_are_named(bad: dict):
    with pytest.raises(UserError, match="=".join(map(str, *bad.items()))):
        OptimConfig(**bad)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    """Beside torch's two optimisers, with a schedule and a restart from a state by names in between."""

    def start(config: OptimConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        ours = nn.Module()
        ours.embedding, ours.blocks = nn.Embedding(7, 4), nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3)])
        return ours, language.model.make_optimizer(ours, config)

    def backward(of: nn.Module, step: int) -> None:
        hidden = of.embedding(torch.arange(7) * (step + 1) % 7)
        of.blocks[1](of.blocks[0](hidden).tanh()).square().sum().backward()

    config = OptimConfig("muon", lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    ours, optimizer = start(config)
    theirs, _ = start(config)
    inside = [block.weight for block in theirs.blocks]
    rest = [theirs.embedding.weight, *(block.bias for block in theirs.blocks)]
    muon = torch.optim.Muon(inside, 0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, 0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0)
    for step in range(4):
        if step == 2:
            saved, weights = of_optimizer(optimizer, ours), ours.state_dict()
            ours, optimizer = start(config)
            ours.load_state_dict(weights)
            load_optimizer(optimizer, ours, saved)
        for group in [g for one in (optimizer, muon, adamw) for g in one.param_groups]:
            group["lr"] = 0.1 / (step + 1)
        for of in (ours, theirs):
            of.zero_grad()
            backward(of, step)
        for one in (optimizer, muon, adamw):
            one.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_muon_elsewhere_is_refused():
    with pytest.raises(UserError, match="optim name=muon: only language models say which matrices lie inside"):
        make_optimizer(model(), OptimConfig("muon"))
