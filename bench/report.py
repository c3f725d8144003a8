"""What the commands of bench have in common: their options, and the report of a measurement.

A report is NAME.json, the figures and where they come from, and NAME.md, the tables.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from core.checkpoints.untrusted import parse_json
from core.errors import UserError
from training.config import commit, version

FORMAT = 1  # of the JSON
UNRECORDED = "-dirty: the working tree had changes that were not recorded"
MOST_WORKERS = 1024
MOST_PARAMETERS = 1e12
Options = TypeVar("Options")
Text = Callable[[dict[str, Any]], str]  # makes the page of what the JSON holds


# -- options ----------------------------------------------------------------------------------------------------


def read_options(kind: type[Options], module: str, **how: Any) -> Options:
    """The options of `python -m MODULE`, once their check(), a UserError of which names the first option that cannot
    be, has found nothing; how: see tyro.cli.

    check() is not called by the dataclass itself, for tyro would dress its UserError up.
    """
    options = tyro.cli(kind, prog=f"python -m {module}", use_underscores=True, **how)
    options.check()  # pyright: ignore[reportAttributeAccessIssue]
    return options


@dataclass(frozen=True)
class Asked:
    """The options of a command; the base of all that write into a folder of their own."""

    out: Path | None = None
    """The folder to write into; runs/NAME-DATE by default."""

    def check(self) -> None:
        """A UserError names the first option that cannot be."""


def require(options: Any, *, once: str = "", positive: str = "", ones: str = "", **known: Collection[str]) -> None:
    """A UserError names the first option that cannot be. Names of options, divided by spaces: tuples of one or more
    values, each once; finite numbers above 0, alone or in a tuple; numbers of 1 or more. NAME=WHAT: the values of a
    tuple must be among these."""
    for name in once.split():
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name}={' '.join(map(str, values))}: give one or more, each once")
    for name in positive.split():
        values = getattr(options, name)
        for value in values if isinstance(values, tuple) else (values,):
            if not 0 < value < math.inf:
                raise UserError(f"{name}={value}: give a number above 0")
    for name in ones.split():
        if getattr(options, name) < 1:
            raise UserError(f"{name}={getattr(options, name)}: give 1 or more")
    for name, what in known.items():
        if unknown := [value for value in getattr(options, name) if value not in what]:
            raise UserError(f"{name}: {unknown[0]!r} does not exist; choose among {', '.join(what)}")


def require_no_crowd(options: Any) -> None:
    """No more workers, alone or in a tuple, than there may be processes for."""
    most = max(options.workers) if isinstance(options.workers, tuple) else options.workers
    if most > MOST_WORKERS:
        raise UserError(f"workers={most}: give up to {MOST_WORKERS}, for each is a process on this machine")


def require_device(options: Any) -> None:
    """A device that is there."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: this torch finds no CUDA device; use cpu")


def require_company(options: Any) -> None:
    """Two workers or more, and no crowd."""
    require_no_crowd(options)
    if options.workers < 2:
        raise UserError(f"workers={options.workers}: a lone worker has no link; give 2 or more")


# -- tables -----------------------------------------------------------------------------------------------------


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; a row that ends early, such as one that was not run, is filled up with empty cells."""
    lines = [row(*titles), "|---" * len(titles) + "|"]
    for cells in rows:
        lines.append(row(*cells, *[""] * (len(titles) - len(cells))))
    return "\n".join(lines)


def bullets(notes: Iterable[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)


@dataclass(frozen=True)
class Spread:
    """The median of a measurement's repeats, and the least and the greatest of them."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def range(self, spec: str) -> str:
        return f"{self.least:{spec}} to {self.greatest:{spec}}"

    def show(self, spec: str) -> str:
        """`median (least to greatest)`, each in the format `spec`; the median alone where all three look alike."""
        alike = f"{self.least:{spec}}" == f"{self.greatest:{spec}}"
        return f"{self.median:{spec}}" + ("" if alike else f" ({self.range(spec)})")


def mean_sd(values: Sequence[float], spec: str) -> str:
    """`mean ± sample standard deviation`, each in the format `spec`; the mean alone of a single value."""
    return plus_minus(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, spec)


def of_seeds(losses: Sequence[float | None], spec: str, seeds: int = 0) -> str:
    """mean_sd of runs that ended with a number; how many diverged, None; and how many there are of `seeds`."""
    known = [loss for loss in losses if loss is not None]
    if not losses:
        return "not run"
    text = mean_sd(known, spec) if known else ""
    if lost := len(losses) - len(known):
        text = f"diverged in {lost} of {len(losses)}" + (f" (else {text})" if known else "")
    return f"{text} ({len(losses)} of {seeds} seeds)" if len(losses) < seeds else text


def plus_minus(mean: float, sd: float | None, spec: str) -> str:
    return f"{mean:{spec}}" + ("" if sd is None else f" ± {sd:{spec}}")


# -- where figures come from ------------------------------------------------------------------------------------


