"""The tables of bench/zeroth.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from bench import report
from bench.report import mean_sd

# (layers, width) of OPT (arXiv 2205.01068), and the GB of device memory that ZO2's README gives for it
OPT = {
    "1.3B": (24, 2048, 3.75),
    "2.7B": (32, 2560, 4.14),
    "6.7B": (32, 4096, 4.99),
    "13B": (40, 5120, 6.18),
    "30B": (48, 7168, 8.86),
    "66B": (64, 9216, 12.07),
    "175B": (96, 12288, 18.04),
}
OPT_VOCABULARY, OPT_POSITIONS = 50272, 2050


def opt_table() -> Iterator[dict[str, Any]]:
    """GB of embedding, head and three blocks in float16; and with what is no weight, as large as in the first row."""
    rest = None
    for name, (_, width, published) in OPT.items():
        block = 12 * width**2 + 13 * width
        ends = (2 * OPT_VOCABULARY + OPT_POSITIONS) * width
        computed = 2 * (ends + 3 * block) / 1e9
        rest = published - computed if rest is None else rest
        yield {
            "model": f"OPT-{name}",
            "published_gb": published,
            "weights_gb": computed,
            "with_rest_gb": computed + rest,
        }


def text(result: dict[str, Any]) -> str:
    o = result["options"]
    lines = [f"Zeroth-order training. {report.source(result)}", ""]
    if rows := result.get("speed"):
        alone = {row["forward_ms"]: row["steps_per_second"] for row in rows if row["mesh"] == "one process"}
        cells = [
            [
                f"{row['forward_ms']:g} ms" if row["forward_ms"] else "a tiny GPT-2, unpaced",
                row["mesh"],
                row["delay"],
                f"{row['steps_per_second']:.2f}",
                f"{row['steps_per_second'] / alone[row['forward_ms']]:.2f}",
                f"{row['exposed_ms']:.1f}" if "exposed_ms" in row else "",
            ]
            for row in rows
        ]
        titles = ("forward, whole batch", "mesh", "delay", "steps/s", "x one process", "waited, ms a step")
        lines += [f"## Speed at {o['rate']:g} Mbit/s and {o['delay_ms']:g} ms", "", report.table(titles, cells), ""]
        lines += [
            "One process takes both forward passes of the whole batch, as ZO2 does. Ideal: 2, and 4 for 2 x 2.",
            "",
        ]
    if rows := result.get("traffic"):
        cells = [[f"{row['parameters']:,}", row["workers"], f"{row['bytes_a_step']:.0f}"] for row in rows]
        lines += ["## Traffic", "", report.table(("parameters", "workers", "bytes a step and worker"), cells), ""]
    if rows := result.get("memory"):
        names = ("compute_ms", "upload_ms", "blocks_on_device", "of_blocks")
        cells = [[*(f"{row[name]:g}" for name in names), f"{row['hidden']:.1%}"] for row in rows]
        titles = ("compute a block, ms", "upload, ms", "blocks on the device", "of", "uploads hidden")
        lines += ["## Blocks, over an emulated bus", "", report.table(titles, cells), ""]
    if rows := result.get("sharing"):
        alike = len({tuple(row["weights"]) for row in rows}) == 1
        cells = [[row["workers"], f"{row['bytes_a_step']:,.0f}"] for row in rows]
        lines += ["## Uploads shared by the workers of a node", ""]
        lines += [report.table(("workers", "bytes that each uploads a step"), cells), ""]
        lines += [f"The weights are {'the same, bit for bit' if alike else 'not the same'}.", ""]
    lines += ["## Device memory of OPT, computed, beside ZO2's README", "", opt_text(result["opt"]), ""]
    if rows := result.get("tuning"):
        lines += ["## Learning rates", "", tuning_text(rows, o["tuning_seed"]), ""]
    if rows := result.get("quality"):
        lines += ["## Quality", "", quality_text(rows), ""]
    return "\n".join(lines)


def opt_text(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            row["model"],
            f"{row['published_gb']:.2f}",
            f"{row['weights_gb']:.2f}",
            f"{row['with_rest_gb']:.2f}",
            f"{row['with_rest_gb'] / row['published_gb'] - 1:+.1%}" if i else "fitted",
        ]
        for i, row in enumerate(rows)
    ]
    titles = ("model", "ZO2's README, GB", "embedding, head, 3 blocks", "and the first row's rest", "off by")
    return report.table(titles, cells) + (
        "\n\nWeights in float16, embedding and head both counted. They alone are less than the published cells, which "
        "hold activations and the CUDA context, too; the last columns add what these are in the first row to all."
    )


def tuning_text(rows: Sequence[dict[str, Any]], seed: int) -> str:
    """Each method's final loss at each learning rate, the least in bold, and a word where that is the grid's end."""
    lrs = sorted({row["lr"] for row in rows})
    cells = []
    for name in dict.fromkeys(row["method"] for row in rows):
        found = {row["lr"]: row.get("final", math.nan) for row in rows if row["method"] == name}
        best = min((lr for lr in found if math.isfinite(found[lr])), key=lambda lr: found[lr], default=None)
        shown = {lr: f"{loss:.4f}" if math.isfinite(loss) else "failed" for lr, loss in found.items()}
        if best is not None:
            shown[best] = f"**{shown[best]}**"
        ends = best in (min(found), max(found)) and len(found) > 1
        cells.append([name, *(shown.get(lr, "") for lr in lrs), "at the grid's end" if ends else ""])
    return report.table(("final loss at", *(f"{lr:g}" for lr in lrs), ""), cells) + (
        f"\n\nSeed {seed}, over links that do not slow. MeZO takes zo's, whose steps it takes."
    )


def quality_text(rows: Sequence[dict[str, Any]]) -> str:
    """The loss that the worst of MeZO's seeds ends with is what the others are timed to."""
    ended = [row for row in rows if "final" in row]
    mezo = [row["final"] for row in ended if row["rate_mbit"] is None]
    target = max(mezo) if mezo else None
    cells = []
    for key in dict.fromkeys((row["method"], row["rate_mbit"]) for row in rows):
        group = [row for row in ended if (row["method"], row["rate_mbit"]) == key]
        failed = [row["failed"] for row in rows if "failed" in row and (row["method"], row["rate_mbit"]) == key]
        if not group:
            cells.append([key[0], f"failed: {failed[0]}"])
            continue
        times = [seconds_to(row["losses"], target) for row in group] if target is not None else []
        reached = [t for t in times if t is not None]
        cells.append(
            [
                key[0],
                f"{key[1]:g}" if key[1] else "none",
                f"{group[0]['lr']:g}",
                group[0]["steps"],
                mean_sd([row["final"] for row in group], ".4f"),
                mean_sd([row["steps_per_second"] for row in group], ".2f"),
                f"{statistics.fmean(row['bytes_a_step'] for row in group):,.0f}",
                (mean_sd(reached, ".1f") if reached else "not reached") + f" ({len(reached)} of {len(times)})",
            ]
        )
    titles = ("method", "Mbit/s", "lr", "steps", "final loss", "steps/s", "bytes sent a step", "seconds to the target")
    told = "not known yet" if target is None else f"{target:.4f}"
    return report.table(titles, cells) + (
        f"\n\nThe target is {told}, where the worst of MeZO's seeds ended. Held-out nats per token. "
        "Four workers share this machine's cores, each on a node of its own."
    )


def seconds_to(losses: Sequence[Sequence[float]], target: float) -> float | None:
    return next((seconds for seconds, loss in losses if loss <= target), None)
