"""The tables of bench.peers, from its runs and its options as they stand in the JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench import report
from bench.peers.adapters import PEERS
from bench.peers.loop import AUTO, BATCH, EVERY, EVERY_STEP, FREE, OWN_TAU, RECOMMENDED, REFERENCE, diloco
from bench.report import Spread
from bench.standin import LR, MOMENTUM, build_model
from bench.trainings import TUNING_SEED, split_wire
from core import CO2Config
from core.methods import OverlapLocalConfig, SlowMoConfig

Options = dict[str, Any]
CO2_SETTINGS = ("outer_lr", "outer_momentum", "gap", "clip", "merge", "mix", "delay")
LIMIT = "limit"  # ddp, were communication free
MAX_REASON = 160  # characters of an error in the table

COLUMNS = {
    "samples_per_second": ("samples/s", ".0f"),
    "exposed": ("exposed share", ".0%"),
    "loss_at_samples": ("loss at equal samples", ".3f"),
    "loss_at_seconds": ("loss at equal seconds", ".3f"),
    "seconds_to_target": ("seconds to the target", ".1f"),
    "bytes_per_sample": ("bytes sent per sample", ".0f"),
    "memory_mib": ("memory per worker, MiB", ".1f"),
    "rounds": ("rounds", ".0f"),
}


LOWEST = ("exposed", "loss_at_samples", "loss_at_seconds", "seconds_to_target")  # the best of these is in bold

# -- what is made of the runs -------------------------------------------------------------------------------------


def summarise(o: Options, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a method: each measure as a list over the repeats, or the reason why it has none."""
    communicated = [run["seconds"] for run in runs if run["method"] != REFERENCE and "seconds" in run]
    budget = min(communicated, default=0.0)  # of "loss at equal seconds"
    reference = {run["repeat"]: run["seconds"] for run in runs if run["method"] == REFERENCE and "seconds" in run}
    rows = []
    for method in (REFERENCE, *o["methods"]):
        mine = [run for run in runs if run["method"] == method]
        done = [run for run in mine if "reason" not in run]
        row: dict[str, Any] = {"method": method, "budget": budget} | {k: mine[0].get(k) for k in ("lr", "tau")}
        if len(done) < len(mine):
            row["reason"] = next(run["reason"] for run in mine if "reason" in run)
        else:
            row |= measures(o, done, reference, budget)
        rows.append(row)
    return [*rows, *limit_row(o, runs)]


