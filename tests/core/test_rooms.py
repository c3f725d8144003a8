"""Read from the source: who may import whom (core's base knows nothing above it, and core imports torch alone), and how
many lines a room may have."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.imports import PACKAGES, ROOT, TASKS, file_of, files, imports, needed, room_of

CORE = {room_of(file) for file in files() if file.parts[0] == "core"}
TRAINING = {"training", *(f"training.{room}" for room in ("start", "data", "layouts", "folder", "loop", "weights"))}

TOOLS = {"core.compression", "core.guards"}
ARROWS: dict[str, set[str]] = {
    # the root, from its base to co2.py
    "core": {"core.shares"},
    "core.shares": {"core", "core.compression"},  # the outer step's kernel
    "core.config": {"core", "core.compression"},  # where a format is made
    "core.co2": {"core", "core.config", "core.shares"},
    "core.__init__": CORE - {"core.elastic", "core.integrations", "core.doctor", "core.testing"},
    # the folders
    "core.compression": {"core"},
    "core.guards": {"core"},
    "core.testing": {"core"},
    "core.checkpoint": {"core", "core.guards"},
    "core.baselines": {"core", "core.co2", "core.config", "core.shares", *TOOLS},
    "core.elastic": {"core", "core.checkpoint", "core.co2", "core.config", "core.shares", *TOOLS},
    "core.integrations": CORE - {"core.doctor"},
    "core.doctor": CORE - {"core.integrations"},  # the planner alone imports it
    # training, from how processes start to the loop and what is made of its weights
    "training.start": CORE,
    "training.data": {*CORE, "training.start"},
    "training": {*CORE, "training.start", "training.data", "training.folder", "training.loop"},  # elastic.py: two
    "training.layouts": {*CORE, "training"},
    "training.folder": {*CORE, "training", "training.start"},
    "training.loop": {*CORE, *TRAINING - {"training.weights"}},
    "training.weights": {*CORE, *TRAINING},
    "training.plan": {*CORE, "training", "training.start", "training.data"},
    **{task: {*CORE, *TRAINING} for task in TASKS},
    "bench": {*CORE, *TRAINING, "training.plan", *TASKS, "results"},
    "results": {*CORE, *TRAINING, "training.plan", *TASKS, "bench"},
}
"""Room or package -> those that its files may import."""


def wanted() -> dict[Path, set[Path]]:
    """What each file imports, along the arrows."""
    return {file: needed(file) for file in files()}


def test_every_room_and_package_has_a_row():
    assert {room_of(file) for file in files()} - ARROWS.keys() == set()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {
        path.parent.name for path in ROOT.glob("*/train.py")
    }
    assert packages - {"tests"} <= set(PACKAGES)


@pytest.mark.parametrize("room", ARROWS)
def test_imports_run_along_the_arrows(room: str):
    others = {file: needs for file, needs in wanted().items() if room_of(file) == room}
    wrong = [
        f"{file} imports {other}"
        for file, needs in others.items()
        for other in sorted(needs)
        if room_of(other) not in ARROWS[room] | {room}
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_make_no_circle():
    """In the whole project. What is imported inside a function, or for a type checker alone, counts: a reader follows
    it, too."""
    needs = wanted()
    circles = {file: others for file in needs if file in (others := reached(needs, file))}
    wrong = [f"{file} needs {', '.join(map(str, sorted(needs[file] & circles.keys())))}" for file in circles]
    assert not wrong, "\n".join(wrong)


def test_the_root_has_few_files():
    """Who opens core sees the algorithm and its collectives."""
    assert len({path.name for path in (ROOT / "core").glob("*.py")} - {"__init__.py"}) <= 14


def test_the_root_loads_nothing_by_its_name():
    """Which would be an arrow that the two tests above do not see."""
    loads = re.compile("import_module|__import__")
    assert not [path.name for path in (ROOT / "core").glob("*.py") if loads.search(path.read_text())]


def reached(wanted: dict[Path, set[Path]], start: Path) -> set[Path]:
    """What a file needs, and what these need, and so on."""
    found: set[Path] = set()
    ahead = [start]
    while ahead:
        new = wanted[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_what_the_imports_mean():
    """A function of a package's file, a module of a package, and what `core` hands on are told apart."""
    named = {
        "core.buckets.copy": "core/buckets.py",
        "core.outer": "core/outer.py",
        "core.CO2Config": "core/__init__.py",
        "core.compression.formats.Wire": "core/compression/formats.py",
        "torch.nn": None,
    }
    assert {name: path and str(path) for name in named if (path := file_of(name)) or True} == named
    rooms = {"core/comm.py": "core", "core/__init__.py": "core.__init__", "core/co2.py": "core.co2"}
    rooms["core/compression/formats.py"] = "core.compression"
    assert {file: room_of(Path(file)) for file in rooms} == rooms
    assert "core.buckets.views" in imports(Path("core/outer.py")), "relative imports are made absolute"


