"""How long workers wait for each other where documents differ in length, by how documents are dealt.

    python -m bench.lengths [--out FOLDER]

Nothing is timed: a document's work is s^2 + crossing s, and the waits follow from it, the same on every machine. Four
ways of dealing are compared: equal counts, as torch's DistributedSampler deals; equal tokens, as a loader with a budget
of tokens does (--balance tokens); cut packing, where documents are joined and cut into rows of as many tokens as there
are positions; and --balance round. What is longer than the positions is cut in all of them, and no token attends to
another document.
"""

from __future__ import annotations

import functools
import lzma
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import report
from bench.report import Asked, mean_sd, require
from core.errors import UserError
from language.corpora import gutenberg_file, wikitext2_file
from language.lengths import laws
from language.lengths.rounds import Order, by_tokens, cost, deal
from training.script import launch

STEP = 8192  # tokens a worker and step, or one full context where that is more
PROMPTS = 16  # a worker and step
DRAWN = 400_000  # documents of a law
WAYS = ("counts", "tokens", "cut packing", "round")
EXCHANGE = 0.5  # of a round: how long the mean takes, where it runs under the next round


@dataclass(frozen=True)
class Case:
    """Documents, the model's positions, and the crossing of its width (12 x 768 is GPT-2 small's, 12 x 4,096 that of
    a model of 7 billion)."""

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


@dataclass(frozen=True)
class Bench(Asked):
    """Waits of every case, number of workers and tau."""

    workers: tuple[int, ...] = (4, 16)
    taus: tuple[int, ...] = (6, 24)
    rounds: int = 20
    """Of each seed."""
    seeds: tuple[int, ...] = (0, 1, 2)

    def check(self) -> None:
        require(self, once="workers taus seeds", ones="rounds")
        if min(self.workers) < 2 or min(self.taus) < 1:
            raise UserError("workers and taus: give 2 workers or more, and local steps, 1 or more")


def main() -> None:
    take = lambda o, session: session.take("rows", measure(o), lambda row: report.row(*cells(row)))  # noqa: E731
    report.run(Bench, "lengths", take, text, packages=("numpy", "torch"))


# -- documents --------------------------------------------------------------------------------------------------------


def documents_of(case: Case, seed: int) -> np.ndarray:
    """Lengths in tokens, none above the positions: int64 [n]. A real text's are the same for all seeds."""
    found = REAL[case.documents]() if case.documents in REAL else laws.draw(case.documents, DRAWN, seed)
    return laws.cut(found, case.positions)


@functools.cache
def books() -> str:
    with lzma.open(gutenberg_file(), "rt") as file:
        return file.read()


def prompts() -> np.ndarray:
    """Sentences of WikiText-2's test text, with an answer of one token: no data set of prompts was at hand."""
    return laws.of_text(wikitext2_file().read_text(), r" \. |\n") + 1


REAL: dict[str, Callable[[], np.ndarray]] = {
    "paragraphs": lambda: laws.of_text(books(), laws.PARAGRAPH),
    "chapters": lambda: laws.of_text(books(), laws.HEADING),
    "prompts": prompts,
}


# -- waits ------------------------------------------------------------------------------------------------------------


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """A row for each case, number of workers and tau; a value for each seed."""
    for case in CASES:
        pools = [documents_of(case, seed) for seed in bench.seeds]
        for workers in bench.workers:
            for tau in bench.taus:
                runs = [one_run(case, pool, workers, tau, bench.rounds, seed) for seed, pool in enumerate(pools)]
                row = {"documents": case.documents, "positions": case.positions, "width": case.width}
                row |= {"workers": workers, "tau": tau}
                yield row | {key: [run[key] for run in runs] for key in runs[0]}


def one_run(case: Case, lengths: np.ndarray, workers: int, tau: int, rounds: int, seed: int) -> dict[str, Any]:
    """Waits of each way, {way: share of a round}: mean and worst over the rounds where workers meet at once, and over
    all of them where a round's exchange runs under the next; and how far tokens are from even, at most."""
    is_prompts = case.documents == "prompts"
    sizes = np.ones_like(lengths) if is_prompts else lengths
    step = workers * (PROMPTS if is_prompts else max(case.positions, STEP))
    none = np.zeros(len(lengths), dtype=bool)
    full = none if is_prompts else lengths == lengths.max()
    crossing = 12.0 * case.width
    as_they_come, held = (Order(sizes, step, of, seed=seed, workers=workers) for of in (none, full))
    loads: dict[str, list[np.ndarray]] = {way: [] for way in WAYS if not (is_prompts and way == "cut packing")}
    off, documents = [], 0
    for start in range(0, rounds * tau, tau):
        found = lengths[as_they_come.of(start, tau)]
        for way in loads:
            some = lengths[held.of(start, tau)] if way == "round" else found
            pieces, owner = owners(way, some, case.positions, workers, crossing, is_prompts)
            loads[way].append(np.bincount(owner, cost(pieces, crossing), workers))
            if way == "round":
                tokens = np.bincount(owner, pieces, workers)
                off.append(float(np.abs(tokens / tokens.mean() - 1).max()))
                documents += len(some)
    waits = {way: [wait(row) for row in rows] for way, rows in loads.items()}
    return {
        "documents a round": documents / rounds,
        "mean": {way: statistics.fmean(found) for way, found in waits.items()},
        "worst": {way: max(found) for way, found in waits.items()},
        "slack": {way: wait_with_slack(np.array(rows)) for way, rows in loads.items()},
        "tokens off": max(off),
    }


