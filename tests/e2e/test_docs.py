"""README and the documentation: short, current, and true."""

import re
import runpy
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.imports import ROOT

README = (ROOT / "README.md").read_text()


def paragraphs(text: str) -> list[str]:
    """Without code blocks, tables and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [part for part in re.split(r"\n\s*\n", text) if part.strip() and part.strip()[0] not in "|#"]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 1000
    for part in paragraphs(README):
        assert len(part.splitlines()) <= 5, part


def test_the_figures_of_the_readme_are_those_of_the_measurement():
    """Every cell of its first table stands in results/time_to_loss.md, at its task, rate and method."""
    rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in README.splitlines() if line[:1] == "|"]
    measured = [line.split("|") for line in (ROOT / "results/time_to_loss.md").read_text().splitlines()]
    found = {
        tuple(cell.strip() for cell in (row[1], row[2], row[3])): row[5].strip() for row in measured if len(row) > 5
    }
    rows = [row for row in rows if re.match(r"(digits|text), \d+", row[0])]
    assert len(rows) == 8
    for place, co2, other, ddp, limit in rows:
        task, rate = re.match(r"(\w+), (\d+)", place).groups()
        at = {"digits": "vision", "text": "language"}[task], f"{rate} Mbit/s"
        seconds, name = re.fullmatch(r"(.*) \((\w+)\)", other).groups()
        assert found[*at, "co2_auto"] == co2 and found[*at, name] == seconds and found[*at, "limit"] == limit
        assert found[*at, "ddp"] == ddp or found[*at, "ddp"] == ", ".join([f"{ddp}.0"] * 3)
        others = [found[*at, m] for m in ("local", "overlap_local", "slowmo")]
        assert float(seconds.split()[0]) == min(float(s.split()[0]) for s in others if "±" in s)


@pytest.fixture(scope="module")
def timelines() -> dict[str, Any]:
    return runpy.run_path(f"{ROOT}/docs/timelines.py")


def test_the_timelines_are_current(timelines: dict[str, Any]):
    there = (ROOT / "docs" / "timelines.svg").read_text()
    assert there == timelines["draw"](), "draw them anew: .venv/bin/python docs/timelines.py"


def test_the_timelines_show_what_is_hidden(timelines: dict[str, Any]):
    ElementTree.fromstring(timelines["draw"]())
    for name, hidden in (("ddp", 0.0), ("co2", 1.0)):
        steps, sends = ([(begin, end) for begin, end, *_ in lane] for lane in timelines[name]())
        beneath = sum(max(0, min(e, end) - max(b, begin)) for b, e in sends for begin, end in steps)
        assert beneath == hidden * sum(e - b for b, e in sends)
