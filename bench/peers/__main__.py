"""CO2 and its baselines beside the same ideas in other packages, run by those packages' own code over one link.

python -m bench.peers [--rate 100] [--tau 12] [--steps 240] [--workers 4] [--repeats 3] [--methods co2 hivemind ...]
    [--tune_lr 0.5 1 2] [--tune_tau 6 24]

Same model, data, data order, initial values, inner optimiser, period and link for every row; with --tune_lr or
--tune_tau each row has the learning rate and the period that suit it best among the same few. The peers need the extra
`peers`; one that cannot run says why in its row.
"""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.cluster import Cluster, run_ranks
from bench.peers.adapters import PEERS
from bench.peers.loop import DILOCO, EVERY_STEP, LATE, OWN_TAU, RECOMMENDED, REFERENCE, Job, Split, worker
from bench.peers.table import markdown, seconds_to, summarise
from bench.report import Asked, require, require_no_crowd
from bench.standin import LR, build_model
from bench.trainings import TUNING_SEED, network, over_each, split_wire
from core import UserError
from core.groups import ring_bytes
from core.wires.formats import BLOCK, BLOCK_BYTES
from training.script import launch
from vision import data

OURS = (*EVERY_STEP, "local", "overlap_local", "slowmo", DILOCO, "co2", RECOMMENDED)
ALL = (*OURS, *PEERS)
KNOWN = (*ALL, *OWN_TAU, *over_each(name for name in OURS if name not in (*LATE, RECOMMENDED)))


@dataclass(frozen=True)
class Bench(Asked):
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
    """The rows, in this order; those of ours also over a narrow format, as local:wire=int4."""
    width: int = 256
    """Of the five hidden layers: 256 makes 0.28 million parameters."""
    step_ms: float = 20.0
    """Stand-in for a step's computing time, so that the workers do not fight for the cores."""
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

    def check(self) -> None:
        require(self, ones="steps tau workers repeats width", methods=KNOWN)
        require(self, positive="rate timeout target tune_lr tune_tau most_seconds")
        require_no_crowd(self)
        if self.step_ms < 0:
            raise UserError(f"step_ms={self.step_ms}: give 0 or more")


def main() -> None:
    packages = list(dict.fromkeys(peer.package for peer in PEERS.values()))
    report.run(Bench, "peers", measure, markdown, packages=packages, forks=lambda bench: not bench.throttle)


def measure(bench: Bench, session: report.Session) -> None:
    link = describe_link(bench)
    print(f"link: {link}\n", flush=True)
    (session.folder / "logs").mkdir(parents=True, exist_ok=True)
    runs, tried = run_all(bench, session.folder / "logs")
    rows = summarise(session.result["options"], runs)
    session.result |= {"link": link, "rows": rows, "runs": runs, "tuning": tried}


def describe_link(bench: Bench) -> str:
    """The link in words; the emulated one is measured first."""
    if bench.throttle:
        return f"throttled in software to {bench.rate:g} Mbit/s, without latency; not a real network"
    if bench.workers < 2:
        return "none: one worker"
    with Cluster(bench.workers, bench.rate) as cluster:
        measured = cluster.verify()
    return f"{bench.rate:g} Mbit/s between network namespaces of one machine (measured {measured:.1f})"


# -- tuning ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """lr: of the inner optimiser. tau: local steps a round."""

    lr: float
    tau: int


def choices(method: str, factors: Sequence[float], taus: Sequence[int]) -> list[Choice]:
    """What is tried: each learning rate with each period. ddp, dpu and acco have no period, co2_auto and
    auto choose their own."""
    taus = taus[:1] if split_wire(method)[0] in (*EVERY_STEP, *OWN_TAU) else taus
    return [Choice(LR * factor, tau) for factor, tau in itertools.product(factors, taus)]


def tune(
    method: str, options: Sequence[Choice], run: Callable[[str, Choice], dict[str, Any]], target: float
) -> tuple[Choice, list[dict[str, Any]]]:
    """The choice that comes first to the target, or where none does, ends with the least loss; and a line each."""
    if len(options) == 1:
        return options[0], []
    tried = []
    for choice in options:
        result = run(method, choice)
        tried.append({"method": method, "lr": choice.lr, "tau": choice.tau, **score(result, target)})
        said = tried[-1].get("reason") or f"{tried[-1]['seconds']:.1f} s to the target, loss {tried[-1]['loss']:.3f}"
        print(f"tuning {method:18} lr {choice.lr:g}, tau {choice.tau}: {said}", flush=True)
    best = min(range(len(tried)), key=lambda i: (tried[i]["seconds"], tried[i]["loss"]))
    return options[best], tried


def score(result: dict[str, Any], target: float) -> dict[str, Any]:
    """seconds until the target, loss at the end; infinite where there is none."""
    if "reason" in result:
        return {"seconds": math.inf, "loss": math.inf, "reason": result["reason"]}
    last = result["losses"][-1]
    seconds = seconds_to(result["times"], result["losses"], target)
    return {"seconds": math.inf if seconds is None else seconds, "loss": last if math.isfinite(last) else math.inf}


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
        once = lambda name, choice: run_row(bench, name, TUNING_SEED, sets, logs, choice, "tuning")  # noqa: E731
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
    with tempfile.TemporaryDirectory() as folder, network(bench.throttle, bench.workers, bench.rate) as cluster:
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
    if split_wire(method)[0] not in EVERY_STEP:
        return bench.steps
    nbytes = ring_bytes(sum(p.nbytes for p in build_model(bench.width).parameters()), bench.workers)
    nbytes *= BLOCK_BYTES.get(split_wire(method)[1], 4 * BLOCK) / (4 * BLOCK)
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
        (job.logs / f"{job.method}-{job.seed}-failed.log").write_text(str(error))
        return {"reason": f"failed: {str(error).strip().splitlines()[-1]}"}
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


if __name__ == "__main__":
    launch(main)
