"""Draws the pictures of the results pages from their rows: python -m results.pictures

Each function of PICTURES makes one figure from the rows in results/*.json. The command writes it to results/NAME.png.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.regimes import cells
from bench.report import paired_ratio
from results.pages import RESULTS, SLOW_LINKS, Row, load, reached, select, series

WIDTH = 8.0  # inches, which are 768 pixels in a browser: text keeps its size in points
STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"hatch.linewidth": 0.6, "figure.constrained_layout.use": True}
DARK, MIDDLE, LIGHT, RED = "#0b4f8a", "#7f7f7f", "#cccccc", "#e69f00"  # they also differ in grayscale
TASKS = {"vision": "digits, to a test loss of 0.25", "language": "text, to 5.7 nats"}


def main(folder: Path = RESULTS) -> None:
    for name, draw in PICTURES.items():
        with plt.rc_context(STYLE):
            figure = draw()
            figure.savefig(folder / f"{name}.png", dpi=200)
            plt.close(figure)


def axes_of(rows: int, columns: int, height: float, **how: Any) -> tuple[Figure, list[Axes]]:
    """A figure of the page's width, and its axes row by row."""
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, **how)
    return figure, list(axes.flat)


# -- seconds to a loss ----------------------------------------------------------------------------------------------


def seconds() -> Figure:
    """One bar per method, in groups by link and target: the mean, each seed, and whether the loss was reached."""
    figure, axes = axes_of(1, 2, 6.0, sharey=True)
    groups = (
        [(f"{rate} Mbit/s, to {0.06 if late else 0.25}", rate, late) for rate in (10, 40) for late in (False, True)],
        [(f"{rate} Mbit/s, to {5.7 if late else 5.8}", rate, late) for rate in (40, 200) for late in (False, True)],
    )
    labels: dict[float, str] = {}
    for a, (task, title), places in zip(axes, TASKS.items(), groups, strict=True):
        left = 2.0 if task == "vision" else 5.0
        for group, (heading, rate, late) in enumerate(places):
            a.text(left, 6.2 * group - 1, heading, va="center", weight="bold")
            for place, (label, (name, runs)) in enumerate(series(task, rate, late=late).items()):
                y = 6.2 * group + place
                labels[y] = label
                if runs:
                    seconds_bar(a, y, runs, name, DARK if label.startswith("CO2") else LIGHT)
        a.set_title(title.partition(",")[0], loc="left", weight="bold")
        a.set(xscale="log", xlim=(left, 120) if task == "vision" else (left, 420), xlabel="seconds (log scale)")
        ticks = [2, 5, 10, 20] if task == "vision" else [5, 10, 30, 60]
        a.set_xticks(ticks, map(str, ticks))
        a.minorticks_off()
        a.tick_params(axis="y", length=0)
    axes[0].set_yticks([*labels], [*labels.values()])
    axes[0].set_ylim(6.2 * 4 - 1, -1.8)
    return figure


def seconds_bar(a: Axes, y: float, runs: Sequence[Row], name: str, color: str) -> None:
    """A bar of the mean with one dot per seed. If a seed did not reach the loss, a hatched bar up to the limit."""
    if found := reached(runs):
        mean = statistics.fmean(found)
        a.barh(y, mean, height=0.8, color=color)
        a.plot(found, [y] * len(found), "o", color="white", mec="black", ms=3, mew=0.7, ls="none")
        text, end = f"{mean:.1f} {name}", max(found)
    else:
        end = max(run["seconds"] for run in runs)
        a.barh(y, end, height=0.8, color="white", edgecolor=MIDDLE, hatch="////")
        text = f"> {end:.0f} ({len(select(runs, status='reached'))} of {len(runs)} seeds)"
    a.text(end * 1.12, y, text, va="center")


WATERFALL = {  # what a step adds -> the method behind it
    "DDP, float32": "ddp",
    "+ local steps (tau 6)": "local:tau=6",
    "+ int4": "local:tau=6,compression=int4",
    "+ hiding, a round late": "co2_recommended:tau=6,compression=int4,delay=boundary",
    "+ merge on arrival": "co2_recommended:tau=6,compression=int4,delay=auto",
    "+ automatic tau": "co2_auto",
}


