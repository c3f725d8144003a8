"""The paper's tables in Markdown, with the runs that count in each row and the reasons why others do not."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from bench import report
from bench.report import mean_sd, plus_minus
from core import UserError
from results.paper import GPUS, TABLES, Metric, Row, Table
from results.runs import Finished, differences, hours, is_kept, read_kept, read_run, write_kept
from training.untrusted import printable


def collect(tables: Mapping[str, Table], folder: Path) -> Iterator[str]:
    """Lines of Markdown: each table with the runs under `folder`, then the runs that count in none, and why."""
    if not folder.is_dir():
        raise UserError(f"--collect {folder}: no such folder; name the one that holds the run folders, such as runs/")
    folders = sorted(path.parent for path in folder.rglob("config.json"))
    if not folders:
        raise UserError(f"--collect {folder}: no run folder in it, at any depth (each has a config.json)")
    found = {path: read_run(path) for path in folders}
    runs = [run for run in found.values() if isinstance(run, Finished)]
    counted: set[Path] = set()
    for name, table in tables.items():
        yield from (f"## {name}: {table.title}", "", *section(table, False, runs, counted), "")
        if table.scaling:
            yield from (*ratios(table, runs), "")
        if table.note:
            yield from (table.note, "")
        if table.has_stand_ins:
            yield from ("Stand-ins, small models and data of our own: no number of the paper compares with these.", "")
            yield from (*section(table, True, runs, counted), "")
    commits = {run.commit for run in runs if run.folder in counted} - {""}
    yield printable(f"Commits: {', '.join(sorted(commits)) or 'none'}.")
    left_out = {path: run if isinstance(run, str) else departure(run, tables) for path, run in found.items()}
    yield from (
        printable(f"Not counted: {path}: {why}.") for path, why in left_out.items() if path not in counted and why
    )


def keep_stand_ins(names: Iterable[str], folder: Path, out: Path) -> Iterator[str]:
    """Keeps in `out`, as NAME.json of each table, the stand-ins that ran under `folder`; yields the tables' lines."""
    ran = [run for path in sorted(folder.rglob("config.json")) if isinstance(run := read_run(path.parent), Finished)]
    runs = ran + read_kept(out)  # of two that count with one seed the first does
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        table, counted = TABLES[name], set[Path]()
        lines = [*section(table, True, runs, counted)]
        mine = sorted((run for run in runs if run.folder in counted), key=lambda run: run.folder.name)
        write_kept(out / f"{name}.json", mine, table.metric)
        yield from (f"## {name}: {table.title}, stand-ins", "", *map(printable, lines), "")


def section(table: Table, local: bool, runs: Sequence[Finished], counted: set[Path]) -> Iterator[str]:
    """One Markdown table, of the rows or of their stand-ins; adds the folders of the runs in it to `counted`."""
    titles = ["model", "method", "tau", "workers", "batch", "seeds", table.metric.title]
    rows: list[tuple[object, ...]] = []
    for row in table.rows:
        if local and not row.local:
            continue
        label = f"{row.label}: {row.local}" if local else row.label
        paper = plus_minus(*row.paper, table.metric.spec) if row.paper else ""
        groups = matching(runs, row, table.metric, local)
        if not groups:
            workers = row.nodes * GPUS if row.nodes and not local else ""
            rows.append((label, row.method, row.tau or "", workers, "", "", "not run", "", "", paper))
        # runs with tau auto last
        for (tau, workers, batch_size), group in sorted(groups.items(), key=lambda of: (of[0][0] == "auto", of[0])):
            counted |= {run.folder for run in group}
            measured = [] if local else [*speed(group), paper]
            value = mean_sd([run.results[table.metric.key] * table.metric.scale for run in group], table.metric.spec)
            rows.append((label, row.method, tau or "", workers, batch_size, len(group), value, *measured))
    # stand-ins have no seconds and no number of the paper beside them
    titles += [] if local else ["samples/s", "exposed", "paper"]
    yield from report.table(titles, [row[: len(titles)] for row in rows]).splitlines()


def speed(runs: Sequence[Finished]) -> list[str]:
    """Means over the seeds: samples/s and the exposed share."""
    rate, exposed = ([run.results[key] for run in runs] for key in ("samples_per_second", "exposed_share"))
    return [f"{statistics.mean(rate):,.1f}", f"{statistics.mean(exposed):.1%}"]