def owners(
    way: str, lengths: np.ndarray, positions: int, workers: int, crossing: float, is_prompts: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What of the documents is dealt, int64 [n] lengths, and to whom, int64 [n]."""
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
    """The share of a round that the average worker waits, where all meet at its end."""
    return float(1 - loads.mean() / loads.max())


def wait_with_slack(loads: np.ndarray, exchange: float = EXCHANGE) -> float:
    """The same over rounds [rounds, workers] of CO2: a worker ends its next round when its work is done, and the mean
    is there that was sent when the slowest one ended the round before. exchange: of an average round, what it takes."""
    end, arrived = np.zeros(loads.shape[1]), 0.0
    for row in loads:
        end = np.maximum(end + row, arrived)
        arrived = end.max() + exchange * loads.mean()
    return float(1 - loads.sum(axis=0).mean() / end.max())


# -- the tables -------------------------------------------------------------------------------------------------------

TITLES = ("documents", "positions", "crossing", "workers", "tau", *WAYS, "round, worst", "round, tokens off by")
NOTE = """\
- Shares of a round's time, in %, that the average worker waits for the one with most work: means and standard
  deviations over {seeds} seeds of {rounds} rounds each. The worst is of all these rounds.
- A step takes 8,192 tokens a worker, or one full context where that is more; of prompts 16 a worker. The crossing is 12
  times the width, 768 or 4,096.
- The laws' parameters are ours: `uniform` 900 to 1,100 tokens; `log_normal` of median 500 and sigma 1.1; `github_like`
  with 6 % from a Pareto tail above 8,000; `prolong_like` with 2 % of 65,536 tokens, some 60 % of all.
- `paragraphs` and `chapters` are those of Gutenberg's books at 4.3 characters a token. `prompts` are sentences of
  WikiText-2 and a token more. What is longer than the positions is cut.
- Computed from costs, not timed: {source}."""
AFTER = """\
Where a worker's share is a few full contexts, its tokens and its work cannot both be even: the exchange weighs the two
alike. Windows that run across documents (--balance none) are all alike, and nobody waits, but every token pays for
attention across documents."""
SLACK = f"""\
A mean is sent at a boundary and needed at the next, so a worker may be late by what the mean leaves of a round. Here
the mean takes {EXCHANGE:g} of one. What a worker is late in one round it may make up in another, so that the gain is
smaller than above."""


def cells(row: dict[str, Any], key: str = "mean") -> list[str]:
    start = [row["documents"], f"{row['positions']:,}", f"{12 * row['width']:,}", row["workers"], row["tau"]]
    ways = [mean_sd([100 * of[way] for of in row[key]], ".2f") if way in row[key][0] else "" for way in WAYS]
    if key == "slack":
        return [*start, *ways]
    worst = max(of["round"] for of in row["worst"])
    return [*start, *ways, f"{100 * worst:.2f}", f"{100 * max(row['tokens off']):.2f}"]


def marks(rows: list[dict[str, Any]], tau: int, most: float) -> str:
    """Whether the mean wait of `round` is at most so much in every row of a tau."""
    found = {
        statistics.fmean(of["round"] for of in row["mean"]): f"{row['documents']}, {row['workers']} workers"
        for row in rows
        if row["tau"] == tau
    }
    if not found:
        return f"tau {tau}: not run"
    largest = max(found)
    verdict = "met in every row" if largest <= most else "missed"
    return f"tau {tau}: at most {100 * most:.0f} %: {verdict}, the largest is {100 * largest:.2f} % ({found[largest]})"


def uneven(rows: list[dict[str, Any]]) -> str:
    """Which rows of `round` have a worker whose tokens are more than 1 % off, and how small their shares are."""
    found = [row for row in rows if max(row["tokens off"]) > 0.01]
    shares = sorted({row["tau"] * max(1, STEP // row["positions"]) for row in found if row["documents"] != "prompts"})
    if not found:
        return "tokens a worker: within 1 % in every round of every row"
    at = ", ".join(map(str, shares))
    return f"tokens a worker: more than 1 % off in some round of {len(found)} rows, whose shares are {at} full contexts"


def lost(rows: list[dict[str, Any]]) -> str:
    """Where equal tokens wait less than 1 % already, or less than `round` does."""
    little = [row for row in rows if statistics.fmean(of["tokens"] for of in row["mean"]) < 0.01]
    names = dict.fromkeys(f"{row['documents']} at {row['positions']:,} positions" for row in little)
    return "; ".join(names) or "nowhere here"


def text(result: dict[str, Any]) -> str:
    rows, options = result["rows"], result["options"]
    note = NOTE.format(seeds=len(options["seeds"]), rounds=options["rounds"], source=report.source(result))
    verdicts = [marks(rows, 24, 0.01), marks(rows, 6, 0.03), uneven(rows)]
    verdicts.append(f"equal tokens wait less than 1 % in some row already, and nothing is to be won: {lost(rows)}")
    parts = [
        "# Waits where documents differ in length",
        note,
        "## Where all meet at a boundary at once",
        report.table(TITLES, (cells(row) for row in rows)),
        "`round` against its marks:",
        report.bullets(verdicts),
        AFTER,
        "## With CO2's slack of a round",
        SLACK,
        report.table(TITLES[:-2], (cells(row, "slack") for row in rows)),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    launch(main)
