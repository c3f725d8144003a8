"""The model of rounds against every measured row of a folder of results, and against the paper's throughput cells.

python -m bench.simulator.against results      # writes results/simulator.md

All constants are fitted to the rows of bench.scaling with the fewer workers (calibrate.split). Everything else is
predicted: its larger worker counts, bench.utilisation's rows of another day, and bench.peers' of another model, of
which the step alone is taken, from the rows without communication.

The model knows a link and no cores. Which of the two decides a row is told by a rule that does not see the row: the
cores' load, the CPU time that the workers need, fitted along with the rest, over the time that the cores have in what
the model predicts; that of the whole run, or of an all-reduce alone, whichever is greater. From BUSY on a worker that
wants a core finds it taken as likely as not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench import report
from bench.simulator import calibrate, paper
from bench.simulator.__main__ import Simulate, papers_report
from bench.simulator.calibrate import Constants, Row
from bench.simulator.events import HIDDEN, simulate
from bench.standin import build_model
from core.methods import METHODS
from training.script import launch

NAME = "simulator"
BATCH, REFERENCE = 16, "none"  # of the rows of other packages: samples per worker and step; no communication
BUSY = 0.5
LIMIT = 0.15  # above which a row is listed
NOT_MODELLED = {
    "time_to_loss.json": "computes for real on shared cores; no row tells what a step takes alone",
    "slow_links.json": "the same",
    "slow_links_10.json": "the same",
    "chaos.json": "no throughput",
}
OTHER = "no row of rounds over a link"


# -- whether the cores decide -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cores:
    """CPU seconds that a worker needs, by least squares on relative errors."""

    step: float
    round: float
    byte: float
    """Sent: with what it takes to receive and add as many."""

    def demand(self, row: Row, nbytes: float, seconds: float, allreduce: float, cores: int) -> float:
        """The share of the cores' time that the row's workers need; above 1 it cannot come true.

        seconds: of the whole row, predicted; allreduce: of one, over the link.
        """
        units = _units(row, nbytes)
        needed = row["workers"] * float(np.dot(units, (self.step, self.round, self.byte)))
        moved = row["workers"] * units[2] / row["rounds"] * self.byte
        return max(needed / (cores * seconds), moved / (cores * allreduce))


def _units(row: Row, nbytes: float) -> tuple[float, float, float]:
    """Steps, rounds and bytes of one worker."""
    n, ddp = row["workers"], row["method"] == "ddp"
    return row["steps"], 0 if ddp else row["rounds"], row["rounds"] * 2 * (n - 1) / n * nbytes


def fit_cores(rows: Sequence[Row], nbytes: float) -> Cores:
    """rows: of bench.scaling."""
    measured = np.array([r["cpu_cores_busy"] * r["seconds"] / r["workers"] for r in rows])
    units = np.array([_units(r, nbytes) for r in rows])
    found = np.linalg.lstsq(units / measured[:, None], np.ones(len(rows)), rcond=None)[0]
    return Cores(*(float(max(0.0, x)) for x in found))


# -- rows, measured and predicted -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A row of a table: the repeats of one setting. samples/s of all workers."""

    part: str
    name: str
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    demand: float

    @property
    def error(self) -> float:
        """Of the medians over the repeats."""
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1

    @property
    def errors(self) -> list[float]:
        return [p / m - 1 for p, m in zip(self.predicted, self.measured, strict=True)]

    @property
    def link_decides(self) -> bool:
        return self.demand < BUSY


