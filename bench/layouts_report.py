"""What bench.layouts says: what the planner predicts, beside what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from bench import report
from bench.report import mean_sd
from training.layouts.layout import Layout
from training.plan import memory, time
from training.plan.case import FLOAT32, MERGES, Case, Layouts
from training.plan.clusters import Cluster, Device

NAME = "layouts"
# while formulas were made: these have run before
SEEN = (
    *("dp8", "dp8.fsdp", "tp4.dp2", "pp4.dp2", "tp2.pp2.dp2", "co2x8", "dp8.zero1", "tp2.pp4", "pp2.v2.dp4"),
    *("tp2.dp4.fsdp", "dp4.co2x2", "tp2.co2x4", "pp4.co2x2", "dp4.fsdp.co2x2"),
)
COUNTED = (*SEEN, "tp4.pp2")  # whose bytes were known when their formulas were last changed
NEAR = 0.05  # of bytes, and of the chosen layout's seconds
TAU, MEDIAN = 0.8, 0.10


def device(o: Any, bandwidth: float, calls: Sequence[float] = (0.0, 0.0, 0.0)) -> Device:
    """That which the stand-in of bench.layouts' options plays: bandwidth, bytes/s of a rank, and calls are measured;
    the ranks share cores."""
    m = o.model
    flops = (m.linear_flops + m.attention_flops) / o.layer_ms * 1e3
    shared: Any = tuple(o.crowd * seconds for seconds in calls)
    return Device("stand-in", flops, math.inf, bandwidth, math.inf, top=1.0, passes=0.0, calls=shared)


def predict(o: Any, name: str, links: dict[str, float], made: Device) -> tuple[float, float]:
    """Seconds of a step, and bytes of the fullest rank. links: of bench.layouts.probe_links."""
    x = Layout.parse(name)
    cluster = Cluster("emulated", made, o.nodes, o.ranks_per_node, **links)
    micro = o.batch // x.data_workers // x.parts
    one = Layouts(x.tp, x.pp, x.dp, x.islands, micro, x.v, x.zero, tau=o.tau, merge=MERGES.index("outer"))
    case = Case(o.model, cluster, FLOAT32, o.batch, one)
    return tuple(float(np.sum([*parts.values()])) for parts in (time.seconds(case), memory.memory(case)))  # pyright: ignore


def combine_links(per_rank: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median over the ranks."""
    return {name: statistics.median(of[name] for of in per_rank) for name in per_rank[0]}


def combine(name: str, rate: float, of_all: Sequence[dict[str, Any]], predicted: float) -> dict[str, Any]:
    """A row: seconds of the slowest rank, and which share of them a rank computes itself."""
    seconds = [max(times) for times in zip(*(of["seconds"] for of in of_all), strict=True)]
    busy = statistics.fmean(of["busy"] for of in of_all) / statistics.fmean(seconds)
    return {"layout": name, "rate": rate, "seconds": seconds, "predicted": predicted, "busy": busy}


def line(row: dict[str, Any]) -> str:
    seconds = mean_sd(row["seconds"], ".4f")
    return f"{row['rate']:g} Mbit/s, {row['layout']}: {seconds} s, predicted {row['predicted']:.4f}"


def memory_table(result: dict[str, Any]) -> str:
    rows = [
        (name, "seen" if name in COUNTED else "new", f"{n / 1e6:.2f}", f"{said / 1e6:.2f}", f"{said / n - 1:+.1%}")
        for name, (n, said) in result["bytes"].items()
    ]
    return report.table(["layout", "while formulas were made", "MB counted", "predicted", "off"], rows)


def seconds_table(result: dict[str, Any]) -> str:
    """A row a layout, three columns a rate."""
    rates = result["options"]["rates"]
    titles = ["layout", *(title for rate in rates for title in (f"s, {rate:g} Mbit/s", "predicted", "off"))]
    cells: dict[str, list[str]] = {}
    for row in result["rows"]:
        said, mean = row["predicted"], statistics.fmean(row["seconds"])
        cells.setdefault(row["layout"], [row["layout"]])
        cells[row["layout"]] += [mean_sd(row["seconds"], ".3f"), f"{said:.3f}", f"{said / mean - 1:+.1%}"]
    return report.table(titles, cells.values())


