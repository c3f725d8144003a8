"""The link rate that a method needs to use so much of the time for computing, measured and by the model of rounds.

python -m bench.utilisation FOLDER     # of `python -m bench.scaling --workers 4 --rates 5 10 20 ... --out FOLDER`

The shape of table 5 of the Eager-updates paper (arXiv 2502.12996), whose figures are simulated. Writes utilisation.md
beside scaling.json.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench import plots, report
from bench.plots import Cell
from bench.scaling import RECOMMENDED
from bench.simulator import calibrate
from core.errors import UserError
from core.methods import METHODS
from training.script import launch

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
FINE = 40  # rates a decade at which the model of rounds is asked


def needed(points: Sequence[tuple[float, float]], share: float) -> str:
    """The least rate from which on the utilisation stays at `share` or above. points: (rate, utilisation), by rate.

    Between two measured rates it is interpolated in the rate's logarithm.
    """
    below = [i for i, (_, used) in enumerate(points) if used < share]
    if not below:
        return f"< {points[0][0]:g}"
    if below[-1] == len(points) - 1:
        return f"> {points[-1][0]:g}"
    (low, less), (high, more) = points[below[-1]], points[below[-1] + 1]
    rate = low * (high / low) ** ((share - less) / (more - less))
    return f"{rate:.3g}" if rate < 999.5 else f"{rate:.0f}"


def measured(cells: Sequence[Cell], ideal: float) -> list[tuple[float, float]]:
    """(rate, samples/s as a share of those without communication), medians over the repeats. ideal: of one worker."""
    return sorted((c.rate_mbit or math.inf, c.samples_per_second.median / (c.workers * ideal)) for c in cells)


def modelled(result: dict[str, Any], label: str, workers: int) -> list[tuple[float, float]]:
    """The same of bench.simulator's model of rounds, fitted to all rows that kept their pace."""
    rows = [row for row in result["rows"] if not row.get("late") and row["method"] in METHODS]
    constants = calibrate.fit(rows, result["model"]["bytes"])
    mine = [r for r in rows if r["workers"] == workers and plots.named(r["method"], r["tau_setting"]) == label]
    rates = sorted(row["rate_mbit"] for row in mine)
    ideal = workers * result["batch"] / (result["step_ms"] / 1e3)
    ask: Callable[[float], float] = lambda rate: (  # noqa: E731
        calibrate.predict(mine[0] | {"rate_mbit": rate}, constants, result["model"]["bytes"], result["batch"])[0]
    )
    count = max(2, round(FINE * math.log10(rates[-1] / rates[0])))
    return [(float(rate), ask(float(rate)) / ideal) for rate in np.geomspace(rates[0], rates[-1], count)]


def markdown(result: dict[str, Any]) -> str:
    """A row a method, for the most workers that were measured."""
    cells = [c for c in plots.summarise(result["rows"]) if c.rate_mbit is not None]
    workers = max((c.workers for c in cells), default=0)
    cells = [c for c in cells if c.workers == workers]
    rates = sorted({c.rate_mbit for c in cells if c.rate_mbit})
    if len(rates) < 3:
        raise UserError(f"rates {', '.join(f'{r:g}' for r in rates) or '(none)'}: measure at three rates or more")
    ideal, lines = result["batch"] / (result["step_ms"] / 1e3), []
    for label in plots.labels(cells):
        points = measured([c for c in cells if c.label == label], ideal)
        known = not label.endswith("auto") and not label.startswith(RECOMMENDED)  # else the settings change on the way
        model = modelled(result, label, workers) if known else None
        fields = [f"{needed(points, share)} ({needed(model, share) if model else 'not modelled'})" for share in SHARES]
        lines.append([label, *fields])
    size, step = result["model"]["bytes"] * 8e-6, result["step_ms"] / 1e3
    notes = [
        f"Mbit/s that {workers} workers need for their step's computing to take this share of the time: measured, "
        "interpolated between the rates that were; in brackets the same by bench.simulator's model of rounds, fitted "
        "to these rows.",
        f"Measured at {', '.join(f'{r:g}' for r in rates)} Mbit/s, {max(c.repeats for c in cells)} repeats, medians; "
        f"{plots.caption(result)}. A model of {size:.1f} Mbit a step of {step:g} s: the rates scale as model / step.",
        f"{report.source(result)}.",
    ]
    titles = ["method", *(f"{share:.0%}" for share in SHARES)]
    return f"{report.table(titles, lines)}\n\n{report.bullets(notes)}\n"


def main() -> None:
    page = lambda folder: markdown(report.load(folder / f"{plots.NAME}.json", "bench.scaling"))  # noqa: E731
    report.remake("bench.utilisation", __doc__, "scaling.json", "utilisation", page)


if __name__ == "__main__":
    launch(main)
