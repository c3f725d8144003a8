"""The memory that a dry run prints, and that every full-size recipe fits its clusters."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from core import CO2Config
from language.train import RECIPES, make_model
from training import checks
from training.checks import dry_run
from training.optim import OptimConfig
from training.recipe import Recipe

# what the largest models need on smaller GPUs, as slurm/task.sh says
SMALLER: dict[tuple[str, int], dict[str, Any]] = {
    ("gpt2_xl_owt", 40): {},
    ("gpt2_xl_owt", 24): {"per_node": 0, "zero": 2},
    ("transnormer_7b_owt", 80): {},
    ("transnormer_7b_owt", 40): {"zero": 3},
    ("transnormer_7b_owt", 24): {"zero": 3, "offload": True},
}


def estimate(task: str, name: str, gpus: int, **changes: Any) -> dict[str, float]:
    """With the multiple of the GPUs (and, for Mixup, of two images each) nearest to the recipe's batch."""
    train = importlib.import_module(f"{task}.train")
    recipe = train.RECIPES[name]
    step = gpus * (2 if getattr(recipe, "mixup", 0) else 1)
    recipe = replace(recipe, batch_size=round(recipe.batch_size / step + 1e-9) * step, **changes)
    pad = {"pad": 1} if task == "language" else {}
    with torch.device("meta"):
        model = train.make_model(recipe, **pad)
    return checks.estimate(recipe, model, gpus)


@pytest.mark.parametrize(("name", "gb"), SMALLER)
def test_the_largest_models_fit_smaller_gpus(name: str, gb: int, monkeypatch: pytest.MonkeyPatch):
    """Without activations."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    estimated = estimate("language", name, 80 if gb == 24 else 128, **SMALLER[name, gb])
    assert sum(estimated.values()) < gb * checks.GIB


def test_a_dry_run_prints_it_and_warns(capsys: pytest.CaptureFixture):
    recipe = replace(RECIPES["gpt2_pydoc_small"], gpu_gb=1.0)
    dry_run(recipe, lambda _: make_model(recipe, pad=1))
    text = capsys.readouterr().out.splitlines()
    assert "GiB a GPU and activations: parameters 0.0, gradients 0.0, optimizer 0.0, co2 0.0, 1.5 for" in text[-3]
    assert text[-2].startswith("warning: gpu_gb=1 is less: a higher --zero needs less")
    assert text[-1] == "0.0224 GB a checkpoint, of which the run folder keeps two"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_frozen_parameters_have_no_gradient_and_16_bits_take_two_bytes(dtype: torch.dtype, size: int):
    def make() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)).to(dtype)
        model[0].requires_grad_(False)
        return model

    found = checks.estimate(Recipe(method="ddp", batch_size=1), make(), 1)  # SGD with momentum
    assert found["parameters"] == 2 * 64 * 64 * size
    assert found["gradients"] == found["optimizer"] == 64 * 64 * size and found["method"] == 0


def test_a_checkpoint_holds_equal_tensors_once():
    adamw, count = OptimConfig("adamw"), checks.checkpoint_bytes
    methods = ("ddp", "co2", "overlap_local")
    sizes = {name: count(Recipe(method=name, optim=adamw), 4.0, 128, 8) for name in methods}
    assert sizes == {"ddp": 4 * 3, "co2": 4 * (16 * 2 + 4), "overlap_local": 4 * (16 * 3 + 3)}
    recommended = Recipe(
        co2=CO2Config.recommended(), optim=adamw
    )  # parameters, moments, snapshot or change, and error of each
    assert count(recommended, 4.0, 128, 1) == 12 + 20 * 128
    assert count(recommended, 4.0, 128, 8) == 8 + 20 * 16  # a node's averaged update is its own change
