"""The files that describe the project agree with each other and with the tree; no module imports itself."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import training
from tests.imports import ROOT
from training import prepared

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
APART = {"peers", "triton"}  # extras that `make setup` leaves out


def exact_pins(lines: list[str]) -> dict[str, str]:
    """Canonical name -> version of requirement lines, each of which must be `name==version`."""
    pins = {}
    for line in lines:
        name, version = line.split("==")
        pins[canonicalize_name(name)] = version
    assert len(pins) == len(lines), "a package is pinned twice"
    return pins


def constraints(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return exact_pins([line for line in lines if line and not line.startswith("#")])


def reached(*extras: str) -> set[str]:
    """These extras and those that they name in their turn."""
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    named = [Requirement(line).extras for line in lines if Requirement(line).name == PROJECT["name"]]
    return {*extras}.union(*(reached(*more) for more in named))


def direct_requirements(*extras: str) -> list[Requirement]:
    """What core needs, and these extras with it."""
    lines = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    requirements = [Requirement(line) for line in PROJECT["dependencies"] + lines]
    return [requirement for requirement in requirements if requirement.name != PROJECT["name"]]


SETUP = direct_requirements(*sorted(reached("all")))  # what `make setup` installs


def test_pins_agree_in_all_files_and_carry_no_local_version():
    pinned = constraints()
    (*_, last) = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert last == {"pip": ["--constraint constraints.txt", "--editable .[all]"]}, "what `make setup` installs"
    assert {canonicalize_name(requirement.name) for requirement in SETUP} <= pinned.keys()
    assert [name for name, version in constraints().items() if "+" in version] == []
    # It adds to constraints.txt and contradicts it nowhere.
    pinned = constraints("bench/peers/constraints.txt")
    assert pinned.keys() & constraints().keys() == set()
    pinned |= constraints()
    for requirement in direct_requirements("peers"):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)])
    # torch 2.13.0's wheel on PyPI wants this version and no other; a new torch wants another.
    pinned = constraints()
    assert (pinned["torch"], pinned["triton"]) == ("2.13.0", "3.7.1")
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"]["triton"])
    assert requirement.specifier.contains(pinned["triton"])


@pytest.mark.parametrize("requirement", SETUP, ids=str)
def test_each_requirement_has_a_lower_bound_and_a_pin_above_it(requirement: Requirement):
    """The one table of lower bounds: each package stands in pyproject.toml once."""
    (bound,) = requirement.specifier
    assert bound.operator == ">=" and bound.contains(constraints()[canonicalize_name(requirement.name)])
    assert [other.name for other in SETUP].count(requirement.name) == 1
    if requirement.name not in ("torch", "numpy"):  # which make test-lowest tries
        assert f"{constraints()[canonicalize_name(requirement.name)]}.".startswith(f"{bound.version}.")


def test_a_package_is_refused_beside_its_fork(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    found = ["mmcv", "onedl-mmcv", "onedl-mmengine"]
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [name for other in found if other == name])
    with pytest.raises(SystemExit):
        training.refuse_both({"mmcv": "onedl-mmcv", "mmengine": "onedl-mmengine"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: mmcv installed together with onedl-mmcv, and they overwrite each other's files: run")
    found.remove("mmcv")
    training.refuse_both({"mmcv": "onedl-mmcv", "mmengine": "onedl-mmengine"})


def test_core_needs_torch_and_numpy_alone_and_is_tried_with_the_lowest():
    assert [requirement.name for requirement in direct_requirements()] == ["torch", "numpy"]
    lowest = " ".join(PROJECT["dependencies"]).replace(">=", "==")
    assert f" {lowest} " in make("--dry-run", "test-lowest")


def make(*arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]  # which it prints where another make runs this test
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_all_extras_and_packages_are_installed_and_the_version_is_one_plain_literal():
    assert reached("all") == set(PROJECT["optional-dependencies"]) - APART
    folders = {path.parent.relative_to(ROOT / "core") for path in (ROOT / "core").rglob("*.py")}
    names = sorted(".".join(("co2_training", *folder.parts)) for folder in folders)
    assert PYPROJECT["tool"]["setuptools"]["packages"] == names
    # setuptools reads it from the source; an expression would make it import torch.
    source = (ROOT / "core" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', source, re.MULTILINE)
    assert version == importlib.import_module("core").__version__


def test_make_lists_each_target_in_its_group_and_ci_runs_them():
    groups = {lines[0]: lines[1:] for lines in (group.splitlines() for group in make().strip().split("\n\n"))}
    assert [*groups] == ["Set-up", "Try", "Test", "Check", "Documentation", "Measure"]
    listed = [line.split()[1] for lines in groups.values() for line in lines]
    (phony,) = re.findall(r"^\.PHONY: help (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == phony.split()
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    targets = ("lint", "test", "test-examples", "test-triton")
    assert script.read_text().splitlines()[-4:] == [f"make {name}" for name in targets]
    (job,) = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())["jobs"].values()
    targets = job["strategy"]["matrix"]["target"]
    assert sorted(targets) == ["docs", "lint", "test", "test-examples", "test-triton", "wheel"]
    for target in targets:
        assert make("--dry-run", target)
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make setup", "make ${{ matrix.target }}"]
    subprocess.run([sys.executable, "-m", "pre_commit", "validate-config"], cwd=ROOT, check=True)
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].removesuffix(" --force-exclude") for hook in local["hooks"]]
    checks = make("--dry-run", "lint").splitlines()[-3:]
    assert entries == [check.removesuffix(" .").removesuffix(" --check") for check in checks]


SLOW_TO_IMPORT = {
    "torchvision", "timm", "mmseg", "mmengine", "mmcv", "transformers", "tokenizers", "tensorboard", "scipy", "sklearn",
    "matplotlib", "cv2", "PIL", "sympy", "torch.distributed.tensor", "torch._dynamo", "torch.utils.tensorboard",
}  # fmt: skip


HELP = """
import contextlib, io, runpy, sys
slow = set(sys.argv[1].split())
for where, *options in (
    ["vision.train", "imagenet_vit_base"],
    ["segmentation.train", "ade20k_resnet50"],
    ["pointcloud.train", "shapenet_mae"],
    ["language.train", "gpt2_small_owt"],
    ["reproduce"],
):
    sys.argv, said = [where, *options, "--help"], io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_module(where, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        print(where, stop.code, said.getvalue().startswith("usage: "), "torch" in sys.modules, slow & set(sys.modules))
from training.prepared import prepare_torchvision
prepare_torchvision(), prepare_torchvision()
import torch, torchvision
from torchvision.transforms import v2
resized, scores = v2.Resize(8)(torch.zeros(3, 16, 16)), torchvision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32))
print("torchvision", tuple(resized.shape), tuple(scores.shape))
"""


@pytest.mark.slow
def test_help_comes_before_what_takes_seconds_to_import_and_torchvision_can_be_imported():
    """torch alone comes before it. One process asks all scripts; then it prepares torchvision, twice, and uses it."""
    command = [sys.executable, "-c", HELP, " ".join(SLOW_TO_IMPORT)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    scripts = [f"{task}.train" for task in ("vision", "segmentation", "pointcloud", "language")] + ["reproduce"]
    expected = [*(f"{script} 0 True True set()" for script in scripts), "torchvision (3, 8, 8) (1, 1000)"]
    assert result.stdout.splitlines() == expected, result.stderr


@pytest.mark.parametrize("accelerator", ["cuda", "hip"])
def test_prepare_torchvision_leaves_a_gpu_build_alone(monkeypatch: pytest.MonkeyPatch, accelerator: str):
    def refuse(name: str):
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr(torch.version, accelerator, "12.8")
    monkeypatch.setattr(prepared.importlib, "import_module", refuse)
    prepared.prepare_torchvision()
