"""The FLOPs, activations, hours and checkpoints that a dry run counts."""

import functools
import importlib
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from core import CO2Config
from training.checks import dry_run
from training.cost import PEAKS, Work, checkpoint_bytes, count
from training.plan.case import device
from training.recipe import Recipe


def told(task: str, name: str, gpus: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> str:
    """The lines of a dry run, without the recipe."""
    monkeypatch.setenv("WORLD_SIZE", str(gpus))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    train = importlib.import_module(f"{task}.train")
    recipe = train.RECIPES[name]
    recipe = replace(recipe, batch_size=512 if recipe.batch_size == 480 else recipe.batch_size)
    make = functools.partial(train.make_model, pad=1) if task == "language" else train.make_model
    dry_run(recipe, make, train.work(recipe))
    return capsys.readouterr().out.split("\n}\n")[1]


@pytest.mark.parametrize(
    ("task", "name", "gpus", "by_hand"),
    [
        ("vision", "imagenet_resnet50", 128, 0.13),
        pytest.param("vision", "imagenet_vit_base", 128, 0.8, marks=pytest.mark.slow),
        pytest.param("vision", "imagenet_regnet", 128, 0.3, marks=pytest.mark.slow),
        pytest.param("segmentation", "ade20k_resnet50", 128, 0.1, marks=pytest.mark.slow),
        pytest.param("language", "gpt2_small_owt", 64, 1.5, marks=pytest.mark.slow),
        pytest.param("language", "gpt2_medium_owt", 64, 4.2, marks=pytest.mark.slow),
        pytest.param("language", "gpt2_large_owt", 64, 12, marks=pytest.mark.slow),
        pytest.param("language", "roberta_base_wikibooks", 128, 4.8, marks=pytest.mark.slow),
        pytest.param("language", "transnormer_7b_owt", 128, 100, marks=pytest.mark.slow),
    ],
)
def test_hours_are_within_a_quarter_of_those_by_hand(task, name, gpus, by_hand, monkeypatch, capsys):
    text = told(task, name, gpus, monkeypatch, capsys)
    (hours,) = re.findall(rf" ([\d.]+) h on {gpus} A100", text)
    assert float(hours) == pytest.approx(by_hand, rel=0.25)
    assert re.search(r"GiB a GPU: .* activations \d", text)


def test_peaks_are_the_planners():
    assert list(PEAKS.values()) == [device("a100").peak, device("rtx3090").peak]


def test_a_count_by_hand():
    def make(_: Recipe) -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))

    work = Work("none", lambda model, n: model(torch.empty(n, 8)), blocks=lambda model: model)
    found = count(Recipe(), make, work, 4)
    assert found.flops == 3 * 3 * 2 * 4 * 64 and found.activations == 3 * 4 * 8 * 4  # the input of each layer
    assert count(Recipe(accumulate=2), make, work, 4) == replace(found, activations=found.activations / 2)
    again = count(Recipe(recompute=True), make, work, 4)
    assert again.flops == found.flops * 4 / 3 and again.activations == 4 * 4 * 8 * 4  # and one block's


def test_a_checkpoint_holds_equal_tensors_once():
    sizes = {name: checkpoint_bytes(Recipe(method=name), 4.0, 2, 128, 8) for name in ("ddp", "co2", "overlap_local")}
    assert sizes == {"ddp": 4 * 3, "co2": 4 * (16 * 2 + 4), "overlap_local": 4 * (16 * 3 + 3)}
    recommended = Recipe(co2=CO2Config.recommended())  # parameters, moments, snapshot or change, and error of each
    assert checkpoint_bytes(recommended, 4.0, 2, 128, 1) == 12 + 20 * 128
    assert checkpoint_bytes(recommended, 4.0, 2, 128, 8) == 8 + 20 * 16  # a node's averaged update is its own change