def matching(runs: Sequence[Finished], row: Row, metric: Metric, local: bool) -> dict[tuple, list[Finished]]:
    """The runs that count in a row, by line; of two with one seed the first."""
    groups: dict[tuple, dict[int, Finished]] = {}
    for run in runs:
        if not differences(run, row, metric, local):
            groups.setdefault(run.line, {}).setdefault(run.settings["seed"], run)
    return {line: list(group.values()) for line, group in groups.items()}


def ratios(table: Table, runs: Sequence[Finished]) -> Iterator[str]:
    """How throughput scales to 128 GPUs: from 16, as the paper has it, and from 8, which counts the first drop, too."""
    rates: dict[tuple, dict[int | None, float | None]] = {}
    for row in table.rows:
        values = [r.results[table.metric.key] for g in matching(runs, row, table.metric, False).values() for r in g]
        rates.setdefault((row.method, row.tau), {})[row.nodes] = statistics.mean(values) if values else None
    rows = []
    for (method, tau), rate in rates.items():
        most, fewer = rate.get(16), {nodes: rate.get(nodes) for nodes in (2, 1)}
        shares = [f"{most / (16 / n * less):.2f}" if most and less else "not run" for n, less in fewer.items()]
        paper = table.paper_ratio.get((method, tau))
        rows.append((method, tau or "", *shares, f"{paper:.2f}" if paper else ""))
    titles = ["method", "tau", "128 / (8 x 16) GPUs", "128 / (16 x 8) GPUs", "paper, 128 / (8 x 16)"]
    yield from report.table(titles, rows).splitlines()


def departure(run: Finished, tables: Mapping[str, Table]) -> str:
    """Why a finished run is in none of the tables; empty when they have nothing to do with it."""
    name, method = run.settings.get("name"), run.settings.get("method")
    found = [
        differences(run, row, table.metric, local)
        for table in tables.values()
        for row in table.rows
        for local in (False, True)
        if (row.local if local else row.recipe, row.method) == (name, method)
    ]
    if not found:
        return f"no row trains {name} with {method}" if len(tables) == len(TABLES) else ""
    return ", ".join(min(found, key=len)) or f"seed {run.settings['seed']} is there already"


# -- what ran -----------------------------------------------------------------------------------------------------


def status(
    tables: Mapping[str, Sequence[tuple[Row, int, Path]]], worker: str, kept: Sequence[Finished] = ()
) -> Iterator[str]:
    """Lines of Markdown: of each row's runs, (row, seed, folder), what ran, what is left, and hours of a `worker`.

    kept: stand-ins that ran elsewhere. The hours left are known where one of the row's runs has finished here.
    """
    titles = ["table", "row", "method", "tau", "finished", "begun", "left", f"{worker} hours", f"{worker} hours left"]
    rows: list[tuple[object, ...]] = []
    spent: dict[Path, float] = {}  # a run may be in several tables
    open_end = False
    to_come: dict[Path, float] = {}
    for name, jobs in tables.items():
        for row in dict.fromkeys(_key(row) for row, _, _ in jobs):
            mine = [job for job in jobs if _key(job[0]) == row]
            folders = [folder for _, _, folder in mine]
            used = {folder: hours(folder) for folder in folders}
            here = [folder for folder in folders if isinstance(read_run(folder), Finished)]
            done = {*here, *(folder for of, seed, folder in mine if is_kept(of, seed, kept))}
            mean = statistics.mean(used[folder] for folder in here) if here else None
            left = {folder: max(0.0, (mean or 0.0) - used[folder]) for folder in folders if folder not in done}
            known = mean is not None or not left
            begun = sum(used[folder] > 0 for folder in left)
            needed = f"{sum(left.values()):,.1f}" if known else "?"
            rows.append((name, *row, len(done), begun, len(left) - begun, f"{sum(used.values()):,.1f}", needed))
            spent, to_come, open_end = spent | used, to_come | left, open_end or not known
    yield from report.table(titles, rows).splitlines()
    more = ", and what the rows marked ? need, of which no run has finished here" if open_end else ""
    yield f"\n{sum(spent.values()):,.1f} {worker} hours used; left: {sum(to_come.values()):,.1f}{more}."


def _key(row: Row) -> tuple[str, str, object]:
    return row.label, row.method, row.tau or ""
