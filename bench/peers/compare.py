"""CO2 and its baselines beside the same ideas in other packages, run by those packages' own code over one link.

python -m bench.peers [--rate 100] [--tau 12] [--steps 240] [--workers 4] [--repeats 3] [--methods co2 hivemind ...]

Same model, data, data order, initial values, inner optimiser, period and link for every row. The peers need the extra
`peers`; one that cannot run says why in its row.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from bench import report
from bench.cluster import Cluster, require_namespaces, run_ranks
from bench.options import require_one_or_more, require_positive
from bench.peers.adapters import PEERS
from bench.peers.loop import BATCH, RECOMMENDED, REFERENCE, Job, worker
from bench.peers.model import LR, MOMENTUM, build_model
from bench.report import Spread
from core import UserError
from core.config import CO2Config
from core.methods import OverlapLocalConfig, SlowMoConfig
from vision import data

OURS = ("ddp", "local", "overlap_local", "slowmo", "co2", RECOMMENDED)
ALL = (*OURS, *PEERS)
CO2_SETTINGS = ("outer_lr", "outer_momentum", "gap", "clip", "merge", "mix", "delay")
MAX_REASON = 160  # characters of an error in the table


@dataclass(frozen=True)
class Bench:
    """Compares methods of this project and of other packages over the same emulated link."""

    steps: int = 240
    """Optimiser steps of every worker."""
    tau: int = 12
    """Local steps per round."""
    rate: float = 100.0
    """Mbit/s of every worker's link."""
    workers: int = 4
    """Workers, each on a node of its own."""
    repeats: int = 3
    """Runs of every row, interleaved; each has its own seed."""
    methods: tuple[str, ...] = ALL
    """The rows, in this order."""
    width: int = 256
    """Of the five hidden layers: 256 makes 0.28 million parameters."""
    step_ms: float = 20.0
    """Stand-in for a step's computing time, so that the workers do not fight for the cores."""
    seconds: float | None = None
    """The time budget of "loss at equal seconds"; by default what the fastest row took."""
    timeout: float = 180.0
    """Seconds until a run of a row is killed."""
    throttle: bool = False
    """Throttle the link in software instead of making namespaces; the other packages cannot take part."""
    out: Path | None = None
    """Folder of peers.md, peers.json and the workers' logs; runs/peers-DATE by default."""

    def check(self) -> None:
        """UserError for options that cannot be."""
        require_one_or_more(self, "steps", "tau", "workers", "repeats", "width")
        require_positive(self, "rate", "timeout")
        if self.step_ms < 0:
            raise UserError(f"step_ms={self.step_ms}: give 0 or more")
        for name in self.methods:
            if name not in ALL:
                raise UserError(f"method {name!r}: choose among {', '.join(ALL)}")


