"""A seeded campaign of harm against small runs: python -m bench.chaos [--kills N] [--minutes M] ...

Each run trains scikit-learn's digits with four workers, and suffers one thing: a worker is killed in a local step, at a
boundary, with its reduction in flight, in a checkpoint or in an evaluation; a worker's link goes down; a killed worker
comes back; the disk takes no more; a worker's gradient is NaN. Elastic runs must go on by themselves, the others are
started again with --resume.
Compared with undisturbed runs of the same settings over several seeds. What is done is not done again: the campaign
goes on where it was stopped.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bench import report
from bench.chaos.crew import Crew, group
from bench.chaos.worker import PHASES, work
from bench.cluster.nodes import Cluster, require_namespaces
from bench.trainings import Metrics
from training.script import launch

Row = dict[str, Any]
WORKERS, EPOCH, TAU = 4, 22, 6  # EPOCH: its steps
RATE_MBIT = 200.0
COMMON = ("digits_small", "--device", "cpu", "--eval_every", "2", "--log_every", "1")
PAPER = "--no_recommended"
CONFIGS: dict[str, tuple[str, ...]] = {
    "elastic": ("--elastic", PAPER),
    "elastic, recommended": ("--elastic",),
    "co2": (PAPER,),
    "co2, recommended": (),
    "co2, skip_after": (PAPER, "--skip_after", "0.5"),
    "co2, shard": (PAPER, "--shard"),
    "co2, int8": (PAPER, "--co2.wire.format", "int8"),
    "co2, zero 2": (PAPER, "--zero", "2", "--per_node", "2"),
    "ddp": (PAPER, "--method", "ddp"),
}
ELASTIC = tuple(name for name in CONFIGS if name.startswith("elastic"))


@dataclass(frozen=True)
class Campaign:
    """How much of what; see this module."""

    kills: int = 100
    outages: int = 20
    rejoins: int = 20
    disks: int = 10
    nans: int = 10
    seeds: int = 5
    """Undisturbed runs of each configuration."""
    seed: int = 0
    minutes: float = 600.0
    """Starts no further run after so many."""
    out: Path = Path("results/chaos.json")
    """One object a run; beside it a table in Markdown."""


def main() -> None:
    asked = tyro.cli(Campaign, prog="python -m bench.chaos", description=__doc__, use_underscores=True)
    if asked.outages:
        require_namespaces()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.chaos.preload"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs what `finally` says
    until = time.monotonic() + 60 * asked.minutes
    rows = json.loads(asked.out.read_text()) if asked.out.exists() else []
    for planned in plan(asked):
        if time.monotonic() > until:
            break
        if any(all(row.get(key) == value for key, value in planned.items()) for row in rows):
            continue
        rows.append(planned | suffer(context, planned))
        print(json.dumps(rows[-1]), flush=True)
        asked.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    report.write(asked.out.with_suffix(".md"), table(rows))


def plan(asked: Campaign) -> Iterator[Row]:
    """The runs, with and without harm, all mixed, so that a part of the campaign is a sample of it."""
    rng = random.Random(asked.seed)
    kills = [(config, phase) for phase in PHASES for config in CONFIGS if config != "ddp" or phase != "flight"]
    rows: list[Row] = []
    for i in range(asked.kills):
        config, phase = kills[i % len(kills)]
        rows.append({"harm": "kill", "config": config, "phase": phase})
    for i in range(asked.rejoins):
        rows.append({"harm": "rejoin", "config": ELASTIC[i % 2], "phase": PHASES[i % len(PHASES)]})
    for i in range(asked.outages):
        rows.append({"harm": "outage", "config": list(CONFIGS)[i % len(CONFIGS)], "seconds": rng.choice([3, 10])})
    for harm, times in (("disk", asked.disks), ("nan", asked.nans)):
        for i in range(times):
            rows.append({"harm": harm, "config": list(CONFIGS)[i % len(CONFIGS)], "phase": harm})
    for row in rows:
        whole = row.get("phase") == "checkpoint" and row["config"] in ELASTIC  # whose first worker alone writes it
        last = 16 if row["harm"] == "rejoin" else 50  # it takes time to come back
        row |= {"who": 0 if whole or row["harm"] == "disk" else rng.randrange(WORKERS), "step": rng.randint(8, last)}
    rows += [{"harm": "none", "config": config} for config in CONFIGS for _ in range(asked.seeds)]
    rng.shuffle(rows)
    counts: dict[str, int] = {}
    for row in rows:
        alike = "{harm} {config}".format(**row)
        number = counts[alike] = counts.get(alike, -1) + 1
        yield row | {"seed": number % max(1, asked.seeds)}


def suffer(context: Any, planned: Row) -> Row:
    """One run to its end, and what became of it."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos"))
    try:
        seen = trained(context, planned, folder)
        minutes = round((time.monotonic() - began) / 60, 2)
        return seen | measured(planned, folder, seen["attempts"]) | {"minutes": minutes}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def trained(context: Any, planned: Row, folder: Path) -> Row:
    """Is started again, with --resume, until it comes to its end; an elastic run, which goes on by itself, only where
    it cannot write. The harm is done once."""
    elastic = planned["config"] in ELASTIC
    attempts, status, hung = 0, 1, False
    while status and attempts < (3 if elastic else 4) and not hung:
        harm = named(planned, f"{planned.get('who')}.0") if attempts == 0 else {}
        args = arguments(planned, folder, harm, attempts)
        with Net(planned if attempts == 0 else {}, folder) as net:
            options = {"cluster": net.cluster, "watch": net.watch, "late": 400.0}
            if elastic:
                back = int(planned["harm"] == "rejoin")
                make = functools.partial(Crew, context, work, args, WORKERS, back, **options)
                crew = net.cluster.inside(WORKERS, make) if net.cluster else make()
                status, hung = crew.run(), crew.timed_out
                if crew.signalled:
                    sys.exit(status)
            else:
                status, hung = group(context, work, args, WORKERS, attempt=attempts, **options)
        attempts += 1
    return {"attempts": attempts, "status": status, "hung": hung}


