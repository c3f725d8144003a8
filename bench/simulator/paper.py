"""The model against the known cells of the CO2 paper's throughput table (arXiv 2401.16265): 80 Gbit/s TCP/IP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.report import table
from bench.simulator.events import Work, simulate
from bench.simulator.network import ALGORITHMS, Algorithm, Cluster, allreduce_seconds
from core.errors import UserError
from results.paper import GPUS, SCALING_RATIO, WORDS_PER_SECOND

ADAMW_8, ADAMW_16, ADAMW_128 = (float(WORDS_PER_SECOND[None, nodes]) for nodes in (1, 2, 16))
CO2_48_128 = float(WORDS_PER_SECOND[48, 16])
RATIO_ADAMW, RATIO_48, RATIO_12 = (SCALING_RATIO[row] for row in (("ddp", None), ("co2", 48), ("co2", 12)))
ROUNDS = 400
TOLERANCE = 0.1
GROWN = "fitted growth"  # from 2 nodes to 16, of an all-reduce whose algorithm is left open
COLUMNS = (*ALGORITHMS, GROWN)


@dataclass(frozen=True)
class Cell:
    name: str
    paper: float
    predicted: dict[str, float]
    fitted: tuple[str, ...] = ()
    """Columns whose constants were fitted to this cell."""

    def error(self, column: str) -> float:
        return self.predicted[column] / self.paper - 1


@dataclass(frozen=True)
class Report:
    cells: list[Cell]
    step: float
    effective_gbps: dict[Algorithm, float]
    """Between nodes, so that the 16-GPU cell comes out."""
    growth: dict[str, float]
    """An all-reduce at 16 nodes over one at 2, by column."""
    needed: dict[str, float]
    """The same, as a cell of the paper needs it."""


def report(
    cluster: Cluster, nbytes: float, words: int, backward_share: float, overlap: float, allreduce_spread: float = 0.0
) -> Report:
    """Fits the step to the 8-GPU cell and the effective inter-node bandwidth to the 16-GPU cell; predicts the rest.

    words: per GPU and step. cluster gives the latencies and the intra-node bandwidth; its nodes and inter-node
    bandwidth are replaced. Steps are constant here and boundaries take no time: the table says nothing of either.
    """
    step = GPUS * words / ADAMW_8
    gpu = Work(1, step, allreduce_spread=allreduce_spread, backward_share=backward_share, overlap=overlap)
    hidden = step * backward_share * overlap
    two = 16 * words / ADAMW_16 - step + hidden  # seconds of an all-reduce of 2 nodes
    gbps = {a: _fit_gbps(cluster, nbytes, a, two) for a in ALGORITHMS}
    there = {a: dataclasses.replace(_nodes(cluster, 16), efficiency=1.0, inter_gbps=gbps[a]) for a in ALGORITHMS}
    needed = {
        "AdamW, 128 GPUs": (128 * words / ADAMW_128 - step + hidden) / two,
        "CO2 tau 12": 12 * step / RATIO_12 / two,  # hidden at 2 nodes, and waited for at 16
    }
    growth: dict[str, float] = {a: allreduce_seconds(there[a], nbytes, a) / two for a in ALGORITHMS}
    growth[GROWN] = needed["AdamW, 128 GPUs"]
    inside = allreduce_seconds(_nodes(cluster, 1), nbytes, "ring")
    cells: dict[str, dict[str, float]] = {}
    for column in COLUMNS:
        seconds = {8: inside, 16: two, 128: growth[column] * two}
        for name, value in _cells(partial(_words_per_second, seconds, gpu, words)).items():
            cells.setdefault(name, {})[column] = value
    return Report([Cell(n, paper, cells[n], fitted) for n, paper, fitted in PAPER], step, gbps, growth, needed)


def _nodes(link: Cluster, nodes: int) -> Cluster:
    return dataclasses.replace(link, nodes=nodes, workers_per_node=GPUS)


def _words_per_second(seconds: dict[int, float], gpu: Work, words: int, method: str, tau: int, gpus: int) -> float:
    """seconds: of an all-reduce, by GPUs."""
    work = dataclasses.replace(gpu, workers=gpus, allreduce=seconds[gpus])
    if method == "ddp":  # whose time is linear in what it waits for: the mean says all
        work = dataclasses.replace(work, allreduce_spread=0.0)
    return gpus * words / simulate(method, work, tau, ROUNDS, warmup=2).step_seconds


PAPER = (
    ("AdamW, 8 GPUs, words/s", ADAMW_8, COLUMNS),
    ("AdamW, 16 GPUs, words/s", ADAMW_16, COLUMNS),
    ("AdamW, 128 GPUs, words/s", ADAMW_128, (GROWN,)),
    ("AdamW, ratio", RATIO_ADAMW, (GROWN,)),
    ("CO2 tau 48, 128 GPUs, words/s", CO2_48_128, ()),
    ("CO2 tau 48, ratio", RATIO_48, ()),
    ("CO2 tau 12, ratio", RATIO_12, ()),
)


def _cells(words_per_second: Callable[[str, int, int], float]) -> dict[str, float]:
    """words_per_second(method, tau, gpus) -> the table's cells in PAPER's order."""
    adamw = [words_per_second("ddp", 1, gpus) for gpus in (8, 16, 128)]
    co2 = {tau: [words_per_second("co2", tau, gpus) for gpus in (16, 128)] for tau in (12, 48)}
    values = [
        *adamw,
        adamw[2] / (8 * adamw[1]),
        co2[48][1],
        co2[48][1] / (8 * co2[48][0]),
        co2[12][1] / (8 * co2[12][0]),
    ]
    return {name: value for (name, _, _), value in zip(PAPER, values, strict=True)}


def _fit_gbps(cluster: Cluster, nbytes: float, algorithm: Algorithm, seconds: float) -> float:
    """Inter-node Gbit/s at which an all-reduce of 2 nodes takes `seconds`; by bisection, for it falls with them."""

    def takes(gbps: float) -> float:
        two = dataclasses.replace(_nodes(cluster, 2), efficiency=1.0, inter_gbps=gbps)
        return allreduce_seconds(two, nbytes, algorithm)

    low, high = 1e-9, 1e9
    if takes(high) > seconds:
        raise UserError(
            f"an all-reduce of {nbytes:g} bytes takes over {seconds:.3g} s by its latency and within nodes alone "
            f"({algorithm}): the 16-GPU cell cannot be matched; give fewer --params or a lower --latency_ms"
        )
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if takes(middle) > seconds else (low, middle)
    return high


def markdown(result: Report) -> str:
    """The table, cell by cell; fitted cells are marked, for they are no predictions."""
    rows = []
    for cell in result.cells:
        number = "{:.2f}" if cell.paper < 10 else "{:,.0f}"
        parts = [cell.name, number.format(cell.paper)]
        for a in COLUMNS:
            parts += [number.format(cell.predicted[a]), error_cell(cell, a)]
        rows.append(parts)
    return table(["cell", "paper", *(title for a in COLUMNS for title in (a, "error"))], rows)


def errors_markdown(result: Report) -> str:
    """The errors alone: the paper's own numbers stand on a page of theirs."""
    return table(["cell", *COLUMNS], ([c.name, *(error_cell(c, a) for a in COLUMNS)] for c in result.cells))


