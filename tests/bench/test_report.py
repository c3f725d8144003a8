"""The report writer of all measurements, checks of options, mistakes; metrics of a run; the plan of bench.chaos."""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import report
from bench.chaos.__main__ import CONFIGS, COUNTS, CRASHES, HARMS, Campaign, damage, plan, right, steps, table
from bench.cluster import sent_bytes
from bench.report import Metrics, Summary, mean_sd, require
from core import UserError
from tests.scripts import Mistakes, run_script


@dataclass
class Options:
    rates: tuple[float, ...] = (1.0, 2.0)
    workers: int = 4
    out: Path | None = Path("folder")


def test_a_table_fills_rows_that_end_early_and_makes_one_line_of_rows_that_agree():
    text = report.table(["a", "b", "c"], [(1, 2, 3), ("x", "not run")])
    assert text.splitlines() == ["| a | b | c |", "|---|---|---|", "| 1 | 2 | 3 |", "| x | not run |  |"]
    summary = Summary("method rate failed", {"seconds": ".1f", "model.plan": ".2f", "loss": ".0f"})
    rows: list[dict[str, Any]] = [
        {"method": "co2", "rate": 40.0, "seconds": 1.0, "model": {"plan": 3.0}, "loss": None},
        {"method": "a|b", "rate": 40.0, "failed": "no answer"},
        {"method": "co2", "rate": 40.0, "seconds": [2.0, 3.0], "model": [{"plan": 4.0}, {"other": 1.0}]},
    ]
    assert summary.lines(rows) == [
        ["co2", "40", "", "2", "2.0 ± 1.0", "3.50 ± 0.71", ""],
        ["a\\|b", "40", "no answer", "1", "", "", ""],
    ]
    assert summary.table(rows[:1]).splitlines()[0] == "| method | rate | failed | rows | seconds | model.plan | loss |"
    assert mean_sd([1.0, 2.0, 3.0], ".2f") == "2.00 ± 1.00" and mean_sd([0.5], ".0%") == "50%"


def test_a_result_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["x", "--out", "a folder"])
    result = report.header("bench.x", Options(), packages=("torch", "co2-no-such-package"))
    assert result["options"] == {"rates": [1.0, 2.0], "workers": 4, "out": "folder"} and result["format"] == 1
    assert result["command"] == "python -m bench.x --out 'a folder'" and result["cpu_count"] >= 1
    assert result["versions"].keys() == {"python", "torch", "co2-no-such-package"}
    assert result["versions"]["co2-no-such-package"] == "absent" and result["versions"]["torch"][0].isdigit()


def test_every_row_is_saved_as_it_comes_and_no_measurement_is_overwritten(tmp_path: Path, capsys):
    folder = report.new_folder("speed", tmp_path / "new")
    session = report.Session("speed", folder, {"format": 1}, {"rows": Summary("method", {"ms": ".1f"})})

    def rows() -> Iterator[dict[str, Any]]:
        yield {"method": "co2", "ms": 2.0, "folder": folder}
        saved = json.loads((folder / "speed.json").read_text())
        assert saved == {"format": 1, "rows": [{"method": "co2", "ms": 2.0, "folder": str(folder)}]}

    session.take("rows", rows())
    assert capsys.readouterr().out == "rows | co2 | 1 | 2.0\n"
    assert {path.name for path in folder.iterdir()} == {"speed.json"}
    with pytest.raises(UserError, match="holds a measurement: choose another --out"):
        report.new_folder("speed", folder)


@pytest.mark.parametrize(
    ("what", "values", "said"),
    [
        ({"once": "rates"}, (1.0, 1.0), "rates=1.0 1.0: give one or more, each once"),
        ({"once": "workers rates"}, (), "rates=: give one or more, each once"),
        ({"positive": "rates"}, (1.0, 0.0), "rates=0.0: give a number above 0"),
        ({"positive": "rates"}, float("nan"), "rates=nan: give a number above 0"),
        ({"rates": ("a", "b")}, ("x", 2), "rates: 'x' does not exist; choose among a, b"),
        ({"ones": "rates"}, 0, "rates=0: give 1 or more"),
    ],
)
def test_an_option_that_cannot_be_is_named(what: dict[str, Any], values: Any, said: str):
    good = 1 if "ones" in what else ("a",) if "rates" in what else (2.0,)
    require(SimpleNamespace(rates=good, workers=(1,)), **what)
    with pytest.raises(UserError) as error:
        require(SimpleNamespace(rates=values, workers=(1,)), **what)
    assert str(error.value) == said


