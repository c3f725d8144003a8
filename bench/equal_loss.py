"""How much faster L-GreCo comes to a loss than the uniform setting it is like, where bytes decide: bench.slow_links's
runs, of which each evaluation says how many bytes a worker had sent by then.

Over a link so slow that the rest of a step takes no time, a run's seconds are its bytes over the link's rate. So a
ratio of speeds at equal loss is one of bytes, and depends on no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench import report
from bench.report import mean_sd

PAIRS = (
    ("lgreco_int4", "ddp_int4"),
    ("lgreco_int4", "ddp_int3"),
    ("lgreco_rank4", "ddp_rank4"),
    ("lgreco_rank4", "ddp_rank3"),
    ("lgreco_any", "ddp_rank4"),
    ("lgreco_top1", "ddp_top1"),
    ("lgreco_top1", "ddp_top03"),
)
"""L-GreCo's methods of bench.slow_links, and uniform settings: the one that it is like, and one of about its bytes."""
TITLES = (
    *("uniform", "L-GreCo", "seeds", "uniform's last loss", "L-GreCo's", "the target"),
    *("uniform: steps to it", "MB", "L-GreCo: steps", "MB", "times as fast where bytes decide"),
)
Evaluation = Sequence[float]  # step, bytes that a worker has sent, loss


def evaluations(rows: Sequence[Mapping[str, Any]], loss: str) -> list[Evaluation]:
    """Of a run's metrics, which name the bytes of each reduction."""
    sent, found = 0.0, []
    for row in rows:
        sent += row.get("round/bytes_sent", 0.0)
        if loss in row:
            found.append((row["step"], sent, row[loss]))
    return found


def reached(evaluated: Sequence[Evaluation], target: float) -> tuple[float, float] | None:
    """Steps and bytes until the loss first was the target, on straight lines between evaluations; None: never, or at
    the first one already."""
    for before, after in zip(evaluated, evaluated[1:], strict=False):
        if before[2] > target >= after[2]:
            share = (before[2] - target) / (before[2] - after[2])
            return before[0] + share * (after[0] - before[0]), before[1] + share * (after[1] - before[1])
    return None


def pairs(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(L-GreCo's method, the uniform one, a comparison for each seed and rate that both have); the target is the higher
    of the two last losses, so that both come to it. The evaluation at the end is left out: it takes more of the text
    than the others."""
    by = {(r["method"], r["seed"], r["rate_mbit"]): r["evaluations"][:-1] for r in rows if r.get("evaluations")}
    for method, uniform in PAIRS:
        found = []
        for (name, *run), theirs in by.items():
            ours = by.get((method, *run), [])
            if name != uniform or len(theirs) < 2 or len(ours) < 2:
                continue
            target = max(theirs[-1][2], ours[-1][2])
            ends = reached(theirs, target), reached(ours, target)
            if ends[0] and ends[1]:
                final = theirs[-1][2], ours[-1][2]
                found.append({"target": target, "final": final, "uniform": ends[0], "own": ends[1]})
        if found:
            yield method, uniform, found


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty where no run was evaluated on its way, or no pair is there."""
    cells = []
    for method, uniform, found in pairs(rows):
        finals = [mean_sd([f["final"][i] for f in found], ".3f") for i in range(2)]
        ends = [
            f(statistics.fmean(each[who][i] for each in found))
            for who in ("uniform", "own")
            for i, f in enumerate((lambda steps: f"{steps:.0f}", lambda sent: f"{sent / 1e6:.1f}"))
        ]
        gain = mean_sd([each["uniform"][1] / each["own"][1] for each in found], ".2f")
        target = mean_sd([each["target"] for each in found], ".3f")
        cells.append([uniform, method, len(found), *finals, target, *ends, gain])
    if not cells:
        return ""
    return (
        f"## Bytes to one loss\n\n{report.table(TITLES, cells)}\n\n"
        "The target is the higher of a pair's two last losses, seed by seed. MB: what a worker has sent until then, "
        "with what deciding sends. Where bytes decide, the ratio of speeds is theirs, at any rate; 1.2 was aimed at.\n"
    )
