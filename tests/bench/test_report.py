"""The report writer of all measurements, checks of options, mistakes; metrics of a run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import report
from bench.cluster import sent_bytes
from bench.report import Metrics, Summary
from bench.time_to_loss import TimeToLoss
from tests.scripts import Mistakes, run_script


def test_a_table_fills_rows_that_end_early_and_makes_one_line_of_rows_that_agree():
    text = report.table(["a", "b", "c"], [(1, 2, 3), ("x", "not run")])
    assert text.splitlines() == ["| a | b | c |", "|---|---|---|", "| 1 | 2 | 3 |", "| x | not run |  |"]
    summary = Summary("method rate failed", {"seconds": ".1f", "late.seconds": ".2f", "loss": ".0f"})
    rows: list[dict[str, Any]] = [
        {"method": "co2", "rate": 40.0, "seconds": 1.0, "late": {"seconds": 3.0}, "loss": None},
        {"method": "a|b", "rate": 40.0, "failed": "no answer"},
        {"method": "co2", "rate": 40.0, "seconds": 2.0, "late": {"seconds": 4.0}},
    ]
    first, *lines = summary.table(rows).splitlines()
    assert first == "| method | rate | failed | rows | seconds | late.seconds | loss |"
    assert lines[1:] == ["| co2 | 40 |  | 2 | 1.5 ± 0.7 | 3.50 ± 0.71 |  |", "| a\\|b | 40 | no answer | 1 |  |  |  |"]


def test_a_result_says_where_it_comes_from_and_is_written_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["x", "--out", "a folder"])
    result = report.header("bench.x", TimeToLoss(out=tmp_path), packages=("torch", "co2-no-such-package"))
    assert result["options"]["out"] == str(tmp_path) and result["options"]["rates"] == [40.0, 200.0]
    assert result["command"] == "python -m bench.x --out 'a folder'" and result["cpu_count"] >= 1
    assert result["versions"]["co2-no-such-package"] == "absent" and result["versions"]["torch"][0].isdigit()
    report.save(tmp_path, "x", result | {"folder": tmp_path})
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == result | {"folder": str(tmp_path)}


# -- a user's mistake is one line and status 2 ------------------------------------------------------------------------


# a case a line: the command, and what it says. FOLDER holds measurements
CASES = """
results.pages --draw => Unrecognized options: --draw
bench.cluster --rates 1mbit -- x => Missing from python -m bench.cluster: --rate
bench.cluster --rate 200MB -- x => rate='200MB': give a number and one of kbit, mbit, gbit
bench.cluster --rate 0mbit -- x => more than 0
bench.cluster --rate 1mbit --nodes 1 --verify -- x => 2 or more
bench.cluster --rate 1mbit -- => no command
bench.chaos --kills -1 => kills=-1: give a number, 0 or more
bench.gpu --device cpu --out FOLDER => gpu.json holds no rows of this command: move it away, or give another --out
bench.gpu --device cpu --checks birds => checks=birds: choose among a boundarys bytes
bench.loss --tasks birds => tasks: 'birds' does not exist; choose among digits, cifar, bytes
bench.loss --tau 0 => tau=0: give 1 or more
bench.loss --workers 2 99999 => workers=99999: give up to 1024, because each is a process on this machine
bench.loss --methods adam => method 'adam' does not exist; choose among ddp, local
bench.loss --methods local:beta=1 => local has no option 'beta'; it has: compression
bench.loss --device cuda => device=cuda: this torch finds no CUDA device
bench.loss --methods co2:merge=half => merge='half'; choose among restart, keep_local
bench.loss --methods co2:beta=x => beta='x'; give a number, 0 or more
bench.loss --methods co2:delay=9 --tau 6 => delay=9: between 0 and tau=6
bench.loss --methods fragments:delay=2 --tau 12 => fragments=8, delay=2: give 1 or more, and a product of at most tau=12
bench.loss --methods co2:beta=1,beta=2 => method 'co2:beta=1,beta=2' has 'beta=2': give each option once, with a value
bench.loss --methods fragments:cut=odd => cut='odd'; choose among bytes, layers, interleaved, reversed
bench.loss --seeds -1 => seeds=-1: give whole numbers from 0 to 1000000000
bench.regimes --ratios ten => --ratios: Could not find valid parse for arguments: ['ten']
bench.loss --seeds 0 100 => seeds=100: it is the tuning seed
bench.loss --clip big => clip=big: give a number above 0, none, or task
bench.regimes --seeds 0 1 => seeds=0 1: an interval needs 3 or more
bench.time_to_loss --methods co2 sgd => methods: 'sgd' does not exist; choose among ddp, local
bench.time_to_loss --rates 10 0 => rates=0.0: give a number above 0
bench.time_to_loss --seeds 1 1 => seeds=1 1: give one or more, each once
bench.time_to_loss --workers 1 => workers=1, per_node=1: give two or more whole nodes
bench.time_to_loss --methods local:share=2 => 'local:share=2' has 'share=2'; give a number between 0 and 1
bench.time_to_loss --methods ddp:cap=0 => 'ddp:cap=0' has 'cap=0'; give MiB, above 0
bench.time_to_loss --methods ddp:accumulate=1.5 => give a whole number of micro-batches
bench.time_to_loss --methods co2:nodes=x => give a whole number of ranks
bench.time_to_loss --methods co2:nodes=3 => 'co2:nodes=3' has nodes that do not divide 4 workers
bench.time_to_loss --methods local:tau=x => 'x'
bench.time_to_loss --methods local:beta=1 => 'local:beta=1' has 'beta=1'; give one of compression, tau, lr
bench.time_to_loss --throttle --out FOLDER => holds a measurement: choose another --out
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_mistake_is_one_line(mistake: Mistakes, tmp_path: Path, case: str):
    """Within a command's own process; nothing is measured, nor written."""
    command, said = case.split(" => ")
    for name in ("time_to_loss.json", "gpu.json"):
        (tmp_path / name).write_text("[1]")
    module, *arguments = command.replace("FOLDER", f"{tmp_path}").split()
    message = mistake(module, *arguments)
    assert message.startswith("error: ") and said in message and message.count("\n") == 1, message


@pytest.mark.parametrize("module", ["results.pages", "bench.cluster.etcd", "bench.regimes"])
def test_a_command_prints_help(module: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("it wrote a file"))
    with pytest.raises(SystemExit) as ended:
        run_script(module, "--help")
    assert ended.value.code == 0 and f"usage: python -m {module}" in capsys.readouterr().out


# -- metrics of a run, and the kernel's counters ----------------------------------------------------------------------


def test_half_a_line_is_left_for_later_and_counters_are_the_interfaces(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path)
    assert metrics.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert metrics.read() == [{"step": 1}]
    with open(path, "a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    assert metrics.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert sent_bytes("lo") >= 0
    with pytest.raises(OSError, match="no interface nonesuch0"):
        sent_bytes("nonesuch0")
