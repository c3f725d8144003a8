"""Runs the rows of the paper's tables, and puts finished runs into those tables, beside the paper's numbers.

    python reproduce.py list
    python reproduce.py TABLE [--cluster a100|3090] [--dry-run]    submits slurm/ scripts, one job a row and seed
    python reproduce.py TABLE --local [--workers 4] [--dry-run]    trains the small stand-ins on this machine
    python reproduce.py [TABLE] --status [--local]                 what ran, what is left, GPU hours
    python reproduce.py [TABLE] --collect runs/                    Markdown, from the run folders alone

A finished run is not repeated, unless you move its folder away. A cell of the paper that is unknown to us is empty; a
row without runs: "not run".
"""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import training  # noqa: F401, says in one line what is not installed

# isort: split
import tyro

from core import UserError
from core.baselines.table import METHODS
from results.collect import (
    Finished,
    collect,
    keep_stand_ins,
    load_recipe,
    read_run,
    run_name,
    stand_in_overrides,
    status,
    words,
)
from results.paper import GPUS, TABLES, Row, Table
from training.recipe import LARGEST, find, parse
from training.start.script import launch, parse_options

ROOT = Path(__file__).resolve().parent
KEPT = ROOT / "runs/tables"  # rows of the stand-ins that ran in this checkout
Cluster = Literal["a100", "3090"]
NODES: dict[Cluster, int] = {"a100": 16, "3090": 10}  # of GPUS each


@dataclass(frozen=True)
class Command:
    """Runs the rows of the paper's tables, and puts finished runs into those tables, beside the paper's numbers.

    Options of the train script stand behind a lone --, such as: reproduce.py imagenet --local -- --epochs 1
    """

    table: tyro.conf.Positional[str] = "list"
    """A table's name, all, or list, which shows the names; with --collect and --status: all by default."""
    rows: str = ""
    """Only these rows, by label or recipe (with --local also by stand-in), separated by commas: resnet50,vitbase."""
    methods: str = ""
    """Only rows of these methods, separated by commas: co2,ddp."""
    seeds: str = ""
    """These seeds in place of the table's, separated by commas: 0,1."""
    cluster: Cluster = "a100"
    """16 x DGX-A100, or 10 servers of 8 x RTX 3090."""
    array: int = 0
    """Submit job arrays, of which this many jobs run at once; 0: each run is a job of its own."""
    local: bool = False
    """Train the small stand-ins here."""
    workers: int = 4
    """Processes of each local run."""
    collect: Path | None = None
    """Print the tables with the finished runs in this folder, at any depth."""
    status: bool = False
    """Print what ran and what is left."""
    dry_run: bool = False
    """Print the command lines only."""


@dataclass(frozen=True)
class Job:
    """A run: its row and seed, its folder, what is added to the environment, and the command."""

    row: Row
    seed: int
    folder: Path
    env: Mapping[str, str]
    command: Sequence[str]


def main() -> None:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    command, extra = parse_options(Command, args=sys.argv[1:at]), passed_on(sys.argv[at + 1 :])
    if command.workers < 1 or command.array < 0:
        remedy = "give 1 or more workers, an array of 0 or more"
        raise UserError(f"workers={command.workers}, array={command.array}: {remedy}")
    if command.table == "list" and not command.collect and not command.status:
        return print("\n".join(listing()))
    named = "`python reproduce.py list` names them"
    tables = TABLES if (name := command.table) in ("all", "list") else {name: find("table", name, TABLES, named)}
    tables = choose(tables, command, extra)
    if command.collect:
        return print("\n".join(collect(tables, command.collect)))
    if command.local and not (tables := {name: table for name, table in tables.items() if table.has_stand_ins}):
        raise UserError(f"{command.table} has no stand-ins: it needs a cluster; see {command.table} --dry-run")
    jobs = {name: jobs_of(table, command, extra) for name, table in tables.items()}
    if extra:
        check_options(job for listed in jobs.values() for job in listed if job.seed == job.row.seeds[0])
    if command.status:
        folders = {name: [(job.row, job.seed, ROOT / job.folder) for job in listed] for name, listed in jobs.items()}
        return print("\n".join(status(folders, "worker" if command.local else "GPU")))
    for name, listed in jobs.items():
        if command.local:
            run_local(listed, command)
        elif command.array:
            submit_arrays(name, unfinished(listed), command)
        else:
            for job in unfinished(listed):
                run_sbatch(job.env, job.command, command.dry_run)
    if command.local and not command.dry_run:
        print("\n".join(keep_stand_ins(tables, ROOT / "runs/local", KEPT)))


