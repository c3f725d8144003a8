"""Plans of language/lengths/plan.py beside the optimum and rivals, by its own model: python -m bench.lengths_plans

No seconds are measured but those of planning, as a thread's own time. The devices are the paper's, as far as we know
them: A800 with four links of 200 Gbit/s a node; speeds are ours, 150 TFLOP/s in linear layers and 100 in attention, a
layer of width 4096 in 16 bits. Rivals:

- even: every document over all ranks, one after the other, each hidden under itself alone, as one long sequence is.
- grouped: disjoint groups of power-of-two sizes, all partitions tried, nothing hidden; after FlexSP.
- whole: no document is split, the costliest first to the least busy rank; packing that keeps documents whole.
- cut: equal rows of tokens, documents cut where a row ends; attention then ends there, too: another model.
- thresholds: our reading of Zeppelin's zones, the ablation: whole, in a node or across, by length alone.

Writes lengths_plans.json and lengths_plans.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch

from bench import report
from bench.report import Asked, mean_sd, require
from language.lengths import laws
from language.lengths.plan import Island, Loads, Ring, layer_seconds, plan
from training.script import launch

WIDTH, LAYERS = 4096, 32
LINEAR, ATTENTION = 72 * WIDTH**2 / 150e12, 7 * WIDTH / 100e12  # seconds; 3.5 times 2 h a pair of a causal triangle
BITS = 8 * 16 * WIDTH  # of a token's keys and values in 16 bits, twice, and of their gradients in 32
LONGEST, TOKENS = 65536, 8192  # tokens of a document, at most, and of a device and step
LINKS = {"800 Gbit/s": 800e9, "25 Gbit/s": 25e9, "1 Gbit/s": 1e9}
MOST = 300_000  # places that the search for the optimum looks at
Placement = tuple[list[int], list[Ring]]  # lengths, and the ranks of each


@dataclass(frozen=True)
class Plans(Asked):
    """How good plans are."""

    laws: tuple[str, ...] = tuple(laws.LAWS)
    draws: int = 20
    """Sets of documents, seeds 0 to draws - 1, for each cell."""

    def check(self) -> None:
        require(self, ones="draws", laws=laws.LAWS)


def island(across: float, nodes: int = 2, devices: int = 8, speed: float = 1.0, inside: float = 1600e9) -> Island:
    """across, inside: bit/s of a flow. speed: of a device, of an A800's."""
    links = (20e-6, BITS / inside), (50e-6 if across > 5e9 else 1e-3, BITS / across)
    return Island(nodes, devices, ATTENTION / speed, LINEAR / speed, *links)


def drawn(law: str, seed: int, number: int, tokens: float = np.inf) -> list[int]:
    """So many lengths of a law, fewer where they come to more tokens."""
    lengths = np.minimum(laws.draw(law, number, seed), LONGEST)
    return lengths[: max(2, int(np.searchsorted(np.cumsum(lengths), tokens)))].tolist()


def planned(lengths: Sequence[int], i: Island) -> list[Ring]:
    return plan(torch.tensor([0, *lengths]).cumsum(0), i)


# -- ways: lengths and island -> rings, and seconds of a layer -------------------------------------------------------


def even(lengths: Sequence[int], i: Island) -> float:
    everyone = tuple(range(i.size))
    return sum(max(i.share(n, everyone)[:2]) for n in lengths) + i.linear * sum(lengths) / i.size


def by_cost(lengths: Sequence[int], i: Island) -> list[Ring]:
    """Whole ones, the costliest first, each to the least busy rank."""
    busy, rings = [0.0] * i.size, [()] * len(lengths)
    for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        rings[k] = (busy.index(min(busy)),)  # pyright: ignore[reportArgumentType]
        busy[rings[k][0]] += i.whole(lengths[k])
    return rings  # pyright: ignore[reportReturnType]


