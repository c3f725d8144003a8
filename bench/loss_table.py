"""What bench.time_to_loss makes of a run's metrics, and its table: python -m bench.loss_table FOLDER makes it anew."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench import report
from bench.report import mean_sd
from bench.trainings import AUTO, over_each, split_wire
from training.script import launch

NAME = "time_to_loss"
LGRECO = ("--co2.wire.format", "lgreco", "--co2.wire.lgreco.every", "10", "--co2.wire.like")
OF_CO2 = {  # name -> the options of a co2 whose settings are not the recipe's
    "co2_recommended": ("--recommended",),
    "co2_auto": AUTO,
    "co2_auto_lgreco": (*AUTO, *LGRECO, "rank4"),
    "co2_auto_lgreco_int4": (*AUTO, *LGRECO, "int4"),
    "co2_auto_lgreco_any": (*AUTO, *LGRECO, "rank4", "--co2.wire.lgreco.family", "any"),
}
DILOCO = ("--co2.outer_lr", "0.7", "--co2.outer_momentum", "0.9", "--co2.gap", "none", "--co2.clip", "None")
DILOCO += ("--co2.delay", "0", "--delayed.nesterov")
PLAIN = ("ddp", "local", "overlap_local", "slowmo", "diloco", "co2")
CHOSEN = {"auto": ("--co2.tau_max", "24")}  # ddp over int4, and co2_auto from where that costs more
METHODS = (*PLAIN, *over_each(PLAIN), *OF_CO2, *CHOSEN)
USUAL = tuple(name for name in METHODS if not name.endswith("int8"))
Status = Literal["reached", "out of time", "not reached", "failed"]


def options_of(name: str) -> tuple[str, ...]:
    """A method of the table as options of a train script."""
    method, wire = split_wire(name)
    options = {"diloco": ("--method", "delayed", *DILOCO), **{n: ("--method", "co2", *o) for n, o in OF_CO2.items()}}
    options |= {name: ("--method", name, *own) for name, own in CHOSEN.items()}
    found = options.get(method, ("--method", method, "--no_recommended"))
    key = "ddp_wire" if method == "ddp" else "co2.wire"
    return found if wire == "float32" else (*found, f"--{key}.format", wire)


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: Status
    seconds: float
    """Of training without evaluations: to the loss if reached, else as far as is known without having reached it."""
    steps: int
    loss: float | None
    """Of the last evaluation; None without one."""
    exposed_share: float | None
    """Time that the loop waited for communication, of `seconds`."""
    credit_seconds: float
    """The part of `seconds` that was added for all-reduces which went on during evaluations: see `unpaid`."""
    reason: str = ""
    """What failed."""
    tau: int | None = None
    """Of the last round that was logged; None without one."""

    def __str__(self) -> str:
        loss = "no evaluation" if self.loss is None else f"loss {self.loss:.3f}"
        how = {"reached": f"{self.seconds:.1f} s", "out of time": f"> {self.seconds:.1f} s"}.get(
            self.status, self.status
        )
        return f"{how} ({loss}, {self.steps} steps)" + (f": {self.reason}" if self.reason else "")


def follow(
    rows: Sequence[dict[str, Any]],
    key: str,
    target: float,
    limit: float,
    *,
    ended: Status | None = None,
    reason: str = "",
) -> Outcome | None:
    """The outcome that a run's rows of metrics.jsonl show; None while it is open.

    key: of the held-out loss. ended: what it is when the run has stopped and the rows do not show "reached" or "out of
    time". A run that logs a later moment than `limit` seconds of training is out of time.
    """
    exposed = credit = seconds = at = 0.0
    steps, loss, tau, before, evaluated = 0, None, None, {"round/round": 0.0, "seconds": 0.0}, False

    def result(status: Status, reason: str = "") -> Outcome:
        share = exposed / at if at else None  # of the time until the last row, which may be past the limit
        return Outcome(status, seconds, steps, loss, share, credit, reason, tau)

    for row in rows:
        if "round/exposed_seconds" in row:
            rounds = row["round/round"] - before["round/round"]
            missing = unpaid(row, row["seconds"] - before["seconds"]) if evaluated and rounds == 1 else 0.0
            credit += missing
            exposed += rounds * row["round/exposed_seconds"] + missing  # of ddp's rounds every few are logged
            before, evaluated, tau = row, False, row.get("round/tau")
        at = row["seconds"] + credit
        if at > limit:
            seconds = limit
            return result("out of time")
        seconds, steps = at, row["step"]
        if key in row:
            loss, evaluated = row[key], True
            if loss <= target:
                return result("reached")
    return result(ended, reason) if ended else None


def unpaid(row: dict[str, Any], seconds: float) -> float:
    """Seconds that this round would have waited longer, had there been no evaluation before its first step.

    row: of a round that took `seconds` by the run's clock. That clock stands still during an evaluation, but an
    all-reduce that is under way does not. What computing could hide of it is the round without its boundary; a method
    that waits at the boundary has nothing under way, and gets 0.
    """
    computing = seconds - row["round/boundary_seconds"]
    return max(0.0, row["round/allreduce_seconds"] - computing - row["round/exposed_seconds"])


# -- the table --------------------------------------------------------------------------------------------------

TITLES = (
    *("task", "link", "method", "reached", "seconds to loss", "speed-up over ddp", "steps to loss", "exposed share"),
    *("final loss", "tau"),
)


def markdown(result: dict[str, Any]) -> str:
    """A row for each task, link rate and method, and what a reader needs to judge it."""
    rows = []
    groups: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {}
    for run in sorted(result["runs"], key=lambda run: run["seed"]):
        methods = groups.setdefault((run["task"], run["rate_mbit"]), {})
        methods.setdefault(run["method"], []).append(run)
    for (task, rate), methods in sorted(groups.items(), key=lambda item: (item[0][0] != "vision", item[0])):
        for method in sorted(methods, key=METHODS.index):
            fields = cells(methods[method], methods.get("ddp", []) if method != "ddp" else [])
            rows.append((task, f"{rate:g} Mbit/s", method, *fields))
        if limit := limit_cell(methods.get("local", []), ddp_steps(result["runs"], task)):
            rows.append((task, f"{rate:g} Mbit/s", "limit", "", limit, *[""] * 5))
    return f"{report.table(TITLES, rows)}\n\n{report.bullets(notes(result))}\n"


def cells(runs: Sequence[dict[str, Any]], ddp: Sequence[dict[str, Any]]) -> list[str]:
    """The columns behind the method's name, from its runs in order of their seeds."""
    reached = [run for run in runs if run["status"] == "reached"]
    all_reached = len(reached) == len(runs)
    times = mean_sd([r["seconds"] for r in runs], ".1f") if all_reached else ", ".join(map(time_cell, runs))
    steps = mean_sd([r["steps"] for r in reached], ".0f") if reached else ""
    shares = [r["exposed_share"] for r in runs if r["exposed_share"] is not None]
    losses = [r["loss"] for r in runs if r["loss"] is not None]
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


