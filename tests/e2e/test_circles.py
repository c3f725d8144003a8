"""No module of the project imports itself by a detour: type-only imports and those inside functions count as well."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests import imports


def test_the_project_has_no_import_circle():
    graph = {file: imports.needed(file) for file in imports.files()}
    assert len(graph) > 150
    TopologicalSorter(graph).prepare()  # its error names the modules of a circle


def test_a_circle_is_found_whatever_it_is_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three modules: by a type-only import, by one inside a function, and by a relative one through a package."""
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    monkeypatch.setattr(imports, "PACKAGES", ("a",))
    texts = {
        "a/__init__.py": "from .x import one\n",
        "a/x.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import y\n",
        "a/y.py": "def f():\n    import a.z\n",
        "a/z.py": "from . import x\n",
        "a/alone.py": "from a import y\n",
    }
    (tmp_path / "a").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CycleError) as found:
        TopologicalSorter({Path(name): imports.needed(Path(name)) for name in texts}).prepare()
    assert {*found.value.args[1]} == {Path(f"a/{name}.py") for name in "xyz"}
