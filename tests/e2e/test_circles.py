"""No module of the project imports itself by a detour: type-only imports and those inside functions count as well."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "training", "vision", "segmentation", "pointcloud", "language", "bench", "results")


def modules(root: Path, files: list[str]) -> dict[str, Path]:
    """Dotted name -> file."""
    named = {file.removesuffix(".py").replace("/", ".").removesuffix(".__init__"): root / file for file in files}
    return dict(sorted(named.items()))


def imported(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The project's modules that this one names in an import.

    A package counts where one of its names is taken, not where it is only on the way to a module of it.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield from (each for each in [inner if inner in known else source] if each in known)


def circles(known: dict[str, Path]) -> list[list[str]]:
    """The groups of modules of which each leads to each other by imports (Tarjan's strongly connected components)."""
    arrows = {name: sorted(set(imported(name, path, known)) - {name}) for name, path in known.items()}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in arrows[name]:
            if other not in number:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            found.extend([sorted(group)] if len(group) > 1 else [])

    for name in arrows:
        if name not in number:
            visit(name)
    return found


def test_the_project_has_no_import_circle():
    command = ["git", "ls-files", *(f"{package}/*.py" for package in PACKAGES)]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = modules(ROOT, [file for file in files if (ROOT / file).exists()])
    assert len(known) > 150 and not (found := circles(known)), found


def test_a_circle_is_found_whatever_it_is_made_of(tmp_path: Path):
    """Three modules: by a type-only import, by one inside a function, and by a relative one through a package."""
    texts = {
        "a/__init__.py": "from .x import one\n",
        "a/x.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import y\n",
        "a/y.py": "def f():\n    import a.z\n",
        "a/z.py": "from . import x\n",
        "a/alone.py": "from a import y\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert circles(modules(tmp_path, list(texts))) == [["a.x", "a.y", "a.z"]]