def ddp_steps(runs: Sequence[dict[str, Any]], task: str) -> dict[int, int]:
    """Seed -> ddp's steps to the loss, which no link changes; of those that reached it over any."""
    reached = [r for r in runs if (r["task"], r["method"], r["status"]) == (task, "ddp", "reached")]
    return {r["seed"]: r["steps"] for r in reached}


def limit_cell(local: Sequence[dict[str, Any]], steps: Mapping[int, int]) -> str:
    """Seconds to the loss of a ddp whose communication took no time: its steps, each as long as one of Local-SGD's
    without what that waits for. Empty where either is not known for a seed."""
    known = [r for r in local if r["seed"] in steps and r["exposed_share"] is not None and r["steps"]]
    if not known or len(known) < len(local):
        return ""
    return mean_sd([steps[r["seed"]] * r["seconds"] * (1 - r["exposed_share"]) / r["steps"] for r in known], ".1f")


def time_cell(run: dict[str, Any]) -> str:
    """One run's seconds to the loss, or why there are none."""
    if run["status"] == "reached":
        return f"{run['seconds']:.1f}"
    if run["status"] == "out of time":
        return f"> {run['seconds']:.1f}"
    return run["status"] if run["loss"] is None else f"{run['status']} (loss {run['loss']:.3f})"


