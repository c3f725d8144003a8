"""Every script of examples/ runs under torchrun as its first lines say, in seconds; `make test-examples` runs all."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
LINES = 60  # most of an example
PREPARED = f"""
import runpy, sys
sys.path.append({str(ROOT)!r})
import training.prepared
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Example(NamedTuple):
    """How a script is run, and what it prints."""

    workers: int = 2
    accuracy: float = 0.85
    """On held-out samples: at least this, in its last line."""
    torchvision: bool = False
    """Its library imports it, which training.prepared makes possible beside a CPU build of torch."""
    resumes: bool = False
    """Given a folder, it goes on from the checkpoints there, bit for bit."""


EXAMPLES = {
    "accelerate_loop": Example(),
    "hf_trainer": Example(accuracy=0.15, torchvision=True),
    "lightning_fit": Example(torchvision=True),
    "own_loop": Example(resumes=True),
    "attach": Example(),
    "fsdp2": Example(workers=4, resumes=True),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH where `co2_training` is not installed: there it is this repository's core."""
    if importlib.util.find_spec("co2_training"):
        return ""
    folder = tmp_path_factory.mktemp("package")
    (folder / "co2_training").symlink_to(ROOT / "core")
    return str(folder)


def test_every_example_has_a_row_and_is_short():
    assert {path.stem for path in FOLDER.glob("*.py")} == EXAMPLES.keys()
    for name, example in EXAMPLES.items():
        text = (FOLDER / f"{name}.py").read_text()
        assert text.count("\n") <= LINES, f"{name}.py is longer than {LINES} lines"
        assert f"--nproc-per-node {example.workers} examples/{name}.py" in text.split('"""')[1]


def run(name: str, package: str, folder: Path) -> str:
    """Its last line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(EXAMPLES[name].workers)]
    if EXAMPLES[name].torchvision:
        first = folder / "prepared.py"
        first.write_text(PREPARED)
        command.append(str(first))
    command.append(str(FOLDER / f"{name}.py"))
    command += [str(folder / "checkpoints")] if EXAMPLES[name].resumes else []
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def check(name: str, line: str) -> None:
    found = re.match(r"accuracy (0\.\d+|1\.0+)", line)
    assert found and float(found[1]) >= EXAMPLES[name].accuracy, line


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "own_loop"])  # that one: below
def test_it_trains(name: str, package: str, tmp_path: Path):
    check(name, run(name, package, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.resumes])
def test_it_trains_and_goes_on_from_its_checkpoint(name: str, package: str, tmp_path: Path):
    """A run whose last checkpoint is missing, as if it had been killed before, ends as it would have."""
    line = run(name, package, tmp_path)
    check(name, line)
    *before, last = sorted((tmp_path / "checkpoints").iterdir())
    assert before
    shutil.rmtree(last)
    assert run(name, package, tmp_path) == line and last.exists()