def steps(config: str) -> int:
    """Of a whole run: so many that a worker that was killed can come back in it."""
    return (4 if config in ELASTIC else 3) * EPOCH


def named(planned: Row, worker: str) -> Row:
    return {"worker": worker, "phase": planned["phase"], "step": planned["step"]} if "phase" in planned else {}


def arguments(planned: Row, folder: Path, harm: Row, attempt: int) -> tuple[Any, ...]:
    """What `work` takes."""
    timeout = "60" if planned["harm"] == "outage" else "20"
    own = ("--out", str(folder / "run"), "--seed", str(planned["seed"]), "--timeout", timeout)
    own += ("--epochs", str(steps(planned["config"]) // EPOCH))
    again = ("--resume",) if attempt else ()
    return "vision.train", (*COMMON, *CONFIGS[planned["config"]], *own, *again), harm, str(folder / "log")


class Net:
    """The emulated cluster of a run whose link goes down, and the hand that takes it down; else nothing."""

    def __init__(self, planned: Row, folder: Path):
        self.planned, self.metrics = planned, Metrics(folder / "run")
        self.cluster = Cluster(WORKERS + 1, RATE_MBIT) if planned.get("harm") == "outage" else None
        self._down_since = 0.0

    def __enter__(self) -> Net:
        if self.cluster:
            self.cluster.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.cluster:
            self.cluster.close()

    def watch(self) -> None:
        """Takes the link down at its step, and up again after its seconds."""
        if not self.cluster or self._down_since < 0:
            return
        if not self._down_since and any(line["step"] >= self.planned["step"] for line in self.metrics.read()):
            self.cluster.set_link(self.planned["who"], up=False)
            self._down_since = time.monotonic()
        if self._down_since and time.monotonic() - self._down_since > self.planned["seconds"]:
            self.cluster.set_link(self.planned["who"], up=True)
            self._down_since = -1.0


def measured(planned: Row, folder: Path, attempts: int) -> Row:
    """What the run folder tells. steps_lost: those that all did again after a restart; without one, those that the
    harmed worker alone had done, and had not sent. pause_seconds: the longest between two steps."""
    run, trace = folder / "run", folder / "log.harm"
    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    history = json.loads((run / "config.json").read_text()).get("history", []) if (run / "config.json").exists() else []
    harmed = json.loads(trace.read_text()) if trace.exists() else None
    metrics = Metrics(run).read()
    seconds = [line["seconds"] for line in metrics if "train_loss" in line]
    left_out = int(sum(line.get("round/left_out", 0) for line in metrics))
    lost = left_out * TAU
    if harmed and attempts > 1:
        lost = max(0, harmed["step"] - (history[-1]["step"] if history else 0))
    elif harmed and planned["harm"] in ("kill", "rejoin"):
        lost = max(0, harmed["step"] - harmed["sent"])
    log = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
    return {
        "test_loss": summary.get("test_loss"),
        "steps": summary.get("steps"),
        "harmed_at": harmed and harmed["step"],
        "steps_lost": lost,
        "left_out": left_out,
        "came_back": sum(" came" in line.get("workers", "") for line in metrics),
        "pause_seconds": round(max((b - a for a, b in zip(seconds, seconds[1:], strict=False)), default=0.0), 2),
        "log": [] if summary else log.splitlines()[-12:],
    }


ABOUT = f"""# Harm, and what became of it

`python -m bench.chaos`: {WORKERS} workers on one machine train scikit-learn's digits for {steps("co2")} steps, elastic
ones for {steps("elastic")} (tau {TAU}, a checkpoint every {EPOCH} steps, an evaluation every {2 * EPOCH}, both at the
next boundary), and suffer one thing each: a worker is killed (in a local step, at a boundary, with its all-reduce in
flight, while it writes a checkpoint, in an evaluation), is killed and started again while the others go on (rejoin),
has no link for 3 or 10 seconds (on the emulated cluster, {RATE_MBIT:g} Mbit/s), computes NaN once, or can write no more
(disk). Seeded; a part of the campaign is a sample of it.

- **ended**: runs that came to their last step and evaluation. **by itself**: of those, without a start with
  `--resume`, which all but elastic runs need where a worker dies.
- **hung**: runs that had to be killed from outside.
- **steps lost**: the most of any run: those that all workers did again after a restart; where there was none, those
  that the harmed worker had done and not sent, or, left out of a round's mean, the round's.
- **pause**: the longest between two steps of any run, without restarts; the machine is shared.
- **agrees**: runs whose final test loss is at most three standard deviations above the mean of the undisturbed runs
  (harm none) of the same settings, over seeds. **equal**: those whose final test loss is, to 1 in 10,000, that of the
  undisturbed run of the same settings and seed. The recommended settings merge a mean when it comes, and skip_after
  goes on while it does not: there a run depends on the times, too, and no two are equal.

`agrees` is a test on one side. Most settings of co2 are still far from the end of training after so few steps, and
their undisturbed runs differ much, so that only great harm is seen:

{{thresholds}}

A model that guesses has a loss of {math.log(10):.2f}. {{disagree}}
"""
HEAD = (
    *("harm", "settings", "runs", "ended", "by itself", "hung", "what else", "steps lost", "pause, s", "agrees"),
    "equal",
)


def table(rows: list[Row]) -> str:
    """The campaign: a line for each kind of harm, and one for each of its configurations."""
    groups: dict[tuple[str, str], list[Row]] = {}
    each: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (kind(row), row["config"])):
        which = "elastic" if row["config"] in ELASTIC else "ddp" if row["config"] == "ddp" else "co2"
        groups.setdefault((kind(row), which), []).append(row)
        each.setdefault((kind(row), row["config"]), []).append(row)
    short, long = (report.table(HEAD, [cells(*key, some, rows) for key, some in of.items()]) for of in (groups, each))
    about = ABOUT.format(thresholds=thresholds(rows), disagree=disagreeing(rows))
    return f"{about}\n{short}\n\n## By settings\n\n{long}\n"


def thresholds(rows: list[Row]) -> str:
    """What a run of each of the settings must not exceed in order to agree."""
    usual = {config: undisturbed(rows, config) for config in CONFIGS}
    lines = [
        (config, report.mean_sd(losses, ".3f"), f"{most(losses):.2f}")
        for config, losses in usual.items()
        if len(losses) >= 3
    ]
    return report.table(("settings", "undisturbed runs' test loss", "agrees up to"), lines)


def disagreeing(rows: list[Row]) -> str:
    """Which settings have runs that do not agree, and of how many that were harmed in the same way."""
    parts = []
    for harm in dict.fromkeys(row["harm"] for row in rows):
        for config in dict.fromkeys(row["config"] for row in rows):
            usual = undisturbed(rows, config)
            ended = [r["test_loss"] for r in rows if (r["harm"], r["config"]) == (harm, config) and r["status"] == 0]
            if len(usual) >= 3 and (over := [loss for loss in ended if loss > most(usual)]):
                losses = " and ".join(f"{loss:.3f}" for loss in sorted(over, reverse=True))
                parts.append(
                    f"Of {len(ended)} runs with the settings `{config}` and the harm {harm} {len(ended) - len(over)} "
                    f"agree; the others end at {losses}."
                )
    return "\n".join(parts) or "All runs agree."


def undisturbed(rows: list[Row], config: str) -> list[float]:
    """The final losses of the runs without harm."""
    same = [r["test_loss"] for r in rows if (r["harm"], r["config"]) == ("none", config)]
    return [loss for loss in same if loss is not None]


def most(losses: list[float]) -> float:
    """What a run that agrees with these ends with at most."""
    return statistics.mean(losses) + 3 * statistics.stdev(losses)


def cells(harm: str, settings: str, some: list[Row], rows: list[Row]) -> tuple[object, ...]:
    """A line of the table: what became of some of the rows."""
    ended = [r for r in some if r["status"] == 0 and r["steps"] == steps(r["config"])]
    itself, hung = sum(r["attempts"] == 1 for r in ended), sum(r["hung"] for r in some)
    lost, pause = (max(r[key] for r in some) for key in ("steps_lost", "pause_seconds"))
    told = [agreement(r, [o for o in rows if o["harm"] == "none" and o["config"] == r["config"]]) for r in ended]
    agreed, equal = ([said[i] for said in told if said[i] is not None] for i in (0, 1))
    counts = (f"{sum(said)} of {len(said)}" if said else "not run" for said in (agreed, equal))
    return harm, settings, len(some), len(ended), itself, hung, besides(some), lost, f"{pause:.1f}", *counts


def besides(some: list[Row]) -> str:
    """What runs of one kind of harm have of their own."""
    if some[0]["harm"] == "rejoin":
        return f"came back in {sum(bool(r['came_back']) for r in some)}"
    return f"left out in {sum(bool(r['left_out']) for r in some)}" if some[0]["harm"] == "nan" else ""


def kind(row: Row) -> str:
    return f"{row['harm']}, {row['phase']}" if row["harm"] in ("kill", "rejoin") else row["harm"]


def agreement(row: Row, usual: list[Row]) -> tuple[bool | None, bool | None]:
    """Whether a run's final loss is no higher than seeds alone explain, and is that of the same seed; None: the
    undisturbed runs for that are not there."""
    losses = [r["test_loss"] for r in usual if r["test_loss"] is not None]
    same = [abs(row["test_loss"] / r["test_loss"] - 1) < 1e-4 for r in usual if r["seed"] == row["seed"]]
    if len(losses) < 3:
        return None, any(same) if same else None
    return row["test_loss"] <= most(losses), any(same) if same else None


if __name__ == "__main__":
    launch(main)
