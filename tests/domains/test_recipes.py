"""Every recipe of every task: the memory that its dry run prints, and what is said where its data is missing."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.scripts import Mistakes
from training.recipe import Recipe

TASKS = ("vision", "segmentation", "pointcloud", "language")
RECIPES: dict[tuple[str, str], Recipe] = {
    (task, name): recipe
    for task in TASKS
    for name, recipe in importlib.import_module(f"{task}.recipes").RECIPES.items()
}

SMALL = [
    ("vision", "digits_small"),
    ("segmentation", "digits_small"),
    ("pointcloud", "surfaces_small"),
    ("language", "roberta_pydoc_small"),
]


@pytest.mark.parametrize(
    ("task", "name"),
    [pytest.param(*key, marks=[] if key in SMALL else pytest.mark.slow) for key in RECIPES],
)
def test_a_dry_run_estimates_the_memory(
    task: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    workers = "128" if RECIPES[task, name].batch_size % 128 == 0 else "4"
    for key, value in {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["train", name, "--dry_run"])
    importlib.import_module(f"{task}.train").main()
    printed = capsys.readouterr().out
    assert f'"name": "{name}"' in printed and f" {workers} workers of " in printed and "activations" in printed


@pytest.mark.parametrize(
    ("task", "name", "what", "stand_in"),
    [
        ("vision", "imagenet_resnet50", "ImageNet in @/imagenet: expected train/CLASS", "digits_small"),
        ("vision", "cifar10_small", "CIFAR-10 in @: expected cifar10_jpeg.tar.xz", "digits_small"),
        ("segmentation", "ade20k_resnet50", "ADE20K in @/ade/ADEChallengeData2016: expected images", "digits_small"),
        ("pointcloud", "shapenet_folding", "data set shapenet in @: expected ShapeNetCore.v2.PC15k/", "surfaces_small"),
        ("language", "gpt2_small_owt", "openwebtext token files in @/openwebtext: expected", "gpt2_pydoc_small"),
    ],
)
def test_missing_data_is_one_line_that_names_a_stand_in(
    task: str, name: str, what: str, stand_in: str, tmp_path: Path, mistake: Mistakes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    said = mistake(f"{task}.train", name, "--out", str(tmp_path / "run"))
    assert said.startswith(f"error: no {what.replace('@', str(tmp_path))}") and said.count("\n") == 1
    assert said.endswith(f", or train {stand_in}, which needs no data\n")
