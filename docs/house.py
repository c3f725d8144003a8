"""Draws docs/house.svg, the rooms of the code and who imports whom, from the imports: `python docs/house.py`."""

from __future__ import annotations

import sys
import textwrap
from html import escape
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.imports import ROOT, TASKS, files, needed, room_of

Place = tuple[float, float, float, float, list[str]]  # left, top, width, height, lines
# from top to bottom; imports run down, and inside a layer sideways
LAYERS: list[list[str]] = [
    ["tasks", "bench"],
    ["training"],
    ["core.doctor", "core.methods", "core.integrations"],
    ["assembly"],
    ["checkpoints", "sharded", "lgreco", "triton", "zeroth", "elastic"],
    ["wires", "robust", "testing, offload, collectives", "adaptive"],
    ["core"],
    ["torch"],
]
WIDTH, GAP, BETWEEN, LINE, LETTER = 1120, 14, 44, 15, 6.1  # pixels
FILLS = ["#eef2f7", "#eef2f7", "#e3eefb", "#e3eefb", "#e6f4e6", "#e6f4e6", "#fdf0d5", "#f3f3f3"]
STYLE = "text{font:11px sans-serif;fill:#222}.n{font-weight:bold;font-size:13px}rect{stroke:#667;rx:5px}"
STYLE += "line{stroke:#557;marker-end:url(#a)}.against{stroke:#c00}.passes{stroke-dasharray:5 4}"


def box_of(file: Path) -> str:
    """The box of the picture that a file belongs to, by the names of LAYERS; "" for none."""
    package = file.parts[0]  # training's rooms are folders of its box
    room = "tasks" if package in TASKS else package if package == "training" else room_of(file)
    names = {room, room.removeprefix("core."), room.removesuffix(".__init__")}
    return next((box for layer in LAYERS for box in layer if names & set(box.split(", "))), "")


def arrows() -> set[tuple[str, str]]:
    """(importer, imported) among the boxes, without those that a longer way shows. What core/__init__.py hands on is
    left out."""
    importers = [file for file in files() if file.as_posix() != "core/__init__.py"]
    ways = {(box_of(file), box_of(other)) for file in importers for other in needed(file)} | {("core", "torch")}
    ways = {(a, b) for a, b in ways if a and b and a != b}
    layer = {box: number for number, boxes in enumerate(LAYERS) for box in boxes}
    reached = {(a, b) for a, b in ways if layer[a] <= layer[b]}
    for middle, a, b in product(layer, layer, layer):  # Warshall's closure: `middle` is the outermost loop
        if a != b and (a, middle) in reached and (middle, b) in reached:
            reached.add((a, b))
    longer = {(a, b) for a, b in ways for c in layer if (a, c) in reached and (c, b) in reached}
    return ways - {(a, b) for a, b in longer if layer[a] <= layer[b]}


def contents(box: str) -> list[str]:
    """Lines of file names; a folder inside a room ends in a slash."""
    lines: dict[str, dict[str, None]] = {}
    for file in files():
        if box_of(file) == box and file.name != "__init__.py":
            inner = file.parts[2 if room_of(file).startswith("core.") else 1 :]
            name = f"{inner[0]}/" if len(inner) > 1 else inner[0].removesuffix(".py")
            lines.setdefault(f"{file.parts[0]}: " if box == "tasks" else "", {})[name] = None
    return [start + "  ".join(names) for start, names in lines.items()]


def placed() -> tuple[dict[str, Place], float]:
    """Box -> (left, top, width, height, lines), and the height of all."""
    places, top = {}, 10.0
    for layer in LAYERS:
        texts = {box: contents(box) for box in layer}
        wide = {box: 9.0 + sum(map(len, texts[box])) ** 0.7 for box in layer}
        left, room = 10.0, WIDTH - 20 - GAP * (len(layer) - 1)
        for box in layer:
            width = room * wide[box] / sum(wide.values())
            lines = [part for text in texts[box] for part in textwrap.wrap(text, int((width - 18) / LETTER))]
            places[box] = left, top, width, 28.0 + LINE * len(lines), lines
            left += width + GAP
        height = max(places[box][3] for box in layer)
        places |= {box: (*places[box][:3], height, places[box][4]) for box in layer}
        top += height + BETWEEN
    return places, top - BETWEEN + 10


def end_of(box: str, other: str, ways: set[tuple[str, str]], places: dict[str, Place]) -> tuple[float, float]:
    """Where the line between two boxes meets the first: lines to other layers share a side evenly."""
    (x, y, w, h, _), (u, v, *_) = places[box], places[other]
    if v == y:
        return x if u < x else x + w, y + h / 2
    ends = {b if a == box else a for a, b in ways if box in (a, b)}
    ends = sorted((places[end][0], end) for end in ends if places[end][1] != y and (places[end][1] > y) == (v > y))
    return x + w * (ends.index((u, other)) + 1) / (len(ends) + 1), y + h if v > y else y


def passes(a: str, b: str, ways: set[tuple[str, str]], places: dict[str, Place]) -> bool:
    """Whether the line between two boxes may meet a third one."""
    (x1, y1), (x2, y2) = sorted((end_of(a, b, ways, places), end_of(b, a, ways, places)))
    top, below = min(y1, y2), max(y1, y2)
    return any(x1 < x + w and x < x2 and top < y + h and y < below for x, y, w, h, _ in places.values())


def arrow(a: str, b: str, ways: set[tuple[str, str]], places: dict[str, Place]) -> str:
    """A line down, or sideways in a layer; red where it runs against the layers, dashed where it passes a box."""
    (x1, y1), (x2, y2) = end_of(a, b, ways, places), end_of(b, a, ways, places)
    kind = "against " * (places[b][1] < places[a][1]) + "passes" * passes(a, b, ways, places)
    return f'<line class="{kind.strip()}" x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"/>'


def draw() -> str:
    """The picture as SVG."""
    (places, height), ways = placed(), arrows()
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}">']
    lines.append(f"<title>Who imports whom</title><style>{STYLE}</style>")
    head = 'id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    lines.append(f'<defs><marker {head}><path d="M0 0L8 4L0 8z" fill="#557"/></marker></defs>')
    lines.append('<rect width="100%" height="100%" fill="#fff" stroke="none"/>')
    for layer, fill in zip(LAYERS, FILLS, strict=True):
        for box in layer:
            x, y, w, h, text = places[box]
            lines.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" fill="{fill}"/>')
            lines.append(f'<text x="{x + 9:.0f}" y="{y + 18:.0f}" class="n">{box}</text>')
            for i, line in enumerate(text):
                lines.append(f'<text x="{x + 9:.0f}" y="{y + 36 + LINE * i:.0f}">{escape(line)}</text>')
    lines += [arrow(a, b, ways, places) for a, b in sorted(ways)]  # over the boxes: one that passes does not end there
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    Path(ROOT, "docs/house.svg").write_text(draw())
