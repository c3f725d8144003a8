"""Ways to place documents on an island, timed on the emulated cluster: python -m bench.lengths_rings

Two nodes of two ranks each, a link for each rank. Messages are those of language/lengths/ring.py, over the links;
computing is stood in for: a rank sleeps for as long as a layer of an A800 would take (bench/lengths_plans.py), times a
stretch. The width of the keys is such that a token's hop across takes as many times longer: the ratio of computing to
links is that of the real one. Ways:

- plan: language/lengths/plan.py, with what hops take on the cluster, measured before.
- even: every document over all ranks, all of them at once: even context parallelism.
- grouped: disjoint groups of ranks, chosen as if no hop were hidden; after FlexSP. Hops are hidden here as ours are.
- whole: no document is split, the costliest first to the least busy rank; packing that keeps documents whole.
- cut: equal rows of tokens, documents cut where a row ends; attention ends there, too: another model.
- thresholds: our reading of Zeppelin's zones.

Writes lengths_rings.json, lengths_rings.md and lengths_rings.png, in which a step is shown on all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench import report
from bench.cluster import Cluster, run_ranks
from bench.lengths_plans import ATTENTION, BITS, LINEAR, RIVALS, WAYS, Placement, drawn
from bench.report import Asked, mean_sd, require
from language.lengths import laws, ring
from language.lengths.plan import Island, layer_seconds
from language.lengths.ring import Shares, ring_attention
from language.lengths.rings import hop_of, slowest
from training.script import launch

NAME = "lengths_rings"
NODES, DEVICES = 2, 2
PAPERS = 200.0  # Gbit/s of a NIC of the paper
SHOWN = ("even", "whole", "plan")  # in the picture


@dataclass(frozen=True)
class Bench(Asked):
    """Seconds of a layer's two passes, each way."""

    laws: tuple[str, ...] = tuple(laws.LAWS)
    links: tuple[float, ...] = (PAPERS, 25.0)
    """Gbit/s of a flow across nodes, beside an A800."""
    draws: int = 3
    """Sets of documents, seeds 0 to draws - 1, for each law."""
    tokens: int = 32768
    """Of a rank."""
    rate: float = 200.0
    """Mbit/s of a link of the cluster."""
    stretch: float = 2.0
    """How many times longer than on an A800 computing takes, about."""

    def check(self) -> None:
        require(self, once="links", positive="links rate stretch", ones="draws tokens", laws=laws.LAWS)


# -- the stand-in -----------------------------------------------------------------------------------------------------


class Paced:
    """Computing that takes as long as it is told. spans: (from, to, kind) of what was done, by the machine's clock."""

    def __init__(self, island: Island):
        self.island = island
        self.due = 0.0
        self.spans: list[tuple[float, float, str]] = []

    def spend(self, seconds: float, kind: str) -> None:
        began = max(self.due, time.perf_counter())
        self.due = began + seconds
        self.spans.append((began, self.due, kind))
        self.catch_up(1e-3)

    def catch_up(self, most: float = 0.0) -> None:
        """Sleeps unless it is at most so far ahead: short sleeps take longer than they should."""
        ahead = self.due - time.perf_counter()
        if ahead > most:
            time.sleep(ahead)

    def attend(self, q: Tensor, k: Tensor, causal: bool, share: float) -> None:
        """A block, one of the two passes."""
        pairs = len(q) * len(k) * (0.5 if causal else 1.0)
        self.spend(share * 2 * self.island.attention * pairs, "a document" if causal else "a visitor")

    def flash(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
        self.attend(q, k, causal, 2 / 7)
        return torch.zeros_like(q), q.new_zeros(q.shape[:2])

    def flash_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, causal: bool) -> Any:  # noqa: ARG002
        self.attend(q, k, causal, 5 / 7)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def stepped(placement: Placement, island: Island, width: int) -> tuple[float, list[tuple[float, float, str]]]:
    """Seconds of a layer's two passes on the slowest rank, and what this one did, from the begin on."""
    lengths, rings = placement
    shares, paced = Shares(torch.tensor([0, *lengths]).cumsum(0), rings), Paced(island)
    tokens = len(shares.indices)
    q, k, v = (torch.zeros(tokens, 1, width, requires_grad=True) for _ in range(3))
    with mock.patch.object(ring, "flash", paced.flash), mock.patch.object(ring, "flash_backward", paced.flash_backward):
        dist.barrier()
        began = time.perf_counter()
        paced.spend(island.linear * tokens / 3, "linear layers")
        out = ring_attention(q, k, v, shares)
        out.sum().backward()
        paced.spend(island.linear * tokens * 2 / 3, "linear layers")
        paced.catch_up()
        took = time.perf_counter() - began
    return slowest([took], dist.group.WORLD)[0], [(a - began, b - began, kind) for a, b, kind in paced.spans]  # pyright: ignore


