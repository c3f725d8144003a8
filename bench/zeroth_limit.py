"""What trains a model in a given memory, and how well: python -m bench.zeroth_limit [--large 12 512 --small 6 256]

A GPT-2 of --large (layers, width) takes two steps in each way, in a process whose memory (private and writable,
RLIMIT_DATA) may grow by a limit and no more; the smallest limit of a ladder in which it does is the way's. Weights that
a way streams lie in a mapped file, which counts as little as the host's memory does beside a GPU's. Then a GPT-2 of
--small, trained on Python's documentation, goes on with WikiText-2's test text, four fifths of it, each way under its
own smallest limit; the rest is held out. Ways that take the same steps are trained once, in the one that needs least.
Seconds are the processor's. Writes zeroth_limit.json and zeroth_limit.md.
"""

from __future__ import annotations

import functools
import math
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.cluster import run_ranks
from bench.report import Asked, mean_sd, require
from bench.trainings import TUNING_SEED
from bench.zeroth_ways import KINDS, WAYS, Job, make_base, random_base, train, warm_up, wikitext
from core.errors import UserError
from training.script import launch

LADDER = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
"""Limits, in units of the weights."""


@dataclass(frozen=True)
class ZerothLimit(Asked):
    """What is trained, and how long."""

    large: tuple[int, int] = (12, 512)
    """Layers and width of the model whose memory is measured."""
    small: tuple[int, int] = (6, 256)
    """Of the model that is trained."""
    ways: tuple[str, ...] = tuple(WAYS)
    seeds: tuple[int, ...] = (0, 1, 2)
    batch: int = 4
    """Windows of 64 tokens in a step."""
    steps: int = 40
    """Of ways with gradients."""
    zo_steps: int = 150
    base_steps: int = 100
    """On Python's documentation, of twice as many windows."""
    lrs: tuple[float, ...] = (1.0, 3.0)
    """Learning rates to choose among, as multiples of each kind's, on a seed of its own; one is taken as it is."""

    def check(self) -> None:
        require(self, once="ways seeds lrs", positive="lrs", ones="batch steps zo_steps base_steps", ways=WAYS)
        for name in ("large", "small"):
            layers, width = getattr(self, name)
            if layers < 1 or width < 64 or width % 64:
                raise UserError(f"{name}={layers} {width}: give layers, 1 or more, and a width that 64 divides")


def run(job: Job) -> dict[str, Any] | None:
    """In a process of its own; None where the memory did not suffice."""
    found = run_ranks(train, None, 1, 1, job, timeout=7200.0)[0]
    return found if found["fits"] else None


# -- memory -----------------------------------------------------------------------------------------------------------


def smallest(job: Job) -> tuple[float | None, dict[str, Any] | None]:
    """The least limit of the ladder in which the job runs, in units of its weights, and what it measured there."""
    found: dict[float, dict[str, Any] | None] = {}

    def suffices(limit: float) -> bool:
        found[limit] = run(job.within(limit))
        return found[limit] is not None

    at = bisect_left(LADDER, True, key=suffices)
    return (LADDER[at], found[LADDER[at]]) if at < len(LADDER) else (None, None)


