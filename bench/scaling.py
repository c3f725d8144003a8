"""Weak scaling on an emulated cluster: samples/s and exposed communication of every method, by workers and link rate.

python -m bench.scaling [--workers 1 2 4 8 16] [--rates 50 200 1000] [--repeats 3] [--throttle] [--out FOLDER]

A worker is a node, a network namespace of its own, with links shaped to each rate; with --throttle all share the
loopback device and collectives are held back in software. Computing is a stand-in (bench/standin.py). The workers are
forked once per worker count and rate; they build every method once and measure all of them, in an order that is
shuffled for each repeat, so that whatever else the machine does falls on all alike. Writes scaling.json, scaling.md and
two plots.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench import plots, report
from bench.cluster import Cluster, run_ranks
from bench.measure import SETTLED, Job, Setting, round_seconds, rounds_to_measure, wire_seconds, work
from bench.report import Asked, require, require_no_crowd
from bench.standin import BYTES, LAYERS, PARAMS, digits
from training.script import launch

# slowmo at two tau, each beside co2 at the same: over the slowest link co2 hides everything at 48 and a part at 12.
# local and overlap_local stand once, at 12, where the most differ: local's times are slowmo's, overlap_local's co2's.
DEFAULT = ("ddp", "local:12", "overlap_local:12", "slowmo:12", "slowmo:48", "co2:3", "co2:12", "co2:48", "co2:auto")


@dataclass(frozen=True)
class Scaling(Asked):
    """What to measure."""

    workers: tuple[int, ...] = (1, 2, 4, 8, 16)
    rates: tuple[float, ...] = (50.0, 200.0, 1000.0)
    """Link rates, Mbit/s."""
    methods: tuple[str, ...] = DEFAULT
    """ddp, or METHOD:TAU; co2_recommended takes CO2Config.recommended. co2:auto, co2_recommended:auto and
    overlap_local:auto choose tau themselves."""
    repeats: int = 3
    seconds: float = 3.0
    """Of each measurement, after a round of warm-up; never less than two rounds."""
    step_ms: float = 40.0
    """A local step of the stand-in."""
    batch: int = 8
    """Samples per step and worker."""
    seed: int = 0
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces."""

    def check(self) -> None:
        require(self, once="workers rates methods", positive="workers rates repeats seconds step_ms batch")
        require_no_crowd(self)
        self.settings()

    def settings(self) -> list[Setting]:
        return [Setting.parse(text) for text in self.methods]

    @property
    def link(self) -> str:
        return "throttled in software" if self.throttle else "namespaces + tbf"

    def groups(self) -> list[tuple[int, float | None]]:
        """(workers, rate): what one fork of the workers measures. A lone worker has no link."""
        return [(n, rate) for n in self.workers for rate in (self.rates if n > 1 else (None,))]


def predict(o: Scaling, workers: int, rate: float | None) -> float:
    """Seconds that a group will take, roughly: start, build (rank 0's parameters are broadcast), measure, drain."""
    wire, step = wire_seconds(workers, rate), o.step_ms / 1e3
    total = 1.0 + 0.1 * workers
    for setting in o.settings():
        tau = max(1, math.ceil(1.25 * wire / step)) if setting.tau == "auto" else setting.tau
        one = round_seconds(setting, tau, step, wire)
        total += wire * math.log2(max(2, workers)) / 2 + (2 * SETTLED * one if setting.settles else 0)
        total += o.repeats * (one + rounds_to_measure(o.seconds, one) * one + wire / 2)
    return total


def tell(setting: Setting, cells: list[dict[str, Any]]) -> None:
    """A line a measurement, by rank 0 of a group; cells are the group's, so far."""
    row = cells[-1]
    link = f"{row['rate_mbit']:g} Mbit/s" if row["rate_mbit"] else "no link"
    print(
        f"{row['workers']:2d} workers, {link}, {setting}: {row['samples_per_second']:.0f} samples/s, "
        f"{row['exposed_share']:.1%} exposed",
        flush=True,
    )


def combine(per_rank: Sequence[dict[str, Any]], step_ms: float) -> list[dict[str, Any]]:
    """One row a measurement: means over the workers; late when the slowest worker's steps were, by over a tenth."""
    rows = []
    for cells in zip(*(result["cells"] for result in per_rank), strict=True):
        row = dict(cells[0])
        for name in ("seconds", "step_seconds", "step_spread", "exposed_seconds", "exposed_share"):
            row[name] = statistics.fmean(c[name] for c in cells)
        for name in ("samples_per_second", "allreduce_seconds", "boundary_seconds"):
            row[name] = statistics.fmean(c[name] for c in cells)
        busy = sum(c["cpu_seconds"] for c in cells) / row["seconds"]
        slowest = max(c["mean_step_seconds"] for c in cells)
        del row["cpu_seconds"], row["mean_step_seconds"]
        rows.append(row | {"cpu_cores_busy": busy, "late": slowest > 1.1 * step_ms / 1e3})
    return rows


def run(o: Scaling, session: report.Session) -> None:
    """Measures every group."""
    session.result |= of_link(o)
    result, data = session.result, digits()
    most, seconds = max(o.workers), {group: predict(o, *group) for group in o.groups()}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(most, o.rates[0])) if most > 1 and not o.throttle else None
        for n, rate in o.groups():
            if cluster and rate:
                cluster.shape(rate, result["verified_mbit"])
            job = Job(o.settings(), n, rate, data, o.repeats, o.seconds, o.step_ms / 1e3, o.batch, o.seed, o.throttle)
            job.report = tell
            print(f"about {math.ceil(sum(seconds.values()) / 60)} min left", flush=True)
            limit = 60 + 4 * seconds.pop((n, rate))
            per_rank = run_ranks(work, cluster if rate else None, 1, n, job, timeout=limit)
            result["rows"] += combine(per_rank, o.step_ms)
            result["model"]["ddp_bucket_bytes"] = per_rank[0]["ddp_buckets"] or result["model"]["ddp_bucket_bytes"]
            session.save()
    plots.draw(session.folder, result)


def of_link(o: Scaling) -> dict[str, Any]:
    """What scaling.json has beside header and rows."""
    return {
        "link": o.link,
        "verified_mbit": {},  # rate -> what a transfer between two nodes measured
        "model": {"params": PARAMS, "bytes": BYTES, "layers": LAYERS, "ddp_bucket_bytes": None},
        "step_ms": o.step_ms,
        "batch": o.batch,
        "seed": o.seed,
        "rows": [],
    }


def main() -> None:
    forks = lambda o: not o.throttle and max(o.workers) > 1  # noqa: E731
    report.run(Scaling, plots.NAME, run, plots.markdown, forks=forks)


if __name__ == "__main__":
    launch(main)
