"""Finished runs, the rows of the paper's tables that they belong to, and these tables in Markdown."""

import contextlib
import dataclasses
import importlib
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.report import mean_sd, plus_minus
from core import UserError
from core.baselines.table import spec_of
from core.checkpoint.stored import parse_json
from results.paper import GPUS, SHORT, TABLES, TOKENS, Metric, Row, Table
from training.data.files import printable
from training.folder.settings import of_other_methods, settings, with_defaults
from training.recipe import Recipe, flat


def load_recipe(task: str, name: str) -> Recipe:
    """The recipe `name` of a task's package."""
    return dataclasses.replace(importlib.import_module(f"{task}.recipes").RECIPES[name], name=name)


def stand_in_overrides(row: Row) -> dict[str, Any]:
    """The overrides of a row's stand-in: it is shorter, and has the row's overrides that suit small runs."""
    of_method = {key: value for key, value in row.overrides.items() if key.startswith("co2.")}
    return SHORT.get(row.script, SHORT[row.task]) | of_method


def words(value: Any) -> list[str]:
    """The words of an option's value on the command line. A value True is a flag, without any."""
    return [] if value is True else [str(word) for word in value] if isinstance(value, list) else [str(value)]


def run_name(recipe: Recipe, row: Row, overrides: Mapping[str, Any], seed: int, nodes: int | None = None) -> str:
    """The name of a run folder: everything that differs between the runs of a recipe."""
    parts = [recipe.name, row.method, f"tau{row.tau or recipe.co2.tau}"]
    parts += [f"{nodes}nodes" if nodes else "", row.network if nodes else ""]
    names = {key.split(".", 1)[-1]: value for key, value in overrides.items() if key != "co2.allow_unstable"}
    parts += ["_".join([name, *words(value)]) for name, value in names.items()]
    return "-".join([*filter(None, parts), f"seed{seed}"]).replace(" ", "_").replace("/", "_")