def speed_up(runs: Sequence[dict[str, Any]], ddp: Sequence[dict[str, Any]]) -> str:
    """Ratio of the mean seconds over the same seeds; a lower bound where ddp ran out of time; else empty."""
    same = {run["seed"] for run in runs} == {run["seed"] for run in ddp}
    known = all(run["status"] in ("reached", "out of time") for run in ddp)
    if not (same and known) or any(run["status"] != "reached" for run in runs):
        return ""
    bound = any(run["status"] == "out of time" for run in ddp)
    ratio = statistics.fmean(r["seconds"] for r in ddp) / statistics.fmean(r["seconds"] for r in runs)
    return f"{'> ' if bound else ''}{ratio:.1f} x"


def notes(result: dict[str, Any]) -> list[str]:
    options, link = result["options"], result["link"]
    if link == "namespaces + tbf":
        measured = ", ".join(f"{rate}: {mbit:.1f}" for rate, mbit in result["verified_mbit"].items())
        link = f"network namespaces of one machine joined by shaped links (Mbit/s asked for: measured; {measured})"
    lines = [
        f"{options['workers']} workers, each on a node of its own; link: {link}.",
        f"All workers share {result['cpu_count']} CPU cores, so that computing takes longer than on devices of their "
        "own, and communication a smaller share of the time.",
        "Every run was stopped at the first evaluation at or below the target, or after "
        f"{options['limit_seconds']:g} s of training (`>`: not reached until then; `not reached`: at the end of all "
        "steps).",
        "Seconds: training without start and evaluations. An all-reduce that went on during an evaluation is charged "
        "as if there had been none.",
        "Methods share data, order, seeds, learning rate, steps and tau, but that of co2_auto, which measures it, 24 "
        "at most; lgreco: L-GreCo within the error of rank 4 (_int4: of int4), among its family or any formats. "
        "Evaluations are due at fixed steps and take place at the next round boundary, of one model on all workers. It "
        "is the mean of theirs, for which overlap_local, co2_recommended and co2_auto wait; the wait is charged. Of "
        "co2 it is the outer iterate, which holds what was sent a round ago.",
        "Speed-up: ratio of the mean seconds over the seeds; `>`: a lower bound, as ddp ran out of time. Mean ± sample "
        "standard deviation over the seeds; steps over those that reached the target; final loss at each run's last "
        "evaluation.",
        "limit: ddp, were its communication free: its steps to the loss (over any link), each as long as one of "
        "local's without waiting.",
        "Exposed share: time that rank 0 waited for communication (ddp: the last bucket of every fifth step). tau: at "
        "the end of each run, empty where it was not kept.",
    ]
    methods = {split_wire(run["method"]) for run in result["runs"]}
    if any(wire != "float32" for _, wire in methods):
        lines.append("wire=: over that format, with error feedback, what the row without it sends in float32.")
    if any(method in CHOSEN for method, _ in methods):
        lines.append(
            "auto: ddp over int4 at first; where more than a tenth of its step is exposed, co2_auto takes over. tau 1: "
            "ddp stayed, or CO2 at tau 1."
        )
    if any(method == "diloco" for method, _ in methods):
        lines.append("diloco: method delayed with delay 0 and Nesterov's momentum 0.9, outer learning rate 0.7.")
    for name, task in result["tasks"].items():
        package = task.get("package", name)  # an older result names none, where it is the task's name
        every = task.get("held_out", 1)
        of = f", on one of {every} images of the test set" if every > 1 else ""
        lines.append(f"{name}: `{package}.train {task['command']}`, target {task['loss']} {task['target']:g}{of}.")
    return [*lines, f"{report.source(result)}."]


def main() -> None:
    page = lambda folder: markdown(report.load(folder / f"{NAME}.json", "bench.time_to_loss", "runs"))  # noqa: E731
    report.remake("bench.loss_table", __doc__, f"{NAME}.json", NAME, page)


if __name__ == "__main__":
    launch(main)
