"""bench.layouts: what it refuses, its table beside predictions, and a small run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.layouts import STATES, Layouts, kendall, text
from core import UserError
from training.layouts.layout import Layout

ROOT = Path(__file__).resolve().parents[2]
SMALL = Layouts(("tp2.pp2", "pp4"), nodes=2, batch=8)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"layouts": ()}, "give one or more"),
        ({"layouts": ("tp2.pp2.dp2",)}, "it takes 8 processes"),
        ({"layouts": ("tp2.dp2.zero1",)}, "takes no DTensors"),
        ({"layouts": ("tp2.pp2.mb4",), "batch": 6}, "multiple of 4"),
        ({"rate": 0.0}, "rate=0"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, Any], part: str):
    with pytest.raises(UserError, match=part):
        replace(SMALL, **given).check()


def test_predictions_are_read_by_layout(tmp_path: Path):
    file = tmp_path / "said.json"
    file.write_text('{"pp2.tp2": {"seconds": 0.5}}')
    assert replace(SMALL, predicted=file).predictions() == {Layout(tp=2, pp=2): {"seconds": 0.5}}
    for wrong in ("[1]", '{"pp2": 3}', "no", '{"qq2": {}}'):
        file.write_text(wrong)
        with pytest.raises(UserError, match=r"predicted=|no axis"):
            replace(SMALL, predicted=file).predictions()


def test_the_table_stands_beside_the_prediction():
    row = {"layout": "tp2.pp2.dp1", "seconds": [0.4, 0.6], "bytes": dict.fromkeys(STATES, 1_000_000)}
    other = row | {"layout": "tp1.pp4.dp1", "seconds": [1.0]}
    options = {"model": "m", "batch": 8, "context": 4, "nodes": 2, "ranks_per_node": 2, "rate": 50.0}
    options |= {"layer_ms": 2.0, "tau": 6, "repeats": 2, "steps": 3}
    result = {"rows": [row, other], "options": options, "commit": "c", "date": "d"}
    said = {Layout(tp=2, pp=2): {"seconds": 0.55, "bytes": 4e6}, Layout(pp=4): {"seconds": 0.5}}
    told = text(result, said)
    assert "| tp2.pp2.dp1 | 0.5000 ± 0.1414 | 0.5500 | +10.0% | 5.00 | 4.00 | -20.0% |" in told
    assert "| 1.0000 | 0.5000 | -50.0% | 5.00 | none |" in told
    assert "Kendall's tau of predicted and measured seconds, 2 layouts: -1.00" in told


def test_kendall_counts_pairs_in_order():
    assert kendall([(1, 1), (2, 2), (3, 3)]) == 1 and kendall([(1, 3), (2, 2), (3, 1)]) == -1
    assert kendall([(1, 1), (2, 3), (3, 2)]) == pytest.approx(1 / 3)


@pytest.mark.slow
def test_layouts_are_measured(tmp_path: Path):
    """Bytes are what the layout leaves on the fullest rank: half as many parameters on twice as many stages."""
    names = ["pp2.dp2", "pp4", "dp4.fsdp", "pp2.co2x2"]
    small = ["--nodes", "2", "--batch", "8", "--context", "16", "--steps", "2", "--tau", "2", "--repeats", "1"]
    command = [sys.executable, "-m", "bench.layouts", "--layouts", *names, *small, "--layer_ms", "0.5"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["layout"]: row for row in json.loads((tmp_path / "layouts.json").read_text())["rows"]}
    two, four, shared, between = rows.values()
    assert all(row["seconds"][0] > 0 and row["bytes"]["kept"] > 0 for row in rows.values())
    assert two["bytes"]["parameters"] > four["bytes"]["parameters"] > shared["bytes"]["parameters"]
    assert two["bytes"]["optimiser"] == pytest.approx(2 * two["bytes"]["parameters"], rel=1e-3)
    assert between["bytes"]["co2"] == pytest.approx(3 * between["bytes"]["parameters"], rel=1e-3)
