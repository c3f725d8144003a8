"""bench.gpu: the checks that a host can run, which fail when something is broken, and a report over several calls."""

import json
import multiprocessing
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import checks, command, loops
from bench.gpu.checks import CHECKS, Scope, outcome
from bench.gpu.loops import SCRIPTS, overlap
from core.adaptive.merging import MergingInPlace
from core.errors import UserError
from core.wires import formats as wire
from tests.bench.emulated import python
from tests.scripts import Mistakes, run_script

ROOT = Path(__file__).parents[2]
OF_ITS_OWN = "collectives begin in one order"  # see test_collectives_begin_in_one_order
CHEAP = (
    "boundary is the plain pass: outer float32",
    "boundary takes and restarts: keep",
    "plain codec gives the hosts bytes: int4",
)


class Inline:
    """Worker in this process, where what a test has broken is broken."""

    def __init__(self, scope: Scope):
        self.scope = scope

    def facts(self) -> dict[str, Any]:
        return checks.of_machine(self.scope)

    def run(self, one: checks.Check, limit: float) -> dict[str, Any]:
        return outcome(one, self.scope)

    def close(self) -> None:
        pass


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Worker", Inline)


def called(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status of the command, and its lines by name."""
    with pytest.raises(SystemExit) as ended:
        run_script("bench.gpu", "--device", "cpu", "--tiny", "--out", str(folder), *arguments)
    rows = json.loads((folder / "gpu.json").read_text())["rows"]
    assert [row["name"] for row in rows] == list(CHECKS)
    return int(ended.value.code or 0), {row["name"]: row for row in rows}


# -- checks -----------------------------------------------------------------------------------------------------

SLOW = ("four ranks", "newcomer", "train script", "gpt2", "benchs own", "codecs rate")  # processes, or minutes


def lines(folder: Path, part: str, *, slow: bool, tiny: bool = True, whole: bool = True) -> list[dict[str, Any]]:
    """Of what a host can run; without `whole` the first case of each check."""
    left_out = (OF_ITS_OWN, *(f"train script: {script}, {way}" for script in SCRIPTS for way in ("local", "co2")))
    of_part = [one for one in CHECKS.values() if one.part == part and not one.cuda and one.name not in left_out]
    of_part = [one for one in of_part if slow == any(w in one.name for w in SLOW)]
    first = {one.name.partition(":")[0]: one for one in reversed(of_part)}
    return [outcome(one, Scope("cpu", folder, tiny)) for one in of_part if whole or one in first.values()]


@pytest.mark.parametrize(("part", "checks"), [("correctness", 14), ("costs", 4)])
def test_every_check_of_a_host_passes_on_it_in_a_case(part: str, checks: int, tmp_path: Path):
    found = lines(tmp_path, part, slow=False, whole=False)
    assert len(found) >= checks and {row["state"] for row in found} == {"ok"}, found


@pytest.mark.slow
@pytest.mark.parametrize(("part", "compiled"), [("correctness", 0), ("costs", 1)])
def test_every_check_of_a_host_passes_on_it(part: str, compiled: int, tmp_path: Path):
    found = lines(tmp_path, part, slow=False)
    assert len(found) > 14 and not [row for row in found if row["state"] == "failed"]
    assert sum(row["state"] == "not run" for row in found) == compiled


@pytest.mark.slow
@pytest.mark.parametrize(("part", "tiny"), [("correctness", False), ("costs", True), ("loops", True), ("search", True)])
def test_every_slow_check_of_a_host_passes_on_it(part: str, tiny: bool, tmp_path: Path):
    found = lines(tmp_path, part, slow=True, tiny=tiny)
    assert found and not [row for row in found if row["state"] != "ok"]


def test_collectives_begin_in_one_order(tmp_path: Path):
    row = outcome(CHECKS[OF_ITS_OWN], Scope("cpu", tmp_path, tiny=True))
    assert row["state"] == "ok", row["says"]


def test_what_needs_a_gpu_is_not_run_on_a_host(tmp_path: Path):
    names = [one.name for one in CHECKS.values() if one.cuda]
    lines = [outcome(CHECKS[name], Scope("cpu", tmp_path, tiny=True)) for name in names]
    assert len(lines) > 20 and {(row["state"], row["says"]) for row in lines} == {("not run", "needs a CUDA device")}


def unscaled(payload: torch.Tensor, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 2 * decode(payload, name, dtype)


decode = wire.decode
BROKEN: dict[str, tuple[Any, str, Any, str, str]] = {  # what, by what, which check says so, and what it says
    "the pass": (MergingInPlace, "update", lambda s, r: torch.zeros(4), CHEAP[0], "relative difference"),
    "take": (MergingInPlace, "take", lambda s: None, CHEAP[1], "take: nothing has changed"),
    "restart": (MergingInPlace, "restart", lambda s, where=None: None, CHEAP[1], "restart: nothing has changed"),
    "decode": (wire, "decode", unscaled, CHEAP[2], "numbers are off by more than half a level"),
    "an error": (wire, "encode", lambda x, name: x.missing, CHEAP[2], "AttributeError: 'Tensor' object"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_broken_is_a_line_and_the_exit_status(
    what: str, tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch
):
    owner, attribute, instead, name, says = BROKEN[what]
    monkeypatch.setattr(owner, attribute, instead)
    status, rows = called(tmp_path, "--checks", *CHEAP)
    assert status == 1 and {row["name"] for row in rows.values() if row["state"] != "not run"} == set(CHEAP)
    assert rows[name]["state"] == "failed" and says in rows[name]["says"], rows[name]
    assert rows[CHEAP[0] if name != CHEAP[0] else CHEAP[2]]["state"] == "ok"
    assert f"| {name} | **failed** | " in (tmp_path / "gpu.md").read_text()
    monkeypatch.undo()


# -- the process ------------------------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> checks.Worker:
    """A worker that knows this test's checks."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(checks.multiprocessing, "get_context", lambda name: fork)
    return checks.Worker(Scope("cpu", Path(), tiny=True))


def test_a_check_that_dies_or_hangs_is_a_line(forked: checks.Worker, monkeypatch: pytest.MonkeyPatch):
    ways = {"dies": lambda scope: os._exit(7), "hangs": lambda scope: time.sleep(600), "ends": lambda scope: "well"}
    found = {}
    for name, run in ways.items():
        monkeypatch.setitem(CHECKS, name, checks.Check("costs", name, run, False, 10.0))
    for name in ways:
        found[name] = forked.run(CHECKS[name], 1.0 if name == "hangs" else 60.0)
    forked.close()
    assert (found["dies"]["state"], found["dies"]["says"]) == ("failed", "the process died with status 7")
    assert (found["hangs"]["state"], found["hangs"]["says"]) == ("failed", "still running after 1 s")
    assert (found["ends"]["state"], found["ends"]["says"]) == ("ok", "well")


def test_a_device_that_no_longer_answers_spoils_one_line(forked: checks.Worker, monkeypatch: pytest.MonkeyPatch):
    """An illegal address is heard of behind the check, and then nothing in that process works any more."""
    monkeypatch.setitem(CHECKS, "one", checks.Check("costs", "one", lambda scope: f"{os.getpid()}", False, 60.0))
    monkeypatch.setattr(checks, "tidy", lambda scope: "AcceleratorError: an illegal memory access")
    spoilt = forked.run(CHECKS["one"], 60.0)
    monkeypatch.undo()
    assert (spoilt["state"], spoilt["says"]) == ("failed", "AcceleratorError: an illegal memory access")
    assert forked._process is None, "the next check needs another process"
    forked.close()


def test_a_process_that_cannot_begin_is_told(forked: checks.Worker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "serve", lambda pipe, scope: os._exit(3))
    with pytest.raises(UserError, match="ends as it begins, with status 3"):
        forked.facts()


def test_what_torch_says_of_its_debug_mode_is_no_synchronisation(monkeypatch: pytest.MonkeyPatch):
    once = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: mode == "warn" and warnings.warn(once, stacklevel=1)
    )
    with checks.synchronisations() as found:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert len(found) == 1 and found[0].startswith("test_gpu_report.py:")