def measure_memory(o: ZerothLimit, base: Path, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    for way in o.ways:
        job = Job(way, shape, base, o.batch, steps=2, lr=1e-6)
        limit, found = smallest(job)
        row = {"way": way, "shape": shape, "weights_mb": job.weights_mb, "limit": limit}
        yield row | {"cpu_seconds_a_step": found["cpu_seconds"] / 2 if found else None}


# -- quality ----------------------------------------------------------------------------------------------------------


def frugal(rows: Sequence[dict[str, Any]], kind: str) -> tuple[str, float] | None:
    """Of the ways that take the same steps the one of the smallest limit, and that."""
    fits = [(r["limit"], r["way"]) for r in rows if WAYS[r["way"]] == kind and r["limit"] is not None]
    return (min(fits)[1], min(fits)[0]) if fits else None


def in_little(job: Job) -> tuple[float | None, dict[str, Any]]:
    """The limit in which the job came to its end, and what it measured: its own, or the next of the ladder where many
    steps need a little more than two."""
    for limit in LADDER[LADDER.index(job.limit) :]:
        if found := run(job.within(limit)):
            return limit, found
    return None, {}


def measure_quality(o: ZerothLimit, base: Path, limits: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for kind, usual in KINDS.items():
        if (way := frugal(limits, kind)) is None:
            continue
        steps = o.zo_steps if kind == "zo" else o.steps
        make = functools.partial(Job, way[0], o.small, base, o.batch, steps, evaluates=True, limit=way[1])

        def trained(seed: int, lr: float, kind: str = kind, make: Any = make) -> dict[str, Any]:
            limit, found = in_little(make(lr=lr, seed=seed))
            return {"kind": kind, "way": make.args[0], "seed": seed, "lr": lr, "limit": limit} | found

        tuning = [trained(TUNING_SEED, usual * by) for by in o.lrs] if len(o.lrs) > 1 else []
        yield from tuning
        finite = {r["lr"]: r["loss"] for r in tuning if math.isfinite(r.get("loss", math.nan))}
        lr = min(finite, key=lambda lr: finite[lr], default=usual * o.lrs[0])
        yield from (trained(seed, lr) for seed in o.seeds)


# -- all of it --------------------------------------------------------------------------------------------------------


def run_all(o: ZerothLimit, session: report.Session) -> None:
    wikitext()  # once, for all processes
    session.result |= {"memory": [], "rows": []}
    with tempfile.TemporaryDirectory() as scratch:
        warm_up(Path(scratch))
        untrained = random_base(Path(scratch) / "large", o.large)
        session.take("memory", measure_memory(o, untrained, o.large))
        untrained.unlink()
        base = Path(scratch) / "small"
        found = run_ranks(make_base, None, 1, 1, base, o.small, o.base_steps, 2 * o.batch, timeout=7200.0)
        session.result["base"] = found[0]
        session.take("memory", measure_memory(o, base, o.small))
        limits = [row for row in session.result["memory"] if row["shape"] == o.small]
        session.take("rows", measure_quality(o, base, limits))


TITLES = (
    *("way", "large: fits in, MB", "x its weights", "processor seconds a step", "small: fits in, MB", "x its weights"),
    *("lr", "steps", "held-out loss, nats", "next token right", "processor seconds"),
)


def text(result: dict[str, Any]) -> str:
    o = result["options"]
    cells = []
    for way in o["ways"]:
        large, small = (
            next((r for r in result["memory"] if r["way"] == way and tuple(r["shape"]) == tuple(o[which])), None)
            for which in ("large", "small")
        )
        rows = [r for r in result["rows"] if r["way"] == way and r["seed"] in o["seeds"]]
        cells.append([way, *fits(large), seconds(large), *fits(small), *quality(rows)])
    base, (large, small) = result.get("base"), (" x ".join(map(str, o[which])) for which in ("large", "small"))
    began = f", from {base['loss']:.3f} nats and {base['accuracy']:.1%}" if base else ""
    return (
        f"Training in little memory. {report.source(result)}\n\n{report.table(TITLES, cells)}\n\n"
        f"Large, small: {large} and {small} layers x width; batches of {o['batch']} windows of 64 tokens. MB: private "
        "writable memory beyond what the process had before the model, the smallest of a ladder in which two steps "
        "run; with less the allocation fails. Loss: of the small one within that, or the next, on WikiText-2's test "
        f"text{began}; {len(o['seeds'])} seeds, mean and standard deviation. Ways that take the same steps are trained "
        "once. Processor seconds: of all threads, in that memory, with whatever else ran on the machine.\n"
    )


def fits(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["not run", ""]
    if row["limit"] is None:
        return [f"not in {LADDER[-1] * row['weights_mb']:.0f}", ""]
    return [f"{row['limit'] * row['weights_mb']:.0f}", f"{row['limit']:g}"]


def seconds(row: dict[str, Any] | None) -> str:
    return f"{row['cpu_seconds_a_step']:.2f}" if row and row["cpu_seconds_a_step"] is not None else ""


def quality(rows: Sequence[dict[str, Any]]) -> list[str]:
    ended = [r for r in rows if "loss" in r]
    if not ended:
        return ["", "", "", "", ""]
    parts = [mean_sd([r["loss"] for r in ended], ".4f"), mean_sd([100 * r["accuracy"] for r in ended], ".2f") + " %"]
    return [f"{ended[0]['lr']:g}", str(ended[0]["steps"]), *parts, mean_sd([r["cpu_seconds"] for r in ended], ".0f")]


def main() -> None:
    packages = ("torch", "transformers")
    report.run(ZerothLimit, "zeroth_limit", run_all, text, packages=packages, forks=lambda _: False)


if __name__ == "__main__":
    launch(main)