def listing() -> Iterator[str]:
    """A line for each table."""
    for name, table in TABLES.items():
        known = sum(row.paper is not None for row in table.rows)
        jobs = sum(len(row.seeds) for row in table.rows)
        yield f"{name:15} {table.title}: {len(table.rows)} rows, {jobs} runs; the paper's value known for {known}"


def passed_on(arguments: Sequence[str]) -> dict[str, Any]:
    """["--optim.lr", "0.1", "--co2.allow_unstable"] -> {"optim.lr": "0.1", "co2.allow_unstable": True}.

    Several words of one option become a list.
    """
    found, key = dict[str, Any](), ""
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, value = argument.removeprefix("--").partition("=")
            found[key := key.replace("-", "_")] = value if equals else True
        elif not found:
            raise UserError(f"{argument!r} behind --: give options of the train script, such as -- --epochs 10")
        else:
            found[key] = argument if found[key] is True else [*words(found[key]), argument]
    ours = {"method": ", see --methods", "seed": ", see --seeds", "dry_run": ", see --dry-run"}
    for key in found.keys() & {*ours, "out", "resume", "extend"}:
        raise UserError(f"--{key} behind --: reproduce.py chooses it itself{ours.get(key, '')}")
    return found


def plain(name: str) -> str:
    """Lower-case letters and digits: "ResNet-50" is "resnet50"."""
    return "".join(c for c in name.lower() if c.isalnum())


def choose(tables: Mapping[str, Table], command: Command, extra: Mapping[str, Any]) -> dict[str, Table]:
    """The tables with the rows, methods and seeds that are asked for, and with a tau that is passed on."""
    rows = [row for table in tables.values() for row in table.rows]

    def names(row: Row) -> set[str]:
        return {plain(name) for name in (row.label, row.recipe, command.local and row.local) if name}

    known = {"rows": {name for row in rows for name in names(row)}, "methods": {plain(name) for name in METHODS}}
    asked = {option: {plain(name): name for name in getattr(command, option).split(",")} for option in known}
    for option, given in asked.items():
        given.pop("", None)
        if unknown := [given[name] for name in given if name not in known[option]]:
            have = ", ".join(dict.fromkeys(row.label for row in rows) if option == "rows" else METHODS)
            raise UserError(f"--{option} {unknown[0]}: not in {command.table}, which has {have}")
    numbers = [seed.strip() for seed in command.seeds.split(",") if seed.strip()]
    if not all(seed.isdecimal() and int(seed) <= LARGEST for seed in numbers):
        raise UserError(f"--seeds {command.seeds}: give numbers up to {LARGEST}, such as 0,1")
    seeds = tuple(map(int, numbers))
    if not (tau := str(extra.get("co2.tau", 1))).isdecimal() or int(tau) < 1:
        raise UserError(f"--co2.tau {tau} behind --: give a number, 1 or more; the train scripts alone take auto")

    def keeps(row: Row) -> bool:
        named = not asked["rows"] or not names(row).isdisjoint(asked["rows"])
        return named and (not asked["methods"] or plain(row.method) in asked["methods"])

    kept, taus = dict[str, Table](), {"tau": int(tau)} if "co2.tau" in extra else {}
    for name, table in tables.items():
        if chosen := tuple(replace(row, seeds=seeds or row.seeds, **taus) for row in table.rows if keeps(row)):
            kept[name] = replace(table, rows=chosen)
    if not kept:
        raise UserError(f"{command.table} has no row with --rows {command.rows!r} and --methods {command.methods!r}")
    return kept


