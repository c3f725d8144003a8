"""A seeded campaign of harm against small runs: python -m bench.chaos [--kills N] [--minutes M] ...

Each run trains scikit-learn's digits with four workers and suffers one harm: a worker is killed in a phase of training,
is killed and comes back, loses its link, cannot write, or has a NaN gradient. Elastic runs must go on by themselves.
All other runs are started again with --resume. Undisturbed runs are there for comparison. The campaign continues
where it was stopped. It writes a row for each run, and prints a table.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chaos.crew import PHASES, Crew, group, work
from bench.cluster.nodes import Cluster, require_namespaces
from bench.report import Metrics, Summary, read_options
from training.script import launch

Row = dict[str, Any]
WORKERS, EPOCH = 4, 22  # EPOCH: steps
COMMON = ("digits_small", "--device", "cpu", "--eval_every", "2", "--log_every", "1")
CONFIGS: dict[str, tuple[str, ...]] = {
    "elastic": ("--elastic", "--no_recommended"),
    "elastic, recommended": ("--elastic",),
    "co2": ("--no_recommended",),
    "co2, recommended": (),
    "co2, shard": ("--no_recommended", "--shard"),
    "co2, int8": ("--no_recommended", "--co2.compression.format", "int8"),
    "co2, zero 2": ("--no_recommended", "--zero", "2", "--per_node", "2"),
    "ddp": ("--no_recommended", "--method", "ddp"),
}
ELASTIC = tuple(name for name in CONFIGS if name.startswith("elastic"))
PRELOAD = ("sklearn.datasets", "torch._dynamo", "torch.utils.tensorboard", "training.zero", "vision.train")


@dataclass(frozen=True)
class Campaign:
    """How many runs of each harm."""

    kills: int = 100
    outages: int = 20
    rejoins: int = 20
    disks: int = 10
    nans: int = 10
    seeds: int = 5
    """Undisturbed runs of each configuration."""
    seed: int = 0
    minutes: float = 600.0
    """Starts no further run after this many minutes."""
    out: Path = Path("results/chaos.json")
    """One object per run."""

    def check(self) -> None:
        if self.outages:
            require_namespaces()


def main() -> None:
    asked = read_options(Campaign, "bench.chaos", description=__doc__)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs `finally`
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
    print(table(rows))


def plan(asked: Campaign) -> Iterator[Row]:
    """The runs in random order, so that a part of the campaign is a sample of it."""
    rng = random.Random(asked.seed)
    names = list(CONFIGS)
    kills = [(config, phase) for phase in PHASES for config in names if (config, phase) != ("ddp", "flight")]
    rows: list[Row] = []
    for config, phase in (kills[i % len(kills)] for i in range(asked.kills)):
        rows.append({"harm": "kill", "config": config, "phase": phase})
    for i in range(asked.rejoins):
        rows.append({"harm": "rejoin", "config": ELASTIC[i % 2], "phase": PHASES[i % len(PHASES)]})
    for i in range(asked.outages):
        rows.append({"harm": "outage", "config": names[i % len(names)], "seconds": rng.choice([3, 10])})
    for harm, times in (("disk", asked.disks), ("nan", asked.nans)):
        rows += [{"harm": harm, "config": names[i % len(names)], "phase": harm} for i in range(times)]
    for row in rows:
        # only one worker writes an elastic run's checkpoint; a worker needs time to come back
        first = row["harm"] == "disk" or (row.get("phase") == "checkpoint" and row["config"] in ELASTIC)
        last = 16 if row["harm"] == "rejoin" else 50
        row |= {"who": 0 if first else rng.randrange(WORKERS), "step": rng.randint(8, last)}
    rows += [{"harm": "none", "config": config} for config in names for _ in range(asked.seeds)]
    rng.shuffle(rows)
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        alike = row["harm"], row["config"]
        number = counts[alike] = counts.get(alike, -1) + 1
        yield row | {"seed": number % max(1, asked.seeds)}


def suffer(context: Any, planned: Row) -> Row:
    """One run. It is started again, with --resume, until it ends; an elastic run, only if it could not write."""
    folder = Path(tempfile.mkdtemp(prefix="chaos"))
    elastic = planned["config"] in ELASTIC
    attempts, status, hung = 0, 1, False
    try:
        while status and attempts < (3 if elastic else 4) and not hung:
            args = arguments(planned, folder, attempts)
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
        summary = json.loads(file.read_text()) if (file := folder / "run" / "summary.json").exists() else {}
        log = file.read_text(errors="replace") if (file := folder / "log").exists() else ""
        came_back = sum(" came" in line.get("workers", "") for line in Metrics(folder / "run").read())
        found = {"attempts": attempts, "status": status, "hung": hung, "came_back": came_back}
        found |= {"test_loss": summary.get("test_loss"), "steps": summary.get("steps")}
        return found | {"log": [] if summary else log.splitlines()[-12:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def steps(config: str) -> int:
    """The steps of a whole run. There are more if a killed worker needs time to come back."""
    return (4 if config in ELASTIC else 3) * EPOCH


def arguments(planned: Row, folder: Path, attempt: int) -> tuple[Any, ...]:
    """The arguments of `work`. The harm is done in the first attempt."""
    timeout = "60" if planned["harm"] == "outage" else "20"
    own = ("--out", str(folder / "run"), "--seed", str(planned["seed"]), "--timeout", timeout)
    own += ("--epochs", str(steps(planned["config"]) // EPOCH), *(("--resume",) if attempt else ()))
    harm = {}
    if "phase" in planned and attempt == 0:
        harm = {"worker": f"{planned['who']}.0", "phase": planned["phase"], "step": planned["step"]}
    return "vision.train", (*COMMON, *CONFIGS[planned["config"]], *own), harm, str(folder / "log")


class Net:
    """The emulated cluster of a run that loses a link. For other runs it does nothing."""

    def __init__(self, planned: Row, folder: Path):
        self.planned, self.metrics = planned, Metrics(folder / "run")
        self.cluster = Cluster(WORKERS + 1, 200.0) if planned.get("harm") == "outage" else None
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


SHOWN = {"ended": ".0%", "attempts": ".1f", "hung": ".0%", "came_back": ".1f", "test_loss": ".3f"}


def table(rows: list[Row]) -> str:
    """One line per harm and configuration. ended: the share of runs that reached their last step."""
    ended = [row | {"ended": row["status"] == 0 and row["steps"] == steps(row["config"])} for row in rows]
    ended.sort(key=lambda row: (row["harm"], row.get("phase", ""), row["config"]))
    return Summary("harm phase config", SHOWN).table(ended)


if __name__ == "__main__":
    launch(main)
