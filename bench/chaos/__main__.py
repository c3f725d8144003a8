"""A seeded campaign of harm against small runs: python -m bench.chaos [--kills N] [--minutes M] ...

Each run trains scikit-learn's digits with two to four workers, or two islands, and suffers one harm. A worker is
killed in a phase of training, or two workers are, and may come back. A worker gets a signal, is stopped for 3 s, loses
its output, its disk or its link, or has a NaN gradient. A member of etcd is killed or stopped. A killed run's newest
files are damaged, as a power cut damages them. Elastic runs must go on by themselves. All other runs are started again
with --resume. Undisturbed runs are there for comparison.

A run is right if it reaches its last step without a traceback. Workers that stay must end as the undisturbed run, bit
for bit. All elastic workers must have equal outer iterates in every round. A harm that ends no run must not end this
one. The campaign continues where it was stopped. It writes and prints a row for each run (results/faults.md).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
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

import torch
from torch.utils._pytree import tree_leaves

from bench.chaos.crew import PHASES, STREAMS, Crew, different_rounds, group, work
from bench.cluster.etcd import LocalEtcd, program
from bench.cluster.nodes import Cluster, require_namespaces
from bench.report import Metrics, read_options, read_rows, require
from core.checkpoint import runs as checkpoint
from core.errors import UserError
from training.start.script import launch

Row = dict[str, Any]
EPOCH = 22  # steps
COMMON = ("digits_small", "--device", "cpu", "--eval_every", "1", "--checkpoint_every", "11steps", "--log_every", "1")
CONFIGS: dict[str, tuple[str, ...]] = {
    "elastic": ("--elastic", "--no_recommended"),
    "elastic, recommended": ("--elastic",),
    "elastic, islands": ("--elastic", "--no_recommended", "--per_node", "2"),
    "elastic, etcd": ("--elastic", "--no_recommended"),
    "co2": ("--no_recommended",),
    "co2, recommended": (),
    "co2, shard": ("--no_recommended", "--shard"),
    "co2, int8": ("--no_recommended", "--co2.compression.format", "int8"),
    "co2, zero 2": ("--no_recommended", "--zero", "2", "--per_node", "2"),
    "ddp": ("--no_recommended", "--method", "ddp"),
}
ELASTIC = tuple(name for name in CONFIGS if name.startswith("elastic"))
FIXED = tuple(name for name in CONFIGS if name not in ELASTIC)
CRASHES = ("cut", "flipped", "empty", "gone", "half renamed", "log cut")  # what a power cut may leave
HARMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # the configurations and phases of each harm
    "kill": ((*CONFIGS,), PHASES),
    "two kills": (ELASTIC, PHASES),
    "rejoin": (ELASTIC, PHASES),
    "stop": ((*CONFIGS,), ("SIGTERM", "SIGINT", "SIGUSR1")),
    "pause": ((*CONFIGS,), ("SIGSTOP",)),
    "stream": ((*CONFIGS,), STREAMS),
    "crash": (FIXED, CRASHES),
    "etcd": (("elastic, etcd",), ("member killed", "member stopped")),
    "outage": (tuple(name for name in CONFIGS if name not in ("elastic, islands", "elastic, etcd")), ("link down",)),
    "disk": ((*CONFIGS,), ("disk",)),
    "nan": ((*CONFIGS,), ("nan",)),
}
COUNTS = {harm: f"{harm.replace(' ', '_')}s" for harm in HARMS} | {"two kills": "two_kills", "crash": "crashes"}
HARMLESS = ("pause", "stream", "etcd", "outage", "none")  # end no run
PRELOAD = ("sklearn.datasets", "torch._dynamo", "torch.utils.tensorboard", "training.layouts.zero", "vision.train")
PRELOAD += ("matplotlib.figure", "matplotlib.backends.backend_agg", "mpl_toolkits.mplot3d")


@dataclass(frozen=True)
class Campaign:
    """How many runs of each harm."""

    kills: int = 100
    two_kills: int = 20
    rejoins: int = 20
    stops: int = 40
    pauses: int = 16
    streams: int = 40
    crashes: int = 36
    etcds: int = 12
    outages: int = 8
    disks: int = 12
    nans: int = 10
    seed: int = 0
    minutes: float = 600.0
    """Starts no further run after this many minutes."""
    out: Path = Path("results/chaos.json")
    """One object per run."""

    def check(self) -> None:
        require(self, positive="minutes", zeros=" ".join(COUNTS.values()))
        if self.outages:
            require_namespaces()
        if program() is None:
            raise UserError("no etcd here: apt-get install etcd-server, or name the program with the variable ETCD")


def main() -> None:
    asked = read_options(Campaign, "bench.chaos", description=__doc__)
    rows = read_rows(asked.out)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs `finally`
    until = time.monotonic() + 60 * asked.minutes
    for planned in plan(asked):
        if time.monotonic() > until:
            break
        if any(all(row.get(key) == value for key, value in planned.items()) for row in rows):
            continue
        rows.append(planned | suffer(context, planned))
        rows[-1]["right"] = right(rows[-1], rows)
        print(json.dumps(rows[-1]), flush=True)
        asked.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def plan(asked: Campaign) -> Iterator[Row]:
    """The undisturbed runs, then all others in random order, so that a part of the campaign is a sample of it."""
    rng = random.Random(asked.seed)
    rows: list[Row] = []
    for harm, (configs, phases) in HARMS.items():
        cases = [(c, p) for p in phases for c in configs if (c, p) != ("ddp", "flight")]
        times = getattr(asked, COUNTS[harm])
        for config, phase in (cases[i % len(cases)] for i in range(times)):
            # only one worker writes an elastic run's checkpoint and prints; a worker needs time to come back
            alone = harm in ("disk", "stream") or (phase == "checkpoint" and config in ELASTIC)
            who = [0] if alone else [rng.randrange(ranks(config))]
            if harm == "two kills":  # of islands one rank each, so that all are lost
                who = [rng.randrange(2), 2 + rng.randrange(2)]
            first, last = (26, 40) if harm == "crash" else (8, 16 if harm == "rejoin" else 36)
            row = {"harm": harm, "config": config, "phase": phase, "ranks": who, "step": rng.randint(first, last)}
            rows.append(row | ({"seconds": rng.choice([3, 10])} if harm == "outage" else {}))
    rng.shuffle(rows)
    yield from (row | {"seed": 0} for row in [{"harm": "none", "config": config} for config in CONFIGS] + rows)


def suffer(context: Any, planned: Row) -> Row:
    """One run. It is started again, with --resume, until it has come to its last step."""
    folder, began = Path(tempfile.mkdtemp(prefix="chaos")), time.monotonic()
    run, config = folder / "run", planned["config"]
    elastic, islands = config in ELASTIC, "islands" in config
    attempts, status, hung, summary = 0, 1, False, {}
    restarts = int(planned["harm"] in ("rejoin", "two kills"))
    try:
        while not ended({"status": status, "steps": summary.get("steps")} | planned) and attempts < 4 and not hung:
            args = arguments(planned, folder, attempts)
            if planned["harm"] == "crash" and attempts == 1:
                damage(random.Random(str(planned)), run, planned["phase"])
            with Net(planned if attempts == 0 else {}, folder, config) as net:
                options = {"cluster": net.cluster, "watch": net.watch, "late": 400.0}
                if elastic:
                    options |= {"island": 1 + islands, "etcd": f"{net.etcd.url}/run{attempts}" if net.etcd else ""}
                    make = functools.partial(Crew, context, work, args, ranks(config), restarts, **options)
                    crew = net.cluster.inside(ranks(config), make) if net.cluster else make()
                    status, hung = crew.run(), crew.timed_out
                    if crew.signalled:
                        sys.exit(status)
                else:
                    status, hung = group(context, work, args, ranks(config), **options)
            attempts += 1
            summary = json.loads(file.read_text()) if (file := run / "summary.json").exists() else {}
        log = file.read_text(errors="replace") if (file := folder / "log").exists() else ""
        came_back = sum(" came" in line.get("workers", "") for line in Metrics(run).read())
        found = {"attempts": attempts, "status": status, "hung": hung, "came_back": came_back}
        found |= {"test_loss": summary.get("test_loss"), "steps": summary.get("steps"), "digest": digest(run)}
        found |= {"different_rounds": different_rounds(folder), "traceback": "Traceback" in log}
        found["seconds"] = round(time.monotonic() - began, 1)
        bad = not ended(planned | found) or found["different_rounds"] or found["traceback"]
        return found | {"log": log.splitlines()[-30:] if bad else []}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def steps(config: str) -> int:
    """The steps of a whole run. There are more if a killed worker needs time to come back."""
    return (3 if config in ELASTIC else 2) * EPOCH


def ranks(config: str) -> int:
    return 4 if config in ELASTIC or "zero" in config else 2


def ended(row: Row) -> bool:
    """Returns whether a run has reached its last step, and says so."""
    return row["status"] == 0 and row["steps"] == steps(row["config"])


def arguments(planned: Row, folder: Path, attempt: int) -> tuple[Any, ...]:
    """The arguments of `work`. The harm is done in the first attempt."""
    timeout = "60" if planned["harm"] == "outage" else "20"
    own = ("--out", str(folder / "run"), "--seed", str(planned["seed"]), "--timeout", timeout)
    own += ("--epochs", str(steps(planned["config"]) // EPOCH), *(("--resume",) if attempt else ()))
    harm: Row = {"run": attempt, "lives": planned["harm"] == "two kills" and "islands" in planned["config"]}
    if planned["harm"] not in ("none", "outage", "etcd") and attempt == 0:
        phase = "local" if planned["harm"] == "crash" else planned["phase"]
        least = 2 if planned["harm"] == "crash" else 0  # one is damaged, and the other one stays
        harm |= {"ranks": planned["ranks"], "phase": phase, "step": planned["step"], "least": least}
    return "vision.train", (*COMMON, *CONFIGS[planned["config"]], *own), harm, str(folder / "log")


def damage(rng: random.Random, run: Path, kind: str) -> None:
    """Damages what the run has written last."""
    newest = max(run.glob("checkpoints/step?????????"))
    file = rng.choice(sorted(newest.iterdir()))
    content = file.read_bytes()
    at = rng.randrange(len(content))
    if kind == "cut":
        file.write_bytes(content[:at])
    elif kind == "flipped":
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "gone":
        file.unlink()
    elif kind == "half renamed":
        newest.rename(newest.with_name(f"{newest.name}.tmp-0"))
    else:
        log = run / "metrics.jsonl"
        log.write_bytes(log.read_bytes()[: -rng.randint(1, 400)])


def digest(run: Path) -> str:
    """Returns a checksum of the model in rank 0's last checkpoint, or an empty text."""
    with contextlib.suppress(UserError):
        if found := checkpoint.load_newest(run / "checkpoints", rank=0, alone=True, part="model"):
            tensors = [part for part in tree_leaves(found[0]) if isinstance(part, torch.Tensor)]
            return hashlib.sha1(b"".join(t.contiguous().view(-1).numpy().tobytes() for t in tensors)).hexdigest()
    return ""