def waterfall() -> Figure:
    """The seconds to a loss as steps lead from DDP to CO2 one by one, each with the seed-by-seed ratio to the step
    before. A run that was out of time counts with the limit."""
    figure, axes = axes_of(2, 2, 5.2, sharey=True)
    found = load("paired/time_to_loss.json")["runs"]
    for a, (rate, late) in zip(axes, ((r, late) for r in (10, 40) for late in (False, True)), strict=True):
        before: dict[int, float] = {}
        was_bound = False
        for y, method in enumerate(WATERFALL.values()):
            runs = select(found, method=method, rate_mbit=float(rate))
            runs = [run | run["late"] for run in runs] if late else runs
            took = {run["seed"]: run["seconds"] for run in runs}
            mean, was = statistics.fmean(took.values()), statistics.fmean(before.values()) if before else 0.0
            slower, bound = y > 0 and mean > was, len(reached(runs)) < len(runs)
            how = {"hatch": "////", "edgecolor": "white"} if slower else {}
            color = LIGHT if y == 0 else RED if slower else DARK
            a.barh(y, mean - was, left=was, height=0.75, color=color, **how)
            text = f"{'> ' * bound}{mean:.1f} s"
            if before and (ratio := paired_ratio(before, took)):
                text += f", {'about ' * (bound or was_bound)}x {ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"
            a.text(max(mean, was) + 0.4, y, text, va="center", fontsize=8)
            before, was_bound = took, bound
        a.set_title(f"digits, {rate} Mbit/s, to {0.06 if late else 0.25}", loc="left", weight="bold")
        a.set(xlim=(0, 52), xlabel="seconds to the loss", xticks=[0, 5, 10, 15, 20])
        a.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(WATERFALL)), [*WATERFALL])
    axes[0].set_ylim(len(WATERFALL) - 0.5, -0.5)
    return figure


def regime_map() -> Figure:
    """Seconds of the best blocking run, and of DDP, over seconds of the best hidden run, by r and task."""
    figure, (left, right) = axes_of(1, 2, 3.2, width_ratios=(1.6, 1))
    found = cells()
    for place, task in enumerate(dict.fromkeys(each.task for each in found)):
        of, color = [each for each in found if each.task == task], (DARK, RED, MIDDLE)[place]
        x = [each.r * 1.06**place for each in of]
        for a, ratios in ((left, [each.faster for each in of]), (right, [each.than_ddp for each in of])):
            a.vlines(x, [low for _, low, _ in ratios], [high for *_, high in ratios], color=color)
            a.plot(x, [ratio for ratio, *_ in ratios], "os^"[place] + "-", color=color, ms=5, label=task)
    for a, title in ((left, "Local-SGD over hidden"), (right, "DDP that overlaps over hidden")):
        a.axhline(1, color="black", lw=0.8)
        a.set(xscale="log", xlabel="r: float32 all-reduce / local step")
        a.set_title(title, loc="left", weight="bold")
        a.set_xticks([1, 3, 10, 30, 100, 1000], ["1", "3", "10", "30", "100", "1,000"])
        a.minorticks_off()
    left.axhline(1.15, color=MIDDLE, lw=0.8, ls=":")
    left.set_ylabel("ratio of the seconds to a loss")
    left.legend(frameon=False)
    right.set_yscale("log")
    right.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    right.minorticks_off()
    return figure


# -- bytes ----------------------------------------------------------------------------------------------------------

TRACED = {  # method -> its name, where that goes (MB and loss), and its line
    "ddp": ("DDP", (11, 1.5), (MIDDLE, "-")),
    "local": ("Local-SGD, tau 24 (dashed)", (0.25, 3.3), (RED, "--")),
    "co2_auto": ("CO2, auto tau, int4 (solid)", (0.25, 2.35), (DARK, "-")),
    "co2_recommended": ("CO2,\ntau 12,\nint4", (0.03, 0.36), (DARK, ":")),
}
PLACES = {  # method -> where its name goes, from its point
    "ddp": (-8, 0, "right"),
    "ddp_int4": (0, -18, "center"),
    "ddp_rank4": (8, 0, "left"),
    "torch_powersgd": (8, -6, "left"),
    "ddp_top1": (8, 0, "left"),
    "lgreco_top1": (8, 4, "left"),
    "co2": (0, -14, "center"),
    "co2_lgreco_rank4": (9, 0, "left"),
}
SLOW_LINK_STEPS = 96