FILES = [file for file in files() if file.parts[0] == "core"]
OUTSIDE = {"checkpoint/stored.py": {"numpy"}}  # imported when used
OUTSIDE |= {f"integrations/{name}.py": {name} for name in ("accelerate", "lightning", "mmengine", "transformers")}
OUTSIDE |= {name: {"triton"} for name in ("compression/outer_kernels.py", "compression/kernels.py")}


def test_only_torch_is_imported_from_outside():
    for file in FILES:
        outside = {name.partition(".")[0] for name in imports(file)} - {"core"}
        allowed = {"torch"} | set(sys.stdlib_module_names) | OUTSIDE.get(str(file.relative_to("core")), set())
        assert outside <= allowed, f"{file} imports {', '.join(outside - allowed)}"


def test_imports_inside_core_are_relative():
    for file in FILES:
        absolute = re.findall(r"^\s*(?:from|import) core\b.*", (ROOT / file).read_text(), re.MULTILINE)
        assert not absolute, f"{file}: {absolute}"


MOST_PRIVATE = 20  # torch's and accelerate's, which have no public name


def private_of_others(tree: ast.AST) -> list[str]:
    """The accesses to an underscore name of another object than self, cls or super()."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and re.match("_(?!_)", node.attr)]
    return [text for node in found if (text := ast.unparse(node)) and not re.match(r"(self|cls|super\(\))\._", text)]


def test_core_reads_few_private_names_of_other_objects():
    mixed = ast.parse("self._a + b._c + self.d._e + cls._f + super()._g + h.__doc__")
    assert {*private_of_others(mixed)} == {"b._c", "self.d._e"}
    found = [f"{file}: {text}" for file in FILES for text in private_of_others(ast.parse((ROOT / file).read_text()))]
    assert len(found) <= MOST_PRIVATE, "\n".join(found)


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


BUDGETS = {
    "core": 5470,  # the files of the folder itself
    "core/baselines": 955,
    "core/checkpoint": 1025,
    "core/compression": 1790,
    "core/doctor": 590,
    "core/elastic": 1900,  # with the launcher, which was in training, and the loop for own scripts
    "core/guards": 1700,
    "core/integrations": 1045,
    "core/testing": 330,
    "training": 6815,
    "language": 4745,
    "pointcloud": 1065,
    "segmentation": 1415,
    "vision": 1310,
    "bench": 4180,
    "results": 1350,
    "examples": 530,
    "tests": 32150,
}
"""Room -> the lines that its Python files may have. Cutting lowers a number; only a reason raises one."""


def lines_of_rooms() -> dict[str, int]:
    """Counts the lines of each room. core's files, core's folders and the other folders are rooms."""
    lines = dict.fromkeys(BUDGETS, 0)
    for path in (path for top in (*PACKAGES, "examples", "tests") for path in (ROOT / top).rglob("*.py")):
        folders = path.relative_to(ROOT).parts[:-1]
        room = "/".join(folders[: 2 if folders[0] == "core" else 1])
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
    return lines


def test_a_room_keeps_its_budget():
    over = {room: lines for room, lines in lines_of_rooms().items() if lines > BUDGETS.get(room, 0)}
    found = "\n".join(f"{room} has {lines} lines, its budget is {BUDGETS.get(room, 0)}" for room, lines in over.items())
    assert not over, f"{found}\nCut, or raise the number in BUDGETS and give the reason in the commit message."
