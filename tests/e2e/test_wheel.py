"""The package that is built: one top-level name, which works beside torch and numpy alone, from any folder."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from core import __version__
from tests import documented
from tests.imports import ROOT

pytestmark = pytest.mark.slow  # `make test-examples` runs it, and .ci/run that

INFO = f"co2_training-{__version__}.dist-info"
ABOUT = {f"{INFO}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "top_level.txt", "licenses/LICENSE")}

TYPED = """# pyright: strict, reportUnknownMemberType=false
from co2_training import CO2, CO2Config
def closes(co2: CO2) -> bool:
    return co2.step()
CO2Config(tau="48")
"""


def run(*command: str | Path, cwd: Path) -> str:
    ended = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def with_needs(name: str) -> set[str]:
    """The installed distribution and all that it needs."""
    needs = [Requirement(line) for line in distribution(name).requires or ()]
    needs = [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return {name}.union(*map(with_needs, needs))


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that holds the wheel, torch, numpy and what these two need."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in with_needs("torch") | with_needs("numpy"):
        tops = {Path(file).parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}
        for top in tops:
            (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    (wheel,) = dist.glob("*.whl")
    # with its dependencies: pip refuses where the wheel needs what is not there
    run(sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-index", wheel, cwd=folder)
    return folder / "bin/python"


def test_the_wheel_holds_core_and_nothing_else_and_the_sdist_what_it_is_built_from(dist: Path):
    (wheel,) = dist.glob("*.whl")
    core = {path.relative_to(ROOT / "core").as_posix() for path in (ROOT / "core").rglob("*.py")} | {"py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        assert {*archive.namelist()} == {f"co2_training/{path}" for path in core} | ABOUT
        assert archive.read(f"{INFO}/top_level.txt") == b"co2_training\n"
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {Path(name).parts[1] for name in archive.getnames() if "/" in name}
    made = {"PKG-INFO", "setup.cfg", "co2_training.egg-info"}
    assert inside - made == {"LICENSE", "README.md", "core", "pyproject.toml"}


def test_the_installed_package_starts_elastic_workers(python: Path, tmp_path: Path):
    (tmp_path / "elastic.py").write_text(documented.script("elastic.py").code)
    said = run(python, "-m", "co2_training.elastic.launch", "--nproc-per-node=2", "elastic.py", cwd=tmp_path)
    assert said.count("ended at step 200 among 2") == 2


def test_a_type_checker_reads_its_types(python: Path, tmp_path: Path):
    """A wrong type is an error; without py.typed the import itself would be one."""
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", str(python), "typed.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout
    assert '"Literal[\'48\']" is not assignable to "int' in said and "\n1 error" in said, said


def test_the_repositorys_environment_has_core_under_both_names(tmp_path: Path):
    """co2_training from any folder, core from the root alone: no other top-level name is installed."""
    find = "from importlib.util import find_spec; print(find_spec('core'), find_spec('co2_training').origin)"
    none, origin = run(sys.executable, "-I", "-c", find, cwd=tmp_path).split()
    assert none == "None" and origin.endswith("/core/__init__.py")