def limit_row(o: Options, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """ddp's seconds to the target, were communication free; nothing where ddp was not measured."""
    done = {(run["method"], run["repeat"]): run for run in runs if "reason" not in run}
    seeds = [repeat for method, repeat in done if method == "ddp" and (REFERENCE, repeat) in done]
    seconds = [limit(done["ddp", seed], done[REFERENCE, seed], o["target"]) for seed in seeds]
    return [{"method": LIMIT, "seconds_to_target": seconds}] if seconds else []


def measures(
    o: Options, runs: Sequence[dict[str, Any]], reference: dict[int, float], budget: float
) -> dict[str, list[float | None]]:
    """What the columns show, a value a repeat."""
    own = BATCH * runs[0]["steps"][-1]  # samples of one worker
    whole = runs[0]["steps"][-1] / o["steps"]  # below 1: see steps_of
    return {
        "samples_per_second": [own * o["workers"] / run["seconds"] for run in runs],
        "exposed": [
            max(0.0, 1 - whole * reference[run["repeat"]] / run["seconds"]) if run["repeat"] in reference else None
            for run in runs
        ],
        "loss_at_samples": [run["losses"][-1] if whole == 1 else None for run in runs],
        "loss_at_seconds": [loss_at(run["times"], run["losses"], budget) for run in runs],
        "seconds_to_target": [seconds_to(run["times"], run["losses"], o["target"]) for run in runs],
        "bytes_per_sample": [None if run["sent"] is None else run["sent"] / own for run in runs],
        "memory_mib": [run["memory"] / 2**20 for run in runs],
        "rounds": [run["rounds"] for run in runs],
    }


def loss_at(times: Sequence[float], losses: Sequence[float], budget: float) -> float:
    """The last loss that was known when the budget had passed; the first is that of the untrained model."""
    return [loss for seconds, loss in zip(times, losses, strict=True) if seconds <= budget or seconds == 0][-1]


def seconds_to(times: Sequence[float], losses: Sequence[float], target: float) -> float | None:
    """Of the first snapshot whose loss is at or below the target; None: there is none."""
    return next((seconds for seconds, loss in zip(times, losses, strict=True) if loss <= target), None)


def limit(ddp: dict[str, Any], reference: dict[str, Any], target: float) -> float | None:
    """Seconds to the target of ddp whose communication takes no time: its losses, when the run without communication
    had done as many steps, by its first snapshot from there on. None: ddp, or that run, did not come so far."""
    reached = next((step for step, loss in zip(ddp["steps"], ddp["losses"], strict=True) if loss <= target), math.inf)
    return next((t for step, t in zip(reference["steps"], reference["times"], strict=True) if step >= reached), None)


# -- the table --------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: median (least to greatest) over the repeats, or the reason across the row."""
    own = tuned(rows)
    best = {name: least(rows, name) for name in LOWEST}
    lines = []
    for row in rows:
        if "reason" in row:
            reason = row["reason"].replace("|", "/")
            lines.append((row["method"], reason if len(reason) <= MAX_REASON else reason[: MAX_REASON - 3] + "..."))
            continue
        texts = [cell(row[name], spec, name) if name in row else "" for name, (_, spec) in COLUMNS.items()]
        texts = [
            f"**{text}**" if best.get(name) == row["method"] else text
            for name, text in zip(COLUMNS, texts, strict=True)
        ]
        lines.append((row["method"], *([settings(row)] if own else []), *texts))
    titles = ["method", *(["lr, tau"] if own else []), *(title for title, _ in COLUMNS.values())]
    return report.table(titles, lines)


def tuned(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether rows differ in their learning rates or taus."""
    return len({(row.get("lr"), row.get("tau")) for row in rows if "lr" in row}) > 1


def least(rows: Sequence[dict[str, Any]], name: str) -> str | None:
    """The method with the least median, among those that communicate and have a finite number in every repeat."""
    medians = {}
    for row in rows:
        values = row.get(name, [None])
        if row["method"] not in (REFERENCE, LIMIT) and all(v is not None and math.isfinite(v) for v in values):
            medians[row["method"]] = statistics.median(values)
    return min(medians, key=lambda method: medians[method]) if len(medians) > 1 else None


def settings(row: dict[str, Any]) -> str:
    """What the tuning chose."""
    if "lr" not in row or row["method"] == REFERENCE:
        return ""
    if split_wire(row["method"])[0] in EVERY_STEP:
        return f"{row['lr']:g}"
    period = "auto" if row["method"] in OWN_TAU else row["tau"]
    return f"{row['lr']:g}, {period}"


def cell(values: Sequence[float | None], spec: str, name: str = "") -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        if name != "seconds_to_target":
            return "not measured"
        return f"not reached in {len(values) - len(known)} of {len(values)}"
    finite = [value for value in known if math.isfinite(value)]
    if len(finite) < len(known):
        left = f" (else {', '.join(f'{value:{spec}}' for value in finite)})" if finite else ""
        return f"diverged in {len(known) - len(finite)} of {len(known)}{left}"
    return Spread.of(known).show(spec)


def markdown(result: dict[str, Any]) -> str:
    """The table with all that a reader needs to judge it."""
    rows, versions, o = result["rows"], result["versions"], result["options"]
    tau, workers, steps = o["tau"], o["workers"], o["steps"]
    millions = sum(p.numel() for p in build_model(o["width"]).parameters()) / 1e6
    sent = "the method's own count, without protocol headers" if o["throttle"] else "counter of each node's interface"
    rate = "the lr of each row in its column" if tuned(rows) else f"lr {LR:g}"
    notes = [
        f"Link: {result['link']}. {workers} workers, each on its own node; {steps} steps, tau {tau}.",
        f"Task: scikit-learn's digits, a perceptron of {millions:.2f} M parameters, SGD {rate}, momentum "
        f"{MOMENTUM:g}, {BATCH} samples per worker and step. Forward and backward are stretched to "
        f"{o['step_ms']:g} ms, layer by layer, a stand-in for computing on hardware of one's own.",
        f"Median (least to greatest) of {o['repeats']} runs, a seed each; a repeat whose loss is not finite has "
        f"diverged. `{REFERENCE}`: the same steps without any communication.",
        f"Exposed share: 1 - (seconds of `{REFERENCE}`) / (seconds of the row), for all rows alike; it holds whatever "
        "slows a row down, not waiting alone.",
        f"Loss: cross-entropy of the mean of all workers' models on every second held-out sample, taken every {EVERY} "
        "steps and at the period's end with the clock stopped, evaluated afterwards; equal seconds: the last before "
        f"{rows[0]['budget']:.2f} s; seconds to the target: of the first that is {o['target']:g} or less.",
        f"`{LIMIT}`: when the run without communication has done as many steps as ddp needs to the target: ddp, were "
        f"communication free. {', '.join(EVERY_STEP)} take as many steps as fit in {o['most_seconds']:g} s.",
        *tuning(o),
        f"Bytes sent: by one worker, per sample that it trained on ({sent}).",
        "Memory: peak resident memory above what was resident once model and package were loaded; of the worker's own "
        "process (hivemind has two or three more).",
        "Rounds: synchronisations, those that end the training included (torchft_streaming: of a fragment). They are "
        "inside the clock too: with few steps they weigh more than in a real training.",
        f"Ours: co2 {chosen(CO2Config(tau=tau), *CO2_SETTINGS)}; {RECOMMENDED} "
        f"{chosen(CO2Config.recommended(workers, o['steps']), *CO2_SETTINGS)}, {FREE} so with tau auto; "
        f"slowmo {chosen(SlowMoConfig())}; diloco {chosen(diloco(tau)[0], 'outer_lr', 'outer_momentum')}, "
        "Nesterov's, blocking; dpu: ddp whose mean gradients are applied one step late; acco (arXiv 2406.02613): an "
        "estimate from one half of each batch, a step from both, without its warm-up; "
        f"overlap_local {chosen(OverlapLocalConfig())}.",
        *([f"{AUTO}: ddp over int4, and {FREE} from where ddp waits."] if AUTO in o["methods"] else []),
        *(f"{name}: {PEERS[name].note}." for name in o["methods"] if name in PEERS),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    return f"{table(rows)}\n\n{report.bullets([*notes, f'{report.source(result)}.'])}\n"


def chosen(config: Any, *names: str) -> str:
    """Settings of a method in words; all of them without names."""
    values = asdict(config)
    return ", ".join(f"{name} {values[name]}" for name in names or values)


def tuning(o: Options) -> list[str]:
    """How the rows were tuned."""
    if len(o["tune_lr"]) * max(1, len(o["tune_tau"])) == 1:
        return []
    taus = f" and tau in {', '.join(map(str, o['tune_tau']))}" if o["tune_tau"] else ""
    rates = ", ".join(f"{LR * factor:g}" for factor in o["tune_lr"])
    return [
        f"Every row was tuned alike: lr in {rates}{taus} ({', '.join(EVERY_STEP)} and {FREE}: lr alone), the first to "
        f"the target, on seed {TUNING_SEED} and on the other half of the held-out samples, which no figure is of."
    ]
