"""The table of bench.peers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench import report
from bench.peers.adapters import PEERS
from bench.peers.loop import BATCH, EVERY, EVERY_STEP, FREE, RECOMMENDED, REFERENCE, diloco
from bench.peers.model import LR, MOMENTUM, build_model
from bench.peers.tuning import SEED
from bench.report import Spread
from core.config import CO2Config
from core.methods import OverlapLocalConfig, SlowMoConfig

if TYPE_CHECKING:
    from bench.peers.compare import Bench

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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: median (least to greatest) over the repeats, or the reason across the row."""
    tuned = len({(row.get("lr"), row.get("tau")) for row in rows if "lr" in row}) > 1
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
        lines.append((row["method"], *([settings(row)] if tuned else []), *texts))
    titles = ["method", *(["lr, tau"] if tuned else []), *(title for title, _ in COLUMNS.values())]
    return report.table(titles, lines)


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
    if row["method"] in EVERY_STEP:
        return f"{row['lr']:g}"
    period = "auto" if row["method"] == FREE else row["tau"]
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
        f"Loss: cross-entropy of the mean of all workers' models on every second held-out sample, taken every {EVERY} "
        "steps and at the period's end with the clock stopped, evaluated afterwards; equal seconds: the last before "
        f"{rows[0]['budget']:.2f} s; seconds to the target: of the first that is {bench.target:g} or less.",
        f"`{LIMIT}`: when the run without communication has done as many steps as ddp needs to the target: ddp, were "
        f"communication free. {', '.join(EVERY_STEP)} take as many steps as fit in {bench.most_seconds:g} s.",
        *tuning(bench),
        f"Bytes sent: by one worker, per sample that it trained on ({sent}).",
        "Memory: peak resident memory above what was resident once model and package were loaded; of the worker's own "
        "process (hivemind has two or three more).",
        "Rounds: synchronisations, those that end the training included (torchft_streaming: of a fragment). They are "
        "inside the clock too: with few steps they weigh more than in a real training.",
        f"Ours: co2 {chosen(CO2Config(tau=bench.tau), *CO2_SETTINGS)}; {RECOMMENDED} "
        f"{chosen(CO2Config.recommended(bench.workers, bench.steps), *CO2_SETTINGS)}, {FREE} so with tau auto; "
        f"slowmo {chosen(SlowMoConfig())}; diloco {chosen(diloco(bench.tau)[0], 'outer_lr', 'outer_momentum')}, "
        "Nesterov's, blocking; dpu: ddp whose mean gradients are applied one step late; acco (arXiv 2406.02613): an "
        "estimate from one half of each batch, a step from both, without its warm-up; "
        f"overlap_local {chosen(OverlapLocalConfig())}.",
        *(f"{name}: {PEERS[name].note}." for name in bench.methods if name in PEERS),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    return f"{table(rows)}\n\n{report.bullets([*notes, f'{report.source(result)}.'])}\n"


def chosen(config: Any, *names: str) -> str:
    """Settings of a method in words; all of them without names."""
    values = asdict(config)
    return ", ".join(f"{name} {values[name]}" for name in names or values)


def tuning(bench: Bench) -> list[str]:
    """How the rows were tuned."""
    if len(bench.tune_lr) * max(1, len(bench.tune_tau)) == 1:
        return []
    taus = f" and tau in {', '.join(map(str, bench.tune_tau))}" if bench.tune_tau else ""
    rates = ", ".join(f"{LR * factor:g}" for factor in bench.tune_lr)
    return [
        f"Every row was tuned alike: lr in {rates}{taus} ({', '.join(EVERY_STEP)} and {FREE}: lr alone), the first to "
        f"the target, on seed {SEED} and on the other half of the held-out samples, which no figure is of."
    ]