# -- running rows -------------------------------------------------------------------------------------------------


def jobs_of(table: Table, command: Command, extra: Mapping[str, Any]) -> list[Job]:
    """The runs of a table's rows or, with --local, of their stand-ins; each run once."""
    jobs: dict[Path, Job] = {}
    for row in table.rows:
        if not command.local and (row.nodes or 0) > NODES[command.cluster]:
            print(f"# left out: {row.label}, for the {command.cluster} cluster has {NODES[command.cluster]} nodes")
            continue
        if not command.local and not command.status and (note := batch_note(row, command.cluster, extra)):
            print(note, file=sys.stderr)
        for seed in row.seeds:
            if not command.local:
                env, arguments = submission(row, command.cluster, seed, extra)
                jobs.setdefault(path := Path(env["OUT"]), Job(row, seed, path, {**table.env, **env}, arguments))
            elif row.local:
                path, arguments = stand_in(row, command.workers, seed, extra)
                jobs.setdefault(path, Job(row, seed, path, {}, arguments))
    return list(jobs.values())


def check_options(jobs: Iterable[Job]) -> None:
    """Refuses what the jobs' train scripts would refuse, by letting their parser read it."""
    for job in jobs:
        module = f"{job.row.task}.train"
        try:
            parse(importlib.import_module(f"{job.row.task}.recipes").RECIPES, train_options(job, module), module)
        except UserError as error:
            where = f"{module}, for row {job.row.label!r}, method {job.row.method}"
            raise UserError(f"behind --: {where}: {error}") from None


def train_options(job: Job, module: str) -> list[str]:
    """A job's recipe and overrides, as its train script, `module`, gets them."""
    if module in job.command:  # with --local
        return [*job.command[job.command.index(module) + 1 :]]
    known = {"method": "METHOD", "co2.tau": "TAU", "batch_size": "BATCH_SIZE", "seed": "SEED"}  # to slurm/launch.sh
    return [job.env["RECIPE"], *options({key: job.env[name] for key, name in known.items()}), *job.command[5:]]


def options(overrides: Mapping[str, Any]) -> list[str]:
    """Overrides as a train script takes them; a value True is a flag."""
    return [argument for key, value in overrides.items() for argument in (f"--{key}", *words(value))]


def fitting_batch(recipe: Any, gpus: int) -> int:
    """The global batch nearest to the recipe's that the GPUs divide; an even share where Mixup pairs images."""
    share = max(1, round(recipe.batch_size / gpus))
    pairs = getattr(recipe, "mixup", 0) or getattr(recipe, "cutmix", 0)
    return (share - share % 2 if pairs else share) * gpus


def batch_note(row: Row, cluster: Cluster, extra: Mapping[str, Any]) -> str:
    """A line where a row's jobs take another batch than its recipe's because of the GPUs, or nothing."""
    recipe, gpus = load_recipe(row.task, row.recipe), (row.nodes or NODES[cluster]) * GPUS
    taken, own = fitting_batch(recipe, gpus), recipe.batch_size
    if "batch_size" in {**row.overrides, **extra} or taken == own:
        return ""
    return f"# {row.label}, {row.method}: batch {taken}, for the recipe's {own} does not divide by {gpus} GPUs"


def submission(row: Row, cluster: Cluster, seed: int, extra: Mapping[str, Any] | None = None) -> tuple[dict, list[str]]:
    """(environment to add, sbatch command) of one job; the batch is the recipe's, rounded to divide by the GPUs."""
    recipe, nodes = load_recipe(row.task, row.recipe), row.nodes or NODES[cluster]
    given = {key: value for key, value in (extra or {}).items() if key != "co2.tau"}  # which is the row's by now
    overrides = {key: value for key, value in row.overrides.items() if key != "batch_size"} | given
    batch_size = row.overrides.get("batch_size") or fitting_batch(recipe, nodes * GPUS)
    name = run_name(recipe, row, overrides, seed, nodes)
    variables = {"RECIPE": row.recipe, "METHOD": row.method, "TAU": str(row.tau or recipe.co2.tau)}
    variables["BATCH_SIZE"] = str(overrides.pop("batch_size", batch_size))
    variables |= {"SEED": str(seed), "OUT": f"runs/{cluster}/{name}"}
    # never two jobs in one folder: a singleton waits for the one of its name
    sbatch = ["sbatch", f"--nodes={nodes}", f"--job-name={name}", "--dependency=singleton"]
    return variables, [*sbatch, f"slurm/{row.script}_{cluster}.sh", *options(overrides)]