# -- a user's mistake is one line and status 2 ------------------------------------------------------------------------


# a case a line: the command, and what it says. FOLDER holds measurements
CASES = """
bench.cluster --rate 200 -- x => rate='200': give a number and one of kbit, mbit, gbit
bench.cluster --rate 200MB -- x => rate='200MB'
bench.cluster --rate -1mbit -- x => rate='-1mbit'
bench.cluster --rate 0mbit -- x => more than 0
bench.cluster --rate 1mbit --nodes 0 -- x => nodes=0
bench.cluster --rate 1mbit --ranks-per-node 0 -- x => ranks_per_node=0
bench.cluster --rate 1mbit --nodes 1 --verify -- x => 2 or more
bench.cluster --rate 1mbit => no command
bench.cluster --rate 1mbit -- => no command
bench.gpu --device cpu --checks birds => checks=birds: choose among a boundarys bytes
bench.scaling --workers 0 => workers=0: give a number above 0
bench.scaling --workers 2 99999 => workers=99999: give up to 1024, because each is a process on this machine
bench.scaling --rates 200 200 => rates=200.0 200.0: give one or more, each once
bench.scaling --seconds inf => seconds=inf: give a number above 0
bench.scaling --methods co2 => methods: 'co2': ddp has no tau
bench.scaling --throttle --out FOLDER => holds a measurement: choose another --out
bench.loss --tasks birds => tasks: 'birds' does not exist; choose among digits, cifar, bytes
bench.loss --tau 0 => tau=0: give 1 or more
bench.loss --steps 0 => steps=0: give 1 or more
bench.loss --workers 0 => workers=0: give a number above 0
bench.loss --methods adam => method 'adam' does not exist; choose among ddp, local
bench.loss --methods co2:speed=1 => co2 has no option 'speed'
bench.loss --methods local:beta=1 => local has no option 'beta'; it has: compression
bench.loss --device cuda => device=cuda: this torch finds no CUDA device
bench.loss --methods co2:merge=half => merge='half'; choose among restart, keep_local
bench.loss --methods co2:beta=x => beta='x'; give a number, 0 or more
bench.loss --methods co2:delay=1.5 => delay='1.5'; give a whole number, 0 or more
bench.loss --methods ddp:compression=int1 => compression='int1'; choose among float32, bfloat16
bench.loss --methods co2:nesterov=1 => nesterov='1'; choose among true, false
bench.loss --methods co2:delay=9 --tau 6 => delay=9: between 0 and tau=6
bench.loss --methods co2:beta=0|0.1|0.2 --configurations 2 => make 3 configurations; allow as many
bench.loss --seeds 0 100 => seeds=100: it is the tuning seed
bench.regimes --tasks digits => tasks: 'digits' does not exist; choose among bytes, cifar, gpt2
bench.regimes --seeds 0 1 100 => seeds=100: it is the tuning seed
bench.regimes --seeds 0 1 => seeds=0 1: an interval needs 3 or more
bench.regimes --eval_every -1 => eval_every=-1: give 0 or more
bench.time_to_loss --tasks speech => tasks: 'speech' does not exist; choose among vision, language
bench.time_to_loss --methods co2 sgd => methods: 'sgd' does not exist; choose among none, ddp
bench.time_to_loss --rates 0 => rates=0.0: give a number above 0
bench.time_to_loss --seeds 1 1 => seeds=1 1: give one or more, each once
bench.time_to_loss --workers 1 => workers=1: a single worker has no link
bench.time_to_loss --target nan => target=nan: give a number above 0
bench.time_to_loss --step_ms -1 => step_ms=-1.0: give 0 or more
bench.time_to_loss --eval_every 0 => eval_every=0: give 1 or more
bench.time_to_loss --methods local:share=2 => 'local:share=2' has 'share=2'; give a number between 0 and 1
bench.time_to_loss --methods local:beta=1 => 'local:beta=1' has 'beta=1'; give one of compression, tau, lr
bench.time_to_loss --throttle --out FOLDER => holds a measurement: choose another --out
"""


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_a_mistake_is_one_line(mistake: Mistakes, tmp_path: Path, case: str):
    """Within a command's own process; nothing is measured, nor written."""
    command, said = case.split(" => ")
    for name in ("scaling", "time_to_loss"):
        (tmp_path / f"{name}.json").write_text("{}")
    module, *arguments = command.replace("FOLDER", f"{tmp_path}").split()
    message = mistake(module, *arguments)
    assert message.startswith("error: ") and said in message and message.count("\n") == 1, message


