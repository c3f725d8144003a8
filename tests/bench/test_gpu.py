"""bench.gpu, at small sizes on a CPU, and a report over several calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.measures import CHECKS, Scope, measured
from tests.scripts import run_script


def test_every_cost_is_measured_on_a_cpu_in_small_sizes():
    rows = [measured(name, Scope("cpu", tiny=True)) for name in CHECKS]
    assert len(rows) == 9 and all(row["state"] == "ok" and row["figures"] and row["says"] for row in rows)


def test_a_second_call_measures_what_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[str] = []

    def one(scope: Scope) -> dict[str, Any]:  # noqa: ARG001
        begun.append("one")
        return {"ms": 1.25, "kernels": 3}

    def broken(scope: Scope) -> dict[str, Any]:  # noqa: ARG001
        begun.append("broken")
        raise AssertionError("too slow")

    def called(*arguments: str) -> dict[str, Any]:
        """The command's rows by name."""
        with pytest.raises(SystemExit) as ended:
            run_script("bench.gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path), *arguments)
        assert ended.value.code == 1, "a measurement failed"
        return {row["name"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]}

    for name in list(CHECKS):
        monkeypatch.delitem(CHECKS, name)
    for name, run in {"one": one, "broken": broken}.items():
        monkeypatch.setitem(CHECKS, name, run)
    old = {"part": "correctness", "name": "gone", "state": "ok", "says": "equal", "commit": "abc"}
    (tmp_path / "gpu.json").write_text(json.dumps({"commit": "def", "device": "cpu", "torch": "1", "rows": [old]}))
    rows = called("--commit", "first")
    assert begun == ["one", "broken"] and rows["gone"]["commit"] == "abc"
    assert (rows["one"]["says"], rows["broken"]["state"]) == ("ms 1.25, kernels 3", "failed")
    called("--commit", "first")
    assert len(begun) == 2
    called("--commit", "second", "--checks", "one")
    called("--commit", "second", "--checks", "one")
    assert begun[2:] == ["one"] * 2, "what is named is measured again"
