"""The folder of a module's runs, which several of its tests look at; the package as it is built."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import ROOT

NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results", "runs", "site")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` makes of a copy of the repository: an sdist, and the wheel that was built from it."""
    copy = tmp_path_factory.mktemp("copy") / "repository"
    shutil.copytree(ROOT, copy, ignore=NOT_COPIED)
    build = [sys.executable, "-m", "build", "--no-isolation"]
    subprocess.run(build, cwd=copy, check=True, capture_output=True, timeout=120)
    return copy / "dist"
