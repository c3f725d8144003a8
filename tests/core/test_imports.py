"""core imports torch and nothing else; inside it, imports are relative and make no circle."""

import ast
import subprocess
import sys
from pathlib import Path

import core

ROOT = Path(core.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
OUTSIDE = {"integrations/mmengine.py": {"mmengine"}}  # imported when used, as these are
OUTSIDE |= {f"triton/{name}.py": {"triton"} for name in ("boundary", "codec", "shared", "where")}


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(level, module) of every import in a file: level 0 is absolute."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.level, node.module))
        elif isinstance(node, ast.ImportFrom):
            found += [(node.level, alias.name) for alias in node.names]
    return found


def file_of(importer: Path, level: int, module: str) -> Path:
    """The file of core that a relative import means."""
    base = importer.parents[level - 1].joinpath(*module.split("."))
    return base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"


def test_only_torch_is_imported_from_outside():
    for path in FILES:
        outside = {module.partition(".")[0] for level, module in imports_of(path) if level == 0}
        allowed = {"torch"} | set(sys.stdlib_module_names) | OUTSIDE.get(str(path.relative_to(ROOT)), set())
        assert outside <= allowed, f"{path.name} imports {', '.join(outside - allowed)}"


def test_imports_make_no_circle():
    """In every order in which files can be imported one by one, none needs a later one."""
    needs = {
        path: {file_of(path, level, module) for level, module in imports_of(path) if level} - {path} for path in FILES
    }
    for path, wanted in needs.items():
        assert all(file.exists() for file in wanted), path
    while ready := [path for path, wanted in needs.items() if not wanted & needs.keys()]:
        for path in ready:
            del needs[path]
    assert not needs, f"a circle among {', '.join(p.name for p in needs)}"


HARNESS = {"tyro", "tqdm", "tensorboard", "timm", "mmengine", "training"}
FRESH = """
import sys
import torch, torch.distributed.tensor  # torch.hub takes tqdm where it is installed
before = set(sys.modules)
import core
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def test_a_fresh_import_loads_nothing_of_the_harness():
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    assert "core" in run.stdout.split() and not HARNESS & set(run.stdout.split())
