"""Runs the rows of the paper's tables, and puts finished runs into those tables, beside the paper's numbers.

    python reproduce.py list
    python reproduce.py TABLE [--cluster a100|3090] [--dry-run]    submits slurm/ scripts, one job a row and seed
    python reproduce.py TABLE --local [--workers 4] [--dry-run]    trains the small stand-ins on this machine
    python reproduce.py [TABLE] --collect runs/                    Markdown, from config.json and summary.json alone

The tables are in results/paper.py. A cell of the paper that is unknown to us is empty; a row without runs: "not run".
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from bench import report
from bench.report import mean_sd, plus_minus
from core import UserError
from results.paper import GPUS, TABLES, Metric, Row, Table
from training.recipe import Recipe, launch

ROOT = Path(__file__).resolve().parent
Cluster = Literal["a100", "3090"]
NODES: dict[Cluster, int] = {"a100": 16, "3090": 10}  # of GPUS each


@dataclass(frozen=True)
class Command:
    """Runs the rows of the paper's tables, and puts finished runs into those tables, beside the paper's numbers."""

    table: tyro.conf.Positional[str] = "list"
    """A table's name, all, or list, which shows the names; with --collect, all tables by default."""
    cluster: Cluster = "a100"
    """16 x DGX-A100, or 10 servers of 8 x RTX 3090."""
    local: bool = False
    """Train the small stand-ins here."""
    workers: int = 4
    """Processes of each local run."""
    collect: Path | None = None
    """Print the tables with the finished runs in this folder, at any depth."""
    dry_run: bool = False
    """Print the command lines only."""


def main() -> None:
    command = tyro.cli(Command)
    if command.table == "list" and not command.collect:
        return print("\n".join(listing()))
    tables = TABLES if command.table in ("all", "list") else {command.table: find_table(command.table)}
    if command.collect:
        return print("\n".join(collect(tables, command.collect)))
    if command.local and not (tables := {name: table for name, table in tables.items() if table.has_stand_ins}):
        raise UserError(f"{command.table} has no stand-ins: it needs a cluster; see {command.table} --dry-run")
    for table in tables.values():
        if command.local:
            run_local(table, command.workers, command.dry_run)
        else:
            submit(table, command.cluster, command.dry_run)
    if command.local and not command.dry_run:
        print("\n".join(collect(tables, ROOT / "runs/local")))


def find_table(name: str) -> Table:
    if name not in TABLES:
        near = difflib.get_close_matches(name, TABLES, n=3) or TABLES
        raise UserError(f"table {name!r} does not exist; did you mean {', '.join(near)}?")
    return TABLES[name]


def listing() -> Iterator[str]:
    """A line for each table."""
    for name, table in TABLES.items():
        known = sum(row.paper is not None for row in table.rows)
        jobs = sum(len(row.seeds) for row in table.rows)
        yield f"{name:12} {table.title}: {len(table.rows)} rows, {jobs} runs; the paper's value known for {known}"


# -- running rows -------------------------------------------------------------------------------------------------


def load_recipe(task: str, name: str) -> Recipe:
    """The recipe `name` of a task's package."""
    return dataclasses.replace(importlib.import_module(f"{task}.recipes").RECIPES[name], name=name)


def options(overrides: Mapping[str, Any]) -> list[str]:
    """Overrides as a train script takes them; a value True is a flag."""
    return [arg for key, value in overrides.items() for arg in (f"--{key}", *([] if value is True else [str(value)]))]


def stand_in_overrides(row: Row) -> dict[str, Any]:
    """Those of a row's overrides that its stand-in has, too."""
    return {key: value for key, value in row.overrides.items() if key.startswith(("co2.", "delayed."))}


def run_name(recipe: Recipe, row: Row, overrides: Mapping[str, Any], seed: int, nodes: int | None = None) -> str:
    """The name of a run folder: all that differs between the runs of a recipe."""
    parts = [recipe.name, row.method, f"tau{row.tau or recipe.co2.tau}", f"{nodes}nodes" if nodes else ""]
    names = {key.split(".", 1)[-1]: value for key, value in overrides.items() if key != "co2.allow_unstable"}
    parts += [name if value is True else f"{name}_{value}" for name, value in names.items()]
    return "-".join([*filter(None, parts), f"seed{seed}"])


