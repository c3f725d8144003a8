"""CO2 and its baselines beside the same ideas in other packages, run by those packages' own code over one link.

python -m bench.peers [--rate 100] [--tau 12] [--steps 240] [--workers 4] [--repeats 3] [--methods co2 hivemind ...]
    [--tune_lr 0.5 1 2] [--tune_tau 6 24]

Same model, data, data order, initial values, inner optimiser, period and link for every row; with --tune_lr or
--tune_tau each row has the learning rate and the period that suit it best among the same few. The peers need the extra
`peers`; one that cannot run says why in its row.
"""

from __future__ import annotations

import contextlib
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
from bench.options import require_no_crowd, require_one_or_more, require_positive
from bench.peers.adapters import PEERS
from bench.peers.loop import BATCH, DILOCO, EVERY_STEP, FREE, LATE, RECOMMENDED, REFERENCE, Job, Split, worker
from bench.peers.model import LR, build_model
from bench.peers.table import LIMIT, markdown
from bench.peers.tuning import SEED, Choice, choices, limit, seconds_to, tune
from core import UserError
from core.groups import ring_bytes
from vision import data

OURS = (*EVERY_STEP, "local", "overlap_local", "slowmo", DILOCO, "co2", RECOMMENDED)
ALL = (*OURS, *PEERS)


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
    target: float = 0.2
    """The held-out loss whose seconds are told."""
    tune_lr: tuple[float, ...] = (1.0,)
    """Each row has that of these factors on the learning rate which suits it best."""
    tune_tau: tuple[int, ...] = ()
    """And that of these periods, in place of --tau."""
    most_seconds: float = 120.0
    """ddp, dpu and acco take as many steps as theory says fit in."""
    timeout: float = 180.0
    """Seconds until a run of a row is killed."""
    throttle: bool = False
    """Throttle the link in software instead of making namespaces; the other packages cannot take part."""
    out: Path | None = None
    """Folder of peers.md, peers.json and the workers' logs; runs/peers-DATE by default."""

    def check(self) -> None:
        """UserError for options that cannot be."""
        require_one_or_more(self, "steps", "tau", "workers", "repeats", "width")
        require_positive(self, "rate", "timeout", "target", "tune_lr", "tune_tau", "most_seconds")
        require_no_crowd(self)
        if self.step_ms < 0:
            raise UserError(f"step_ms={self.step_ms}: give 0 or more")
        for name in self.methods:
            if name not in (*ALL, FREE):
                raise UserError(f"method {name!r}: choose among {', '.join((*ALL, FREE))}")


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
    runs, tried = run_all(bench, out / "logs")
    packages = list(dict.fromkeys(peer.package for peer in PEERS.values()))
    result = report.header("bench.peers", bench, packages)
    result |= {"link": link, "rows": summarise(bench, runs), "runs": runs, "tuning": tried}
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