def island_of(link: float, rate: float, stretch: float) -> tuple[Island, float, int]:
    """The island with what hops take here, its stretch, and the width of keys with which a hop is stretched as much."""
    per_width = 8 * 24 / (rate * 1e6)  # seconds of a hop for a token and unit of width: 24 bytes in float32
    modelled = BITS / (link * 1e9)
    width = max(1, round(stretch * modelled / per_width))
    stretch = width * per_width / modelled
    assert dist.group.WORLD is not None
    rings = (DEVICES, NODES * DEVICES)
    inside, across = (hop_of(dist.group.WORLD, devices, 24 * width, 4096, CPU) for devices in rings)
    return Island(NODES, DEVICES, stretch * ATTENTION, stretch * LINEAR, inside, across), stretch, width


CPU = torch.device("cpu")


def measured(o: Bench) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """On each rank of the cluster: a row for each link, law, draw and way; and what the rank did in some of them."""
    dist.init_process_group("gloo")
    rows, spans = [], {}
    for link in o.links:
        island, stretch, width = island_of(link, o.rate, o.stretch)
        stepped(([64], [tuple(range(island.size))]), island, width)  # connects, and warms up
        for law in o.laws:
            for seed in range(o.draws):
                lengths = drawn(law, seed, 4000, o.tokens * island.size)
                least = sum(map(island.whole, lengths)) / island.size
                row = dict(link=link, law=law, seed=seed, tokens=sum(lengths), documents=len(lengths), least=least)
                row |= dict(stretch=stretch, width=width, hops=(island.inside, island.across), seconds={}, model={})
                for way, place in WAYS.items():
                    placement = place(lengths, island)
                    row["seconds"][way], did = stepped(placement, island, width)
                    row["model"][way] = layer_seconds(*placement, island)
                    if seed == 0 and way in SHOWN:
                        spans[f"{link:g} {law} {way}"] = did
                rows.append(row)
    dist.barrier()
    return rows, spans


# -- the table and the picture ----------------------------------------------------------------------------------------


def ratios(rows: Sequence[dict[str, Any]], way: str) -> list[float]:
    """How many times as long as the plan."""
    return [row["seconds"][way] / row["seconds"]["plan"] for row in rows]


def cells(rows: Sequence[dict[str, Any]]) -> list[object]:
    """Of one link and law. Tokens a second are those of a device that is not stretched."""
    speeds = [r["stretch"] * r["tokens"] / r["seconds"]["plan"] / 1e3 for r in rows]
    least = mean_sd([100 * r["least"] / r["seconds"]["plan"] for r in rows], ".0f")
    model = mean_sd([100 * r["seconds"]["plan"] / r["model"]["plan"] - 100 for r in rows], "+.0f")
    rivals = [mean_sd(ratios(rows, way), ".2f") for way in RIVALS]
    return [f"{rows[0]['link']:g}", rows[0]["law"], mean_sd(speeds, ".0f"), *rivals, least, model]


