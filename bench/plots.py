"""The two plots of bench.scaling's rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

COLOURS = {"ddp": "C7", "local": "C2", "overlap_local": "C4", "slowmo": "C1", "co2": "C0", "co2_recommended": "C3"}
WIDE = ("local", "overlap_local")  # their lines lie under the lines of slowmo and co2, which take the same time
MARKERS = {1: "o", 3: "v", 12: "s", 48: "D", "auto": "*"}
TITLES = {
    "samples_per_second": "Throughput of all workers (weak scaling)",
    "exposed_share": "Time spent waiting for communication",
}
Line = tuple[str, int | str]  # a method, and its setting of tau


def lines_of(rows: Sequence[dict[str, Any]]) -> list[Line]:
    """In a fixed order; auto comes after numbers."""
    order = list(COLOURS)
    return sorted(
        {(row["method"], row["tau_setting"]) for row in rows},
        key=lambda line: (order.index(line[0]), line[1] == "auto", 0 if line[1] == "auto" else line[1]),
    )


def plot(result: dict[str, Any], what: str) -> Figure:
    """samples_per_second against workers, a panel for each link rate; or exposed_share against link rates, a panel for
    each number of workers. Medians, with bars from the lowest to the highest repeat."""
    speed = what == "samples_per_second"
    rows = [row for row in result["rows"] if speed or row["rate_mbit"] is not None]
    panel_of, x_of, unit = ("rate_mbit", "workers", "Mbit/s") if speed else ("workers", "rate_mbit", "workers")
    panels = sorted({row[panel_of] for row in rows} - {None}) or [None]
    size = (max(6.5, 3.3 * len(panels)), 4.2)
    figure, (axes, *_) = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    pace = f"compute is a stand-in of {result['step_ms']:g} ms a step, {result['model']['bytes'] / 1e6:.1f} MB model"
    figure.suptitle(f"{TITLES[what]}\nlink: {result['link']}; {pace}", fontsize=9)
    for ax, panel in zip(axes, panels, strict=True):
        here = [row for row in rows if row[panel_of] in (panel, None)]
        ticks = sorted({row[x_of] for row in here})
        if speed:
            perfect = result["batch"] / result["step_ms"] * 1e3
            ax.plot(ticks, [n * perfect for n in ticks], "k:", lw=1, label="no communication")
        for line in lines_of(here):
            mine = [row for row in here if (row["method"], row["tau_setting"]) == line]
            xs = sorted({row[x_of] for row in mine})
            draw_line(ax, line, xs, [[row[what] for row in mine if row[x_of] == x] for x in xs])
        title = f"{panel:g} {unit}" if panel else "no link"
        ax.set(xscale="log", xlabel=x_of.replace("_mbit", ", Mbit/s"), title=title)
        ax.set(**{"yscale": "log"} if speed else {"ylim": (-0.02, 1.02)})
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("samples/s" if speed else "exposed share of the time")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def draw_line(axes: Any, line: Line, xs: Sequence[float], repeats: Sequence[Sequence[float]]) -> None:
    method, tau = line
    medians = [statistics.median(values) for values in repeats]
    bars = [
        [median - min(values) for median, values in zip(medians, repeats, strict=True)],
        [max(values) - median for median, values in zip(medians, repeats, strict=True)],
    ]
    style: dict[str, Any] = {"color": COLOURS[method], "marker": MARKERS.get(tau, "."), "elinewidth": 1, "capsize": 2}
    style |= {"lw": 5, "ms": 10, "alpha": 0.5} if method in WIDE else {"lw": 1.3, "ms": 5}
    style |= {"linestyle": "--" if tau == "auto" else "-"}
    axes.errorbar(xs, medians, bars, label=method if method == "ddp" else f"{method} tau {tau}", **style)


def draw(folder: Path, result: dict[str, Any]) -> None:
    """Both plots, as files."""
    names = {"samples_per_second": "throughput_vs_workers", "exposed_share": "exposed_vs_bandwidth"}
    for what, name in names.items():
        figure = plot(result, what)
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)
