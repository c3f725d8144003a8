"""Every script of examples/ runs under torchrun on the installed wheel, in seconds; `make test-examples` runs all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.imports import ROOT

FOLDER = ROOT / "examples"
LINES = 110  # most of an example
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
    """Given a folder, it goes on from the checkpoints there, and prints where. Its averages arrive when the network is
    ready, so it does not repeat bit for bit."""
    options: str = "{folder}"
    """How a script that resumes is given its folder."""
    checkpoints: str = "step*"
    """The checkpoints in that folder."""
    needs: str = ""
    """A package that is not among the project's own, without which the script is skipped."""


EXAMPLES = {
    "accelerate_loop": Example(),
    "hf_trainer": Example(accuracy=0.15, torchvision=True, resumes=True, checkpoints="checkpoint-*"),
    "lightning_fit": Example(torchvision=True),
    "attach": Example(),
    "fsdp2": Example(workers=4, resumes=True),
    "torchtitan_llama": Example(workers=4, needs="torchtitan"),
    "nanogpt": Example(accuracy=0.35, resumes=True),
    "timm_train": Example(torchvision=True, resumes=True, options="--output {folder} --resume {folder}"),
}


@pytest.fixture(scope="module")
def package(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for PYTHONPATH that holds the installed wheel, so that no script imports the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = dist.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    found = "import co2_training; print(co2_training.__file__)"
    env = os.environ | {"PYTHONPATH": str(folder / "site")}
    where = subprocess.check_output([sys.executable, "-c", found], env=env, cwd=folder, text=True)
    assert where.startswith(str(folder / "site")), where
    return str(folder / "site")


def test_every_example_has_a_row_and_is_short():
    assert {path.stem for path in FOLDER.glob("*.py")} == EXAMPLES.keys()
    for name, example in EXAMPLES.items():
        text = (FOLDER / f"{name}.py").read_text()
        assert text.count("\n") <= LINES, f"{name}.py is longer than {LINES} lines"
        assert f"--nproc-per-node {example.workers} examples/{name}.py" in text.split('"""')[1]


def run(name: str, package: str, folder: Path) -> list[str]:
    """Its lines."""
    if EXAMPLES[name].needs:
        pytest.importorskip(EXAMPLES[name].needs, reason=f"{EXAMPLES[name].needs} is not installed")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(EXAMPLES[name].workers)]
    if EXAMPLES[name].torchvision:
        first = folder / "prepared.py"
        first.write_text(PREPARED)
        command.append(str(first))
    command.append(str(FOLDER / f"{name}.py"))
    command += EXAMPLES[name].options.format(folder=folder / "checkpoints").split() if EXAMPLES[name].resumes else []
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check(name: str, lines: list[str]) -> float:
    """The accuracy that the last line says."""
    found = re.match(r"accuracy (0\.\d+|1\.0+)", lines[-1])
    assert found and float(found[1]) >= EXAMPLES[name].accuracy, lines
    return float(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if not example.resumes])
def test_it_trains(name: str, package: str, tmp_path: Path):
    check(name, run(name, package, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.resumes])
def test_it_trains_and_goes_on_from_its_checkpoint(name: str, package: str, tmp_path: Path):
    """A run whose last checkpoint is missing, as if it had been killed before, ends as it would have."""
    lines = run(name, package, tmp_path)
    accuracy = check(name, lines)
    step = lambda path: int(re.sub(r"\D", "", path.name))  # noqa: E731
    *_, before, last = sorted((tmp_path / "checkpoints").glob(EXAMPLES[name].checkpoints), key=step)
    shutil.rmtree(last)
    again = run(name, package, tmp_path)
    assert last.exists()
    assert "resumed at step 0" in lines and f"resumed at step {step(before)}" in again
    assert abs(check(name, again) - accuracy) < 0.1
