"""Fits the model's constants to rows of bench.scaling, and predicts such a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bench import report
from bench.simulator.events import HIDDEN, Outcome, Work, expected_skew, simulate
from bench.simulator.network import Cluster, allreduce_seconds, ring_seconds
from core.errors import UserError
from core.methods import METHODS

MODEL_KEYS = ("params", "bytes")
ROW_KEYS = (
    *("method", "tau", "workers", "rate_mbit", "steps", "seconds", "samples_per_second", "step_seconds", "step_spread"),
    *("exposed_share", "allreduce_seconds", "boundary_seconds"),
)
Row = dict[str, Any]
AWAITED = 0.02  # exposed share above which a hidden method has waited for its all-reduces


@dataclass(frozen=True)
class Link:
    """What an all-reduce over the link costs: theory / efficiency + hops x latency + overhead, in seconds."""

    efficiency: float = 1.0
    """Effective bandwidth as a share of the nominal one, for the ring's 2 (n-1)/n bytes."""
    latency: float = 0.0
    overhead: float = 0.0

    def seconds(self, workers: int, nbytes: float, rate_mbit: float) -> float:
        """One all-reduce around a ring of workers whose links carry rate_mbit Mbit/s each way."""
        cluster = Cluster(
            workers,
            inter_gbps=rate_mbit / 1e3,
            latency=self.latency,
            efficiency=self.efficiency,
            overhead=self.overhead,
        )
        return allreduce_seconds(cluster, nbytes, "ring")


@dataclass(frozen=True)
class Constants:
    """All that is fitted. Seconds unless stated."""

    step: float
    spread: float
    link: Link
    """Of whole all-reduces that workers wait for at once."""
    hidden_link: Link
    """Of whole all-reduces under the next round, which leave the link no rest: a burst that it saves up comes once."""
    ddp_link: Link
    """Of a step's buckets, under and after the backward pass."""
    boundary: dict[str, float]
    """A method's own; "" for one that was not measured."""
    overlap: float | None
    """ddp: share of the backward pass that communication runs under; None: no row could tell."""


def read(path: Path) -> dict[str, Any]:
    """bench.scaling's JSON, checked, without its rows of co2_recommended, whose wire and merging no event here has; a
    UserError names what is missing."""
    remedy = "write the file with python -m bench.scaling"
    data = report.load(path, "bench.scaling")
    _require(data, ("model", "batch"), str(path), remedy)
    _require(data["model"], MODEL_KEYS, f"{path}: model", remedy)
    data["rows"] = [r for r in data["rows"] if not isinstance(r, dict) or r.get("method") != "co2_recommended"]
    for index, row in enumerate(data["rows"]):
        _require(row, ROW_KEYS, f"{path}: row {index}", remedy)
        if row["method"] not in METHODS:
            raise UserError(f"{path}: row {index} has method {row['method']!r}, not one of {', '.join(METHODS)}")
        for key in ROW_KEYS[1:]:
            empty = key == "rate_mbit" and row["workers"] == 1
            good = isinstance(row[key], int | float) and math.isfinite(row[key])
            if not empty and not (good and row[key] >= 0):
                raise UserError(f"{path}: row {index}: {key}={row[key]!r} is no number from 0 on; {remedy}")
        for key in ("tau", "workers", "steps", "seconds", "samples_per_second", "step_seconds", "rate_mbit"):
            if row[key] == 0:
                raise UserError(f"{path}: row {index}: {key} is 0; {remedy}")
    return data


def _require(table: Any, keys: Sequence[str], where: str, remedy: str) -> None:
    missing = [key for key in keys if not isinstance(table, dict) or key not in table]
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; {remedy}")