def stand_in(row: Row, workers: int, seed: int, extra: Mapping[str, Any] | None = None) -> tuple[Path, list[str]]:
    """(run folder, torchrun command) of the row's small recipe with `workers` processes on this machine."""
    assert row.local is not None
    overrides = stand_in_overrides(row) | {key: value for key, value in (extra or {}).items() if key != "co2.tau"}
    name = f"{row.task}-{run_name(load_recipe(row.task, row.local), row, overrides, seed)}"
    folder = Path("runs/local", name if workers == Command.workers else f"{name}-{workers}workers")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    tau = {"co2.tau": row.tau} if row.tau else {}
    given = options({"no_recommended": True, "method": row.method} | tau | overrides | {"seed": seed, "out": folder})
    return folder, [*torchrun, "-m", f"{row.task}.train", row.local, *given, "--resume"]


def unfinished(jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs to run: those without a finished folder. Prints the others."""
    for job in jobs:
        if isinstance(read_run(ROOT / job.folder), Finished):
            print(f"# finished: {job.folder}", flush=True)
        else:
            yield job


def submit_arrays(name: str, jobs: Iterator[Job], command: Command) -> None:
    """Submits one job array for all jobs with the same script and nodes; slurm/launch.sh reads their lines."""
    groups: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        _, nodes, _, _, script, *given = job.command
        assigned = " ".join(f"{key}={shlex.quote(value)}" for key, value in job.env.items())
        groups.setdefault((nodes, script), []).append(f"export {assigned}; JOB_ARGS=({shlex.join(given)})")
    stamp = time.strftime("%Y%m%d-%H%M%S")  # a file stays as it is while its jobs wait
    for (nodes, script), lines in groups.items():
        kind = f"{name}-{Path(script).stem}-{nodes.removeprefix('--nodes=')}nodes"
        path = Path("runs", command.cluster, "jobs", f"{kind}-{stamp}.sh")
        print(*(f"# {number}: {line}" for number, line in enumerate(lines)), sep="\n")
        if not command.dry_run:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text("\n".join(lines) + "\n")
        array = f"--array=0-{len(lines) - 1}%{command.array}"
        run_sbatch({"JOBS": str(path)}, ["sbatch", nodes, f"--job-name={kind}", array, script], command.dry_run)


def run_sbatch(env: Mapping[str, str], command: Sequence[str], dry_run: bool) -> None:
    """Prints a job's line and, unless dry_run, submits it."""
    if not dry_run and not shutil.which("sbatch"):
        raise UserError("no sbatch here: --dry-run prints the lines for a Slurm cluster, --local runs the stand-ins")
    print(*(f"{key}={shlex.quote(value)}" for key, value in env.items()), shlex.join(command), flush=True)
    if not dry_run and subprocess.run(command, cwd=ROOT, env=os.environ | {"SBATCH_EXPORT": "ALL"} | env).returncode:
        raise UserError("sbatch refused this job, its own message is above; the jobs before it are submitted")


def run_local(jobs: Sequence[Job], command: Command) -> None:
    """Runs stand-ins, one after the other; a finished one is not repeated."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for job in unfinished(jobs):
        print(shlex.join(job.command), flush=True)
        if command.dry_run:
            continue
        process = subprocess.Popen(job.command, cwd=ROOT)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()  # it has the signal, too, and its workers save
            raise
        if not isinstance(read_run(ROOT / job.folder), Finished):
            raise UserError(f"{job.folder} is not finished, see above; the command goes on from its last checkpoint")


if __name__ == "__main__":
    launch(main)
