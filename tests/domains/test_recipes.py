"""Every recipe of every task: what its dry run prints, and values that no run could use."""

import functools
import importlib
import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from core import UserError
from training.checks import dry_run
from training.recipe import Recipe, parse

TASKS = ("vision", "segmentation", "pointcloud", "language")
RECIPES: dict[tuple[str, str], Recipe] = {
    (task, name): recipe
    for task in TASKS
    for name, recipe in importlib.import_module(f"{task}.recipes").RECIPES.items()
}
MILLIONS = {  # published, with the recipe's vocabulary, before that is padded
    "gpt2_small_owt": 124.44,
    "gpt2_medium_owt": 354.82,
    "gpt2_large_owt": 774.03,
    "roberta_base_wikibooks": 124.70,
    "roberta_large_wikibooks": 355.41,
}


@pytest.mark.parametrize(("task", "name"), RECIPES)
def test_every_recipe_runs_dry(task: str, name: str, capsys: pytest.CaptureFixture[str]):
    script = importlib.import_module(f"{task}.train")
    recipe: Any = parse(script.RECIPES, [name, "--dry_run"])
    dry_run(recipe, functools.partial(script.make_model, recipe, **({"pad": 1} if task == "language" else {})))
    printed, rest = capsys.readouterr().out.split("\n}\n")
    shown, millions = json.loads(printed + "}"), float(rest.split()[0])
    assert shown["name"] == name and shown["batch_size"] == recipe.batch_size and millions > 0.03
    if name in MILLIONS:
        assert 0 <= millions - MILLIONS[name] + 0.005 < 64 * 1280 / 1e6, "more by the padding alone"


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
    ("task", "name", "value"),
    [
        ("vision", "label_smoothing", 2.0),
        ("vision", "mixup", -3.0),
        ("vision", "random_erasing", 1.5),
        ("vision", "drop_path", 2.0),
        ("vision", "loader_workers", -1),
        ("segmentation", "loader_workers", -1),
        ("pointcloud", "points", 0),
        ("pointcloud", "emd_points", 0),
        ("pointcloud", "loader_workers", -1),
        ("language", "dropout", 2.0),
        ("language", "vocab_size", 900_000_000),
        ("language", "context", 900_000_000),
    ],
)
def test_values_out_of_range_are_refused(task: str, name: str, value: Any):
    recipe = RECIPES[task, dict(SMALL)[task]]
    with pytest.raises(UserError, match=f"{name}={value}: give a number from"):
        replace(recipe, **{name: value})