def of_scaling(
    data: dict[str, Any], part: str, constants: Constants, cores: Cores, fitted: Sequence[Row] = ()
) -> list[Compared]:
    """bench.scaling's rows with two workers or more but the late ones. fitted: those that the constants know."""
    nbytes, batch, groups = data["model"]["bytes"], data["batch"], {}
    for row in data["rows"]:
        if row["workers"] > 1 and not row.get("late"):
            key = row["method"], row["tau_setting"], row["workers"], row["rate_mbit"]
            groups.setdefault(key, []).append(row)
    found = []
    for (method, tau, workers, rate), rows in groups.items():
        predicted = [calibrate.predict(row, constants, nbytes, batch)[0] for row in rows]
        loads = []
        for row, speed in zip(rows, predicted, strict=True):
            seconds, link = workers * batch * row["steps"] / speed, calibrate.work_of(row, constants, nbytes).allreduce
            loads.append(cores.demand(row, nbytes, seconds, link, data["cpu_count"]))
        name = _name(method, tau, workers, rate)
        measured = tuple(row["samples_per_second"] for row in rows)
        load, known = statistics.median(loads), rows[0] in fitted
        found.append(
            Compared(f"{part}, {'fitted to' if known else 'predicted'}", name, measured, tuple(predicted), load)
        )
    return found