# -- calls ------------------------------------------------------------------------------------------------------


def test_a_second_call_goes_on_where_the_first_was_stopped(
    tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    begun: list[str] = []
    for name in [one.name for one in CHECKS.values() if one.name not in CHEAP]:
        monkeypatch.delitem(CHECKS, name)
    monkeypatch.setattr(Inline, "run", lambda self, one, limit: begun.append(one.name) or outcome(one, self.scope))
    assert called(tmp_path, "--checks", "outer")[0] == 0 and begun == [CHEAP[0]]
    assert called(tmp_path, "--minutes", "0.1")[0] == 0 and len(begun) == 1
    assert "stopped: minutes=0.1; the same command goes on from here" in capsys.readouterr().out
    status, rows = called(tmp_path)
    assert status == 0 and begun == list(CHEAP) and [rows[name]["state"] for name in CHEAP] == ["ok"] * 3
    called(tmp_path, "--checks", "codec")
    assert begun == [*CHEAP, CHEAP[2]], "a check that is named runs again"
    status, rows = called(tmp_path, "--commit", "another", "--keep", "--checks", "codec")
    text = (tmp_path / "gpu.md").read_text()
    assert len(begun) == 5 and [rows[name]["commit"] == "another" for name in CHEAP] == [False, False, True]
    assert f"| {CHEAP[0]} | ok ({rows[CHEAP[0]]['commit']}) |" in text and f"| {CHEAP[2]} | ok |" in text
    assert called(tmp_path, "--commit", "third")[1].keys() == set(CHEAP) and len(begun) == 8
    assert "begins anew" in capsys.readouterr().out


def test_nothing_is_begun_that_would_likely_be_cut_off():
    one, rows = CHECKS["loss of gpt2 small: paper"], [checks.line("search", "loss of gpt2 small: ddp", "ok", "", 200.0)]
    assert command.expected(one, rows) == 200 and command.expected(CHECKS[CHEAP[0]], rows) == command.LEAST


def test_a_run_of_the_search_that_is_there_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loops.subprocess, "run", lambda *_, **__: pytest.fail("the search is asked"))
    of_paper = {"task": "digits", "steps": 3, "method": "co2", "options": "beta 0.5", "workers": 2}
    of_other = of_paper | {"options": "beta 0.2"}
    run = {"kind": "run", "loss": 2.5, "loss_of_mean": 2.6, "seconds": 7.0, "device": "cpu", "commit": "abc"}
    run |= {"seed": 0}
    rows = [of_paper | {"kind": "choice", "asked": "co2:beta=0.5"}, of_other | run | {"loss": 1.0}, of_paper | run]
    rows += [of_paper | run | {"loss": 1.0, "device": "cuda"}, of_paper | run | {"loss": 1.0, "seed": 1}]
    (tmp_path / "gpu_search.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = loops.loss_of_gpt2_small(Scope("cpu", tmp_path, tiny=True), "paper")
    assert found == {"held-out loss": 2.5, "before the end's drain": 2.6, "seconds": 7.0, "commit": "abc"}
    with pytest.raises(pytest.fail.Exception, match="the search is asked"):
        loops.loss_of_gpt2_small(Scope("cpu", tmp_path, tiny=True), "ddp")


def test_what_the_end_cuts_off_is_left_for_the_next_call(tmp_path: Path, inline: None, monkeypatch: pytest.MonkeyPatch):
    late = lambda self, one, limit: checks.line(one.part, one.name, "failed", "still running", limit, late=True)  # noqa: E731
    monkeypatch.setattr(Inline, "run", late)
    arguments = ("--checks", CHEAP[0])
    status, rows = called(tmp_path, *arguments, "--minutes", "1")
    assert status == 0 and rows[CHEAP[0]]["says"].startswith("cut off by minutes=1: the same command begins it anew")
    status, rows = called(tmp_path, *arguments)
    assert status == 1 and rows[CHEAP[0]]["state"] == "failed", "its own limit is no matter of the call"


@pytest.mark.slow
def test_the_command_by_itself(tmp_path: Path):
    """In a process of its own, with wheels that its Python lacks."""
    (tmp_path / "wheels").mkdir()
    arguments = ["--device", "cpu", "--tiny", "--checks", "delay 0 sends", "copy bandwidth", "--out", tmp_path / "out"]
    said = python("-m", "bench.gpu", *arguments, CO2_WHEELS=str(tmp_path / "wheels"))
    assert f"2 ok, 0 failed, {len(CHECKS) - 2} not run; written to" in said
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "- Device: cpu, tiny sizes: a test of the command" in text and "| copy bandwidth | ok | GB/s" in text
    assert "| loss of gpt2 small: paper | not run |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a device")
