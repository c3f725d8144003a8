"""Documents of unequal lengths: how long workers wait, and where a document is best split over ranks.

    python -m bench.lengths [--parts waits rings] [--out FOLDER]

waits: computed from costs, the same on every machine. A document costs s^2 + crossing s. Ways to deal documents:

- counts: equal numbers, as torch's DistributedSampler.
- tokens: --balance tokens.
- cut packing: documents are joined and cut into rows of as many tokens as there are positions.
- round: --balance round.

rings: a layer's forward and backward pass, timed on the emulated cluster with two nodes of two ranks. Each rank
has a link. language/lengths/ring.py sends the messages. Computing is a stand-in: a rank sleeps as long as an A800 would
take, times a stretch, and the width of the keys makes a hop across nodes as much slower. Ways to place documents:

- plan: language/lengths/plan.py, with hops measured on the cluster.
- even: every document over all ranks (even context parallelism).
- grouped: disjoint groups of ranks, chosen as if no hop were hidden (after FlexSP).
- whole: no document is split. Each goes to the least busy rank, the costliest first.
- cut: rows of equal tokens. Attention ends where a row ends, so this trains another model.
"""

import functools
import lzma
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench import report
from bench.cluster import Cluster, run_ranks
from bench.report import Asked, Summary, require
from core.errors import UserError
from language.data import gutenberg_file, wikitext2_file
from language.lengths import ring
from language.lengths import rounds as laws
from language.lengths.dealt import hop_of
from language.lengths.plan import Island, Ring, layer_seconds, plan
from language.lengths.ring import Shares, ring_attention
from language.lengths.rounds import Order, by_tokens, cost, deal
from training.script import launch
from training.workers import largest_of_workers

PARTS = ("waits", "rings")


@dataclass(frozen=True)
class Bench(Asked):
    """What to measure."""

    parts: tuple[str, ...] = PARTS
    workers: tuple[int, ...] = (4, 16)
    """For waits."""
    taus: tuple[int, ...] = (6, 24)
    """For waits."""
    rounds: int = 20
    """For waits, with each seed."""
    seeds: tuple[int, ...] = (0, 1, 2)
    laws: tuple[str, ...] = tuple(laws.LAWS)
    """For rings: distributions of document lengths."""
    links: tuple[float, ...] = (200.0, 25.0)
    """For rings: Gbit/s of a flow across nodes, next to an A800."""
    tokens: int = 32768
    """For rings: tokens of each rank."""
    rate: float = 200.0
    """For rings: Mbit/s of a link of the emulated cluster."""
    stretch: float = 2.0
    """For rings: about how many times slower than on an A800 computing is."""

    def check(self) -> None:
        require(self, once="parts workers taus seeds laws links", positive="links rate stretch", ones="rounds tokens")
        require(self, parts=PARTS, laws=laws.LAWS)
        if min(self.workers) < 2 or min(self.taus) < 1:
            raise UserError("workers and taus: give 2 workers or more, and local steps, 1 or more")


# -- waits ------------------------------------------------------------------------------------------------------------

STEP = 8192  # tokens a worker and step, or one full context if that is more
PROMPTS = 16  # samples a worker and step
DRAWN = 400_000  # documents of a law
WAYS = ("counts", "tokens", "cut packing", "round")
EXCHANGE = 0.5  # duration of the all-reduce, as a share of a round


@dataclass(frozen=True)
class Case:
    """Documents, the model's positions, and its width: 768 for GPT-2 small, 4,096 for 7 billion parameters."""

    documents: str
    positions: int
    width: int = 768


CASES = (
    Case("uniform", 2048),
    Case("log_normal", 2048),
    Case("log_normal", 8192),
    Case("github_like", 32768),
    Case("prolong_like", 65536),
    Case("prolong_like", 65536, 4096),
    Case("prompts", 512),
    Case("paragraphs", 2048),
    Case("chapters", 8192),
    Case("chapters", 32768),
)


