"""The table and the plots of bench.scaling's measurements; python -m bench.plots FOLDER makes them anew."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import report
from bench.report import Spread
from training.script import launch

NAME = "scaling"
COLOURS = {"ddp": "C7", "local": "C2", "overlap_local": "C4", "slowmo": "C1", "co2": "C0", "co2_recommended": "C3"}
# (size of the marker, width of the line): wide ones lie under the thin lines of methods that take as long
SIZES = {"local": (10, 5), "overlap_local": (10, 5), "slowmo": (6, 1.5), "co2": (4, 1.2), "ddp": (5, 1.3)}
SIZES |= {"co2_recommended": (4, 1.2)}
MARKERS = {1: "o", 3: "v", 12: "s", 48: "D", "auto": "*"}


def named(method: str, tau: int | str) -> str:
    return method if method == "ddp" else f"{method} tau {tau}"


@dataclass(frozen=True)
class Cell:
    """The repeats of one method at one number of workers and one link rate."""

    method: str
    tau_setting: int | str
    tau: float
    """The median of what "auto" chose; else tau_setting."""
    workers: int
    rate_mbit: float | None
    repeats: int
    samples_per_second: Spread
    exposed_share: Spread
    late: bool
    """In any repeat the stand-in missed its deadline."""

    @property
    def label(self) -> str:
        return named(self.method, self.tau_setting)


def summarise(rows: Iterable[dict[str, Any]]) -> list[Cell]:
    """Rows of scaling.json, repeats gathered, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ("method", "tau_setting", "workers", "rate_mbit")), []).append(row)
    return [_cell(group) for group in groups.values()]


def _cell(rows: list[dict[str, Any]]) -> Cell:
    taus, speeds, exposed = ([row[k] for row in rows] for k in ("tau", "samples_per_second", "exposed_share"))
    first = rows[0]
    return Cell(
        first["method"],
        first["tau_setting"],
        statistics.median(taus),
        first["workers"],
        first["rate_mbit"],
        len(rows),
        Spread.of(speeds),
        Spread.of(exposed),
        any(row.get("late", False) for row in rows),
    )


def ratio(cells: Sequence[Cell], cell: Cell, base: int) -> float | None:
    """Scaling ratio: throughput over (workers / base) times the throughput of `base` workers; 1 is perfect.

    None without that base. The paper's ratio is of this kind and takes a base that has a network in it already.
    """
    for other in cells:
        same = (other.method, other.tau_setting) == (cell.method, cell.tau_setting)
        if same and other.workers == base and (other.rate_mbit == cell.rate_mbit or base == 1):
            return cell.samples_per_second.median / (cell.workers / base * other.samples_per_second.median)
    return None


def labels(cells: Iterable[Cell]) -> list[str]:
    """The methods in a fixed order, auto behind numbers."""
    order = list(COLOURS)
    known = {c.label: (order.index(c.method), math.inf if c.tau_setting == "auto" else c.tau_setting) for c in cells}
    return sorted(known, key=lambda label: known[label])


def caption(result: dict[str, Any]) -> str:
    link = {"namespaces + tbf": "network namespaces with shaped links"}.get(result["link"], f"link {result['link']}")
    size = result["model"]["bytes"] / 1e6
    return f"{link}; compute is a stand-in of {result['step_ms']:g} ms a step, {size:.1f} MB model"


# -- the table --------------------------------------------------------------------------------------------------


def markdown(result: dict[str, Any]) -> str:
    """Throughput, exposed share and both scaling ratios: a table for each link rate."""
    cells = summarise(result["rows"])
    repeats = max((c.repeats for c in cells), default=0)
    text = [
        f"Weak scaling, one worker a node; {caption(result)}. {result['cpu_count']} CPU cores, "
        f"{report.source(result)}.",
        "",
        f"samples/s of all workers, median of {repeats} repeats [lowest to highest], and in round brackets the exposed "
        "share: time that the loop waited for communication. Scaling ratio at the most workers: throughput per worker, "
        "relative to that of 1 worker and of 2 (the latter leaves out the first drop, as the paper's ratio does).",
    ]
    if buckets := result["model"].get("ddp_bucket_bytes"):
        text[-1] += f" ddp's buckets: {' + '.join(f'{b / 1e6:.2f}' for b in buckets)} MB, torch's default sizes."
    rates = sorted({c.rate_mbit for c in cells if c.rate_mbit is not None})
    for rate in rates or [None]:
        text += ["", f"{rate:g} Mbit/s" if rate else "No link", "", _rate_table(cells, rate)]
    if any(c.late for c in cells):
        text += ["", "† the stand-in missed its deadlines by over 10 %: this machine was too slow for so many workers"]
    return "\n".join(text) + "\n"


def _rate_table(cells: list[Cell], rate: float | None) -> str:
    here = [c for c in cells if c.rate_mbit in (rate, None)]
    counts = sorted({c.workers for c in here})
    heads = [f"{n} worker{'s' * (n > 1)}" for n in counts]
    rows = []
    for label in labels(here):
        found = {c.workers: c for c in here if c.label == label}
        fields = [_speed(found[n]) if n in found else "not run" for n in counts]
        last = found.get(counts[-1])
        ratios = [ratio(here, last, base) if last and last.workers > base else None for base in (1, 2)]
        rows.append([_name(label, found), *fields, *(f"{r:.2f}" if r else "" for r in ratios)])
    return report.table(["method", *heads, "ratio from 1", "from 2"], rows)


