"""The table of bench.time_to_loss, from its rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench import report
from bench.peers.adapters import PEERS
from bench.report import mean_sd

TITLES = (
    *("task", "link", "method", "reached", "seconds to loss", "speed-up over ddp", "steps to loss", "exposed share"),
    *("final loss", "tau"),
)
Row = dict[str, Any]


def outcome(result: Row, run: Row) -> Row:
    """How a run came to its task's target: status, seconds, steps, loss, exposed_share, tau.

    The status is reached, or how the run ended. Seconds and the rest are at the first evaluation at or below the
    target, or else at the last one. A row of an older result has an outcome in place of a trajectory.
    """
    if "trajectory" not in run:
        return run
    lines, target = run["trajectory"], result["tasks"][run["task"]]["target"]
    reached = next((line for line in lines if line["loss"] <= target), None)
    at = reached or (lines[-1] if lines else {"step": 0, "seconds": 0.0, "loss": None})
    seconds = result["options"]["limit_seconds"] if run["ended"] == "out of time" and not reached else at["seconds"]
    return run | {
        "status": "reached" if reached else run["ended"],
        "seconds": seconds,
        "steps": at["step"],
        "loss": at["loss"],
        "exposed_share": exposed_share(result, run, at),
        "tau": at.get("tau"),
    }


def exposed_share(result: Row, run: Row, at: Row) -> float | None:
    """The share of the time until `at` that the run without communication (method none) did not need for the same
    steps; where it was not measured, the share that the method says it waited for communication."""
    if not at["seconds"]:
        return None
    same = [r for r in result["runs"] if (r["method"], r["task"], r["seed"]) == ("none", run["task"], run["seed"])]
    free = [line["seconds"] for r in same for line in r["trajectory"] if line["step"] == at["step"]]
    if free:
        return max(0.0, 1 - statistics.fmean(free) / at["seconds"])
    return at["exposed_seconds"] / at["seconds"] if "exposed_seconds" in at else None


def say(run: Row) -> str:
    """An outcome in words."""
    return f"{time_cell(run)} ({run['steps']} steps)" + (f": {run['reason']}" if run["reason"] else "")


def markdown(result: Row) -> str:
    """A row for each task, link rate and method, and what a reader needs to judge it."""
    runs = [outcome(result, run) for run in sorted(result["runs"], key=lambda run: run["seed"])]
    order = {method: number for number, method in enumerate(result["options"]["methods"])}
    groups: dict[tuple[str, float], dict[str, list[Row]]] = {}
    for run in sorted(runs, key=lambda run: order[run["method"]]):
        groups.setdefault((run["task"], run["rate_mbit"]), {}).setdefault(run["method"], []).append(run)
    rows = []
    for (task, rate), methods in sorted(groups.items(), key=lambda item: (item[0][0] != "vision", item[0])):
        ddp = methods.get("ddp", [])
        for method, of_seeds in methods.items():
            rows.append((task, f"{rate:g} Mbit/s", method, *cells(of_seeds, ddp if method != "ddp" else [])))
        if limit := limit_cell(methods.get("local", []), ddp_steps(runs, task)):
            rows.append((task, f"{rate:g} Mbit/s", "limit", "", limit))
    return f"{report.table(TITLES, rows)}\n\n{report.bullets(notes(result))}\n"


def cells(runs: Sequence[Row], ddp: Sequence[Row]) -> list[str]:
    """The columns behind the method's name, from its runs in order of their seeds."""
    reached = [run for run in runs if run["status"] == "reached"]
    all_reached = len(reached) == len(runs)
    times = mean_sd([r["seconds"] for r in runs], ".1f") if all_reached else ", ".join(map(time_cell, runs))
    steps = mean_sd([r["steps"] for r in reached], ".0f") if reached else ""
    shares = [r["exposed_share"] for r in runs if r["exposed_share"] is not None]
    losses = [r["trajectory"][-1]["loss"] if r.get("trajectory") else r["loss"] for r in runs if r["loss"] is not None]
    taus = [f"{r['tau']:g}" for r in runs if r.get("tau") is not None]
    return [
        f"{len(reached)} of {len(runs)}",
        times,
        speed_up(runs, ddp),
        steps,
        f"{statistics.fmean(shares):.0%}" if shares else "",
        mean_sd(losses, ".3f") if losses else "no evaluation",
        ", ".join(taus),
    ]


