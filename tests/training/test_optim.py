"""Optimisers and schedules; micro-batches and recomputed activations give the gradient of the whole batch."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import Tensor, nn

import language.model
from core.checkpoint.runs import load_optimizer, of_optimizer
from language.recipes import gpt2_pydoc_small, roberta_pydoc_small, transnormer_pydoc_small
from language.train import backward as language_backward
from language.train import make_model as language_model
from pointcloud.recipes import modelnet10_mae_small, surfaces_small
from pointcloud.train import backward as pointcloud_backward
from pointcloud.train import make_model as pointcloud_model
from segmentation.recipes import digits_small as digits_segmentation
from segmentation.recipes import digits_swin
from segmentation.train import backward as segmentation_backward
from segmentation.train import make_model as segmentation_model
from tests.scripts import refused
from training.loop.run import Run
from training.optim import OptimConfig, lr_factor, make_optimizer, make_schedule, recompute
from training.recipe import Recipe
from vision.recipes import digits_small, digits_vit
from vision.train import backward as vision_backward
from vision.train import make_model as vision_model


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


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    """The first step beside timm's, later steps beside a restart from a state by names."""
    from timm.optim import Muon  # after training.prepared, for torchvision

    def start(config: OptimConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        ours = nn.Module()
        ours.embedding, ours.blocks = nn.Embedding(7, 4), nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3)])
        return ours, language.model.make_optimizer(ours, config)

    def step(of: nn.Module, rate: float, *optimizers: torch.optim.Optimizer) -> None:
        of.zero_grad()
        of.blocks[1](of.blocks[0](of.embedding.weight).tanh()).square().sum().backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    config = OptimConfig("muon", lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    (ours, optimizer), (theirs, _) = start(config), start(config)
    rest = [theirs.embedding.weight, *(block.bias for block in theirs.blocks)]
    muon = Muon([block.weight for block in theirs.blocks], 0.1, weight_decay=0.3, momentum=0.9, eps=1e-6)
    step(ours, 0.1, optimizer)
    step(theirs, 0.1, muon, torch.optim.AdamW(rest, 0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0))
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
    again, resumed = start(config)
    again.load_state_dict(ours.state_dict())
    load_optimizer(resumed, again, copy.deepcopy(of_optimizer(optimizer, ours)))
    for rate in (0.05, 0.02):
        step(ours, rate, optimizer)
        step(again, rate, resumed)
    assert all(map(torch.equal, ours.parameters(), again.parameters()))


# -- the gradient of the whole batch, in every task -------------------------------------------------------------------


Pass = Callable[[Run, Any, nn.Module], Any]
N = 5  # samples, which two micro-batches do not share evenly


def text(run: Run, recipe: Any, model: nn.Module) -> Any:
    tokens = torch.randint(4, recipe.vocab_size, (N, recipe.context), generator=torch.Generator().manual_seed(0))
    targets = tokens.masked_fill(torch.rand(N, recipe.context, generator=torch.Generator().manual_seed(0)) > 0.4, -100)
    return {"train_loss": language_backward(run, recipe, model, (tokens, targets))}


def vision(run: Run, recipe: Any, model: nn.Module) -> Any:
    return vision_backward(run, recipe, model, torch.randn(N, 1, 8, 8), torch.arange(N))


def pointcloud(run: Run, recipe: Any, model: nn.Module) -> Any:
    return pointcloud_backward(run, recipe, model, torch.randn(N, recipe.points, 3))


def segmentation(run: Run, recipe: Any, model: nn.Module) -> Any:
    label = SegDataSample(gt_sem_seg=PixelData(data=torch.randint(11, (1, 48, 48))))
    return segmentation_backward(run, recipe, model, model, torch.randn(N, 3, 48, 48), [label] * N)


TASKS: dict[str, tuple[Recipe, Callable[[Any], nn.Module], Pass]] = {
    "gpt2": (gpt2_pydoc_small(), lambda r: language_model(r, pad=1), text),
    "transnormer": (transnormer_pydoc_small(), lambda r: language_model(r, pad=1), text),
    "roberta": (roberta_pydoc_small(), lambda r: language_model(r, pad=1), text),
    "vision": (digits_vit(), vision_model, vision),
    "segmentation": (digits_swin(), segmentation_model, segmentation),
    "mae": (modelnet10_mae_small(), pointcloud_model, pointcloud),
    "autoencoder": (surfaces_small(), pointcloud_model, pointcloud),
}


def step(task: str, dropout: bool, **changes: Any) -> tuple[Any, list[Tensor]]:
    """What a step returns, and its gradient. Without dropout there is no BatchNorm over a micro-batch either."""
    recipe, make, backward = TASKS[task]
    recipe = replace(recipe, device="cpu", **changes)
    if dropout and hasattr(recipe, "dropout"):
        recipe = replace(recipe, dropout=0.1)
    torch.manual_seed(0)
    model = make(recipe).train()
    for m in model.modules():
        if not dropout and isinstance(m, nn.modules.batchnorm._BatchNorm | nn.Dropout | nn.Dropout2d):
            m.eval()
    torch.manual_seed(1)
    scalars = backward(Run(recipe), recipe, model)
    return scalars, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("task", [task for task in TASKS if task != "mae"])
def test_micro_batches_give_the_gradient_of_the_batch(task: str):
    whole, expected = step(task, False)
    for accumulate in (2, 3):
        parts, found = step(task, False, accumulate=accumulate)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "autoencoder"])