def by_law(result: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each link and law."""
    for link in result["options"]["links"]:
        for law in result["options"]["laws"]:
            yield [row for row in result["rows"] if (row["link"], row["law"]) == (link, law)]


MARKS = (("even", 2.0, "even context parallelism"), ("grouped", 1.05, "groups, after FlexSP"))


def verdicts(result: dict[str, Any]) -> Iterator[str]:
    """The marks at the paper's ratio, law by law."""
    papers = {rows[0]["law"]: rows for rows in by_law(result) if rows[0]["link"] == PAPERS}
    for way, mark, name in MARKS:
        found = {law: statistics.fmean(ratios(rows, way)) for law, rows in papers.items() if law != "uniform"}
        missed = [law for law, ratio in found.items() if ratio < mark]
        yield f"{name}, at least {mark:g} times under each law: " + (
            f"missed under {', '.join(missed)}" if missed else "met"
        )
    even = [
        law for law, rows in papers.items() if statistics.fmean(r["least"] / r["seconds"]["plan"] for r in rows) > 0.95
    ]
    if even:
        yield f"within 5 % of the least time, so that no way could be 1.05 times as fast: {', '.join(even)}"
    if "uniform" in papers:
        rows = papers["uniform"]
        best = min(statistics.fmean(ratios(rows, way)) for way in WAYS if way not in ("plan", "cut"))
        met = "met" if best >= 0.97 else "missed"
        yield f"uniform lengths, at least 0.97 of the best way: {met}, whose time is {best:.2f} of the plan's"
    lost = [
        f"{r[0]['law']} at {r[0]['link']:g} Gbit/s" for r in by_law(result) if statistics.fmean(ratios(r, "cut")) < 0.99
    ]
    if lost:
        yield f"cut packing, which trains another model, is faster under {', '.join(lost)}"


def text_of(result: dict[str, Any]) -> str:
    o, rows = result["options"], result["rows"]
    rivals = [f"{way} / plan" for way in RIVALS]
    titles = ("link, Gbit/s", "law", "plan, 1,000 tokens/s", *rivals, "least / plan, %", "plan beside the model, %")
    tokens = NODES * DEVICES * o["tokens"]
    stretch = ", ".join(f"{s:.2f}" for s in dict.fromkeys(row["stretch"] for row in rows))
    ratio = ", ".join(f"{LINEAR * link * 1e9 / BITS:.2g}" for link in o["links"])
    notes = [
        f"Seconds of a layer, both passes, over those of the plan: above 1 the plan wins. {NODES} nodes of {DEVICES} "
        f"ranks, {tokens:,} tokens or a little less, laws with parameters of ours, seeds 0 to {o['draws'] - 1}: mean ± "
        "standard deviation.",
        f"Computing is a stand-in: that of an A800, {stretch} times slower. Links of {o['rate']:g} Mbit/s carry keys "
        "as many times more slowly. Zeppelin's nodes have links of 200 Gbit/s.",
        f"A token's linear layers take {ratio} times as long as its hop across, link by link.",
        "`least` is the work over the ranks: no way is faster. `cut` trains another model. `grouped` hides its hops "
        "here, as the plan does. On 16 ranks, by the model alone: [lengths_plans.md](lengths_plans.md).",
        f"{report.source(result)}.",
    ]
    parts = [
        "# Documents on an island, timed",
        report.bullets(notes),
        report.table(titles, map(cells, by_law(result))),
        "At Zeppelin's ratio, and where cut packing wins:" if PAPERS in o["links"] else "Zeppelin's ratio: not run.",
        report.bullets(verdicts(result)),
        f"![A layer on {NODES * DEVICES} ranks]({NAME}.png)",
        "Above: a layer's two passes on each rank, the first set of documents of a law, at Zeppelin's ratio if it was "
        "run. White is waiting.",
    ]
    return "\n\n".join(parts) + "\n"


COLOURS = {"linear layers": "C7", "a document": "C0", "a visitor": "C1"}


def draw(file: Path, spans: Sequence[dict[str, Any]], o: Bench) -> None:
    """A Gantt chart. spans: of each rank, {name of a step: what it did}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    law = next((law for law in ("github_like", "prolong_like") if law in o.laws), o.laws[0])
    link = PAPERS if PAPERS in o.links else o.links[0]
    figure, axes = plt.subplots(len(SHOWN), sharex=True, figsize=(8, 4.2), layout="constrained")
    for axis, way in zip(axes, SHOWN, strict=True):
        for rank, of_rank in enumerate(spans):
            for kind, colour in COLOURS.items():
                bars = [(a, b - a) for a, b, its in of_rank[f"{link:g} {law} {way}"] if its == kind]
                axis.broken_barh(bars, (rank - 0.4, 0.8), color=colour, linewidth=0)
        axis.set(yticks=range(len(spans)), ylabel="rank", title=f"{way}, {law}")
        axis.invert_yaxis()
    axes[-1].set_xlabel("seconds, stretched")
    figure.legend([Patch(color=colour) for colour in COLOURS.values()], COLOURS, loc="outside lower center", ncols=3)
    figure.savefig(file, dpi=90)
    plt.close(figure)


def main() -> None:
    report.run(Bench, NAME, measure, text_of, forks=lambda _: True)


def measure(o: Bench, session: report.Session) -> None:
    with Cluster(NODES, o.rate, nics=DEVICES) as cluster:
        found = run_ranks(measured, cluster, DEVICES, NODES, o, timeout=3600.0)
    session.result["rows"] = found[0][0]
    draw(session.folder / f"{NAME}.png", [of_rank for _, of_rank in found], o)


if __name__ == "__main__":
    launch(main)