@functools.cache
def books() -> str:
    with lzma.open(gutenberg_file(), "rt") as file:
        return file.read()


REAL: dict[str, Callable[[], np.ndarray]] = {
    "paragraphs": lambda: laws.of_text(books(), laws.PARAGRAPH),
    "chapters": lambda: laws.of_text(books(), laws.HEADING),
    # sentences of WikiText-2's test text, with an answer of one token
    "prompts": lambda: laws.of_text(wikitext2_file().read_text(), r" \. |\n") + 1,
}


def documents_of(case: Case, seed: int) -> np.ndarray:
    """Lengths in tokens, none above the positions: int64 [n]. A real text has the same for all seeds."""
    found = REAL[case.documents]() if case.documents in REAL else laws.draw(case.documents, DRAWN, seed)
    return laws.cut(found, case.positions)


def measure_waits(o: Bench) -> Iterator[dict[str, Any]]:
    """A row for each case, number of workers and tau; a value for each seed."""
    for case in CASES:
        pools = [documents_of(case, seed) for seed in o.seeds]
        for workers in o.workers:
            for tau in o.taus:
                runs = [one_run(case, pool, workers, tau, o.rounds, seed) for seed, pool in enumerate(pools)]
                row = {"documents": case.documents, "positions": case.positions, "width": case.width}
                row |= {"workers": workers, "tau": tau}
                yield row | {key: [run[key] for run in runs] for key in runs[0]}


def one_run(case: Case, lengths: np.ndarray, workers: int, tau: int, rounds: int, seed: int) -> dict[str, Any]:
    """Waits of each way, {way: share of a round}. mean, worst: over the rounds, if workers meet at every boundary.
    slack: over all rounds, if the all-reduce runs during the next round."""
    is_prompts = case.documents == "prompts"
    sizes = np.ones_like(lengths) if is_prompts else lengths
    step = workers * (PROMPTS if is_prompts else max(case.positions, STEP))
    none = np.zeros(len(lengths), dtype=bool)
    full = none if is_prompts else lengths == lengths.max()
    crossing = 12.0 * case.width
    as_they_come, held = (Order(sizes, step, of, seed=seed, workers=workers) for of in (none, full))
    loads: dict[str, list[np.ndarray]] = {way: [] for way in WAYS if not (is_prompts and way == "cut packing")}
    for start in range(0, rounds * tau, tau):
        found = lengths[as_they_come.of(start, tau)]
        for way in loads:
            some = lengths[held.of(start, tau)] if way == "round" else found
            pieces, owner = owners(way, some, case.positions, workers, crossing, is_prompts)
            loads[way].append(np.bincount(owner, cost(pieces, crossing), workers))
    waits = {way: [wait(row) for row in rows] for way, rows in loads.items()}
    return {
        "mean": {way: statistics.fmean(found) for way, found in waits.items()},
        "worst": {way: max(found) for way, found in waits.items()},
        "slack": {way: wait_with_slack(np.array(rows)) for way, rows in loads.items()},
    }