def header(module: str, options: Any, packages: Sequence[str] = ("torch",)) -> dict[str, Any]:
    """What the JSON of `python -m MODULE` begins with. options: a dataclass."""
    found = {package: version(package) or "absent" for package in packages}
    return {
        "format": FORMAT,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": commit(),
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **found},
        "cpu_count": len(os.sched_getaffinity(0)),
        "options": json.loads(json.dumps(asdict(options), default=str)),
    }


def source(result: dict[str, Any]) -> str:
    """Command, commit and date of a measurement in words."""
    command = f"`{result['command']}`, " if "command" in result else ""
    changed = f" ({UNRECORDED})" if (result["commit"] or "").endswith("-dirty") else ""
    return f"{command}commit {result['commit'] or 'unknown'}{changed}, {result['date']}"


# -- files ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Ctrl-C in the block ends the command. kept: where what was measured stands."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; {kept}", file=sys.stderr)
        sys.exit(130)


def new_folder(name: str, out: Path | None) -> Path:
    """Makes the folder for a measurement, runs/NAME-DATE unless `out` is given; refuses one that holds such already."""
    folder = out or Path("runs") / time.strftime(f"{name}-%Y%m%d-%H%M%S")
    if (folder / f"{name}.json").exists():
        raise UserError(f"{folder} holds a measurement: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write(page: Path, text: str) -> None:
    page.write_text(text)


def save(folder: Path, name: str, result: dict[str, Any], text: str | None = None) -> None:
    """Writes NAME.json, never half of it, and NAME.md when there is a text."""
    partial = folder / f".{name}.json"
    partial.write_text(json.dumps(result, indent=1, default=str) + "\n")
    partial.rename(folder / f"{name}.json")
    if text is not None:
        write(folder / f"{name}.md", text)


def conclude(folder: Path, name: str, result: dict[str, Any], text: str) -> None:
    """Saves a measurement that is complete, and shows it."""
    save(folder, name, result, text)
    print(f"\n{text}\nwritten to {folder}/{name}.md and {name}.json")


@dataclass
class Session:
    """A measurement under way. result: what is known so far, of which `text` makes the page."""

    name: str
    folder: Path
    result: dict[str, Any]
    text: Text

    def save(self) -> None:
        """Both files as they are now, so that an interruption costs no more than what is being measured."""
        save(self.folder, self.name, self.result, self.text(self.result))

    def take(
        self, part: str, rows: Iterable[dict[str, Any]], say: Callable[[dict[str, Any]], object] | None = str
    ) -> None:
        """Adds rows to a part of the result, and saves and shows each as it comes; say: how, None for not at all."""
        found = self.result.setdefault(part, [])
        for row in rows:
            found.append(row)
            self.save()
            if say is not None:
                print(say(row), flush=True)


def run(
    kind: type[Options],
    name: str,
    measure: Callable[[Options, Session], object],
    text: Text,
    *,
    packages: Sequence[str] = ("torch",),
    forks: Callable[[Options], bool] | None = None,
    module: str = "",
) -> None:
    """A command, python -m MODULE, bench.NAME by default: its options, a measurement, NAME.json and NAME.md.

    measure: fills the session's result, which begins as the header. packages: whose versions that names. forks: where
    ranks are forked; whether they sit on an emulated cluster.
    """
    module = module or f"bench.{name}"
    o = read_options(kind, module)
    if forks is not None:
        from bench.cluster import prepare_to_fork

        prepare_to_fork(namespaces=forks(o))
    session = Session(name, new_folder(name, o.out), header(module, o, packages), text)
    with stoppable(f"what was measured is in {session.folder / name}.json"):
        measure(o, session)
    conclude(session.folder, name, session.result, text(session.result))


def load(path: Path, module: str, rows: str = "rows") -> dict[str, Any]:
    """A file that `python -m MODULE` has written, with a row in one of its parts `rows`; else a UserError."""
    remedy = f"measure with python -m {module} --out {path.parent}"
    try:
        result = parse_json(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path.parent} holds no {path.name}: {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; {remedy}") from None
    except ValueError as error:  # also of bytes that are no text
        raise UserError(f"{path}: not JSON ({error}); {remedy}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise UserError(f"{path}: not of format {FORMAT}; {remedy}")
    if not any(isinstance(result.get(part), list) and result[part] for part in rows.split()):
        raise UserError(f"{path}: has no {rows.split()[0]}; {remedy}")
    return result


def remake(module: str, about: str | None, holds: str, name: str, page: Callable[[Path], str]) -> None:
    """The command `python -m MODULE FOLDER`, which makes NAME.md of a folder's figures anew."""
    positional = tyro.conf.arg(metavar="FOLDER", help=f"Holds {holds}.")
    folder = Annotated[tyro.conf.Positional[Path], positional]
    where = tyro.cli(folder, prog=f"python -m {module}", description=about)
    text = page(where)
    write(where / f"{name}.md", text)
    print(text)
