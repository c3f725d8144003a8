"""The picture of the house in docs/ is the one that today's imports give, and nothing in it overlaps."""

import runpy
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.imports import ROOT


@pytest.fixture(scope="module")
def house() -> dict[str, Any]:
    return runpy.run_path(f"{ROOT}/docs/house.py")


def test_the_picture_is_current(house: dict[str, Any]):
    there = (ROOT / "docs" / "house.svg").read_text()
    assert there == house["draw"](), "draw it anew: .venv/bin/python docs/house.py"


def test_boxes_are_apart_and_hold_their_words(house: dict[str, Any]):
    picture = ElementTree.fromstring(house["draw"]())
    width, height = map(float, picture.attrib["viewBox"].split()[2:])
    tags = [(child.tag.rpartition("}")[2], child.attrib, child.text or "") for child in picture]
    numbers = [[float(a[k]) for k in ("x", "y", "width", "height")] for tag, a, _ in tags if tag == "rect" and "x" in a]
    boxes = [(x, y, x + w, y + h) for x, y, w, h in numbers]
    assert len(boxes) == sum(map(len, house["LAYERS"]))
    assert all(x >= 0 and y >= 0 and right <= width and below <= height for x, y, right, below in boxes)
    for a, b in combinations(boxes, 2):
        assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1], "two boxes overlap"
    for x, y, text in [(float(a["x"]), float(a["y"]), text) for tag, a, text in tags if tag == "text"]:
        inside = [box for box in boxes if box[0] < x < box[2] and box[1] < y < box[3]]
        assert len(inside) == 1, f"{text!r} is in no box"
        assert x + house["LETTER"] * len(text) <= inside[0][2], f"{text!r} is wider than its box"


def test_a_line_that_passes_a_box_is_dashed_and_drawn_over_it(house: dict[str, Any]):
    """Beneath the box it would look as if it ended there."""
    tags = [child.tag.rpartition("}")[2] for child in ElementTree.fromstring(house["draw"]())]
    assert "rect" not in tags[tags.index("line") :]
    places, _ = house["placed"]()
    ways = house["arrows"]()
    for a, b in ways:
        ends = house["end_of"](a, b, ways, places), house["end_of"](b, a, ways, places)
        (x1, y1), (x2, y2) = sorted(ends)
        for x, y, w, h, _ in places.values():
            beside = x2 <= x or x + w <= x1 or max(y1, y2) <= y or y + h <= min(y1, y2)
            assert beside or "passes" in house["arrow"](a, b, ways, places), (a, b)


def test_every_file_is_drawn(house: dict[str, Any]):
    """But for the packages' __init__.py, and results/, which is data."""
    for file in house["files"]():
        box = house["box_of"](file)
        assert box or file.parts[0] == "results", file
        name = file.stem if file.stem != "__init__" else ""
        folder = f"{file.parts[-2]}/"
        shown = " ".join(house["contents"](box)).split() if box else []
        assert not box or not name or {name, folder} & set(shown), f"{file} is not shown in {box}"


def test_an_arrow_is_drawn_where_no_longer_way_shows_it(house: dict[str, Any]):
    ways = house["arrows"]()
    assert {("tasks", "training"), ("bench", "tasks"), ("core", "torch")} <= ways
    assert ("bench", "training") not in ways and ("training", "core") not in ways
