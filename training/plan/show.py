"""What a plan says: the ten best, the sums of one layout, which term decides between two, a plot."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from training.plan import memory, time
from training.plan.case import MERGES, RECOMPUTE, WIRES, Case
from training.plan.clusters import Cluster, Numbers
from training.plan.search import ALIKE, GB, Plan, hint, listed, notes

TEN, WIDTH = 10, 120
KINDS = {"recompute": RECOMPUTE, "wire": list(WIRES), "merge": MERGES}  # axes that are an index
COLUMNS = "{:>2} {:<30} {:<13} {:<20} {:>6} {:>8} {:>10} {:>6} {:>7} {:>8}"
TITLES = ("", "layout", "micro, again", "tau, wire, merge", "GB", "s/step", "tokens/s", "MFU", "bubble", "exposed")
LOSS = (
    "loss is left out: after 2,000 steps of a 0.07 M model tau 24 ended at 1.849 +- 0.007, tau 2 at 1.797 +- 0.006, "
    "ddp at 1.772 +- 0.001 (results/loss.md); layouts within 1 % are ordered by tau"
)


def tokens(c: Case, seconds: Numbers) -> Numbers:
    """B s / seconds: tokens a second"""
    return c.batch * c.model.context / seconds


def mfu(c: Case, seconds: Numbers) -> Numbers:
    """3 B (l (linear + attention) + head) / (seconds devices peak): recomputation is no work [K sec. 6]"""
    return c.batch * c.model.step_flops / (seconds * c.cluster.devices * c.cluster.device.peak)


def exposed(parts: dict[str, Numbers]) -> Numbers:
    """tensor + ends + pipeline + tied + data + waiting: seconds of communication that nothing hides"""
    return sum(parts[name] for name in time.COMMUNICATION)


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
    """Two lines for each of the best: its figures, and its gigabytes by part."""
    yield COLUMNS.format(*TITLES)
    for number, row in enumerate(p.best[:TEN], 1):
        c, seconds = p.at(row), p.total[row]
        x, parts = c.layout, {name: v[row] / p.bytes[row] for name, v in p.memory.items()}
        shares = mfu(c, seconds), p.seconds["bubble"][row] / seconds, exposed(p.seconds)[row] / seconds
        co2 = f"{x.tau}, {list(WIRES)[x.wire]}, {'host' if x.offload else MERGES[x.merge]}"
        yield COLUMNS.format(
            number,
            p.name(row),
            f"{x.micro}, {RECOMPUTE[x.recompute]}{', seq' * int(x.sequence)}",
            co2 if x.islands > 1 else "ddp",
            f"{p.bytes[row] / GB:.3g}",
            f"{seconds:.4g}",
            f"{tokens(c, seconds):,.0f}",
            *(f"{share:.1%}" for share in shares),
        )
        large = (f"{name} {p.memory[name][row] / GB:.2g}" for name, share in parts.items() if share >= 0.01)
        yield f"      GB: {', '.join(large)}" + (f"; {text}" if (text := notes(c)) else "")


def table(p: Plan) -> Iterator[str]:
    """The screen."""
    for text in sentences(p):
        width = max(WIDTH, len(text)) if text.endswith("%") else WIDTH  # of a row with a long name, a line as well
        yield from textwrap.wrap(text, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)


def sentences(p: Plan) -> Iterator[str]:
    yield from header(p.case)
    yield from rows(p)
    yield f"the best of each TP x PP x DP, islands, interleaving and ZeRO; exposed: {', '.join(time.COMMUNICATION)}"
    if p.dropped:
        yield f"dropped: {listed(p.dropped)}" + (f"; nearest miss: {p.miss}" if p.miss else "")
    if text := hint(p.case, p.dropped):
        yield f"to allow more: {text}"
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
    yield f"CO2, {p.name(co2)}: {told} as {p.name(sync)}, the best synchronous layout; {decides(p, sync, co2)}"
    yield LOSS


# -- one, and two -----------------------------------------------------------------------------------------------------


def line(name: str, value: str, of: object) -> str:
    """of: a text, or what its docstring's first line says."""
    text = of if isinstance(of, str) else inspect.getdoc(of).splitlines()[0]  # pyright: ignore
    return f"  {name:<18}{value:>16}  {text}"