def error_cell(cell: Cell, column: str) -> str:
    return "fitted" if column in cell.fitted else f"{cell.error(column):+.1%}"


def remarks(result: Report) -> str:
    """What the fit used, which cells the model cannot reach, and the assumption that fails there."""
    most = 128 / GPUS * ADAMW_8
    above = (
        f"Nor can words/s above 128/8 of the 8-GPU cell, {most:,.0f}, where the paper's CO2 has {CO2_48_128:,.0f}: the "
        "8-GPU cell may hold costs that CO2 does not pay, such as exposed communication inside the node, which the "
        "model takes as none."
    )
    return "\n\n".join([*findings(result), above])


def findings(result: Report) -> list[str]:
    """The same without the paper's numbers."""
    rates = ", ".join(f"{a} {result.effective_gbps[a]:.3g}" for a in ALGORITHMS)
    grows = ", ".join(f"{a} {result.growth[a]:.2f}" for a in ALGORITHMS)
    needs = ", ".join(f"{name} {growth:.2f}" for name, growth in result.needed.items())
    lines = [
        f"Fitted: the step ({result.step:.4g} s) to AdamW's 8-GPU cell, with its all-reduce inside the node taken as "
        f"hidden; the effective bandwidth between nodes (Gbit/s: {rates}; in proportion to the bytes) to AdamW's "
        f"16-GPU cell; in the column {GROWN!r} also the all-reduce of 128 GPUs, to AdamW's cell there. A cell that was "
        "fitted to is no prediction."
    ]
    far = [
        cell.name
        for cell in result.cells
        if not cell.fitted or set(cell.fitted) == {GROWN}
        if all(abs(cell.error(a)) > TOLERANCE for a in ALGORITHMS)
    ]
    if far:
        lines.append(
            f"Beyond {TOLERANCE:.0%} by every algorithm: {'; '.join(far)}. The assumption that fails: between 16 nodes "
            "the links carry what they carry between 2, so that an all-reduce grows as its algorithm says. From 2 "
            f"nodes to 16 it grows by these factors: {grows}. The paper's cells need: {needs}."
        )
    off = [f"{c.name} {c.error(GROWN):+.1%}" for c in result.cells if GROWN not in c.fitted]
    lines.append(f"With AdamW's growth CO2's cells come out at: {'; '.join(off)}.")
    above = [c.name for c in result.cells if "ratio" in c.name and c.paper > 1]
    lines.append(
        f"Not matched: {', '.join(above)}. No ratio above 1 can come out of this model: a worker never gets faster by "
        "having more peers."
    )
    return lines
