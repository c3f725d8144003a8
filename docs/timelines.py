"""Draws docs/timelines.svg, one worker's time with ddp and with CO2: `python docs/timelines.py`.

A drawing, not a measurement: an all-reduce takes ALL_REDUCE local steps, and all of ddp's is waited for.
"""

from __future__ import annotations

from pathlib import Path

ALL_REDUCE, TAU, TIME = 3, 4, 24  # all in local steps; the all-reduce, a round of CO2, the picture's length
STEP, LEFT, WIDTH, HIGH = 25, 92, 720, 26  # pixels: a local step, the first one's place, the picture, a bar
COMPUTES, SENDS = "#4c78a8", "#f2a541"
STYLE = "text{font:13px sans-serif;fill:#222}.title{font-weight:bold;font-size:15px}.in{font-size:11px}"

Bar = tuple[float, float, str, str]  # begin and end in local steps, colour, words


def ddp() -> tuple[list[Bar], list[Bar]]:
    """Its local steps, and its all-reduces: each step waits for one."""
    starts = range(0, TIME, 1 + ALL_REDUCE)
    sends = [(t + 1, t + 1 + ALL_REDUCE, SENDS, "all-reduce") for t in starts]
    return [(t, t + 1, COMPUTES, "") for t in starts], sends


def co2() -> tuple[list[Bar], list[Bar]]:
    """The all-reduce of a round's change runs under the next round's steps."""
    ends = range(TAU, TIME, TAU)
    sends = [(t, t + ALL_REDUCE, SENDS, f"of round {t // TAU}") for t in ends]
    return [(t, t + 1, COMPUTES, "") for t in range(TIME)], sends


def lane(name: str, top: int, bars: list[Bar]) -> list[str]:
    """One line of bars with its name on the left."""
    lines = [f'<text x="{LEFT - 8}" y="{top + 18}" text-anchor="end">{name}</text>']
    for begin, end, colour, words in bars:
        x, width = LEFT + STEP * begin, STEP * (end - begin) - 2
        lines.append(f'<rect x="{x}" y="{top}" width="{width}" height="{HIGH}" rx="3" fill="{colour}"/>')
        if words:
            middle = x + width / 2
            lines.append(f'<text x="{middle}" y="{top + 17}" class="in" text-anchor="middle">{words}</text>')
    return lines


def timeline(title: str, top: int, bars: tuple[list[Bar], list[Bar]]) -> list[str]:
    """A method's two lanes under its title."""
    lines = [f'<text x="12" y="{top + 16}" class="title">{title}</text>']
    return lines + lane("computing", top + 28, bars[0]) + lane("network", top + 60, bars[1])


def draw() -> str:
    """The picture as SVG."""
    steps = len(ddp()[0])
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 258" width="{WIDTH}">']
    lines.append(f"<title>One worker's time with ddp and with CO2</title><style>{STYLE}</style>")
    lines.append('<rect width="100%" height="100%" fill="#fff"/>')
    lines += timeline(f"ddp: every step waits for an all-reduce; {steps} steps", 8, ddp())
    words = f"CO2: the all-reduce of {TAU} steps runs under the next {TAU}; {TIME} steps in the same time"
    lines += timeline(words, 118, co2())
    for i in range(TIME // TAU + 1):
        x = LEFT + STEP * TAU * i - 1
        lines.append(f'<line x1="{x}" y1="142" x2="{x}" y2="208" stroke="#222" stroke-dasharray="3 3"/>')
    for i in range(TIME // TAU):
        middle = LEFT + STEP * TAU * (i + 0.5)
        lines.append(f'<text x="{middle}" y="222" class="in" text-anchor="middle">round {i + 1}</text>')
    scale = f"A drawing: here an all-reduce takes as long as {ALL_REDUCE} steps."
    lines.append(f'<text x="{LEFT}" y="246">{scale}</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