def explain(p: Plan, row: int) -> Iterator[str]:
    """The sums of one layout: quantities, bytes and seconds, each with its formula and source."""
    c, m = p.at(row), p.case.model
    last = bool(sum(memory.of_stage(c, True).values()) > sum(memory.of_stage(c, False).values()))
    yield from header(c)
    chosen = vars(c.layout) | {axis: names[getattr(c.layout, axis)] for axis, names in KINDS.items()}
    yield f"{p.name(row)}: {', '.join(f'{name} {value}' for name, value in chosen.items())}"
    yield "quantities"
    for name in ("micro_batches", "layers", "block", "kept", "scores", "island"):
        yield line(name, f"{float(getattr(c, name)):,.6g}", getattr(Case, name).func)
    for name, value in zip(("measured, kept", "measured, more"), c.measured, strict=True):
        yield line(name, f"{float(value):,.6g}", Case.measured.func)
    yield line("given", f"{float(c.given):,.6g}", Case.given.func)
    for name in ("params", "linear_flops", "attention_flops", "head_flops"):
        yield line(name, f"{getattr(m, name):,.6g}", getattr(type(m), name))
    yield line("own", f"{float(c.own(last)):,.6g}", Case.own)
    for name, act in (("all-reduce of CO2", time.outer_allreduce), ("boundary pass", time.boundary_pass)):
        if c.layout.islands > 1:
            yield line(name, f"{float(act(c)):.6g} s", act)
    if c.layout.pp > 1:
        yield line("hop", f"{float(time.hop(c)):.6g} s", time.hop)
    yield line("all-reduces", "", Cluster.allreduce)
    yield line("rings", "", time.ring)
    yield f"gigabytes of the {'last' if last else 'first'} stage, which needs more" if c.layout.pp > 1 else "gigabytes"
    yield from (line(part.__name__, f"{p.memory[part.__name__][row] / GB:.4f}", part) for part in memory.PARTS)
    yield line("sum", f"{p.bytes[row] / GB:.4f}", f"of {c.cluster.device.memory / GB:.1f}")
    yield "seconds of a step"
    yield from (line(part.__name__, f"{p.seconds[part.__name__][row]:.6f}", part) for part in time.PARTS)
    yield line("sum", f"{p.total[row]:.6f}", "")
    yield line("tokens/s", f"{tokens(c, p.total[row]):,.1f}", tokens)
    yield line("MFU", f"{mfu(c, p.total[row]):.2%}", mfu)
    yield "symbols and sources: training/plan/__init__.py"
    if text := notes(c):
        yield text


def decides(p: Plan, a: int, b: int) -> str:
    """The term whose seconds differ most."""
    name = max(p.seconds, key=lambda part: abs(p.seconds[part][a] - p.seconds[part][b]))
    return f"{name} decides, {p.seconds[name][a]:.4g} s against {p.seconds[name][b]:.4g}"


def why(p: Plan, a: int, b: int) -> Iterator[str]:
    """Each term of two layouts, and which one decides."""
    yield f"{'':<14}{p.name(a):>34}{p.name(b):>34}{'difference':>14}"
    for title, parts, unit, spec in (("s", p.seconds, 1.0, ".5f"), ("GB", p.memory, GB, ".3f")):
        for name, value in [*parts.items(), ("sum", sum(parts.values()))]:
            x, y = value[a] / unit, value[b] / unit
            if x or y:
                yield f"{name + ', ' + title:<14}{x:>34{spec}}{y:>34{spec}}{x - y:>+14{spec}}"
    yield decides(p, a, b)


def plot(p: Plan, file: Path) -> None:
    """Memory against seconds of a step: the best of each kind, and the Pareto front of all layouts, named."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes, shown, at = figure.add_subplot(), np.array(p.best), front(p)
    co2 = p.case.layout.islands[shown] > 1
    for some, style, text in (
        (shown[~co2], ".", "synchronous"), (shown[co2], ".", "CO2 across islands"), (at, "k.-", "Pareto front")
    ):  # fmt: skip
        axes.plot(p.bytes[some] / GB, p.total[some], style, ms=4, lw=0.8, label=text)
    for i, row in enumerate(at):
        if not i or p.name(row) != p.name(at[i - 1]):  # the first of each name in a row
            axes.annotate(p.name(row), (p.bytes[row] / GB, p.total[row]), fontsize=6, rotation=30)
    title = f"{p.case.model.name}, {p.case.cluster.name}"
    axes.set(xlabel="GB on a device", ylabel="seconds of a step", yscale="log", title=title)
    axes.legend()
    figure.savefig(file, dpi=150)


def front(p: Plan) -> list[int]:
    """Rows than which none needs both less memory and fewer seconds, by memory."""
    order = np.lexsort((p.total, p.bytes))
    best = np.minimum.accumulate(p.total[order])
    return order[np.append(True, p.total[order][1:] < best[:-1])].tolist()
