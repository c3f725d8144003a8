"""What a plan says: the ten best, with their bytes and seconds by part, and what CO2 gains."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from training.plan import time
from training.plan.case import MERGES, RECOMPUTE, WIRES, Case
from training.plan.clusters import Numbers
from training.plan.search import ALIKE, GB, Plan, listed, notes

TEN, WIDTH = 10, 120
COLUMNS = "{:>2} {:<30} {:<13} {:<20} {:>6} {:>8} {:>10} {:>6} {:>7} {:>8}"
TITLES = ("", "layout", "micro, again", "tau, wire, merge", "GB", "s/step", "tokens/s", "MFU", "bubble", "exposed")
LOSS = (
    "loss is left out: after 2,000 steps of a 0.07 M model tau 24 ended at 1.849 +- 0.007, tau 2 at 1.797 +- 0.006, "
    "ddp at 1.772 +- 0.001 (results/loss.md); layouts within 1 % are ordered by tau"
)


def mfu(c: Case, seconds: Numbers) -> Numbers:
    """3 B (l (linear + attention) + head) / (seconds devices peak): recomputation is no work [K sec. 6]"""
    return c.batch * c.model.step_flops / (seconds * c.cluster.devices * c.cluster.device.peak)


def rounded(value: float) -> str:
    """Three digits, or a whole number where it has more."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def header(c: Case) -> Iterator[str]:
    k, d, params = c.cluster, c.cluster.device, c.model.params
    size = f"{rounded(params / 1e9)} billion" if params >= 1e9 else f"{params / 1e6:.3g} million"
    yield f"{c.model.name}, {size} parameters, {c.batch} samples of {c.model.context} tokens a step"
    inside = f"{k.inside / GB:.3g} GB/s inside" if k.per_node > 1 else ""
    links = ", ".join(filter(None, (inside, f"{rounded(k.across * 8 / GB)} Gbit/s across" if k.nodes > 1 else "")))
    nodes = f"{k.nodes} node{'s' * (k.nodes > 1)} of {k.per_node}{f' ({links})' * bool(links)}"
    rate = f"{d.top * d.peak / 1e12:.3g} TFLOP/s of products"
    yield f"{k.name}: {nodes}, {d.name}, {d.memory / GB:.3g} GB, {rate}"


def rows(p: Plan) -> Iterator[str]:
    """Three lines for each of the best: its figures, its gigabytes and its seconds by part."""
    yield COLUMNS.format(*TITLES)
    for number, row in enumerate(p.best[:TEN], 1):
        c, seconds = p.at(row), p.total[row]
        x = c.layout
        waits = sum(p.seconds[part][row] for part in time.COMMUNICATION)
        shares = mfu(c, seconds), p.seconds["bubble"][row] / seconds, waits / seconds
        co2 = f"{x.tau}, {list(WIRES)[x.wire]}, {'host' if x.offload else MERGES[x.merge]}"
        yield COLUMNS.format(
            number,
            p.name(row),
            f"{x.micro}, {RECOMPUTE[x.recompute]}",
            co2 if x.islands > 1 else "ddp",
            f"{p.bytes[row] / GB:.3g}",
            f"{seconds:.4g}",
            f"{c.batch * c.model.context / seconds:,.0f}",
            *(f"{share:.1%}" for share in shares),
        )
        yield f"      GB: {large(p.memory, row, GB)}" + (f"; {text}" if (text := notes(c)) else "")
        yield f"      s: {large(p.seconds, row, 1)}"


def large(parts: dict[str, Numbers], row: int, unit: float) -> str:
    """Those that make 1 % of the sum or more."""
    least = sum(values[row] for values in parts.values()) / 100
    return ", ".join(f"{name} {v[row] / unit:.2g}" for name, v in parts.items() if v[row] and v[row] >= least)


def table(p: Plan) -> Iterator[str]:
    """The screen."""
    for text in _sentences(p):
        width = max(WIDTH, len(text)) if text.endswith("%") else WIDTH  # rows with a long name stay one line
        yield from textwrap.wrap(text, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)


def _sentences(p: Plan) -> Iterator[str]:
    yield from header(p.case)
    yield from rows(p)
    yield f"the best of each TP x PP x DP, islands, interleaving and ZeRO; exposed: {', '.join(time.COMMUNICATION)}"
    if p.dropped:
        yield f"dropped: {listed(p.dropped)}" + (f"; nearest miss: {p.miss}" if p.miss else "")
    yield from gain(p)


def gain(p: Plan) -> Iterator[str]:
    """What CO2's best wins over the best synchronous one, where both are there, and what decides."""
    sync, co2 = (next((row for row in p.best if (p.case.layout.islands[row] > 1) == of), None) for of in (False, True))
    if co2 is None:
        return
    if sync is None:
        yield f"no synchronous layout fits; {LOSS}"
        return
    ratio = p.total[sync] / p.total[co2]
    told = f"{ratio:.2f} times as fast" if ratio > 1 + ALIKE else f"no gain, {ratio:.2f} times as fast"
    part = max(p.seconds, key=lambda name: abs(p.seconds[name][sync] - p.seconds[name][co2]))
    reason = f"{part} decides, {p.seconds[part][sync]:.4g} s against {p.seconds[part][co2]:.4g}"
    yield f"CO2, {p.name(co2)}: {told} as {p.name(sync)}, the best synchronous layout; {reason}"
    yield LOSS