def main() -> None:
    bench = tyro.cli(Bench, prog="python -m bench.peers", use_underscores=True)
    bench.check()
    if not bench.throttle:
        require_namespaces()
    torch.set_num_threads(1)  # before any work: the ranks are forked, and threads do not survive that
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    link = describe_link(bench)
    print(f"link: {link}\n", flush=True)
    out = report.new_folder("peers", bench.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    runs = run_all(bench, out / "logs")
    packages = list(dict.fromkeys(peer.package for peer in PEERS.values()))
    result = report.header("bench.peers", bench, packages)
    result |= {"link": link, "rows": summarise(bench, runs), "runs": runs}
    text = markdown(bench, result)
    report.save(out, "peers", result, text)
    print(f"\n{text}\n{out / 'peers.md'}\n{out / 'peers.json'}")


def describe_link(bench: Bench) -> str:
    """The link in words; the emulated one is measured first."""
    if bench.throttle:
        return f"throttled in software to {bench.rate:g} Mbit/s, without latency; not a real network"
    if bench.workers < 2:
        return "none: one worker"
    with Cluster(bench.workers, bench.rate) as cluster:
        measured = cluster.verify()
    return f"{bench.rate:g} Mbit/s between network namespaces of one machine (measured {measured:.1f})"


# -- running --------------------------------------------------------------------------------------------------


def run_all(bench: Bench, logs: Path) -> list[dict[str, Any]]:
    """All repeats of all rows, the reference without communication first; a failed run holds its `reason`."""
    sets = data.digits()
    runs, broken = [], {}
    for repeat in range(bench.repeats):
        for method in (REFERENCE, *bench.methods):
            reason = broken.get(method) or refusal(method, bench.throttle)
            result = {"reason": reason} if reason else run_row(bench, method, repeat, sets, logs)
            broken |= {method: result["reason"]} if "reason" in result else {}  # no second wait for its timeout
            runs.append({"method": method, "repeat": repeat, **result})
            said = result.get("reason") or f"{result['seconds']:.1f} s, loss {result['losses'][-1]:.3f}"
            print(f"{repeat + 1}/{bench.repeats} {method:18} {said}", flush=True)
    return runs


def refusal(method: str, throttle: bool) -> str:
    """Why a row cannot run here; empty when it can."""
    if method not in PEERS:
        return ""
    if throttle:
        return "not run: a software throttle cannot hold back another package's collectives"
    missing = PEERS[method].missing()
    return f"not run: {missing}" if missing else ""


def run_row(
    bench: Bench, method: str, repeat: int, sets: tuple[data.Images, data.Images], logs: Path
) -> dict[str, Any]:
    """One run of one row in fresh processes on a fresh cluster, which takes all that a peer started with it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        cluster = None if bench.throttle else stack.enter_context(Cluster(bench.workers, bench.rate))
        job = Job(
            method=method,
            steps=bench.steps,
            tau=bench.tau,
            workers=bench.workers,
            width=bench.width,
            step_ms=bench.step_ms,
            seed=repeat,
            timeout=bench.timeout,
            link_mbit=bench.rate if bench.throttle else None,
            interface=cluster.interface if cluster else None,
            folder=Path(folder),
            logs=logs,
        )
        return attempt(job, cluster, sets)


def attempt(job: Job, cluster: Cluster | None, sets: tuple[data.Images, data.Images]) -> dict[str, Any]:
    """The row's measurements over all its workers, or the reason why there are none."""
    try:
        ranks = run_ranks(worker, cluster, 1, job.workers, job, *sets, timeout=job.timeout)
    except TimeoutError:
        return {"reason": f"killed: still running after {job.timeout:g} s"}
    except (UserError, RuntimeError) as error:
        return {"reason": f"failed: {str(error).strip().splitlines()[0]}"}
    sent = [rank["sent"] for rank in ranks]
    return {
        "seconds": max(rank["seconds"] for rank in ranks),
        "steps": list(ranks[0]["times"]),
        "times": [max(rank["times"][step] for rank in ranks) for step in ranks[0]["times"]],
        "losses": ranks[0]["losses"],
        "rounds": ranks[0]["rounds"],
        "sent": None if None in sent else statistics.mean(sent),
        "memory": statistics.mean(rank["memory"] for rank in ranks),
    }


# -- results --------------------------------------------------------------------------------------------------


def summarise(bench: Bench, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a method: each measure as a list over the repeats, or the reason why it has none."""
    budget = bench.seconds or time_budget(runs)
    reference = {run["repeat"]: run["seconds"] for run in runs if run["method"] == REFERENCE and "seconds" in run}
    rows = []
    for method in (REFERENCE, *bench.methods):
        mine = [run for run in runs if run["method"] == method]
        done = [run for run in mine if "reason" not in run]
        row: dict[str, Any] = {"method": method, "budget": budget}
        if len(done) < len(mine):
            row["reason"] = next(run["reason"] for run in mine if "reason" in run)
        else:
            row |= measures(bench, done, reference, budget)
        rows.append(row)
    return rows


def time_budget(runs: Sequence[dict[str, Any]]) -> float:
    """Seconds of the fastest run that communicated; 0 when none did."""
    return min((run["seconds"] for run in runs if run["method"] != REFERENCE and "seconds" in run), default=0.0)


def measures(
    bench: Bench, runs: Sequence[dict[str, Any]], reference: dict[int, float], budget: float
) -> dict[str, list[float | None]]:
    """What the columns show, a value a repeat."""
    own = BATCH * bench.steps  # samples of one worker
    return {
        "samples_per_second": [own * bench.workers / run["seconds"] for run in runs],
        "exposed": [
            max(0.0, 1 - reference[run["repeat"]] / run["seconds"]) if run["repeat"] in reference else None
            for run in runs
        ],
        "loss_at_samples": [run["losses"][-1] for run in runs],
        "loss_at_seconds": [loss_at(run["times"], run["losses"], budget) for run in runs],
        "bytes_per_sample": [None if run["sent"] is None else run["sent"] / own for run in runs],
        "memory_mib": [run["memory"] / 2**20 for run in runs],
        "rounds": [run["rounds"] for run in runs],
    }


def loss_at(times: Sequence[float], losses: Sequence[float], budget: float) -> float:
    """The last loss that was known when the budget had passed; the first is that of the untrained model."""
    return [loss for seconds, loss in zip(times, losses, strict=True) if seconds <= budget or seconds == 0][-1]


COLUMNS = {
    "samples_per_second": ("samples/s", ".0f"),
    "exposed": ("exposed share", ".0%"),
    "loss_at_samples": ("loss at equal samples", ".3f"),
    "loss_at_seconds": ("loss at equal seconds", ".3f"),
    "bytes_per_sample": ("bytes sent per sample", ".0f"),
    "memory_mib": ("memory per worker, MiB", ".1f"),
    "rounds": ("rounds", ".0f"),
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: median (least to greatest) over the repeats, or the reason across the row."""
    lines = []
    for row in rows:
        if "reason" in row:
            reason = row["reason"].replace("|", "/")
            lines.append((row["method"], reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."))
        else:
            lines.append((row["method"], *(cell(row[key], spec) for key, (_, spec) in COLUMNS.items())))
    return report.table(["method", *(title for title, _ in COLUMNS.values())], lines)


def cell(values: Sequence[float | None], spec: str) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "not measured"
    finite = [value for value in known if math.isfinite(value)]
    if len(finite) < len(known):
        left = f" (else {', '.join(f'{value:{spec}}' for value in finite)})" if finite else ""
        return f"diverged in {len(known) - len(finite)} of {len(known)}{left}"
    return Spread.of(known).show(spec)


def markdown(bench: Bench, result: dict[str, Any]) -> str:
    """The table with all that a reader needs to judge it."""
    rows, versions = result["rows"], result["versions"]
    millions = sum(p.numel() for p in build_model(bench.width).parameters()) / 1e6
    sent = "the method's own count, without protocol headers" if bench.throttle else "counter of each node's interface"
    notes = [
        f"Link: {result['link']}. {bench.workers} workers, each on its own node; {bench.steps} steps, tau {bench.tau}.",
        f"Task: scikit-learn's digits, a perceptron of {millions:.2f} M parameters, SGD lr {LR:g} momentum "
        f"{MOMENTUM:g}, {BATCH} samples per worker and step. Forward and backward are stretched to "
        f"{bench.step_ms:g} ms, layer by layer, a stand-in for computing on hardware of one's own.",
        f"Median (least to greatest) of {bench.repeats} runs, a seed each; a repeat whose loss is not finite has "
        f"diverged. `{REFERENCE}`: the same steps without any communication.",
        f"Exposed share: 1 - (seconds of `{REFERENCE}`) / (seconds of the row), for all rows alike; it holds whatever "
        "slows a row down, not waiting alone.",
        "Loss: held-out cross-entropy of the mean of all workers' models, taken every tau steps with the clock stopped "
        f"and evaluated afterwards; equal seconds: the last before {rows[0]['budget']:.2f} s.",
        f"Bytes sent: by one worker, per sample that it trained on ({sent}).",
        "Memory: peak resident memory above what was resident once model and package were loaded; of the worker's own "
        "process (hivemind has two or three more).",
        "Rounds: synchronisations, those that end the training included (torchft_streaming: of a fragment). They are "
        "inside the clock too: with few steps they weigh more than in a real training.",
        f"Ours: co2 {chosen(CO2Config(tau=bench.tau), *CO2_SETTINGS)}; {RECOMMENDED} "
        f"{chosen(CO2Config.recommended(bench.workers, bench.steps), *CO2_SETTINGS)}; "
        f"slowmo {chosen(SlowMoConfig())}; overlap_local {chosen(OverlapLocalConfig())}.",
        *(f"{name}: {PEERS[name].note}." for name in bench.methods if name in PEERS),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    return f"{table(rows)}\n\n{report.bullets([*notes, f'{report.source(result)}.'])}\n"


def chosen(config: Any, *names: str) -> str:
    """Settings of a method in words; all of them without names."""
    values = asdict(config)
    return ", ".join(f"{name} {values[name]}" for name in names or values)