def cut_rows(lengths: Sequence[int], i: Island) -> tuple[list[int], list[Ring]]:
    """Lengths of the pieces where documents are cut to rows of as many tokens, and the rank of each."""
    ends = np.cumsum(lengths)
    row = -(-int(ends[-1]) // i.size)
    cuts = np.union1d(ends, np.arange(row, ends[-1], row))
    return np.diff(cuts, prepend=0).tolist(), [(rank,) for rank in ((cuts - 1) // row).tolist()]


def in_groups(lengths: Sequence[int], i: Island) -> list[Ring]:
    """The best partition into groups, where no hop is hidden: each document to the group that is done first."""
    best, found = np.inf, list[Ring]()
    for sizes in partitions(i.size):
        ends = np.cumsum(sizes).tolist()
        groups = [tuple(range(end - g, end)) for end, g in zip(ends, sizes, strict=True)]
        busy, rings = [0.0] * len(groups), [groups[0]] * len(lengths)
        for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
            n = lengths[k]
            costs = [sum(i.share(n, g)[:2]) + i.linear * n / len(g) for g in groups]
            after = [b + c for b, c in zip(busy, costs, strict=True)]
            first = after.index(min(after))
            busy[first], rings[k] = after[first], groups[first]
        if max(busy) < best:
            best, found = max(busy), rings
    return found


def grouped(lengths: Sequence[int], i: Island) -> float:
    loads = Loads.of(lengths, in_groups(lengths, i), i)
    spent = zip(loads.work, loads.hops, loads.tokens, strict=True)
    return max(work + hops + i.linear * tokens for work, hops, tokens in spent)


def partitions(total: int, largest: int | None = None) -> list[list[int]]:
    """All ways to write total as a sum of powers of two, the greatest first."""
    if total == 0:
        return [[]]
    sizes = [1 << k for k in range(total.bit_length()) if 1 << k <= min(total, largest or total)]
    return [[g, *rest] for g in reversed(sizes) for rest in partitions(total - g, g)]


def zones(lengths: Sequence[int], i: Island) -> list[Ring]:
    """Nodes are filled by tokens and squares, then devices by squares. Where a hop takes as long as its computing, in a
    node and across, are the thresholds of length; ties, capacities and the order are ours."""
    local, most = (link[1] / i.attention for link in (i.inside, i.across))
    space = [1.05 * sum(lengths) / i.nodes] * i.nodes
    squares, device = [0.0] * i.nodes, [0.0] * i.size
    rings: list[Ring] = [()] * len(lengths)
    homes: list[list[int]] = [[] for _ in range(i.nodes)]
    order = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    for k in order:
        n, square = lengths[k], float(lengths[k] ** 2)
        fits = [node for node in range(i.nodes) if space[node] >= n]
        if fits and n <= max(most, local):
            chosen = [min(fits, key=squares.__getitem__)]
            homes[chosen[0]].append(k)
        else:
            empty = sorted(range(i.nodes), key=lambda node: -space[node])
            enough = (c for c in range(2, i.nodes + 1) if sum(space[node] for node in empty[:c]) >= n)
            chosen = sorted(empty[: next(enough, i.nodes)])
            rings[k] = tuple(node * i.devices + d for node in chosen for d in range(i.devices))
            for d in rings[k]:
                device[d] += square / len(rings[k])
        for node in chosen:
            space[node] -= n / len(chosen)
            squares[node] += square / len(chosen)
    for node, home in enumerate(homes):
        share = max(squares[node] / i.devices, 1.0)
        for k in home:
            g = min(i.devices, int(-(-(lengths[k] ** 2) // share))) if lengths[k] > local else 1
            mine = range(node * i.devices, (node + 1) * i.devices)
            rings[k] = tuple(sorted(sorted(mine, key=device.__getitem__)[: max(g, 1)]))
            for d in rings[k]:
                device[d] += lengths[k] ** 2 / len(rings[k])
    return rings


WAYS: dict[str, Callable[[list[int], Island], Placement]] = {
    "plan": lambda lengths, i: (lengths, planned(lengths, i)),
    "even": lambda lengths, i: (lengths, [tuple(range(i.size))] * len(lengths)),
    "grouped": lambda lengths, i: (lengths, in_groups(lengths, i)),
    "whole": lambda lengths, i: (lengths, by_cost(lengths, i)),
    "cut": cut_rows,
    "thresholds": lambda lengths, i: (lengths, zones(lengths, i)),
}
OWN = {"even": even, "grouped": grouped}  # prices of ways whose hops are hidden otherwise than the plan's
RIVALS = tuple(way for way in WAYS if way != "plan")


def price(way: str, lengths: list[int], i: Island) -> float:
    """Seconds of a layer."""
    return OWN[way](lengths, i) if way in OWN else layer_seconds(*WAYS[way](lengths, i), i)


# -- the optimum ------------------------------------------------------------------------------------------------------


def optimum(lengths: Sequence[int], i: Island, bound: float, most: int = MOST) -> float | None:
    """Least layer_seconds over all sets of devices, by branch and bound below `bound`; None: too many to look at."""
    rings = [ring for g in range(1, i.size + 1) for ring in combinations(range(i.size), g)]
    order = sorted(lengths, reverse=True)
    costs = [[(ring, *i.share(n, ring)) for ring in rings] for n in order]
    left = [sum(map(i.whole, order[depth:])) for depth in range(len(order) + 1)]
    best, looked = bound, 0

    def descend(depth: int, state: list[tuple[float, float, float]]) -> None:
        nonlocal best, looked
        looked += 1
        busy = [max(work, hops) + i.linear * tokens for work, hops, tokens in state]
        spent = sum(work + i.linear * tokens for work, _, tokens in state)
        if looked > most or max(max(busy), (spent + left[depth]) / i.size) >= best * (1 - 1e-9):
            return
        if depth == len(order):
            best = max(busy)
            return
        seen = set()
        for ring, *more in costs[depth]:
            after = [tuple(map(sum, zip(s, more, strict=True))) if d in ring else s for d, s in enumerate(state)]
            nodes = (tuple(sorted(after[n : n + i.devices])) for n in range(0, i.size, i.devices))
            if (key := tuple(sorted(nodes))) not in seen:  # devices of a node are alike, and nodes
                seen.add(key)
                descend(depth + 1, after)  # type: ignore[arg-type]

    descend(0, [(0.0, 0.0, 0.0)] * i.size)
    return best if looked <= most else None


def against_optimum(o: Plans) -> list[dict[str, Any]]:
    """For each link the seconds of plan and thresholds over the optimum's; 3 to 7 documents, 2 x 2 devices."""
    rows = []
    for link, rate in LINKS.items():
        row: dict[str, Any] = dict(link=link, plan=[], thresholds=[], open=0)
        i = island(rate, 2, 2)
        for seed in range(o.draws):
            lengths = drawn("github_like", seed, 3 + seed % 5)
            took = price("plan", lengths, i)
            if (best := optimum(lengths, i, took * (1 + 1e-6))) is None:
                row["open"] += 1
                continue
            row["plan"].append(took / best)
            row["thresholds"].append(price("thresholds", lengths, i) / best)
        rows.append(row)
    return rows


# -- rivals and time ------------------------------------------------------------------------------------------------

ISLANDS = {
    "A800, 200 Gbit/s a flow": island(200e9),
    "A800, 25 Gbit/s": island(25e9),
    "A800, 1 Gbit/s": island(1e9),
    "a fiftieth of an A800, 1 Gbit/s": island(1e9, speed=0.02, inside=1e11),
}


def against_rivals(o: Plans) -> list[dict[str, Any]]:
    """For each island and law the rivals' seconds over the plan's, and the share of documents that are split."""
    rows = []
    for name, i in ISLANDS.items():
        for law in o.laws:
            row: dict[str, Any] = dict(island=name, law=law, split=[], **{rival: [] for rival in RIVALS})
            for seed in range(o.draws):
                lengths = drawn(law, seed, 4000, TOKENS * i.size)
                rings = planned(lengths, i)
                row["split"].append(statistics.fmean(len(ring) > 1 for ring in rings))
                for rival in RIVALS:
                    row[rival].append(price(rival, lengths, i) / layer_seconds(lengths, rings, i))
            rows.append(row)
    return rows


def planning(o: Plans) -> list[dict[str, Any]]:
    """Seconds of planning and, by the model, of a step of LAYERS layers; at last of few documents on many devices."""
    rows = []
    for number, nodes, tokens in ((1000, 2, np.inf), (10_000, 2, np.inf), (4000, 8, TOKENS * 64)):
        for law in o.laws:
            i, row = island(200e9, nodes), dict(devices=8 * nodes, law=law, documents=[], plan=[], step=[])
            for seed in range(5):
                lengths = drawn(law, seed, number, tokens)
                began = time.thread_time()
                rings = planned(lengths, i)
                row["plan"].append(time.thread_time() - began)
                row["step"].append(LAYERS * layer_seconds(lengths, rings, i))
                row["documents"].append(len(lengths))
            rows.append(row)
    return rows


# -- the tables -------------------------------------------------------------------------------------------------------


def text_of(result: dict[str, Any]) -> str:
    source, last = report.source(result), result["options"]["draws"] - 1
    sections = [
        (
            "Seconds of a layer over the optimum's, 2 nodes of 2 devices, 3 to 7 documents of the law github_like; "
            f"seeds 0 to {last}; {source}",
            ("link across", "plan, mean", "worst", "thresholds alone, mean", "worst", "not finished"),
            map(optimum_cells, result["optimum"]),
        ),
        (
            "Seconds of a layer over the plan's, by the model alone: above 1 the plan wins. 2 nodes of 8 devices, "
            f"{TOKENS} tokens a device, documents of up to {LONGEST}, laws with parameters of ours; seeds 0 to "
            f"{last}; {source}",
            ("devices and links across", "law", *RIVALS, "documents split, %"),
            map(rival_cells, result["rivals"]),
        ),
        (
            f"Seconds of planning, a thread's own, and of a step of {LAYERS} layers of width {WIDTH}, nodes of 8 A800, "
            f"by the model; on 64 devices as many documents as make {TOKENS} tokens a device; seeds 0 to 4; {source}",
            ("devices", "documents", "law", "planning, ms", "step, s", "planning / step, %"),
            map(planning_cells, result["planning"]),
        ),
    ]
    return "\n\n".join(f"- {caption}\n\n{report.table(titles, rows)}" for caption, titles, rows in sections) + "\n"


def optimum_cells(r: dict[str, Any]) -> list[object]:
    ratios = [(mean_sd(r[which], ".3f"), f"{max(r[which]):.3f}") for which in ("plan", "thresholds")]
    return [r["link"], *ratios[0], *ratios[1], r["open"]]


def rival_cells(r: dict[str, Any]) -> list[object]:
    split = mean_sd([100 * share for share in r["split"]], ".1f")
    return [r["island"], r["law"], *(mean_sd(r[rival], ".2f") for rival in RIVALS), split]


def planning_cells(r: dict[str, Any]) -> list[object]:
    share = [100 * p / s for p, s in zip(r["plan"], r["step"], strict=True)]
    took = mean_sd([1e3 * p for p in r["plan"]], ".0f")
    return [
        r["devices"],
        mean_sd(r["documents"], ".0f"),
        r["law"],
        took,
        mean_sd(r["step"], ".1f"),
        mean_sd(share, ".2f"),
    ]


def main() -> None:
    parts = {"optimum": against_optimum, "rivals": against_rivals, "planning": planning}
    measure = lambda o, session: session.result.update({part: of(o) for part, of in parts.items()})  # noqa: E731
    report.run(Plans, "lengths_plans", measure, text_of)


if __name__ == "__main__":
    launch(main)