def test_recomputing_gives_the_same_gradient(task: str):
    (kept, expected), (recomputed, found) = step(task, True), step(task, True, recompute=True)
    assert all(torch.equal(recomputed[name], kept[name]) for name in kept)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def statistics(make: Callable[[bool], nn.Module], loss: Callable[[nn.Module], Tensor]) -> list[dict[str, Tensor]]:
    """Returns the buffers after two steps, without and with recomputing."""
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        model = make(recomputed).train()
        for _ in range(2):
            loss(model).backward()
        found.append({name: t.clone() for name, t in model.named_buffers()})
    return found


def seg(recompute: bool) -> nn.Module:
    return segmentation_model(replace(digits_segmentation(), backbone="resnet_mini", recompute=recompute))


def own(recomputed: bool) -> nn.Module:
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True), nn.BatchNorm2d(4))
    if recomputed:  # ends with the norm, where recomputing stops early
        recompute([block])
    return block


RECOMPUTING: dict[str, Any] = {
    "timm's resnet": (
        lambda r: vision_model(replace(digits_small(), recompute=r)),
        lambda m: m(torch.randn(4, 1, 8, 8)).square().mean(),
    ),
    "mmseg's with_cp": (seg, lambda m: m(torch.randn(2, 3, 48, 48), mode="tensor").square().mean()),
    "ours": (own, lambda m: m(torch.randn(2, 3, 4, 4)).square().mean()),
}


@pytest.mark.parametrize("kind", RECOMPUTING)
def test_recomputing_moves_running_statistics_once_a_step(kind: str):
    kept, recomputed = statistics(*RECOMPUTING[kind])
    assert any("running_mean" in name for name in kept)
    for name, t in kept.items():
        torch.testing.assert_close(recomputed[name], t, rtol=1e-4, atol=1e-6)


def test_timms_optimizers_and_layer_decay():
    vit = vision_model(replace(digits_small(), model="vit_small"))
    lamb = make_optimizer(vit, OptimConfig("lamb", lr=0.1, weight_decay=0.05, layer_decay=0.5))
    assert type(lamb).__name__ == "Lamb"
    of = {name: g for g in lamb.param_groups for p in g["params"] for name, q in vit.named_parameters() if p is q}
    rates = {"head.weight": 0.1, "blocks.3.mlp.fc1.weight": 0.1 / 2, "blocks.0.mlp.fc1.weight": 0.1 / 16}
    assert {name: of[name]["lr"] for name in rates} == pytest.approx(rates)
    assert of["patch_embed.proj.weight"]["lr"] == of["pos_embed"]["lr"] == pytest.approx(0.1 / 32)
    assert of["pos_embed"]["weight_decay"] == of["head.bias"]["weight_decay"] == 0 < of["head.weight"]["weight_decay"]
    schedule = make_schedule(lamb, 100, OptimConfig("lamb", warmup_steps=9))
    assert schedule.get_last_lr()[0] / lamb.param_groups[0]["initial_lr"] == pytest.approx(0.1)
    with refused("optim name='lionn': neither ours nor timm's; did you mean lion"):
        make_optimizer(vit, OptimConfig("lionn"))
    for name, betas in {"adahessian": (0.9, 0.999), "adan": (0.8, 0.99)}.items():  # adan has three betas
        with refused(f"optim name='{name}': cannot be made"):
            make_optimizer(vit, OptimConfig(name, betas=betas))