def run_all(bench: Bench, logs: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All repeats of all rows, the reference without communication first, a failed run with its `reason`; and the
    tuning's lines."""
    sets = data.digits()
    runs, tried = [], []
    broken = {method: why for method in bench.methods if (why := refusal(method, bench.throttle))}
    chosen = {REFERENCE: Choice(LR, bench.tau)}
    for method in bench.methods:
        options = choices(method, bench.tune_lr, bench.tune_tau or (bench.tau,))
        options = options[:1] if method in broken else options
        once = lambda name, choice: run_row(bench, name, SEED, sets, logs, choice, "tuning")  # noqa: E731
        chosen[method], lines = tune(method, options, once, bench.target)
        tried += lines
    for repeat in range(bench.repeats):
        for method in (REFERENCE, *bench.methods):
            reason, choice = broken.get(method), chosen[method]
            result = {"reason": reason} if reason else run_row(bench, method, repeat, sets, logs, choice)
            broken |= {method: result["reason"]} if "reason" in result else {}  # no second wait for its timeout
            runs.append({"method": method, "repeat": repeat, **asdict(choice), **result})
            said = result.get("reason") or f"{result['seconds']:.1f} s, loss {result['losses'][-1]:.3f}"
            print(f"{repeat + 1}/{bench.repeats} {method:18} {said}", flush=True)
    return runs, tried


def refusal(method: str, throttle: bool) -> str:
    """Why a row cannot run here; empty when it can."""
    if method not in PEERS:
        return ""
    if throttle:
        return "not run: a software throttle cannot hold back another package's collectives"
    missing = PEERS[method].missing()
    return f"not run: {missing}" if missing else ""


def run_row(
    bench: Bench,
    method: str,
    seed: int,
    sets: tuple[data.Images, data.Images],
    logs: Path,
    choice: Choice,
    held_out: Split = "test",
) -> dict[str, Any]:
    """One run of one row in fresh processes on a fresh cluster, which takes all that a peer started with it."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        cluster = None if bench.throttle else stack.enter_context(Cluster(bench.workers, bench.rate))
        job = Job(
            method=method,
            steps=steps_of(bench, method),
            tau=choice.tau,
            workers=bench.workers,
            width=bench.width,
            step_ms=bench.step_ms,
            seed=seed,
            timeout=bench.timeout,
            link_mbit=bench.rate if bench.throttle else None,
            interface=cluster.interface if cluster else None,
            folder=Path(folder),
            logs=logs,
            lr=choice.lr,
            held_out=held_out,
        )
        return attempt(job, cluster, sets)


def steps_of(bench: Bench, method: str) -> int:
    """Fewer where every step sends gradients and so takes long: a snapshot is the same whatever follows."""
    if method not in EVERY_STEP:
        return bench.steps
    nbytes = ring_bytes(sum(p.nbytes for p in build_model(bench.width).parameters()), bench.workers)
    compute, crossing = bench.step_ms / 1e3, nbytes * 8e-6 / bench.rate
    step = max(compute, crossing * LATE[method][1]) if method in LATE else compute + crossing
    return max(1, min(bench.steps, int(bench.most_seconds / step)))


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
        row: dict[str, Any] = {"method": method, "budget": budget} | {k: mine[0].get(k) for k in ("lr", "tau")}
        if len(done) < len(mine):
            row["reason"] = next(run["reason"] for run in mine if "reason" in run)
        else:
            row |= measures(bench, done, reference, budget)
        rows.append(row)
    return [*rows, *limit_row(bench, runs)]


def limit_row(bench: Bench, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """ddp's seconds to the target, were communication free; nothing where ddp was not measured."""
    done = {(run["method"], run["repeat"]): run for run in runs if "reason" not in run}
    seeds = [repeat for method, repeat in done if method == "ddp" and (REFERENCE, repeat) in done]
    seconds = [limit(done["ddp", seed], done[REFERENCE, seed], bench.target) for seed in seeds]
    return [{"method": LIMIT, "seconds_to_target": seconds}] if seconds else []


def time_budget(runs: Sequence[dict[str, Any]]) -> float:
    """Seconds of the fastest run that communicated; 0 when none did."""
    return min((run["seconds"] for run in runs if run["method"] != REFERENCE and "seconds" in run), default=0.0)


def measures(
    bench: Bench, runs: Sequence[dict[str, Any]], reference: dict[int, float], budget: float
) -> dict[str, list[float | None]]:
    """What the columns show, a value a repeat."""
    own = BATCH * runs[0]["steps"][-1]  # samples of one worker
    whole = runs[0]["steps"][-1] / bench.steps  # below 1: see steps_of
    return {
        "samples_per_second": [own * bench.workers / run["seconds"] for run in runs],
        "exposed": [
            max(0.0, 1 - whole * reference[run["repeat"]] / run["seconds"]) if run["repeat"] in reference else None
            for run in runs
        ],
        "loss_at_samples": [run["losses"][-1] if whole == 1 else None for run in runs],
        "loss_at_seconds": [loss_at(run["times"], run["losses"], budget) for run in runs],
        "seconds_to_target": [seconds_to(run["times"], run["losses"], bench.target) for run in runs],
        "bytes_per_sample": [None if run["sent"] is None else run["sent"] / own for run in runs],
        "memory_mib": [run["memory"] / 2**20 for run in runs],
        "rounds": [run["rounds"] for run in runs],
    }


def loss_at(times: Sequence[float], losses: Sequence[float], budget: float) -> float:
    """The last loss that was known when the budget had passed; the first is that of the untrained model."""
    return [loss for seconds, loss in zip(times, losses, strict=True) if seconds <= budget or seconds == 0][-1]
