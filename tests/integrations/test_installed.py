"""The integrations as the installed package has them, where a module and the library that it imports share a name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.integrations.ranks import ranks

NAMES = {"accelerate": "CO2Training", "lightning": "CO2Strategy", "transformers": "CO2Callback"}


def installed(rank: int, workers: int, folder: str) -> dict[str, list[str]]:
    """Of each class under co2_training what it derives from."""
    sys.path.insert(0, folder)
    modules = {name: importlib.import_module(f"co2_training.integrations.{name}") for name in NAMES}
    assert all(sys.modules[name] is not modules[name] for name in NAMES)
    return {name: [base.__module__ for base in getattr(modules[name], NAMES[name]).__mro__] for name in NAMES}


@pytest.mark.slow
def test_a_module_imports_the_library_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "co2_training").symlink_to(ROOT / "core")
    (bases,) = ranks(installed, 1, str(tmp_path))
    assert "co2_training.co2" in bases["accelerate"]
    assert "lightning.pytorch.strategies.ddp" in bases["lightning"]
    assert "transformers.trainer_callback" in bases["transformers"]