def of_peers(data: dict[str, Any], part: str, constants: Constants, cores: Cores) -> list[Compared]:
    """bench.peers' rows of methods that the model has: whole runs, with the drain at their end."""
    o = data["options"]
    nbytes = 4.0 * sum(p.numel() for p in build_model(o["width"]).parameters())
    alone = next(row for row in data["rows"] if row["method"] == REFERENCE)
    step = o["workers"] * BATCH / statistics.median(alone["samples_per_second"])
    here, found = replace(constants, step=step), []
    for row in (row for row in data["rows"] if row["method"] in METHODS):
        run = next(r for r in data["runs"] if r["method"] == row["method"] and "reason" not in r)
        steps, tau = run["steps"][-1], 1 if row["method"] == "ddp" else row["tau"]
        asked = {"method": row["method"], "tau": tau, "workers": o["workers"], "rate_mbit": o["rate"]}
        asked |= {"steps": steps, "rounds": steps // tau}
        work = calibrate.work_of(asked, here, nbytes)
        seconds = simulate(row["method"], work, tau, steps // tau).seconds + steps % tau * step
        seconds += work.allreduce if row["method"] in HIDDEN else 0.0
        speed = (o["workers"] * BATCH * steps / seconds,) * len(row["samples_per_second"])
        load = cores.demand(asked, nbytes, seconds, work.allreduce, data["cpu_count"])
        found.append(
            Compared(
                part, _name(row["method"], tau, o["workers"], o["rate"]), tuple(row["samples_per_second"]), speed, load
            )
        )
    return found


def _name(method: str, tau: int | str, workers: int, rate: float) -> str:
    return f"{method if method == 'ddp' else f'{method}, tau {tau}'}; {workers} workers, {rate:g} Mbit/s"


# -- the page ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    rows: list[Compared]
    late: int
    not_modelled: int
    """Rows of co2_recommended, dpu and so on, for which the model has no events."""
    sources: list[str]


def compare(folder: Path) -> Found:
    """All rows of the folder that the model has."""
    data = calibrate.read(folder / "scaling.json")
    on_time = [row for row in data["rows"] if not row.get("late")]
    fitted, _, words = calibrate.split(on_time)
    nbytes = data["model"]["bytes"]
    constants, cores = calibrate.fit(fitted, nbytes), fit_cores(fitted, nbytes)
    rows, sources = (
        of_scaling(data, "scaling.json", constants, cores, fitted),
        [f"{_source('scaling.json', data)}; {words}"],
    )
    late, left = len(data["rows"]) - len(on_time), 0
    for path in sorted(folder.glob("*/**/scaling.json")):
        there, name = report.load(path, "bench.scaling"), str(path.relative_to(folder))
        left += sum(row["method"] not in METHODS for row in there["rows"])
        late += sum(bool(row.get("late")) for row in there["rows"])
        rows += of_scaling(calibrate.read(path), name, constants, cores)
        sources.append(_source(name, there))
    for path in sorted(folder.glob("peers*.json")):
        there = report.load(path, "bench.peers")
        left += sum(
            len(row.get("samples_per_second", ()))
            for row in there["rows"]
            if row["method"] not in (*METHODS, REFERENCE)
        )
        rows += of_peers(there, "peers*.json, predicted", constants, cores)
        sources.append(_source(path.name, there))
    return Found(rows, late, left, sources)


def _source(name: str, data: dict[str, Any]) -> str:
    return f"{name}: commit {data['commit']}, {data['date']}"


def summary(rows: Sequence[Compared]) -> str:
    """A line for each part and for each of the two that may decide it."""
    lines = []
    for decides in (True, False):
        chosen = [row for row in rows if row.link_decides == decides]
        predicted = [row for row in chosen if "fitted" not in row.part]
        parts = {
            part: [row for row in chosen if row.part == part] for part in dict.fromkeys(row.part for row in chosen)
        }
        for part, found in (parts | {"**all predicted**": predicted}).items():
            if found:
                lines.append(_summary_line("the link" if decides else "the cores", part, found))
    titles = ["decided by", "rows", "number", "median error", "worst", "worst of a single repeat", "the worst row"]
    return report.table(titles, lines)


def _summary_line(decides: str, part: str, rows: Sequence[Compared]) -> list[object]:
    worst = max(rows, key=lambda row: abs(row.error))
    single = max((e for row in rows for e in row.errors), key=abs)
    middle = statistics.median(abs(row.error) for row in rows)
    return [decides, part, len(rows), f"{middle:.1%}", f"{worst.error:+.1%}", f"{single:+.1%}", worst.name]


def shares(rows: Sequence[Compared]) -> str:
    """What the worst error were, did the cores decide from another share of their time on."""
    predicted = [row for row in rows if "fitted" not in row.part]
    worst = {b: [abs(row.error) for row in predicted if row.demand < b] for b in (0.3, 0.4, 0.6, 0.7, 0.8)}
    return ", ".join(f"{b:g}: {max(e):.1%} of {len(e)} rows" for b, e in worst.items() if e)


def far(rows: Sequence[Compared], limit: float) -> str:
    """Each row with a greater error."""
    beyond = sorted((row for row in rows if abs(row.error) > limit), key=lambda row: -abs(row.error))
    lines = [
        [
            r.part,
            r.name,
            *(f"{statistics.median(x):,.0f}" for x in (r.measured, r.predicted)),
            f"{r.error:+.0%}",
            f"{r.demand:.2f}",
        ]
        for r in beyond
    ]
    return report.table(["rows", "row", "measured, samples/s", "predicted", "error", "load of the cores"], lines)


def markdown(folder: Path) -> str:
    """The page."""
    found, (cells, assumed) = compare(folder), papers_report(Simulate())
    skipped = "; ".join(f"{name} ({why})" for name, why in NOT_MODELLED.items())
    notes = [
        "Error: of the predicted samples/s, medians over the repeats; median and worst without the sign.",
        "Decided by the cores: where the CPU time that the workers need, fitted to the same rows as the link, takes "
        f"{BUSY:g} or more of the cores' time in what the model predicts, of the whole run or of an all-reduce alone. "
        "The rule sees nothing of the row itself.",
        f"With another share, the worst predicted row that the link decides: {shares(found.rows)}.",
        f"Left out: {found.late} repeats in which the machine missed the pace of the stand-in; {found.not_modelled} of "
        "methods for which the model has no events (co2_recommended, dpu, acco and the like).",
        f"Not looked at: {skipped}; other files ({OTHER}).",
        "peers*.json: whole runs of another model, of which the model is told the bytes, and the step of the runs "
        "without communication.",
        *(f"{source}." for source in found.sources),
    ]
    parts = (
        "# The simulator against what was measured",
        "[All results](index.md). A model of rounds, its constants fitted to a part of one file, predicts the rest. "
        f"Command: `python -m bench.simulator.against {folder.name}`.",
        summary(found.rows),
        report.bullets(notes),
        f"## Rows off by more than {LIMIT:.0%}",
        far(found.rows, LIMIT),
        "## The paper's throughput table",
        paper.errors_markdown(cells),
        report.bullets(["Errors; the paper's own numbers: `python -m bench.simulator --paper`.", assumed])
        + "\n"
        + report.bullets(paper.findings(cells)),
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    report.remake("bench.simulator.against", __doc__, "scaling.json, and what else was measured", NAME, markdown)


if __name__ == "__main__":
    launch(main)