def test_without_a_device_everything_is_not_run_and_no_report_is_lost(tmp_path: Path, inline: None, mistake: Mistakes):
    with pytest.raises(SystemExit) as ended:
        run_script("bench.gpu", "--out", str(tmp_path))
    assert not ended.value.code
    text = (tmp_path / "gpu.md").read_text()
    assert "- Device: none was at hand" in text and text.count("| not run |") == len(CHECKS) and "| ok |" not in text
    called(tmp_path, "--checks", CHEAP[0])
    assert "finds no CUDA device, and" in mistake("bench.gpu", "--out", str(tmp_path))


def test_another_file_is_not_taken_for_a_report(tmp_path: Path, mistake: Mistakes, inline: None):
    (tmp_path / "gpu.json").write_text('{"rows": [{"name": 1}]}')
    said = mistake("bench.gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--checks", "copy")
    assert "gpu.json is no report of bench.gpu: remove it, or choose another --out" in said


# -- a trace ----------------------------------------------------------------------------------------------------


def kernel(name: str, stream: int, start: float, duration: float) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def test_how_much_of_a_sleeping_kernel_lies_under_others():
    others = [
        kernel("gemm", 7, 0, 60),
        kernel("add", 7, 50, 20),
        kernel("gemm", 9, 90, 150),
        kernel("add", 9, 260, 30),
        kernel("copy", 20, 0, 500),
    ]
    sleeping = [kernel("spin_kernel(long)", 20, 20, 100), kernel("spin_kernel(long)", 20, 300, 100)]
    found = overlap([*others, *sleeping, {"cat": "cpu_op", "name": "x"}])  # nothing comes after the second sleep
    assert found == pytest.approx({"computing under the sleep": 80 / 100, "computing else": 170 / 190})
    with pytest.raises(checks.NotRun, match="no sleeping kernel"):
        overlap(others)