class Net:
    """The emulated cluster of a run that loses a link, and the members of etcd that a run uses."""

    def __init__(self, planned: Row, folder: Path, config: str):
        self.planned, self.metrics = planned, Metrics(folder / "run")
        self.cluster = Cluster(ranks(config) + 1, 200.0) if planned.get("harm") == "outage" else None
        self.etcd = LocalEtcd(Path(tempfile.mkdtemp(dir=folder))) if "etcd" in config else None
        self._down_since = 0.0

    def __enter__(self) -> Net:
        for part in filter(None, (self.cluster, self.etcd)):
            part.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.cluster:
            self.cluster.close()
        if self.etcd:
            self.etcd.__exit__()

    def watch(self) -> None:
        """Does the harm at its step, and ends it after its seconds."""
        if self.planned.get("harm") not in ("outage", "etcd") or self._down_since < 0:
            return
        if not self._down_since and any(line["step"] >= self.planned["step"] for line in self.metrics.read()):
            self._harm(up=False)
            self._down_since = time.monotonic()
        if self._down_since and time.monotonic() - self._down_since > self.planned.get("seconds", 5):
            self._harm(up=True)
            self._down_since = -1.0

    def _harm(self, *, up: bool) -> None:
        who = self.planned["ranks"][0]
        if self.cluster:
            self.cluster.set_link(who, up=up)
        elif self.etcd and self.planned["phase"] == "member stopped":
            self.etcd.processes[who % 3].send_signal(signal.SIGCONT if up else signal.SIGSTOP)
        elif self.etcd and not up:
            self.etcd.processes[who % 3].kill()


def right(row: Row, rows: list[Row]) -> bool:
    """Returns whether a run is right, see the text of this module. `rows` has the undisturbed runs."""
    harm, fixed = row["harm"], row["config"] in FIXED
    well = ended(row) and row["test_loss"] is not None
    well &= not (row["hung"] or row["different_rounds"] or row["traceback"])
    goes_on = harm in HARMLESS or (not fixed and harm in ("kill", "two kills", "rejoin", "nan"))
    exact = fixed and "recommended" not in row["config"] and harm != "nan"
    calm = [r["digest"] for r in rows if (r["harm"], r["config"]) == ("none", row["config"])]
    return well and (row["attempts"] == 1 or not goes_on) and (not exact or row["digest"] in calm)


if __name__ == "__main__":
    launch(main)
