"""Paths that a user types with ~, and numbers that JSON does not have."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from core import UserError
from language.finetune_recipes import RECIPES as FINETUNE
from training.data import cached, data_root, from_home, paths_from_home
from training.folder import RunFolder
from training.progress import Stopwatch
from training.recipe import parse
from vision.recipes import RECIPES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_home_is_put_in_and_a_user_who_is_not_there_is_named(home: Path, monkeypatch: pytest.MonkeyPatch):
    user = f"~{os.environ.get('USER', 'root')}"
    wanted = {"~/run": home / "run", "~": home, "~/a/~b": home / "a/~b", user: Path(os.path.expanduser(user))}
    for typed, path in wanted.items():
        assert from_home(typed) == path and from_home(Path(typed)) == path
    assert from_home("a/~/b") == Path("a/~/b") and from_home("/x/~") == Path("/x/~")
    for typed in ("~nobodyhere", "~nobodyhere/run"):
        with pytest.raises(UserError, match=f"^{typed}: ~nobodyhere is no user here"):
            from_home(typed)
    monkeypatch.setenv("CO2_CACHE", "~nobodyhere/x")
    with pytest.raises(UserError, match="~nobodyhere is no user here"):
        cached("x", lambda folder: None)


def test_recipes_data_cache_and_commands_take_it(home: Path, monkeypatch: pytest.MonkeyPatch):
    assert parse(RECIPES, ["digits_small", "--out=~/run"]).out == home / "run"
    assert parse(RECIPES, ["digits_small", "--out", "~/run"]).folder == home / "run"
    found = parse(FINETUNE, ["prompts", "--model=~/m", "--data", "~/d", "--out=~/o"])
    assert (found.model, found.data, found.out) == (home / "m", home / "d", home / "o")
    monkeypatch.setenv("CO2_DATA", "~/data")
    monkeypatch.setenv("CO2_CACHE", "~/cache")
    assert data_root() == home / "data" and cached("x", lambda folder: None) == home / "cache" / "x"

    @dataclass(frozen=True)
    class Asked:
        out: Path
        plot: Path | None = None
        name: str = "~"

    assert paths_from_home(Asked(Path("~/a"), Path("~/b.png"))) == Asked(home / "a", home / "b.png")
    assert paths_from_home(Asked(Path("a"))) == Asked(Path("a"))
    (home / "cluster.json").write_text("[]")
    command = ["training.plan", "--cluster=~/cluster.json", "--model=gpt-125m", "--batch=8"]
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and f"{home}/cluster.json: no report of format 1" in done.stderr


def test_what_is_not_installed_is_one_line():
    """As after `pip install .`, which brings torch and numpy alone."""
    code = (
        "import importlib.util, runpy, sys; real = importlib.util.find_spec\n"
        "_, gone, target = sys.argv; sys.path.insert(0, '.'); sys.argv = [target, '--help']\n"
        "importlib.util.find_spec = lambda n, *a: None if n in gone.split(',') else real(n, *a)\n"
        "runpy.run_path(target, run_name='__main__') if target.endswith('.py') else "
        "runpy.run_module(target, run_name='__main__')\n"
    )
    for gone, target, extra in (
        ("tyro", "reproduce.py", "tasks"),
        ("tyro,tqdm", "vision.train", "tasks"),
        ("timm", "vision.train", "tasks"),
        ("transformers", "language.prepare", "language"),
        ("mmseg", "segmentation.train", "segmentation"),
    ):
        done = subprocess.run([sys.executable, "-c", code, gone, target], cwd=ROOT, capture_output=True, text=True)
        line = f"error: {gone.replace(',', ' and ')} not installed: run pip install -e '.[{extra}]' in the repository\n"
        assert (done.returncode, done.stderr) == (2, line), target


def test_metrics_are_json_where_a_number_is_not_finite(tmp_path: Path):
    from unittest.mock import MagicMock

    folder = RunFolder(tmp_path, 0, Stopwatch())
    folder.writer = writer = MagicMock()
    folder._metrics = open(tmp_path / "metrics.jsonl", "w", buffering=1)  # noqa: SIM115
    folder.log(3, {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 1.5})
    folder._metrics.close()

    def refuse(name: str) -> None:
        raise ValueError(name)

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert [line[key] for key in "abcd"] == [None, None, None, 1.5] and line["step"] == 3
    assert writer.add_scalar.call_count == 4, "TensorBoard has them as they are"
