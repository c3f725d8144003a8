"""Every recipe of every task: the memory that its dry run prints, and values that no run could use."""

import importlib
import sys

import pytest

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