def owners(
    way: str, lengths: np.ndarray, positions: int, workers: int, crossing: float, is_prompts: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The lengths of the pieces, and the worker of each. Both int64 [n]."""
    if way == "counts":
        return lengths, np.arange(len(lengths)) % workers
    if way == "tokens":
        return lengths, by_tokens(lengths, workers)
    if way == "cut packing":
        ends = np.cumsum(lengths)
        cuts = np.union1d(ends, np.arange(positions, ends[-1], positions))
        return np.diff(cuts, prepend=0), (cuts - 1) // positions % workers
    targets = np.ones_like(lengths) if is_prompts else lengths
    return lengths, deal(np.stack([targets, cost(lengths, crossing)], axis=1), workers)


def wait(loads: np.ndarray) -> float:
    """The share of a round that the average worker waits if all meet at its end."""
    return float(1 - loads.mean() / loads.max())


def wait_with_slack(loads: np.ndarray, exchange: float = EXCHANGE) -> float:
    """The same over rounds [rounds, workers] of CO2. A worker ends its next round when its work is done and the
    average has arrived whose all-reduce started when the slowest worker ended the round before."""
    end, arrived = np.zeros(loads.shape[1]), 0.0
    for row in loads:
        end = np.maximum(end + row, arrived)
        arrived = end.max() + exchange * loads.mean()
    return float(1 - loads.sum(axis=0).mean() / end.max())


# -- rings: ways to place documents -----------------------------------------------------------------------------------

NODES, DEVICES = 2, 2
WIDTH = 4096  # of the layer on an A800: 150 TFLOP/s in linear layers, 100 in attention
LINEAR, ATTENTION = 72 * WIDTH**2 / 150e12, 7 * WIDTH / 100e12  # seconds a token; a pair of a causal triangle
BITS = 8 * 16 * WIDTH  # a token's keys and values in 16 bits, twice, and their gradients in 32
LONGEST = 65536  # tokens of a document, at most
CPU = torch.device("cpu")
Placement = tuple[list[int], list[Ring]]  # lengths, and the ranks of each


def drawn(law: str, seed: int, number: int, tokens: float = np.inf) -> list[int]:
    """`number` lengths of a law, or fewer if they reach so many tokens."""
    lengths = np.minimum(laws.draw(law, number, seed), LONGEST)
    return lengths[: max(2, int(np.searchsorted(np.cumsum(lengths), tokens)))].tolist()


def whole(lengths: list[int], i: Island) -> Placement:
    busy, rings = [0.0] * i.size, [(0,)] * len(lengths)
    for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        rings[k] = (busy.index(min(busy)),)
        busy[rings[k][0]] += i.whole(lengths[k])
    return lengths, list[Ring](rings)


def cut(lengths: list[int], i: Island) -> Placement:
    ends = np.cumsum(lengths)
    row = -(-int(ends[-1]) // i.size)
    cuts = np.union1d(ends, np.arange(row, ends[-1], row))
    return np.diff(cuts, prepend=0).tolist(), [(rank,) for rank in ((cuts - 1) // row).tolist()]


def grouped(lengths: list[int], i: Island) -> Placement:
    """The best partition into groups of power-of-two sizes; each document goes to the group that is done first."""
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
    return lengths, found


def partitions(total: int, largest: int | None = None) -> list[list[int]]:
    """All ways to write total as a sum of powers of two, the largest first."""
    if total == 0:
        return [[]]
    sizes = [1 << k for k in range(total.bit_length()) if 1 << k <= min(total, largest or total)]
    return [[g, *rest] for g in reversed(sizes) for rest in partitions(total - g, g)]


PLACED: dict[str, Callable[[list[int], Island], Placement]] = {
    "plan": lambda lengths, i: (lengths, plan(torch.tensor([0, *lengths]).cumsum(0), i)),
    "even": lambda lengths, i: (lengths, [tuple(range(i.size))] * len(lengths)),
    "grouped": grouped,
    "whole": whole,
    "cut": cut,
}

# -- rings: timed -----------------------------------------------------------------------------------------------------


class Paced:
    """Computing of a given duration, in place of the attention of language/lengths/ring.py."""

    def __init__(self, island: Island):
        self.island, self.due, self.busy = island, 0.0, 0.0

    def spend(self, seconds: float) -> None:
        self.due = max(self.due, time.perf_counter()) + seconds
        self.busy += seconds
        self.catch_up(1e-3)

    def catch_up(self, most: float = 0.0) -> None:
        """Sleeps unless it is at most so far ahead: short sleeps take longer than they should."""
        ahead = self.due - time.perf_counter()
        if ahead > most:
            time.sleep(ahead)

    def attend(self, q: Tensor, k: Tensor, causal: bool, share: float) -> None:
        self.spend(share * 2 * self.island.attention * len(q) * len(k) * (0.5 if causal else 1.0))

    def flash(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        self.attend(q, k, causal, 2 / 7)
        return torch.zeros_like(q), q.new_zeros(q.shape[:2])

    def flash_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor, causal: bool) -> Any:  # noqa: ARG002
        self.attend(q, k, causal, 5 / 7)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def stepped(placement: Placement, island: Island, width: int) -> tuple[float, float]:
    """Seconds of a layer's two passes: on the slowest rank from begin to end, and this rank's computing."""
    lengths, rings = placement
    shares, paced = Shares(torch.tensor([0, *lengths]).cumsum(0), rings), Paced(island)
    tokens = len(shares.indices)
    q, k, v = (torch.zeros(tokens, 1, width, requires_grad=True) for _ in range(3))
    with mock.patch.object(ring, "flash", paced.flash), mock.patch.object(ring, "flash_backward", paced.flash_backward):
        dist.barrier()
        began = time.perf_counter()
        paced.spend(island.linear * tokens / 3)
        ring_attention(q, k, v, shares).sum().backward()
        paced.spend(island.linear * tokens * 2 / 3)
        paced.catch_up()
        took = time.perf_counter() - began
    assert dist.group.WORLD is not None
    return largest_of_workers([took], dist.group.WORLD)[0], paced.busy


def island_of(link: float, rate: float, stretch: float) -> tuple[Island, float, int]:
    """The island with the hops measured here, its stretch, and the width of keys that stretches a hop as much."""
    per_width = 8 * 24 / (rate * 1e6)  # seconds of a hop for a token and unit of width: 24 bytes in float32
    modelled = BITS / (link * 1e9)
    width = max(1, round(stretch * modelled / per_width))
    stretch = width * per_width / modelled
    assert dist.group.WORLD is not None
    rings = (DEVICES, NODES * DEVICES)
    inside, across = (hop_of(dist.group.WORLD, devices, 24 * width, 4096, CPU) for devices in rings)
    return Island(NODES, DEVICES, stretch * ATTENTION, stretch * LINEAR, inside, across), stretch, width


def measured_rings(o: Bench) -> list[dict[str, Any]]:
    """On each rank of the cluster: a row for each link, law and seed."""
    dist.init_process_group("gloo")
    rows = []
    for link in o.links:
        island, stretch, width = island_of(link, o.rate, o.stretch)
        stepped(([64], [tuple(range(island.size))]), island, width)  # connects, and warms up
        for law in o.laws:
            for seed in o.seeds:
                lengths = drawn(law, seed, 4000, o.tokens * island.size)
                row = dict(link=link, law=law, seed=seed, tokens=sum(lengths), stretch=stretch, seconds={}, model={})
                row["least"] = sum(map(island.whole, lengths)) / island.size
                for way, place in PLACED.items():
                    placement = place(lengths, island)
                    row["seconds"][way], _ = stepped(placement, island, width)
                    row["model"][way] = layer_seconds(*placement, island)
                rows.append(row)
    dist.barrier()
    return rows


# -- all of it --------------------------------------------------------------------------------------------------------

SHARES = {f"{what}.{way}": ".2%" for what in ("mean", "slack") for way in WAYS}
SECONDS = {f"seconds.{way}": ".3f" for way in PLACED} | {"model.plan": ".3f", "least": ".3f"}
TABLES = {
    "waits": Summary("documents positions width workers tau", SHARES | {"worst.round": ".2%"}),
    "rings": Summary("link law", SECONDS),
}


def measure(o: Bench, session: report.Session) -> None:
    if "waits" in o.parts:
        session.take("waits", measure_waits(o))
    if "rings" in o.parts:
        with Cluster(NODES, o.rate, nics=DEVICES) as cluster:
            session.take("rings", run_ranks(measured_rings, cluster, DEVICES, NODES, o, timeout=3600.0)[0])


def main() -> None:
    report.run(Bench, "lengths", measure, TABLES, packages=("numpy", "torch"), forks=lambda o: "rings" in o.parts)


if __name__ == "__main__":
    launch(main)
