"""The report writer of all measurements, and the checks of their options."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import plots, report
from bench.report import Spread, mean_sd, require
from core.errors import UserError


@dataclass
class Options:
    rates: tuple[float, ...] = (1.0, 2.0)
    workers: int = 4
    out: Path | None = Path("folder")


def test_a_table_fills_rows_that_end_early():
    text = report.table(["a", "b", "c"], [(1, 2, 3), ("x", "not run")])
    assert text.splitlines() == ["| a | b | c |", "|---|---|---|", "| 1 | 2 | 3 |", "| x | not run |  |"]


def test_repeats_in_words():
    assert Spread.of([4.0, 1.0, 2.0]) == Spread(2.0, 1.0, 4.0)
    assert Spread.of([4.0, 1.0, 2.0]).show(".1f") == "2.0 (1.0 to 4.0)"
    assert Spread.of([0.701, 0.702]).show(".0%") == "70%", "all look alike"
    assert mean_sd([1.0, 2.0, 3.0], ".2f") == "2.00 ± 1.00" and mean_sd([0.5], ".0%") == "50%"


def test_a_result_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["x", "--out", "a folder"])
    result = report.header("bench.x", Options(), packages=("torch", "co2-no-such-package"))
    assert result["options"] == {"rates": [1.0, 2.0], "workers": 4, "out": "folder"} and result["format"] == 1
    assert result["command"] == "python -m bench.x --out 'a folder'" and result["cpu_count"] >= 1
    assert result["versions"].keys() == {"python", "torch", "co2-no-such-package"}
    assert result["versions"]["co2-no-such-package"] == "absent" and result["versions"]["torch"][0].isdigit()
    assert re.fullmatch(
        r"`python -m bench.x --out 'a folder'`, commit \S+( \(-dirty: .*\))?, 2\d{3}-\d\d-\d\d \S+",
        report.source(result),
    )
    assert report.source({"commit": "", "date": "today"}) == "commit unknown, today"
    changed = "commit abc-dirty (-dirty: the working tree had changes that were not recorded), today"
    assert report.source({"commit": "abc-dirty", "date": "today"}) == changed


def test_what_is_saved_can_be_loaded_and_is_not_overwritten(tmp_path: Path):
    folder = report.new_folder("speed", tmp_path / "new")
    result = {"format": 1, "rows": [{"folder": folder}]}
    report.save(folder, "speed", result, "| a |\n")
    assert report.load(folder / "speed.json", "bench.x") == {"format": 1, "rows": [{"folder": str(folder)}]}
    assert {path.name for path in folder.iterdir()} == {"speed.json", "speed.md"}
    with pytest.raises(UserError, match="holds a measurement: choose another --out"):
        report.new_folder("speed", folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds no scaling.json: measure with python -m bench.scaling --out "),
        ("{", "not JSON"),
        ("[]", "not of format 1"),
        ('{"format": 1}', "has no rows"),
    ],
)
def test_a_folder_without_measurements_is_refused(text: str | None, said: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "scaling.json").write_text(text)
    with pytest.raises(UserError, match=said):
        plots.page(tmp_path)


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