def verdict(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Of one rate: Kendall's tau, the layout that the planner chooses against the best, the median of the errors."""
    pairs = {row["layout"]: (statistics.fmean(row["seconds"]), row["predicted"]) for row in rows}
    best, chosen = (min(pairs, key=lambda name, i=i: pairs[name][i]) for i in (0, 1))
    behind = pairs[chosen][0] / pairs[best][0] - 1
    off = statistics.median(abs(said / seen - 1) for seen, said in pairs.values())
    tau = kendalltau(*zip(*pairs.values(), strict=True)).statistic
    held = "yes" if tau >= TAU and behind <= NEAR and off <= MEDIAN else "no"
    return f"{rows[0]['rate']:g}", f"{tau:.2f}", chosen, best, f"{behind:+.1%}", f"{off:.1%}", held


def text(result: dict[str, Any]) -> str:
    """layouts.md."""
    o = result["options"]
    of_rate = [[row for row in result["rows"] if row["rate"] == rate] for rate in o["rates"]]
    titles = ["Mbit/s", "Kendall's tau", "chosen", "best", "chosen behind the best", "median error", "all three hold"]
    off = {name: abs(said / n - 1) for name, (n, said) in result["bytes"].items()}
    fresh = [x for name, x in off.items() if name not in COUNTED]
    alone = [verdict(new) for rows in of_rate if len(new := [row for row in rows if row["layout"] not in SEEN]) > 1]
    return TEXT.format(
        TAU=TAU,
        source=report.source(result),
        memory=memory_table(result),
        counted=result.get("counted", "as above"),
        seconds=seconds_table(result),
        verdicts=report.table(titles, map(verdict, filter(None, of_rate))),
        within=sum(x <= NEAR for x in off.values()),
        many=len(off),
        worst=f"{max(off.values()):.1%}",
        fresh=f"{sum(x <= NEAR for x in fresh)} of {len(fresh)}",
        alone="\n".join(ALONE.format(rate, tau, off) for rate, tau, _, _, _, off, _ in alone),
        calls=[seconds * 1e3 for seconds in result["calls"]],
        busy=f"{statistics.fmean(row['busy'] for row in result['rows']):.0%}",
        links=report.table(
            ["Mbit/s", "across, MB/s", "a hop, ms", "in a node, MB/s", "a hop, ms"],
            [
                (rate, *(f"{of[k] * unit:.4g}" for k, unit in zip(LINK, (1e-6, 1e3) * 2, strict=True)))
                for rate, of in result["links"].items()
            ],
        ),
        **{k: o[k] for k in ("nodes", "ranks_per_node", "batch", "context", "layer_ms", "tau", "steps", "repeats")},
    )


ALONE = "- The new layouts alone, at {} Mbit/s: tau {}, and a median error of {}."
LINK = ("across", "latency", "inside", "inside_latency")
TEXT = """\
# Layouts: predicted and measured

[All results](index.md). The planner's formulas ([Planning](../docs/planning.md)) beside layouts that ran on an
emulated cluster. All its ranks share one machine of few cores.

- Source: {source}.
- Cluster: {nodes} nodes of {ranks_per_node} ranks, gloo. Model: GPT-2, 0.93 million parameters, float32.
- Batch: {batch} samples of {context} random tokens. Seed: 0. CO2: tau {tau}, float32.
- Computing is a stand-in: a block takes {layer_ms:g} ms a sample, which the planner is told. Communication is real.
- What a rank itself computes, {busy} of a step on average, is part of these milliseconds, as beneath a GPU.
- A thread takes {calls[0]:.1f} ms for a block's passes and update. TP adds {calls[1]:.1f} ms, FSDP2 {calls[2]:.1f} ms.
- Mean ± standard deviation of {repeats} repeats of {steps} steps, rounded up to whole rounds.
- After a pause links let 2 ms of their rate pass at once, and 32 KiB or more. What a stage sends is 64 KiB or more.
- New: layouts that had not run before when the formulas were last changed, of bytes or of seconds.

## Bytes of the fullest rank

{memory}

- Counted: what torch's allocator holds at the peak of a step, the least of three.
- Counted by: {counted}.
- Within 5 %: {within} of {many}. The worst: {worst}.
- What a block keeps is measured on one local block, as `--dry_run` does. The other formulas were made knowing the
  layouts that are marked as seen. Of the new ones within 5 %: {fresh}.

## Seconds of a step

{seconds}

{verdicts}

- Chosen: the layout for which the planner predicts the fewest seconds. Limits: a tau of {TAU} or more; 5 %; 10 %.
{alone}
- Changed after the run before this one, whose layouts are those marked as seen: the formulas of stages, of TP's ends,
  of ZeRO-1 and of hosts. The stand-in slept beside a rank's own thread then, and links let 256 KiB pass at once.

The links, as probed before:

{links}
"""