# Settings that do not change what a row measures.
FREE = {
    "seed", "out", "resume", "dry_run", "device", "timeout", "eval_every", "checkpoint_every",
    "log_every", "recommended", "accumulate", "workers", "loader_workers", "gpu_gb", "recompute", "tf32",
    "light_checkpoints",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A finished run: its recipe under the names of the command line, and its results."""

    folder: Path
    settings: dict[str, Any]
    workers: int
    commit: str
    """The commit of the run, then the commits at which it was resumed, separated by commas."""
    results: dict[str, float]

    @property
    def line(self) -> tuple[int, int, int]:
        """(tau, workers, batch size), with tau 0 for ddp. Runs of a row that agree in this share a line."""
        tau = 0 if self.settings["method"] == "ddp" else self.settings["co2.tau"]
        return tau, self.workers, self.settings["batch_size"]


WARM_UP = 0.1  # the share of a run's steps whose time does not count in its throughput


def logged(folder: Path, key: str) -> list[tuple[int, float]]:
    """(step, value) of each line of metrics.jsonl that is complete and ours and has the key."""
    found: list[tuple[int, float]] = []
    with contextlib.suppress(OSError):
        for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = parse_json(line)
                if type(row["step"]) is int and math.isfinite(row[key]):
                    found.append((row["step"], row[key]))
    return found


def warm_rate(folder: Path) -> float | None:
    """Steps per second after the warm-up, or None if the log is too short."""
    times = logged(folder, "seconds")
    warm = [(step, seconds) for step, seconds in times if step >= WARM_UP * times[-1][0]]
    if not warm or warm[-1][0] <= warm[0][0] or warm[-1][1] <= warm[0][1]:
        return None
    return (warm[-1][0] - warm[0][0]) / (warm[-1][1] - warm[0][1])


def hours(folder: Path) -> float:
    """Hours of all workers that a run has trained so far, without evaluations. 0 if it was never started."""
    times = logged(folder, "seconds")
    try:
        return times[-1][1] * parse_json((folder / "config.json").read_text())["world_size"] / 3600 if times else 0.0
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def read_run(folder: Path) -> Finished | str:
    """The run in `folder`, or why it does not count."""
    try:
        config, summary = (parse_json((folder / name).read_text()) for name in ("config.json", "summary.json"))
        settings = flat(config["recipe"])
        if "stopped_by_signal" in summary:
            return f"it was stopped at step {summary['steps']}"
        samples = (warm_rate(folder) or summary["steps_per_second"]) * settings["batch_size"]
        derived = {
            "samples_per_second": samples,
            "tokens_per_second": samples * settings.get("context", 0),
            "exposed_share": 1 - (math.nan if summary["hidden_share"] is None else summary["hidden_share"]),
        }
        commits = dict.fromkeys([config["commit"], *(line["commit"] for line in config.get("history", []))])
        found = Finished(folder, settings, config["world_size"], ", ".join(commits), summary | derived)
        _check_types(found)
        return found
    except FileNotFoundError:
        return "it has no summary.json: not finished"
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        return f"config.json or summary.json is damaged ({error!r})"


def _check_types(run: Finished) -> None:
    """Raises TypeError if a value that the tables need has another type than a run writes."""
    values: dict[str, Any] = {"world_size": run.workers, "commit": run.commit, "pretrained": None} | run.settings
    whole = {"world_size", "seed", "batch_size"} | ({"co2.tau"} if values["co2.tau"] != "auto" else set())
    texts = {"commit", "name", "method"} | ({"pretrained"} if values["pretrained"] is not None else set())
    wrong = [key for key in whole if type(values[key]) is not int]
    wrong += [key for key in texts if type(values[key]) is not str]
    wrong += [key for key, value in run.results.items() if value is not None and not isinstance(value, int | float)]
    if wrong:
        raise TypeError(f"{wrong[0]}={values.get(wrong[0], run.results.get(wrong[0]))!r}"[:100])


def idle_settings(method: str) -> set[str]:
    """The settings, and the groups of settings, that do not affect a run with this method."""
    return of_other_methods(method) | (set() if spec_of(method).reads_co2 else {"co2"})


def differences(run: Finished, row: Row, metric: Metric, local: bool) -> list[str]:
    """Where the run differs from the row or, if `local`, from its stand-in. Empty if the run counts."""
    name, overrides = (row.local, stand_in_overrides(row)) if local else (row.recipe, row.overrides)
    if name is None or (run.settings.get("name"), run.settings.get("method")) != (name, row.method):
        return ["another recipe or method"]
    recipe = load_recipe(row.task, name)
    wanted = settings(recipe) | {"co2.tau": row.tau or recipe.co2.tau, **overrides, "method": row.method}
    idle = idle_settings(row.method)
    given = with_defaults(run.settings, type(recipe))
    free = FREE | {"batch_size", "co2.tau"} | {k for k in wanted.keys() | given.keys() if k.split(".")[0] in idle}
    free -= overrides.keys() | ({"co2.tau"} if row.tau or local else set())
    for of in (wanted, given):
        if weights := of.get("pretrained"):
            of["pretrained"] = Path(weights).name  # it holds the hash that a run checks
    found = [
        f"{key}={given.get(key)} in place of {wanted.get(key)}"
        for key in sorted((wanted.keys() | given.keys()) - free)
        if given.get(key) != wanted.get(key)
    ]
    if row.nodes and not local and run.workers != row.nodes * GPUS:
        found.append(f"{run.workers} workers in place of {row.nodes * GPUS}")
    if row.network and not local and row.network not in run.folder.name.split("-"):
        found.append(f"not over {row.network}, by its folder's name")
    found += [] if run.results.get(metric.key) is not None else [f"no {metric.key} in summary.json"]
    return found


# -- tables -----------------------------------------------------------------------------------------------------------


def collect(tables: Mapping[str, Table], folder: Path) -> Iterator[str]:
    """Yields lines of Markdown: each table with the runs under `folder`, then the runs in no table, and why."""
    if not folder.is_dir():
        raise UserError(f"--collect {folder}: no such folder; name the folder with the run folders, such as runs/")
    folders = sorted(path.parent for path in folder.rglob("config.json"))
    if not folders:
        raise UserError(f"--collect {folder}: no run folder in it, at any depth (each has a config.json)")
    found = {path: read_run(path) for path in folders}
    runs = [run for run in found.values() if isinstance(run, Finished)]
    counted: set[Path] = set()
    for name, table in tables.items():
        yield from (f"## {name}: {table.title}", "", *section(table, False, runs, counted), "")
        if table.metric is TOKENS:
            yield from (*ratios(table, runs), "")
        if table.note:
            yield from (table.note, "")
        if table.has_stand_ins:
            yield from ("Stand-ins, small models and data of our own: no number of the paper compares with these.", "")
            yield from (*section(table, True, runs, counted), "")
    commits = {run.commit for run in runs if run.folder in counted} - {""}
    yield printable(f"Commits: {', '.join(sorted(commits)) or 'none'}.")
    excluded = {path: run if isinstance(run, str) else departure(run, tables) for path, run in found.items()}
    yield from (
        printable(f"Not counted: {path}: {why}.") for path, why in excluded.items() if path not in counted and why
    )


def keep_stand_ins(names: Iterable[str], folder: Path, out: Path) -> Iterator[str]:
    """Writes the stand-ins that ran under `folder` to NAME.json of each table in `out`, a run per line.

    Settings that no row needs are left out. Yields the tables' lines.
    """
    runs = [run for path in sorted(folder.rglob("config.json")) if isinstance(run := read_run(path.parent), Finished)]
    out.mkdir(parents=True, exist_ok=True)
    asked = {"seed", "co2.tau"}.union(*SHORT.values())
    for name in names:
        table, counted = TABLES[name], set[Path]()
        lines, rows = [*section(table, True, runs, counted)], list[str]()
        for run in sorted((run for run in runs if run.folder in counted), key=lambda run: run.folder.name):
            free = idle_settings(run.settings["method"]) | FREE
            row = {"folder": run.folder.name, "workers": run.workers, "commit": run.commit}
            row |= {table.metric.key: run.results[table.metric.key]}
            of = {key: run.settings[key] for key in run.settings if key in asked or key.split(".")[0] not in free}
            rows.append(json.dumps(row | {"settings": of}))
        (out / f"{name}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
        yield from (f"## {name}: {table.title}, stand-ins", "", *map(printable, lines), "")


SPEED = {"samples_per_second": ",.1f", "exposed_share": ".1%"}  # means over the seeds


def section(table: Table, local: bool, runs: Sequence[Finished], counted: set[Path]) -> Iterator[str]:
    """One Markdown table of the rows or of their stand-ins. Adds the folders of its runs to `counted`."""
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
            means = {key: statistics.mean(run.results[key] for run in group) for key in SPEED if not local}
            measured = [f"{means[key]:{spec}}" for key, spec in SPEED.items() if not local] + [paper] * (not local)
            value = mean_sd([run.results[table.metric.key] * table.metric.scale for run in group], table.metric.spec)
            rows.append((label, row.method, tau or "", workers, batch_size, len(group), value, *measured))
    # stand-ins have no seconds, and no number of the paper next to them
    titles += [] if local else ["samples/s", "exposed", "paper"]
    yield from report.table(titles, [row[: len(titles)] for row in rows]).splitlines()


def matching(runs: Sequence[Finished], row: Row, metric: Metric, local: bool) -> dict[tuple, list[Finished]]:
    """The runs that count in a row, by line. If two have the same seed, the first one counts."""
    groups: dict[tuple, dict[int, Finished]] = {}
    for run in runs:
        if not differences(run, row, metric, local):
            groups.setdefault(run.line, {}).setdefault(run.settings["seed"], run)
    return {line: list(group.values()) for line, group in groups.items()}


def ratios(table: Table, runs: Sequence[Finished]) -> Iterator[str]:
    """How throughput scales to 128 GPUs: from 16, as in the paper, and from 8, which includes the first drop."""
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
    """Why a finished run is in none of the tables. Empty if no table could contain it."""
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


def status(tables: Mapping[str, Sequence[tuple[Row, int, Path]]], worker: str) -> Iterator[str]:
    """Yields lines of Markdown: which runs of each row have finished, which are left, and their hours.

    Args:
        tables: The runs (row, seed, folder) of each table.
        worker: How to call the device that a worker uses.
    """
    titles = ["table", "row", "method", "tau", "finished", "begun", "left", f"{worker} hours", "of a finished run"]
    rows: list[tuple[object, ...]] = []
    for name, jobs in tables.items():
        runs: dict[tuple[str, str, int | str], list[Path]] = {}
        for row, _, folder in jobs:
            runs.setdefault((row.label, row.method, row.tau or ""), []).append(folder)
        for row, folders in runs.items():
            done = [hours(folder) for folder in folders if isinstance(read_run(folder), Finished)]
            used = [hours(folder) for folder in folders]
            begun = sum(value > 0 for value in used) - sum(value > 0 for value in done)
            mean = f"{statistics.mean(done):,.1f}" if done else ""
            rows.append((name, *row, len(done), begun, len(folders) - len(done) - begun, f"{sum(used):,.1f}", mean))
    yield from report.table(titles, rows).splitlines()