def ddp_steps(runs: Sequence[Row], task: str) -> dict[int, int]:
    """Seed -> ddp's steps to the loss, which no link changes; of those that reached it over any."""
    reached = [r for r in runs if (r["task"], r["method"], r["status"]) == (task, "ddp", "reached")]
    return {r["seed"]: r["steps"] for r in reached}


def limit_cell(local: Sequence[Row], steps: dict[int, int]) -> str:
    """Seconds to the loss of a ddp whose communication takes no time: its steps, each as long as one of Local-SGD's
    without what that waits for. Empty where either is not known for a seed."""
    known = [r for r in local if r["seed"] in steps and r["exposed_share"] is not None and r["steps"]]
    if not known or len(known) < len(local):
        return ""
    return mean_sd([steps[r["seed"]] * r["seconds"] * (1 - r["exposed_share"]) / r["steps"] for r in known], ".1f")


def time_cell(run: Row) -> str:
    """One run's seconds to the loss, or why there are none."""
    if run["status"] == "reached":
        return f"{run['seconds']:.1f}"
    if run["status"] == "out of time":
        return f"> {run['seconds']:.1f}"
    return run["status"] if run["loss"] is None else f"{run['status']} (loss {run['loss']:.3f})"


def speed_up(runs: Sequence[Row], ddp: Sequence[Row]) -> str:
    """Ratio of the mean seconds over the same seeds; a lower bound where ddp ran out of time; else empty."""
    same = {run["seed"] for run in runs} == {run["seed"] for run in ddp}
    known = all(run["status"] in ("reached", "out of time") for run in ddp)
    if not (same and known) or any(run["status"] != "reached" for run in runs):
        return ""
    bound = any(run["status"] == "out of time" for run in ddp)
    ratio = statistics.fmean(r["seconds"] for r in ddp) / statistics.fmean(r["seconds"] for r in runs)
    return f"{'> ' if bound else ''}{ratio:.1f} x"


def notes(result: Row) -> list[str]:
    options, link = result["options"], result["link"]
    if link == "namespaces + tbf":
        measured = ", ".join(f"{rate}: {mbit:.1f}" for rate, mbit in result["verified_mbit"].items())
        link = f"network namespaces of one machine joined by shaped links (Mbit/s asked for: measured; {measured})"
    step_ms = options.get("step_ms")
    pace = f"Forward and backward pass are stretched to {step_ms:g} ms." if step_ms else "Workers compete for cores."
    lines = [
        f"{options['workers']} workers, each on its own node, share {result['cpu_count']} CPU cores. {pace}",
        f"Link: {link}.",
        f"A run stops after {options['limit_seconds']:g} s of training (`>`). Every {options.get('eval_every')} steps "
        "we evaluate the mean of all workers' models, after the run.",
        "Speed-up: ratio of the mean seconds over the seeds; `>`: a lower bound, because ddp ran out of time. Entries "
        "are mean ± sample standard deviation over the seeds; steps are over the seeds that reached the target.",
        "limit: ddp's steps to the loss (over any link), each as long as one of local's without waiting.",
        "Exposed share: 1 - (seconds of `none`) / (seconds of the row) for the same steps; where `none` was not run, "
        "the share of time that the method waited for communication.",
    ]
    lines += [f"{method}: `{text}`." for method, text in result.get("method_options", {}).items()]
    lines += [f"{name}: {PEERS[name].note}." for name in options["methods"] if name in PEERS]
    lines += [f"{m}: {r}." for m, r in dict.fromkeys((r["method"], r["reason"]) for r in result["runs"]) if r]
    for name, task in result["tasks"].items():
        of = f", on one of {task['held_out']} images of the test set" if task.get("held_out", 1) > 1 else ""
        command = task.get("command") or " ".join([task["recipe"], *task["settings"]])  # the first in older results
        command = f"{task.get('package', name)}.train {command}"
        lines.append(f"{name}: the parts of `{command}`, target loss {task['target']:g}{of}.")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [*lines, f"Versions: {versions}.", f"{report.source(result)}."]
