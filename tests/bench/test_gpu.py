"""bench.gpu, at small sizes on a CPU, and a report over several calls."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import measures
from bench.gpu.command import CHECKS, Options, Scope, measured
from bench.gpu.ranks import of_trace
from tests.scripts import Mistakes, run_script


@pytest.mark.parametrize("size", [1, 2048**2, 2048**2 + 5, 2 * 2048**2 + 2048 + 3])
def test_the_model_has_the_size_asked_for(size):
    assert sum(p.numel() for p in measures.model(size, "cpu")) == size


ROWS = {"ranks": 4, "costs": 9}


@pytest.fixture(autouse=True)
def all_checks() -> None:
    Options().chosen()


def called(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status of the command, and its rows by name."""
    with pytest.raises(SystemExit) as ended:
        run_script("bench.gpu", "--device", "cpu", "--tiny", "--out", str(folder), *arguments)
    rows = json.loads((folder / "gpu.json").read_text())["rows"]
    return int(ended.value.code or 0), {row["name"]: row for row in rows}


def test_every_cost_is_measured_on_a_cpu_in_small_sizes(tmp_path: Path):
    assert {part: sum(CHECKS[name][0] == part for name in CHECKS) for part in ROWS} == ROWS
    rows = [measured(name, Scope("cpu", tmp_path, tiny=True)) for name in CHECKS if CHECKS[name][0] == "costs"]
    assert all(row["state"] == "ok" and row["figures"] and row["says"] for row in rows)


@pytest.mark.slow
def test_several_ranks_are_measured_on_a_cpu(tmp_path: Path):
    rows = [measured(name, Scope("cpu", tmp_path, tiny=True)) for name in CHECKS if CHECKS[name][0] == "ranks"]
    assert all(row["state"] == "ok" for row in rows), rows
    assert 0 <= rows[1]["figures"]["paper"]["hidden, statistics"] <= 1


def kernel(name: str, start: int, end: int, stream: int) -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": end - start, "args": {"stream": stream, "grid": [2, 1, 1]}}


def test_a_trace_tells_what_of_a_collective_is_exposed():
    steps = [kernel("gemm", 0, 40, 7), kernel("gemm", 50, 90, 7)]
    hidden = of_trace([*steps, kernel("ncclAllReduce", 10, 80, 9)])
    assert hidden == {"hidden, trace": 1.0, "NCCL kernels ms": 0.07, "thread blocks": [2]}
    assert of_trace([*steps, kernel("ncclAllReduce", 10, 110, 9)])["hidden, trace"] == 0.8


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
        monkeypatch.setitem(CHECKS, name, ("costs", run))
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
