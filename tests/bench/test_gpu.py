"""bench.gpu, at small sizes on a CPU, and a report over several calls."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import measures
from bench.gpu.measures import CHECKS, Scope, measured
from tests.scripts import Mistakes, run_script


@pytest.mark.parametrize("size", [1, 2048**2, 2048**2 + 5, 2 * 2048**2 + 2048 + 3])
def test_the_model_has_the_size_asked_for(size):
    assert sum(p.numel() for p in measures.model(size, "cpu")) == size


def called(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status of the command, and its rows by name."""
    with pytest.raises(SystemExit) as ended:
        run_script("bench.gpu", "--device", "cpu", "--tiny", "--out", str(folder), *arguments)
    rows = json.loads((folder / "gpu.json").read_text())["rows"]
    return int(ended.value.code or 0), {row["name"]: row for row in rows}


def test_every_cost_is_measured_on_a_cpu_in_small_sizes():
    rows = [measured(name, Scope("cpu", tiny=True)) for name in CHECKS]
    assert len(rows) == 9 and all(row["state"] == "ok" and row["figures"] and row["says"] for row in rows)


def test_a_second_call_measures_what_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    begun: list[str] = []

    def one(scope: Scope, name: str = "one") -> dict[str, Any]:  # noqa: ARG001
        begun.append(name)
        return {"ms": 1.25, "kernels": 3}

    def broken(scope: Scope) -> dict[str, Any]:  # noqa: ARG001
        begun.append("broken")
        raise AssertionError("too | slow")

    for name in list(CHECKS):
        monkeypatch.delitem(CHECKS, name)
    for name, run in {"one": one, "broken": broken}.items():
        monkeypatch.setitem(CHECKS, name, run)
    old = {"part": "correctness", "name": "gone", "state": "ok", "says": "equal", "commit": "abc"}
    (tmp_path / "gpu.json").write_text(json.dumps({"commit": "def", "device": "cpu", "torch": "1", "rows": [old]}))
    status, rows = called(tmp_path, "--commit", "first")
    assert status == 1 and begun == ["one", "broken"] and rows["gone"]["commit"] == "abc"
    assert (rows["one"]["says"], rows["broken"]["state"]) == ("ms 1.25, kernels 3", "failed")
    assert "Traceback" in rows["broken"]["traceback"]
    assert called(tmp_path, "--commit", "first")[0] == 1 and len(begun) == 2
    assert called(tmp_path, "--commit", "second", "--checks", "one")[0] == 1 and begun[2:] == ["one"]
    called(tmp_path, "--commit", "second", "--checks", "one")
    assert begun[3:] == ["one"], "what is named is measured again"
    said = capsys.readouterr().out
    assert "| one | ok | ms 1.25, kernels 3 | second | cpu" in said and "| broken | failed |" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a device")
def test_without_a_device_no_report_is_made(tmp_path: Path, mistake: Mistakes):
    assert "device=cuda: this torch finds no CUDA device" in mistake("bench.gpu", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())
