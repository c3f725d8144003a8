"""The report writer of all measurements, and the checks of their options."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import report
from bench.report import Summary, mean_sd, require
from core.errors import UserError


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