def submission(row: Row, cluster: Cluster, seed: int) -> tuple[dict[str, str], list[str]]:
    """(environment to add, sbatch command) of one job; the batch is the recipe's, rounded to divide by the GPUs."""
    recipe, nodes = load_recipe(row.task, row.recipe), row.nodes or NODES[cluster]
    overrides = {key: value for key, value in row.overrides.items() if key != "batch_size"}
    batch_size = row.overrides.get("batch_size") or round(recipe.batch_size / nodes / GPUS) * nodes * GPUS
    variables = {
        "RECIPE": row.recipe,
        "METHOD": row.method,
        "TAU": str(row.tau or recipe.co2.tau),
        "BATCH_SIZE": str(batch_size),
        "SEED": str(seed),
        "OUT": f"runs/{cluster}/{run_name(recipe, row, overrides, seed, nodes)}",
    }
    return variables, ["sbatch", f"--nodes={nodes}", f"slurm/{row.script}_{cluster}.sh", *options(overrides)]


def stand_in(row: Row, workers: int, seed: int) -> tuple[Path, list[str]]:
    """(run folder, torchrun command) of the row's small recipe with `workers` processes on this machine."""
    assert row.local is not None
    overrides = stand_in_overrides(row)
    folder = Path("runs/local", f"{row.task}-{run_name(load_recipe(row.task, row.local), row, overrides, seed)}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    recipe = ["-m", f"{row.task}.train", row.local, "--method", row.method, *options(overrides)]
    return folder, [*torchrun, *recipe, "--seed", str(seed), "--out", str(folder), "--resume"]


def submit(table: Table, cluster: Cluster, dry_run: bool) -> None:
    """Prints each job's line and, unless dry_run, submits it."""
    if not dry_run and not shutil.which("sbatch"):
        raise UserError("no sbatch here: --dry-run prints the lines for a Slurm cluster, --local runs the stand-ins")
    for row in table.rows:
        for seed in row.seeds:
            variables, command = submission(row, cluster, seed)
            env = {**table.env, **variables}
            print(*(f"{key}={shlex.quote(value)}" for key, value in env.items()), shlex.join(command), flush=True)
            if not dry_run and subprocess.run(command, cwd=ROOT, env=os.environ | env).returncode:
                raise UserError("sbatch refused this job, its own message is above; the jobs before it are submitted")


def run_local(table: Table, workers: int, dry_run: bool) -> None:
    """Runs the table's stand-ins, one after the other; what is finished is left alone."""
    jobs = dict(stand_in(row, workers, seed) for row in table.rows if row.local for seed in row.seeds)
    for folder, command in jobs.items():
        print(shlex.join(command), flush=True)
        if dry_run or isinstance(read_run(ROOT / folder), Finished):
            continue
        process = subprocess.Popen(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1"} | os.environ)
        try:
            process.wait()
        except KeyboardInterrupt:  # torchrun has got it, too, and its workers are saving
            process.wait()
        if not isinstance(read_run(ROOT / folder), Finished):
            raise UserError(f"{folder} is not finished, see above; the same command goes on from its last checkpoint")


# -- reading runs -------------------------------------------------------------------------------------------------

# Settings that do not change what a row measures.
FREE = {
    "seed", "out", "resume", "dry_run", "device", "timeout", "eval_every", "checkpoint_every", "log_every",
    "accumulate", "workers", "loader_workers",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A finished run: its recipe under the names of the command line, and its results."""

    folder: Path
    settings: dict[str, Any]
    workers: int
    commit: str
    results: dict[str, float]

    @property
    def line(self) -> tuple[int, int, int]:
        """Runs of a row that agree in this share a line: (tau or, for ddp, 0; workers; batch size)."""
        tau = 0 if self.settings["method"] == "ddp" else self.settings["co2.tau"]
        return tau, self.workers, self.settings["batch_size"]


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"co2": {"tau": 6}} -> {"co2.tau": 6}."""
    items: dict[str, Any] = {}
    for key, value in nested.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return items


def read_run(folder: Path) -> Finished | str:
    """The run in `folder`, or why it does not count."""
    try:
        config, summary = (json.loads((folder / name).read_text()) for name in ("config.json", "summary.json"))
        settings = flat(config["recipe"])
        if "stopped_by_signal" in summary:
            return f"it was stopped at step {summary['steps']}"
        samples = summary["steps_per_second"] * settings["batch_size"]
        derived = {
            "samples_per_second": samples,
            "tokens_per_second": samples * settings.get("context", 0),
            "exposed_share": 1 - summary["hidden_share"],
        }
        return Finished(folder, settings, config["world_size"], config["commit"], summary | derived)
    except FileNotFoundError:
        return "it has no summary.json: not finished"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"config.json or summary.json is damaged ({error!r})"


def differences(run: Finished, row: Row, metric: Metric, local: bool) -> list[str]:
    """Where the run departs from the row or, if `local`, from its stand-in; empty when it counts."""
    name, overrides = (row.local, stand_in_overrides(row)) if local else (row.recipe, row.overrides)
    if name is None or (run.settings.get("name"), run.settings.get("method")) != (name, row.method):
        return ["another recipe or method"]
    recipe = load_recipe(row.task, name)
    wanted = flat(json.loads(json.dumps(dataclasses.asdict(recipe), default=str)))
    wanted |= {"co2.tau": row.tau or recipe.co2.tau, **overrides, "method": row.method}
    used = {"co2", "delayed"} if row.method == "delayed" else {row.method}  # delayed reads co2's settings, too
    idle = {"co2", "delayed", "slowmo", "overlap_local"} - used
    free = FREE | {"batch_size", "co2.tau"} | {key for key in wanted if key.split(".")[0] in idle}
    free -= overrides.keys() | ({"co2.tau"} if row.tau else set())
    found = [
        f"{key}={run.settings.get(key)} in place of {wanted.get(key)}"
        for key in sorted((wanted.keys() | run.settings.keys()) - free)
        if run.settings.get(key) != wanted.get(key)
    ]
    if row.nodes and not local and run.workers != row.nodes * GPUS:
        found.append(f"{run.workers} workers in place of {row.nodes * GPUS}")
    found += [] if metric.key in run.results else [f"no {metric.key} in summary.json"]
    return found


# -- collecting runs ----------------------------------------------------------------------------------------------


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
        if table.paper_ratio:
            yield from (*ratios(table, runs), "")
        if table.note:
            yield from (table.note, "")
        if table.has_stand_ins:
            yield from ("Stand-ins, small models and data of our own: no number of the paper compares with these.", "")
            yield from (*section(table, True, runs, counted), "")
    commits = {run.commit for run in runs if run.folder in counted} - {""}
    yield f"Commits: {', '.join(sorted(commits)) or 'none'}."
    left_out = {path: run if isinstance(run, str) else departure(run, tables) for path, run in found.items()}
    yield from (f"Not counted: {path}: {why}." for path, why in left_out.items() if path not in counted and why)


def section(table: Table, local: bool, runs: Sequence[Finished], counted: set[Path]) -> Iterator[str]:
    """One Markdown table, of the rows or of their stand-ins; adds the folders of the runs in it to `counted`."""
    titles = ["model", "method", "tau", "workers", "batch", "seeds", table.metric.title, "samples/s", "exposed"]
    rows: list[tuple[object, ...]] = []
    for row in table.rows:
        if local and not row.local:
            continue
        label = f"{row.label}: {row.local}" if local else row.label
        paper = [] if local else [plus_minus(*row.paper, table.metric.spec) if row.paper else ""]
        groups = matching(runs, row, table.metric, local)
        if not groups:
            workers = row.nodes * GPUS if row.nodes and not local else ""
            rows.append((label, row.method, row.tau or "", workers, "", "", "not run", "", "", *paper))
        for (tau, workers, batch_size), group in sorted(groups.items()):
            counted |= {run.folder for run in group}
            measured = measures(group, table.metric)
            rows.append((label, row.method, tau or "", workers, batch_size, len(group), *measured, *paper))
    yield from report.table(titles + ([] if local else ["paper"]), rows).splitlines()


def measures(runs: Sequence[Finished], metric: Metric) -> list[str]:
    """Means over the seeds: the metric with its standard deviation (n - 1), samples/s and the exposed share."""
    rate, exposed = ([run.results[key] for run in runs] for key in ("samples_per_second", "exposed_share"))
    value = mean_sd([run.results[metric.key] * metric.scale for run in runs], metric.spec)
    return [value, f"{statistics.mean(rate):,.1f}", f"{statistics.mean(exposed):.1%}"]


def matching(runs: Sequence[Finished], row: Row, metric: Metric, local: bool) -> dict[tuple, list[Finished]]:
    """The runs that count in a row, by line; of two with one seed the first."""
    groups: dict[tuple, dict[int, Finished]] = {}
    for run in runs:
        if not differences(run, row, metric, local):
            groups.setdefault(run.line, {}).setdefault(run.settings["seed"], run)
    return {line: list(group.values()) for line, group in groups.items()}


def ratios(table: Table, runs: Sequence[Finished]) -> Iterator[str]:
    """How throughput scales to 128 GPUs: from 16, as the paper has it, and from 8, which counts the first drop, too."""
    rates = {}
    for row in table.rows:
        values = [r.results[table.metric.key] for g in matching(runs, row, table.metric, False).values() for r in g]
        rates[row.tau, row.nodes] = statistics.mean(values) if values else None
    rows = []
    for tau, paper in table.paper_ratio.items():
        most, fewer = rates[tau, 16], {nodes: rates[tau, nodes] for nodes in (2, 1)}
        shares = [f"{most / (16 / n * rate):.2f}" if most and rate else "not run" for n, rate in fewer.items()]
        rows.append(("co2" if tau else "ddp", tau or "", *shares, f"{paper:.2f}"))
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


if __name__ == "__main__":
    launch(main)
