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

TEN = 10
COLUMNS = "{:>2} {:<30} {:<13} {:<20} {:>6} {:>8} {:>10} {:>6} {:>7} {:>8}"
WIDTH = 120
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


# -- the ten best -----------------------------------------------------------------------------------------------------


def header(c: Case) -> Iterator[str]:
    k, d = c.cluster, c.cluster.device
    params = c.model.params
    size = f"{params / 1e9:.3g} billion" if params >= 1e9 else f"{params / 1e6:.3g} million"
    yield f"{c.model.name}, {size} parameters, {c.batch} samples of {c.model.context} tokens a step"
    rate = f"{d.top * d.peak / 1e12:.3g} TFLOP/s of products"
    yield f"{k.name}: {of_nodes(k)} {d.name}, {d.memory / GB:.3g} GB, {rate}"


def of_nodes(k: Cluster) -> str:
    """How many devices on how many nodes, and their links."""
    inside = f"{k.inside / GB:.3g} GB/s inside" if k.per_node > 1 else ""
    across = f"{k.across * 8 / GB:.3g} Gbit/s across" if k.nodes > 1 else ""
    links = ", ".join(filter(None, (inside, across)))
    return f"{k.nodes} node{'s' * (k.nodes > 1)} of {k.per_node}{f' ({links})' * bool(links)},"


def choice(c: Case) -> tuple[str, str]:
    """What the name of one layout leaves open: micro-batch and what is computed again; tau, wire and merge."""
    x = c.layout
    kept = f"{x.micro}, {RECOMPUTE[x.recompute]}" + ("" if not x.sequence else ", seq")
    if x.islands == 1:
        return kept, "ddp"
    return kept, f"{x.tau}, {list(WIRES)[x.wire]}, {'host' if x.offload else MERGES[x.merge]}"


def rows(p: Plan) -> Iterator[str]:
    """Two lines for each of the best: its figures, and its gigabytes by part."""
    yield COLUMNS.format(*TITLES)
    for number, row in enumerate(p.best[:TEN], 1):
        c, seconds = p.at(row), p.total[row]
        share = {"bubble": p.seconds["bubble"][row] / seconds, "exposed": exposed(p.seconds)[row] / seconds}
        yield COLUMNS.format(
            number,
            p.name(row),
            *choice(c),
            f"{p.bytes[row] / GB:.3g}",
            f"{seconds:.4g}",
            f"{tokens(c, seconds):,.0f}",
            f"{mfu(c, seconds):.1%}",
            *(f"{value:.1%}" for value in share.values()),
        )
        large = {name: v[row] for name, v in p.memory.items() if v[row] >= 0.01 * p.bytes[row]}
        parts = ", ".join(f"{name} {value / GB:.2g}" for name, value in large.items())
        yield f"      GB: {parts}" + (f"; {text}" if (text := notes(c)) else "")


def table(p: Plan) -> Iterator[str]:
    """The screen."""
    for text in sentences(p):
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)


def sentences(p: Plan) -> Iterator[str]:
    c = p.case
    yield from header(c)
    yield from rows(p)
    yield f"the best of each TP x PP x DP, islands, interleaving and ZeRO; exposed: {', '.join(time.COMMUNICATION)}"
    if p.dropped:
        yield f"dropped: {listed(p.dropped)}" + (f"; nearest miss: {p.miss}" if p.miss else "")
    if text := hint(c, p.dropped):
        yield f"to allow more: {text}"
    yield from gain(p)


def gain(p: Plan) -> Iterator[str]:
    """What CO2's best wins over the best synchronous one, where both are there, and what decides."""
    firsts = [next((row for row in p.best if (p.case.layout.islands[row] > 1) == co2), None) for co2 in (False, True)]
    if None in firsts:
        if firsts[1] is not None:
            yield f"no synchronous layout fits; {LOSS}"
        return
    sync, co2 = firsts
    ratio = p.total[sync] / p.total[co2]
    told = f"{ratio:.2f} times as fast" if ratio > 1 + ALIKE else f"no gain, {ratio:.2f} times as fast"
    yield f"CO2, {p.name(co2)}: {told} as {p.name(sync)}, the best synchronous layout; {decides(p, sync, co2)}"
    yield LOSS


# -- one, and two -----------------------------------------------------------------------------------------------------


def formula(of: object) -> str:
    return inspect.getdoc(of).splitlines()[0]  # pyright: ignore[reportOptionalMemberAccess]


