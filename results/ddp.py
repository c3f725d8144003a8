"""The tables of DDP whose buckets cross the link during the backward pass, and the rule for r without a measurement."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import holm, mean_sd
from bench.time_to_loss import ratio_of
from training.plan.methods import Work

Row = dict[str, Any]
Table = list[Sequence[str]]  # its titles, then its rows
PAIRED = Path(__file__).parent / "paired"
OVERLAPPED = {  # in results/paired/ddp_*.json
    "ddp:cap=1000": "DDP, one bucket",
    "ddp:cap=0.25": "DDP",
    "ddp:compression=int4,cap=1000": "DDP, int4, one bucket",
    "ddp:compression=int4,cap=0.25": "DDP, int4",
    "torch_fp16": "torch's fp16_compress_hook",
    "torch_powersgd_rank4": "torch's PowerSGD, rank 4, one bucket",
}
ACCUMULATED = {
    "ddp:accumulate=4,cap=0.25": "DDP, 4 micro-batches",
    "ddp:compression=int4,cap=0.25,accumulate=4": "DDP, int4, 4 micro-batches",
}


def ddp_steps() -> Table:
    """Seconds of a step of DDP, and in brackets the seconds in which it waits, from step 4 on, by link."""
    runs = read("ddp_steps.json")
    rates = sorted({run["rate_mbit"] for run in runs})
    table: Table = [("method", *(f"{rate:g} Mbit/s" for rate in rates))]
    for method, name in OVERLAPPED.items():
        cells = []
        for rate in rates:
            lines = [t[1:] if len(t := run["trajectory"]) > 2 else t for run in of(runs, rate, method)]
            ends = [(line[0], line[-1]) for line in lines if len(line) > 1]
            each = {
                key: [(last[key] - first[key]) / (last["step"] - first["step"]) for first, last in ends if key in last]
                for key in ("seconds", "exposed_seconds")
            }
            waits = f" ({mean_sd(each['exposed_seconds'], '.2f')})" if each["exposed_seconds"] else ""
            cells.append(mean_sd(each["seconds"], ".2f") + waits if ends else "over 4")
        table.append((name, *cells))
    return table


def ddp_seconds() -> Table:
    """Digits: DDP's seconds to the first target over CO2's, seed by seed, with the 95 % interval, by link."""
    runs = read("ddp_digits.json")
    rates = sorted({run["rate_mbit"] for run in runs})
    methods = dict.fromkeys(run["method"] for run in runs)
    table: Table = [("method", *(f"{rate:g} Mbit/s" for rate in rates))]
    names = {method: name for method, name in {**OVERLAPPED, **ACCUMULATED}.items() if method in methods}
    found = [[ratio_of(of(runs, rate), method, "co2_auto") for rate in rates] for method in names]
    return table + [(name, *cells) for name, cells in zip(names.values(), bold(found), strict=True)]


def read(name: str) -> list[Row]:
    return json.loads((PAIRED / name).read_text())["runs"]


def of(runs: Sequence[Row], rate: float, method: str = "") -> list[Row]:
    """Returns the runs of a link, and of a method if it is given."""
    return [run for run in runs if run["rate_mbit"] == rate and method in ("", run["method"])]


def bold(rows: Sequence[Sequence[Row | None]]) -> list[list[str]]:
    """The cells of a family of comparisons, from `ratio_of`. Bold: not 1, with p < 0.05 after Holm's correction.

    > is a lower bound, < an upper bound, and ~ neither, because a method missed the target.
    """
    family = [found for row in rows for found in row if found]
    sure = [found for found, p in zip(family, holm([found["p"] for found in family]), strict=True) if p < 0.05]

    def cell(found: Row | None) -> str:
        if found is None:
            return ""
        missed = found["missed"] > 0, found["against_missed"] > 0
        bound = {(True, False): "> ", (False, True): "< ", (True, True): "~ "}.get(missed, "")
        text = f"{bound}{found['ratio']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
        return f"**{text}**" if any(found is each for each in sure) else text

    return [[cell(found) for found in row] for row in rows]


GPUS = {"H100": 989e12, "A100": 312e12, "RTX 4090": 165e12}  # peak FLOP/s in bfloat16, dense, as their makers say
UTILIZATION, OF_NODE, NODES = 0.4, 8, 16  # of the peak; GPUs of a node


def rule() -> Table:
    """r = 64 F / (6 T B), calculated, and behind it the planner's r for two sizes of a model."""
    links = (25, 50, 100, 400)
    table: Table = [("8 GPUs a node, tokens of a GPU", *(f"{gbit} Gbit/s" for gbit in links))]
    for (name, peak), tokens in itertools.product(GPUS.items(), (8192, 32768)):
        flops, cells = OF_NODE * UTILIZATION * peak, []
        for gbit in links:
            ratios = []
            for parameters in (1e9, 7e9):
                step = 6 * parameters * OF_NODE * tokens / flops
                work = Work(parameters, step, gbit * 1e9 / 8)
                ratios.append(work.allreduce(NODES) / step)
            by_rule = 64 * flops / (6 * OF_NODE * tokens * gbit * 1e9)
            cells.append(f"{by_rule:.2g} ({', '.join(f'{ratio:.2g}' for ratio in ratios)})")
        table.append((f"{name}, {tokens:,}", *cells))
    return table


NODES_OF_TEXT = {  # in results/paired/nodes_text.json
    "co2_auto:nodes=2,compression=int4": "CO2, recommended, nodes of two, int4",
    "co2_auto:compression=int4": "CO2, recommended, one worker per rank, int4",
    "local:nodes=2,tau=6,compression=int4": "Local-SGD, tau 6, nodes of two, int4",
    "ddp:compression=int4": "DDP, int4",
}


def nodes_text() -> Table:
    """Text on two nodes of two ranks, by link: seconds to the first loss, and in brackets the steps."""
    runs = read("nodes_text.json")
    rates = sorted({run["rate_mbit"] for run in runs})
    table: Table = [("method", *(f"{rate:g} Mbit/s" for rate in rates))]
    for method, name in NODES_OF_TEXT.items():
        cells = list[str]()
        for found in (of(runs, rate, method) for rate in rates):
            missed = sum(run["status"] != "reached" for run in found)
            seconds, steps = (
                mean_sd([run[key] for run in found], f) for key, f in (("seconds", ".1f"), ("steps", ".0f"))
            )
            cells.append(
                f"{seconds} ({steps})" if not missed else f"> {seconds} ({len(found) - missed} of {len(found)})"
            )
        table.append((name, *cells))
    return table
