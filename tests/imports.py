"""Reads who imports whom from the source, for the tests of the rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("language", "pointcloud", "segmentation", "vision")
PACKAGES = ("core", "training", *TASKS, "bench", "results")


@cache
def files() -> list[Path]:
    """The project's modules, as paths below its root."""
    return sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """The absolute names that a file imports, also inside functions and for a type checker: core.buckets.copy."""
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = list(file.parts[: -node.level]) if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def file_of(name: str) -> Path | None:
    """The project's file that defines a name, as core.buckets.copy; None: it comes from outside."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1) if parts[0] in PACKAGES else ():
        for path in (Path(*parts[:end]).with_suffix(".py"), Path(*parts[:end], "__init__.py")):
            if (ROOT / path).is_file():
                return path
    return None


@cache
def needed(file: Path) -> set[Path]:
    """The project's other files that a file imports."""
    return {other for name in imports(file) if (other := file_of(name))} - {file}


UPPER = ("shares", "config", "co2")
"""The modules of core that know its packages, or each other. All others are its base."""


def room_of(file: Path) -> str:
    """core for its base; core.config or such; core.__init__, which hands on names; core.compression, training.plan or
    such; else the package."""
    if file.parts[0] == "core" and len(file.parts) == 2 and file.stem in ("__init__", *UPPER):
        return f"core.{file.stem}"
    has_rooms = file.parts[0] in ("core", "training") and len(file.parts) > 2
    return ".".join(file.parts[: 2 if has_rooms else 1])