def _name(label: str, found: dict[int, Cell]) -> str:
    """What "auto" chose stands behind its label, in order of workers."""
    chosen = [f"{found[n].tau:g}" for n in sorted(found)]
    return f"{label} ({', '.join(chosen)})" if label.endswith("auto") else label


def _speed(c: Cell) -> str:
    speed = c.samples_per_second
    spread = f" [{speed.range('.0f')}]" if c.repeats > 1 else ""
    return f"{speed.median:.0f}{'†' if c.late else ''}{spread} ({c.exposed_share.median:.1%})"


# -- the plots --------------------------------------------------------------------------------------------------


def throughput_vs_workers(result: dict[str, Any]) -> Figure:
    """A panel for each link rate: samples/s against workers, bars from the lowest to the highest repeat."""
    cells = summarise(result["rows"])
    rates = sorted({c.rate_mbit for c in cells if c.rate_mbit is not None}) or [None]
    figure, panels = _panels(len(rates), "Throughput of all workers (weak scaling)", result)
    for axes, rate in zip(panels, rates, strict=True):
        here = [c for c in cells if c.rate_mbit in (rate, None)]
        counts = sorted({c.workers for c in here})
        perfect = result["batch"] / result["step_ms"] * 1e3
        axes.plot(counts, [n * perfect for n in counts], "k:", lw=1, label="no communication")
        for label in labels(here):
            line = sorted((c for c in here if c.label == label), key=lambda c: c.workers)
            _line(axes, line[0], [c.workers for c in line], [c.samples_per_second for c in line])
        axes.set(xscale="log", yscale="log", xlabel="workers", title=f"{rate:g} Mbit/s" if rate else "no link")
        axes.set_xticks(counts, map(str, counts))
        axes.minorticks_off()
    panels[0].set_ylabel("samples/s")
    _legend(figure, panels[0])
    return figure


def exposed_vs_bandwidth(result: dict[str, Any]) -> Figure:
    """A panel for each number of workers above 1: exposed share of the time against the link rate."""
    cells = [c for c in summarise(result["rows"]) if c.rate_mbit is not None]
    counts = sorted({c.workers for c in cells})
    rates = sorted({c.rate_mbit for c in cells if c.rate_mbit is not None})
    figure, panels = _panels(max(1, len(counts)), "Time spent waiting for communication", result)
    for axes, n in zip(panels, counts, strict=False):
        for label in labels(c for c in cells if c.workers == n):
            line = sorted((c for c in cells if c.workers == n and c.label == label), key=lambda c: c.rate_mbit or 0)
            _line(axes, line[0], [c.rate_mbit for c in line], [c.exposed_share for c in line], scale=100)
        axes.set(xscale="log", xlabel="link rate, Mbit/s", ylim=(-2, 102), title=f"{n} workers")
        axes.set_xticks(rates, [f"{r:g}" for r in rates])
        axes.minorticks_off()
    panels[0].set_ylabel("exposed, % of the time")
    _legend(figure, panels[0])
    return figure


def _panels(count: int, title: str, result: dict[str, Any]) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(
        1, count, figsize=(max(6.5, 3.3 * count), 4.2), sharey=True, squeeze=False, constrained_layout=True
    )
    figure.suptitle(f"{title}\n{caption(result)}", fontsize=9)
    for panel in axes[0]:
        panel.grid(alpha=0.3)
    return figure, list(axes[0])


def _line(axes: Axes, cell: Cell, x: Sequence[Any], points: Sequence[Spread], scale: float = 1) -> None:
    """Medians, with bars from the least to the greatest."""
    size, width = SIZES[cell.method]
    bars = [[scale * (p.median - p.least) for p in points], [scale * (p.greatest - p.median) for p in points]]
    style = {"color": COLOURS[cell.method], "lw": width, "ms": size, "alpha": 0.5 if width > 2 else 1.0}
    style |= {"linestyle": "--" if cell.tau_setting == "auto" else "-", "marker": MARKERS.get(cell.tau_setting, ".")}
    axes.errorbar(x, [scale * p.median for p in points], bars, elinewidth=1, capsize=2, label=cell.label, **style)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=5, fontsize=8)


# -- files ------------------------------------------------------------------------------------------------------


def draw(folder: Path, result: dict[str, Any]) -> None:
    """Both plots."""
    for plot in (throughput_vs_workers, exposed_vs_bandwidth):
        figure = plot(result)
        figure.savefig(folder / f"{plot.__name__}.png", dpi=150)
        plt.close(figure)


def page(folder: Path) -> str:
    """Draws the plots of scaling.json; returns the table."""
    result = report.load(folder / f"{NAME}.json", "bench.scaling")
    draw(folder, result)
    return markdown(result)


def main() -> None:
    report.remake("bench.plots", __doc__, f"{NAME}.json", NAME, page)


if __name__ == "__main__":
    launch(main)
