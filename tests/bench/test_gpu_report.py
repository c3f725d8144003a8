"""bench.gpu: its measurements at small sizes on a CPU, and a report over several calls."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import command
from bench.gpu.command import CHECKS, NotRun, Options, Scope, measured
from tests.scripts import Mistakes, run_script

ROWS = {"costs": 17, "loops": 11}
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
    assert {part: sum(of == part for of, _ in CHECKS.values()) for part in ROWS} == ROWS
    rows = [measured(name, Scope("cpu", tmp_path, tiny=True)) for name, (part, _) in CHECKS.items() if part == "costs"]
    assert [row["name"] for row in rows if row["state"] != "ok"] == ["a boundarys bytes a parameter: outer, compiled"]
    assert all(row["figures"] and row["says"] for row in rows if row["state"] == "ok")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train script: vision.train, co2", "train script: language.train, recommended"])
def test_a_train_script_is_measured_on_a_cpu(name: str, tmp_path: Path):
    row = measured(name, Scope("cpu", tmp_path, tiny=True))
    assert row["state"] == "ok", row


@pytest.mark.slow
def test_a_loop_beside_a_sleeping_collective_is_measured_on_a_cpu(tmp_path: Path):
    row = measured("gpt2 beside a sleeping collective ms a round: co2", Scope("cpu", tmp_path, tiny=True))
    assert row["state"] == "ok" and row["figures"]["the sleep"] > 0, row


def test_a_second_call_measures_what_has_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun: list[str] = []

    def one(scope: Scope, name: str = "one") -> dict[str, Any]:  # noqa: ARG001
        begun.append(name)
        return {"ms": 1.25, "kernels": 3}

    def broken(scope: Scope) -> dict[str, Any]:  # noqa: ARG001
        begun.append("broken")
        raise AssertionError("too | slow")

    def absent(scope: Scope) -> dict[str, Any]:  # noqa: ARG001
        raise NotRun("needs a second device")

    for name in list(CHECKS):
        monkeypatch.delitem(CHECKS, name)
    for name, run in {"one": one, "broken": broken, "absent": absent}.items():
        monkeypatch.setitem(CHECKS, name, ("costs", run))
    old = {"part": "correctness", "name": "gone", "state": "ok", "says": "equal", "commit": "abc"}
    (tmp_path / "gpu.json").write_text(json.dumps({"commit": "def", "device": "cpu", "torch": "1", "rows": [old]}))
    status, rows = called(tmp_path, "--commit", "first")
    assert status == 1 and begun == ["one", "broken"] and rows["gone"]["commit"] == "abc"
    assert (rows["one"]["says"], rows["broken"]["state"]) == ("ms 1.25, kernels 3", "failed")
    assert rows["absent"]["state"] == "not run" and "Traceback" in rows["broken"]["traceback"]
    assert called(tmp_path, "--commit", "first")[0] == 1 and len(begun) == 2
    assert called(tmp_path, "--commit", "second", "--checks", "one")[0] == 1 and begun[2:] == ["one"]
    called(tmp_path, "--commit", "second", "--checks", "one")
    assert begun[3:] == ["one"], "what is named is measured again"
    page = (tmp_path / "gpu.md").read_text()
    assert "| one | ok | ms 1.25, kernels 3 | 0.0 |" in page
    assert "| broken | **failed** (first) | AssertionError: too \\| slow | 0.0 |" in page
    assert "1 rows of gpu.json are of earlier checks, at commits abc: see `make test-gpu`." in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a device")
def test_without_a_device_no_report_is_made(tmp_path: Path, mistake: Mistakes):
    assert "device=cuda: this torch finds no CUDA device" in mistake("bench.gpu", "--out", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_another_file_is_not_taken_for_a_report(tmp_path: Path, mistake: Mistakes):
    (tmp_path / "gpu.json").write_text('{"rows": [{"name": 1}]}')
    said = mistake("bench.gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--checks", "copy")
    assert "gpu.json is no report of bench.gpu: remove it, or choose another --out" in said


def test_the_published_rows_are_read_and_the_old_checks_name_their_commits():
    path = Path(__file__).parents[2] / "results" / "gpu.json"
    rows = command.read(path)
    published = json.loads(path.read_text())
    page = command.markdown(published | {"rows": rows})
    assert len(rows) == len(published["rows"]) and "earlier checks, at commits " in page and "92d8401" in page
    assert "| a reductions bytes a parameter: int8 | ok" in page