def explain(p: Plan, row: int) -> Iterator[str]:
    """The sums of one layout: quantities, bytes and seconds, each with its formula and source."""
    c, cls = p.at(row), type(p.case)
    last = bool(sum(memory.of_stage(c, True).values()) > sum(memory.of_stage(c, False).values()))
    yield from header(c)
    yield f"{p.name(row)}: {', '.join(f'{name} {getattr(c.layout, name)}' for name in vars(c.layout))}"
    yield "quantities"
    for name in ("micro_batches", "layers", "block", "kept", "scores", "island"):
        yield line(name, f"{float(getattr(c, name)):,.6g}", formula(getattr(cls, name).func))
    for name in ("params", "linear_flops", "attention_flops", "head_flops"):
        yield line(name, f"{getattr(c.model, name):,.6g}", formula(getattr(type(c.model), name).fget))
    yield line("own", f"{float(c.own(last)):,.6g}", formula(cls.own))
    for name, act in (("all-reduce of CO2", time.outer_allreduce), ("boundary pass", time.boundary_pass)):
        if c.layout.islands > 1:
            yield line(name, f"{float(act(c)):.6g} s", formula(act))
    yield line("all-reduces", "", formula(Cluster.allreduce))
    yield f"gigabytes of the {'last' if last else 'first'} stage, which needs more" if c.layout.pp > 1 else "gigabytes"
    for part in memory.PARTS:
        yield line(part.__name__, f"{p.memory[part.__name__][row] / GB:.4f}", formula(part))
    yield line("sum", f"{p.bytes[row] / GB:.4f}", f"of {c.cluster.device.memory / GB:.1f}")
    yield "seconds of a step"
    for part in time.PARTS:
        yield line(part.__name__, f"{p.seconds[part.__name__][row]:.6f}", formula(part))
    yield line("sum", f"{p.total[row]:.6f}", "")
    yield line("tokens/s", f"{tokens(c, p.total[row]):,.1f}", formula(tokens))
    yield line("MFU", f"{mfu(c, p.total[row]):.2%}", formula(mfu))
    if text := notes(c):
        yield text


def line(name: str, value: str, text: str) -> str:
    return f"  {name:<18}{value:>16}  {text}"


def decides(p: Plan, a: int, b: int) -> str:
    """The term whose seconds differ most."""
    apart = {name: float(v[a] - v[b]) for name, v in p.seconds.items()}
    name = max(apart, key=lambda part: abs(apart[part]))
    return f"{name} decides, {p.seconds[name][a]:.4g} s against {p.seconds[name][b]:.4g}"


def why(p: Plan, a: int, b: int) -> Iterator[str]:
    """Each term of two layouts, and which one decides."""
    yield f"{'':<14}{p.name(a):>34}{p.name(b):>34}{'difference':>14}"
    for title, parts, unit, spec in (("s", p.seconds, 1.0, ".5f"), ("GB", p.memory, GB, ".3f")):
        whole = sum(parts.values())
        for name, value in [*parts.items(), ("sum", whole)]:
            x, y = value[a] / unit, value[b] / unit
            if x or y:
                yield f"{name + ', ' + title:<14}{x:>34{spec}}{y:>34{spec}}{x - y:>+14{spec}}"
    yield decides(p, a, b)


def plot(p: Plan, file: Path) -> None:
    """Memory against seconds of a step: the best of each kind, and the Pareto front of all layouts, named."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes, shown = figure.add_subplot(), np.array(p.best)
    co2 = p.case.layout.islands[shown] > 1
    for rows, text in ((shown[~co2], "synchronous"), (shown[co2], "CO2 across islands")):
        axes.plot(p.bytes[rows] / GB, p.total[rows], ".", ms=4, label=text)
    at = front(p)
    axes.plot(p.bytes[at] / GB, p.total[at], "k.-", lw=0.8, label="Pareto front")
    for row in thinned(p, at):
        axes.annotate(p.name(row), (p.bytes[row] / GB, p.total[row]), fontsize=6, rotation=30)
    axes.set(
        xlabel="GB on a device",
        ylabel="seconds of a step",
        yscale="log",
        title=f"{p.case.model.name}, {p.case.cluster.name}",
    )
    axes.legend()
    figure.savefig(file, dpi=150)


def front(p: Plan) -> list[int]:
    """Rows than which none needs both less memory and fewer seconds, by memory."""
    order = np.lexsort((p.total, p.bytes))
    best = np.minimum.accumulate(p.total[order])
    first = np.append(True, p.total[order][1:] < best[:-1])
    return order[first].tolist()


def thinned(p: Plan, at: list[int]) -> list[int]:
    """The first of each name in a row."""
    return [row for i, row in enumerate(at) if not i or p.name(row) != p.name(at[i - 1])]