def split(rows: list[Row]) -> tuple[list[Row], list[Row], str]:
    """(rows to fit to, rows held out, in words). Lone workers are fitted to: their step times count.

    Held out are the larger worker counts; with one count, every second rate.
    """
    linked = [row for row in rows if row["workers"] > 1]
    counts = sorted({row["workers"] for row in linked})
    rates = sorted({row["rate_mbit"] for row in linked})
    key, values = ("workers", counts) if len(counts) > 1 else ("rate_mbit", rates)
    chosen = counts[: (len(counts) + 1) // 2] if key == "workers" else rates[::2]
    rest = [value for value in values if value not in chosen]
    if not rest:
        raise UserError(
            f"cannot fit to {key} {_list(chosen)} of {_list(values)}: the file needs two worker counts above 1 or two "
            "rates, and some of them must stay to be predicted"
        )
    words = f"fitted to {key} {_list(chosen)}; held out: {key} {_list(rest)}"
    held_out = [row for row in linked if row[key] in rest]
    return [row for row in rows if row["workers"] == 1 or row[key] in chosen], held_out, words


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "(none)"


def fit(rows: list[Row], nbytes: float) -> Constants:
    """Least squares on relative errors for the all-reduce and the overlap; medians for the rest."""
    step, spread = median(r["step_seconds"] for r in rows), median(r["step_spread"] for r in rows)
    linked = [r for r in rows if r["workers"] > 1]
    ddp = [r for r in linked if r["method"] == "ddp"]
    hidden = [r for r in linked if r["method"] in HIDDEN]
    # Blocking methods see an all-reduce end at once; a hidden one's end is noted at the next step, unless awaited.
    blocking = [r for r in linked if r["method"] not in (*HIDDEN, "ddp")]
    awaited = [r for r in hidden if r["exposed_share"] > AWAITED]
    link = _fit_link(blocking or awaited or hidden or ddp, nbytes, spread)
    hidden_link = _fit_link(awaited, nbytes, spread) if awaited else link
    ddp_link = _fit_link(ddp, nbytes, spread) if ddp else link
    boundary = {"": median(r["boundary_seconds"] for r in rows)}
    for method in {r["method"] for r in linked}:
        boundary[method] = median(r["boundary_seconds"] for r in linked if r["method"] == method)
    constants = Constants(step, spread, link, hidden_link, ddp_link, boundary, None)
    return replace(constants, overlap=_fit_overlap(ddp, constants, nbytes))


def _fit_link(rows: list[Row], nbytes: float, spread: float) -> Link:
    """Non-negative least squares of measured on theoretical seconds, hops and 1, each row divided by its measurement.

    The wait for the last worker, which a measured all-reduce includes, is subtracted first.
    """
    columns, measured = [], []
    for row in rows:
        n, rate = row["workers"], row["rate_mbit"] * 1e6 / 8
        skew = expected_skew(Work(n, row["step_seconds"], spread, paced=_paced(row)), row["tau"])
        measured.append(row["allreduce_seconds"] - skew)
        columns.append((ring_seconds(n, nbytes, rate), 2 * (n - 1), 1.0))
    y, a = np.array(measured), np.array(columns)
    if not (y > 0).all():
        raise UserError("an all-reduce took no longer than the spread of the steps: measure on a slower link")
    slope, latency, overhead = (float(x) for x in nnls(a / y[:, None], np.ones_like(y))[0])
    if not slope > 0:
        raise UserError(
            "the all-reduces took no longer at lower rates or with more workers: nothing to fit; measure again"
        )
    return Link(1 / slope, latency, overhead)


def _fit_overlap(rows: list[Row], c: Constants, nbytes: float) -> float | None:
    """ddp's overlap share by least squares on the relative step time, from steps that communication lengthened."""
    top = bottom = 0.0
    for row in rows:
        work = work_of(row, c, nbytes)
        wall = row["seconds"] / row["steps"]
        exposed = wall - work.step - work.boundary
        backward = work.step * work.backward_share
        if exposed > 0.02 * wall:
            top += (work.allreduce + expected_skew(work, 1) - exposed) * backward / wall**2
            bottom += (backward / wall) ** 2
    return min(1.0, max(0.0, top / bottom)) if bottom else None


def work_of(row: Row, c: Constants, nbytes: float) -> Work:
    """The model's input for a row of which only workers, rate and method are known."""
    n, method = row["workers"], row["method"]
    link = c.ddp_link if method == "ddp" else c.hidden_link if method in HIDDEN else c.link
    allreduce = link.seconds(n, nbytes, row["rate_mbit"]) if n > 1 else 0.0
    boundary = c.boundary.get(method, c.boundary[""])
    return Work(n, c.step, c.spread, allreduce, boundary=boundary, overlap=c.overlap or 0.0, paced=_paced(row))


def _paced(row: Row) -> bool:
    return row.get("compute") == "stand-in"


def predict(row: Row, c: Constants, nbytes: float, batch: int, seed: int = 0) -> tuple[float, float]:
    """(samples/s, exposed share) of a run with the row's method, tau, workers, rate and number of steps.

    A round before it is not counted, as in bench.scaling.
    """
    tau = 1 if row["method"] == "ddp" else row["tau"]
    rounds = row["steps"] // tau
    rest = (row["steps"] - rounds * tau) * c.step
    outcome = Outcome(0, 0.0, 0.0, 0.0)
    if rounds:
        outcome = simulate(row["method"], work_of(row, c, nbytes), tau, rounds + 1, seed=seed, warmup=1)
    seconds = outcome.seconds + rest
    return row["workers"] * batch * row["steps"] / seconds, outcome.exposed_seconds / seconds
