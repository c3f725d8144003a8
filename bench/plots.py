"""The table and the two plots of bench.scaling's rows; python -m bench.plots FOLDER makes them again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from bench import report
from bench.report import Spread
from training.script import launch

NAME = "scaling"
COLOURS = {"ddp": "C7", "local": "C2", "overlap_local": "C4", "slowmo": "C1", "co2": "C0", "co2_recommended": "C3"}
WIDE = ("local", "overlap_local")  # their lines lie under the lines of slowmo and co2, which take the same time
MARKERS = {1: "o", 3: "v", 12: "s", 48: "D", "auto": "*"}
TITLES = {"speed": "Throughput of all workers (weak scaling)", "exposed": "Time spent waiting for communication"}


def named(method: str, tau: int | str) -> str:
    return method if method == "ddp" else f"{method} tau {tau}"


@dataclass(frozen=True)
class Cell:
    """The repeats of one method at one number of workers and one link rate."""

    method: str
    tau_setting: int | str
    workers: int
    rate_mbit: float | None
    repeats: int
    tau: float
    """The median of the values that "auto" chose; otherwise tau_setting."""
    speed: Spread
    """Samples a second."""
    exposed: Spread
    late: bool
    """The stand-in missed its deadline in a repeat."""

    @property
    def label(self) -> str:
        return named(self.method, self.tau_setting)


def summarise(rows: Iterable[dict[str, Any]]) -> list[Cell]:
    """Gathers the repeats of the rows of scaling.json, in order of first appearance."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ("method", "tau_setting", "workers", "rate_mbit")), []).append(row)
    spread = lambda group, name: Spread.of([row[name] for row in group])  # noqa: E731
    return [
        Cell(
            *case,
            len(group),
            spread(group, "tau").median,
            spread(group, "samples_per_second"),
            spread(group, "exposed_share"),
            any(row.get("late") for row in group),
        )
        for case, group in groups.items()
    ]


def ratio(cells: Sequence[Cell], cell: Cell, base: int) -> float | None:
    """Scaling ratio: throughput over (workers / base) times the throughput of `base` workers; 1 is perfect.

    Returns None without that base. The paper's base already has a network in it.
    """
    for other in cells:
        same_rate = other.rate_mbit == cell.rate_mbit or base == 1
        if other.label == cell.label and other.workers == base and same_rate:
            return cell.speed.median / (cell.workers / base * other.speed.median)
    return None


def labels(cells: Iterable[Cell]) -> list[str]:
    """The methods in a fixed order; auto comes after numbers."""
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
        f"Weak scaling, one worker per node; {caption(result)}. {result['cpu_count']} CPU cores, "
        f"{report.source(result)}.",
        "",
        f"A cell has the samples/s of all workers, as the median of {repeats} repeats [lowest to highest]. Parentheses "
        "hold the exposed share: the time that the loop waited for communication. The scaling ratio compares the "
        "throughput per worker at the most workers with that at 1 and at 2 workers.",
    ]
    for rate in sorted({c.rate_mbit for c in cells if c.rate_mbit is not None}) or [None]:
        text += ["", f"{rate:g} Mbit/s" if rate else "No link", "", _rate_table(cells, rate)]
    if any(c.late for c in cells):
        text += ["", "† The stand-in missed its deadlines by over 10 %: this machine is too slow for so many workers."]
    return "\n".join(text) + "\n"


def _rate_table(cells: list[Cell], rate: float | None) -> str:
    here = [c for c in cells if c.rate_mbit in (rate, None)]
    counts = sorted({c.workers for c in here})
    rows = []
    for label in labels(here):
        found = {c.workers: c for c in here if c.label == label}
        taus = f" ({', '.join(f'{found[n].tau:g}' for n in sorted(found))})" if label.endswith("auto") else ""
        last = found.get(counts[-1])
        ratios = [ratio(here, last, base) if last and last.workers > base else None for base in (1, 2)]
        fields = [_speed(found[n]) if n in found else "not run" for n in counts]
        rows.append([label + taus, *fields, *(f"{r:.2f}" if r else "" for r in ratios)])
    return report.table(["method", *(f"{n} workers" for n in counts), "ratio from 1", "from 2"], rows)


def _speed(c: Cell) -> str:
    spread = f" [{c.speed.range('.0f')}]" if c.repeats > 1 else ""
    return f"{c.speed.median:.0f}{'†' if c.late else ''}{spread} ({c.exposed.median:.1%})"


# -- the plots --------------------------------------------------------------------------------------------------


def plot(result: dict[str, Any], what: str) -> Figure:
    """`speed` against workers, a panel for each link rate; `exposed` against link rates, a panel for each number of
    workers. Bars go from the lowest to the highest repeat."""
    cells = [c for c in summarise(result["rows"]) if what == "speed" or c.rate_mbit is not None]
    panel_of, x_of, unit = (
        ("rate_mbit", "workers", "Mbit/s") if what == "speed" else ("workers", "rate_mbit", "workers")
    )
    values = lambda name, some: sorted({v for c in some if (v := getattr(c, name)) is not None})  # noqa: E731
    panels = values(panel_of, cells) or [None]
    size = (max(6.5, 3.3 * len(panels)), 4.2)
    figure, (axes, *_) = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    figure.suptitle(f"{TITLES[what]}\n{caption(result)}", fontsize=9)
    for ax, panel in zip(axes, panels, strict=True):
        here = [c for c in cells if getattr(c, panel_of) in (panel, None)]
        ticks = values(x_of, here)
        if what == "speed":
            perfect = result["batch"] / result["step_ms"] * 1e3
            ax.plot(ticks, [n * perfect for n in ticks], "k:", lw=1, label="no communication")
        for label in labels(here):
            line = sorted((c for c in here if c.label == label), key=lambda c: getattr(c, x_of))
            _draw(ax, line[0], [getattr(c, x_of) for c in line], [getattr(c, what) for c in line])
        ax.set(
            xscale="log", xlabel=x_of.replace("_mbit", ", Mbit/s"), title=f"{panel:g} {unit}" if panel else "no link"
        )
        ax.set(**{"yscale": "log"} if what == "speed" else {"ylim": (-0.02, 1.02)})
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("samples/s" if what == "speed" else "exposed share of the time")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _draw(axes: Any, cell: Cell, x: Sequence[Any], points: Sequence[Spread]) -> None:
    """Medians, with bars from the lowest to the highest."""
    bars = [[p.median - p.least for p in points], [p.greatest - p.median for p in points]]
    wide = {"lw": 5, "ms": 10, "alpha": 0.5} if cell.method in WIDE else {"lw": 1.3, "ms": 5}
    style = wide | {"color": COLOURS[cell.method], "marker": MARKERS.get(cell.tau_setting, ".")}
    style |= {"linestyle": "--" if cell.tau_setting == "auto" else "-"}
    axes.errorbar(x, [p.median for p in points], bars, elinewidth=1, capsize=2, label=cell.label, **style)


def draw(folder: Path, result: dict[str, Any]) -> None:
    """Both plots, as files."""
    for what, name in (("speed", "throughput_vs_workers"), ("exposed", "exposed_vs_bandwidth")):
        figure = plot(result, what)
        figure.savefig(folder / f"{name}.png", dpi=150)
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
