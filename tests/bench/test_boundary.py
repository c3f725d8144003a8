"""bench.boundary and bench.gpu: a small run, memory, the compiled pass, and a report over several calls."""

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import boundary
from bench.boundary import peak_bytes, reset_peak
from bench.gpu import measures
from bench.gpu.command import CHECKS, Options, Scope, measured
from bench.gpu.ranks import of_trace
from core import outer
from tests.core.test_outer import RULES, check
from tests.scripts import Mistakes, run_script


def test_what_does_not_fit_is_not_run():
    row = boundary.in_process(boundary.Bench(), 10**14)
    assert row["not_run"].startswith("needs about 1600001")
    (line,) = boundary.TABLES["rows"].lines([{"parameters": 10**14} | row])
    assert line[0] == str(10**14) and line[1].startswith("needs about") and line[3] == ""


@pytest.mark.parametrize("size", [1, 2048**2, 2048**2 + 5, 2 * 2048**2 + 2048 + 3])
def test_the_model_has_the_size_asked_for(size):
    assert sum(p.numel() for p in boundary.model(size, "cpu")) == size


def test_the_compiled_pass_is_the_specification_compiled(monkeypatch):
    """Bit for bit where the compiler is left out, which takes half a minute; what it is given is outer.update."""
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    measures.compiled.cache_clear()
    assert measures.compiled() is outer.update
    held = []
    for kind in (outer.OuterStep, measures.CompiledOuterStep):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(40, 3)), torch.nn.Parameter(torch.randn(7))]
        d, x, m = torch.randn(127), *measures.state(params)[1:]
        kind(params, d, x, m).run(outer.Rule(0.5, 1.0, 1.0, 1.0, 1.0, delta_rms=outer.norm([d])))
        held.append([*params, d, x, m])
    measures.compiled.cache_clear()
    assert all(map(torch.equal, *held))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_compiled_is_the_formulas(dtype):
    for name in ("elementwise", "norm", "unclipped"):
        check(measures.CompiledOuterStep, dtype, RULES[name])


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    run_script("bench.boundary", "--sizes", "1e5", "--repeats", "2", "--threads", "1", "--out", str(tmp_path))
    result = json.loads((tmp_path / "boundary.json").read_text())
    assert result["options"]["repeats"] == 2 and result["command"].startswith("python -m bench.boundary --sizes 1e5")
    (row,) = result["rows"]
    assert row["way"] == "co2" and len(row["seconds"]) == 2 and min(row["seconds"]) > 0
    assert row["bytes_moved"] == 36e5 and row["memory_counted"] == 12e5 and row["memory_measured"] > 0
    assert "| 100000 |" in capsys.readouterr().out


def test_the_peak_is_that_since_the_reset():
    base = reset_peak()
    with mmap.mmap(-1, 32 << 20) as held:  # what malloc gives may have been resident before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    assert 30 << 20 < peak_bytes() - base < 60 << 20 and reset_peak() - base < 16 << 20


# -- bench.gpu, at small sizes on a CPU -------------------------------------------------------------------------------


ROWS = {"ranks": 5, "costs": 16, "loops": 11}
SLOW = ("train script", "gpt2")


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
    names = [name for name in CHECKS if "compiled" not in name]  # it is there where a device is
    assert {part: sum(CHECKS[name][0] == part for name in names) for part in ROWS} == ROWS
    rows = [measured(name, Scope("cpu", tmp_path, tiny=True)) for name in names if CHECKS[name][0] == "costs"]
    assert all(row["state"] == "ok" and row["figures"] and row["says"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train script: vision.train, co2", "train script: language.train, recommended"])
def test_a_train_script_is_measured_on_a_cpu(name: str, tmp_path: Path):
    row = measured(name, Scope("cpu", tmp_path, tiny=True))
    assert row["state"] == "ok", row


@pytest.mark.slow
def test_a_loop_beside_a_sleeping_collective_is_measured_on_a_cpu(tmp_path: Path):
    row = measured("gpt2 beside a sleeping collective ms a round: co2", Scope("cpu", tmp_path, tiny=True))
    assert row["state"] == "ok" and row["figures"]["the sleep"] > 0, row


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