@pytest.mark.parametrize("module", ["results.pages", "bench.cluster.etcd"])
def test_a_command_prints_help_and_refuses_unknown_options(module: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("it wrote a file"))
    for option, status, said in (("--help", 0, f"usage: python -m {module}"), ("--draw", 2, "--draw")):
        with pytest.raises(SystemExit) as ended:
            run_script(module, option)
        printed = capsys.readouterr()
        assert ended.value.code == status and said in printed.out + printed.err


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


# -- bench.chaos ------------------------------------------------------------------------------------------------------


def test_the_plan_has_all_that_was_asked_for_and_is_the_same_each_time():
    rows = list(plan(Campaign()))
    assert rows == list(plan(Campaign())) != list(plan(Campaign(seed=1)))
    asked = {harm: getattr(Campaign(), COUNTS[harm]) for harm in HARMS} | {"none": len(CONFIGS)}
    assert Counter(row["harm"] for row in rows) == asked and len(rows) >= 300 + len(CONFIGS)
    for harm, (configs, phases) in HARMS.items():
        tried = {(row["config"], row["phase"]) for row in rows if row["harm"] == harm}
        assert {phase for _, phase in tried} == {*phases}, harm
        assert tried <= {(c, p) for c in configs for p in phases} - {("ddp", "flight")}
        assert len(tried) == min(asked[harm], len(configs) * len(phases) - (harm == "kill")), harm
    assert all(row["step"] < steps(row["config"]) for row in rows if "step" in row)
    islands = [row["ranks"] for row in rows if (row["harm"], row["config"]) == ("two kills", "elastic, islands")]
    assert islands and all(a < 2 <= b for a, b in islands), "a rank of each"
    undisturbed = {(row["config"], row["seed"]) for row in rows if row["harm"] == "none"}
    assert undisturbed == {(row["config"], row["seed"]) for row in rows}, "each run has one to be compared with"


def row(harm: str, config: str = "co2", **more: Any) -> dict[str, Any]:
    told = {"harm": harm, "config": config, "phase": "local", "seed": 0, "attempts": 1, "status": 0, "hung": False}
    told |= {"steps": steps(config), "came_back": 0, "test_loss": 1.0, "digest": "a", "different_rounds": []}
    return told | {"traceback": False, "seconds": 9.0} | more


WRONG = [
    row("kill", status=1),
    row("kill", steps=9),
    row("kill", hung=True),
    row("kill", traceback=True),
    row("kill", test_loss=None),
    row("kill", digest="b"),
    row("stream", attempts=2),
    row("kill", "elastic", attempts=2),
    row("kill", "elastic", different_rounds=["0.7"]),
]
RIGHT = [
    row("kill", attempts=2),
    row("nan", digest="b"),
    row("kill", "elastic", digest="b"),
    row("stop", "elastic", attempts=2),
    row("kill", "co2, recommended", digest="b", attempts=2),
]


@pytest.mark.parametrize(("runs", "well"), [(WRONG, False), (RIGHT, True)])
def test_a_run_is_right_or_wrong(runs: list[dict[str, Any]], well: bool):
    assert [right(run, [row("none")]) for run in runs] == [well] * len(runs)


def test_the_table_says_what_became_of_the_runs():
    rows = [
        row("kill", attempts=2, right=True),
        row("kill", hung=True, right=False),
        row("none", "elastic", right=True),
    ]
    lines = table(rows).splitlines()
    assert lines[2].startswith("| kill | local | co2 | 2 | 50% ± 71% | 1.5 ± 0.7 | 50% ± 71% | 0.0 ± 0.0 |")
    assert lines[3].startswith("| none | local | elastic | 1 | 100% | 1.0 | 0% | 0.0 |")


@pytest.mark.parametrize("kind", CRASHES)
def test_damage_is_done_to_the_newest_files(kind: str, tmp_path: Path):
    for step in (11, 22):
        (folder := tmp_path / "checkpoints" / f"step{step:09}").mkdir(parents=True)
        (folder / "manifest.json").write_text("whole")
    (tmp_path / "metrics.jsonl").write_text("a line\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damage(random.Random(0), tmp_path, kind)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed and not any("step000000011" in str(path) for path in changed)
