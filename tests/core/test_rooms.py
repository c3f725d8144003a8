"""Who may import whom, read from the source: the root of core knows no room, and core imports torch alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import PACKAGES, ROOT, TASKS, file_of, files, imports, needed, room_of

ABOVE_ROOMS = ("core.assembly", "core.methods", "core.integrations", "core.doctor", "core.__init__")
ROOMS = {room_of(file) for file in files() if room_of(file).startswith("core.")} - set(ABOVE_ROOMS)
CORE = {"core", *ROOMS, *ABOVE_ROOMS}
TRAINING = {"training", "training.elastic", "training.layouts"}

ARROWS: dict[str, set[str]] = {
    "core": set(),
    "core.adaptive": {"core"},
    "core.checkpoints": {"core", "core.robust"},  # which knows where a worker is that does not come to save()
    # newcomers get what is saved
    "core.elastic": {"core", "core.adaptive", "core.assembly", "core.checkpoints", "core.robust", "core.testing"},
    "core.lgreco": {"core", "core.wires"},
    "core.robust": {"core"},
    # settings say when a mean is merged
    "core.sharded": {"core", "core.adaptive", "core.assembly", "core.checkpoints"},
    "core.testing": {"core"},
    "core.triton": {"core", "core.adaptive", "core.wires"},  # whose passes and formats it knows as kernels
    "core.wires": {"core"},
    "core.assembly": {"core", *ROOMS},  # the one room that puts others together
    "core.methods": {"core", *ROOMS, "core.assembly"},
    "core.__init__": {"core", *ROOMS, "core.methods"},
    "core.integrations": CORE - {"core.doctor"},
    "core.doctor": CORE - {"core.integrations"},  # nothing imports it
    "training": {*CORE, *TRAINING},
    "training.elastic": {*CORE, "training"},
    "training.layouts": {*CORE, "training"},
    "training.plan": {*CORE, *TRAINING},
    **{task: {*CORE, *TRAINING} for task in TASKS},
    "bench": {*CORE, *TRAINING, "training.plan", *TASKS, "results"},
    "results": {*CORE, *TRAINING, "bench"},
}
"""Room or package -> those that its files may import."""


def test_every_room_and_package_has_a_row():
    assert {room_of(file) for file in files()} - ARROWS.keys() == set()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {
        path.parent.name for path in ROOT.glob("*/train.py")
    }
    assert packages - {"tests"} <= set(PACKAGES)


@pytest.mark.parametrize("room", ARROWS)
def test_imports_run_along_the_arrows(room: str):
    others = {file: needed(file) for file in files() if room_of(file) == room}
    wrong = [
        f"{file} imports {other}"
        for file, wanted in others.items()
        for other in sorted(wanted)
        if room_of(other) not in ARROWS[room] | {room}
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_make_no_circle():
    """In the whole project. What is imported inside a function, or for a type checker alone, counts: a reader follows
    it, too."""
    wanted = {file: needed(file) for file in files()}
    circles = {file: others for file in wanted if file in (others := reached(wanted, file))}
    wrong = [f"{file} needs {', '.join(map(str, sorted(wanted[file] & circles.keys())))}" for file in circles]
    assert not wrong, "\n".join(wrong)


def test_the_root_loads_nothing_by_its_name():
    """Which would be an arrow that the two tests above do not see."""
    assert not [path.name for path in (ROOT / "core").glob("*.py") if "importlib" in path.read_text()]


def reached(wanted: dict[Path, set[Path]], start: Path) -> set[Path]:
    """What a file needs, and what these need, and so on."""
    found: set[Path] = set()
    ahead = [start]
    while ahead:
        new = wanted[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_a_circle_is_found():
    a, b, c, d = map(Path, "abcd")
    wanted = {a: {b}, b: {c}, c: {b}, d: set[Path]()}
    assert [file for file in wanted if file in reached(wanted, file)] == [b, c]


def test_what_the_imports_mean():
    """A function of a package's file, a module of a package, and what `core` hands on are told apart."""
    named = {
        "core.flat.copy": "core/flat.py",
        "core.outer": "core/outer.py",
        "core.CO2Config": "core/__init__.py",
        "core.wires.formats.Wire": "core/wires/formats.py",
        "torch.nn": None,
    }
    assert {name: path and str(path) for name in named if (path := file_of(name)) or True} == named
    rooms = {"core/flight.py": "core", "core/__init__.py": "core.__init__", "core/wires/formats.py": "core.wires"}
    assert {file: room_of(Path(file)) for file in rooms} == rooms
    assert "core.flat.copy" in imports(Path("core/outer.py")), "relative imports are made absolute"


FILES = [file for file in files() if file.parts[0] == "core"]
OUTSIDE = {
    "checkpoints/stored.py": {"numpy"},
    "integrations/mmengine.py": {"mmengine"},
}  # imported when used, as these are
OUTSIDE |= {f"integrations/{name}.py": {name} for name in ("accelerate", "lightning", "transformers")}
OUTSIDE |= {f"triton/{name}.py": {"triton"} for name in ("boundary", "codec")}


def test_only_torch_is_imported_from_outside():
    for file in FILES:
        outside = {name.partition(".")[0] for name in imports(file)} - {"core"}
        allowed = {"torch"} | set(sys.stdlib_module_names) | OUTSIDE.get(str(file.relative_to("core")), set())
        assert outside <= allowed, f"{file} imports {', '.join(outside - allowed)}"


def test_imports_inside_core_are_relative():
    for file in FILES:
        absolute = re.findall(r"^\s*(?:from|import) core\b.*", (ROOT / file).read_text(), re.MULTILINE)
        assert not absolute, f"{file}: {absolute}"


HARNESS = {"tyro", "tqdm", "tensorboard", "timm", "mmengine", "training", "accelerate", "lightning", "transformers"}
FRESH = """
import sys
import torch, torch.distributed.tensor  # torch.hub takes tqdm where it is installed
before = set(sys.modules)
import core
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def test_a_fresh_import_loads_nothing_of_the_harness():
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert "core" in run.stdout.split() and not HARNESS & set(run.stdout.split())
