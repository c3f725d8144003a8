"""Every recipe of every task: the memory that its dry run prints, and what is said where its data is missing."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("task", "name"),
    [(t, "digits_small") for t in ("vision", "segmentation")]
    + [("pointcloud", "surfaces_small"), ("language", "roberta_pydoc_small")],
)
def test_a_train_scripts_dry_run_estimates_the_memory(task: str, name: str, monkeypatch, capsys):
    for key, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", ["train", name, "--dry_run"])
    importlib.import_module(f"{task}.train").main()
    printed = capsys.readouterr().out
    assert f'"name": "{name}"' in printed and " 4 workers of " in printed and "activations" in printed