def sent() -> Figure:
    """Loss against the bytes that a worker has sent: while training (digits), and at the end, by compression (text)."""
    figure, (left, right) = axes_of(1, 2, 3.9, width_ratios=(1, 1.2))
    for method, (name, (x, y), (color, dashes)) in TRACED.items():
        runs = select(load("peers_200.json")["runs"], method=method)
        steps = runs[0]["steps"][1:]
        megabytes = [statistics.fmean(r["sent"] for r in runs) / 1e6 * step / steps[-1] for step in steps]
        by_step = [sorted(losses) for losses in zip(*(run["losses"][1:] for run in runs), strict=True)]
        left.fill_between(megabytes, [of[0] for of in by_step], [of[-1] for of in by_step], color=color, alpha=0.15)
        left.plot(megabytes, [statistics.median(of) for of in by_step], color=color, ls=dashes)
        left.text(x, y, name)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="MB that a worker has sent",
        ylabel="test loss",
        xlim=(0.025, 500),
        ylim=(0.06, 4.5),
    )
    left.set_title("digits, while training", loc="left", weight="bold")
    left.set_yticks([0.1, 0.3, 1, 3], ["0.1", "0.3", "1", "3"])
    left.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    left.minorticks_off()
    for method, (dx, dy, align) in PLACES.items():
        runs = select(load("slow_links.json")["rows"], method=method, rate_mbit=50.0)
        megabytes = statistics.fmean(run["bytes_a_step"] for run in runs) * SLOW_LINK_STEPS / 1e6
        losses = [run["loss"] for run in runs]
        color, mark = (DARK, "D") if method.startswith("co2") else (MIDDLE, "o")
        right.plot([megabytes] * 2, [min(losses), max(losses)], color=color, lw=1.5)
        right.plot(megabytes, statistics.fmean(losses), mark, color=color, ms=6)
        name = SLOW_LINKS[method].replace(", recommended settings", "")
        place = megabytes, statistics.fmean(losses)
        right.annotate(name, place, (dx, dy), textcoords="offset points", ha=align, va="center")
    right.set(xscale="log", xlabel=f"MB that a worker sends in {SLOW_LINK_STEPS} steps", ylabel="final loss, nats")
    right.set(xlim=(6, 900), ylim=(4.8, 6.2))
    right.set_title(f"text, after {SLOW_LINK_STEPS} steps", loc="left", weight="bold")
    right.set_xticks([10, 30, 100, 300], ["10", "30", "100", "300"])
    right.minorticks_off()
    return figure


# -- hiding ---------------------------------------------------------------------------------------------------------

TRACES = {
    "ddp": "DDP",
    "local": "Local-SGD",
    "co2": "CO2, our reading\nof the paper's rule",
    "co2_recommended": "CO2, recommended\n(int4)",
}


def timeline() -> Figure:
    """Steps of worker 0 above what is on its link, by method, over the same stretch of time."""
    trace = load("timeline.json")
    figure, (a,) = axes_of(1, 1, 3.6)
    end = trace["options"]["seconds"]
    for place, (method, name) in enumerate(TRACES.items()):
        (row,) = select(trace["rows"], method=method, rank=0)
        y = 2.6 * place
        spans(a, row["steps"], y, end, color=DARK, edgecolor="white", linewidth=0.8)
        spans(a, row["allreduces"], y + 0.95, end, color=RED, edgecolor="white", linewidth=0)
        a.text(-0.012 * end, y + 0.45, name, ha="right", va="center", weight="bold")
        a.text(1.01 * end, y, f"computes ({row['finished_steps']} steps)", va="center")
        a.text(1.01 * end, y + 0.95, "all-reduce on the link", va="center")
    a.set(xlim=(0, end), ylim=(2.6 * len(TRACES) - 1, -0.6), xlabel="seconds", yticks=[])
    a.spines["left"].set_visible(False)
    return figure


def spans(a: Axes, found: Iterable[tuple[float, float]], y: float, end: float, **how: Any) -> None:
    """Draws a box for each span, cut at the picture's ends."""
    cut = [(max(0.0, start), min(end, until)) for start, until in found]
    a.broken_barh([(start, until - start) for start, until in cut], (y - 0.4, 0.8), **how)


EXPOSED = {  # method, tau -> its name, where that goes (rate and share), and its line
    ("ddp", 1): ("DDP", (150, 0.84), (MIDDLE, "-", "o")),
    ("local", 12): ("Local-SGD, tau 12", (46, 0.58), (RED, "--", "s")),
    ("overlap_local", 12): ("Overlap-Local-SGD, tau 12", (5, 0.45), (MIDDLE, ":", "^")),
    ("co2_recommended", "auto"): ("CO2, recommended (automatic tau, int4)", (5, 0.06), (DARK, "-", "D")),
}


def exposed() -> Figure:
    """The share of the time that a worker waits, by link rate."""
    rows = select(load("utilisation/scaling.json")["rows"], workers=4)
    figure, (a,) = axes_of(1, 1, 3.4)
    rates = sorted({row["rate_mbit"] for row in rows})
    for (method, tau), (name, (x, y), (color, dashes, mark)) in EXPOSED.items():
        of = [select(rows, method=method, tau_setting=tau, rate_mbit=rate) for rate in rates]
        shares = [sorted(r["exposed_seconds"] / r["seconds"] for r in runs) for runs in of]
        a.vlines(rates, [s[0] for s in shares], [s[-1] for s in shares], color=color)
        a.plot(rates, [statistics.median(s) for s in shares], color=color, ls=dashes, marker=mark, ms=5)
        a.text(x, y, name)
    a.set(xscale="log", ylim=(-0.02, 1.02), xlabel="link rate, Mbit/s", ylabel="share of the time\nthat a worker waits")
    a.set_xticks(rates, [f"{rate:g}" for rate in rates])
    a.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    a.minorticks_off()
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "seconds": seconds,
    "waterfall": waterfall,
    "regimes": regime_map,
    "bytes": sent,
    "timeline": timeline,
    "exposed": exposed,
}

if __name__ == "__main__":
    main()
