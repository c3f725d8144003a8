"""The shared parts of the commands of bench: their options, and the report of a measurement.

A command writes NAME.json, its rows and where they come from, and prints a table. results/pages.py reads the rows.
"""

import contextlib
import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from core.errors import UserError
from training.folder.settings import commit, version
from training.start.script import parse_options

FORMAT = 1  # of the JSON
TUNING_SEED = 100  # of the runs that choose settings; no figure uses it
MOST_WORKERS, LARGEST = 1024, 10**9
Options = TypeVar("Options")


# -- options ----------------------------------------------------------------------------------------------------


def read_options(kind: type[Options], module: str, **how: Any) -> Options:
    """Reads and checks the options of `python -m MODULE`.

    The dataclass does not call check() itself, because tyro would wrap its UserError.

    Args:
        kind: A dataclass with a method check().
        module: The name of the command's module.
        how: See tyro.cli.

    Raises:
        UserError: Names the first option with an invalid value.
    """
    options = parse_options(kind, prog=f"python -m {module}", use_underscores=True, **how)
    options.check()  # pyright: ignore[reportAttributeAccessIssue]
    return options


def split_method(text: str) -> tuple[str, dict[str, str]]:
    """Splits NAME or NAME:KEY=VALUE,... into the name and the values. Refuses an option without a value, or twice."""
    name, _, rest = text.partition(":")
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if not key or not value or key in given:
            raise UserError(f"method {text!r} has {part!r}: give each option once, with a value, as in {name}:tau=12")
        given[key] = value
    return name, given


def require(
    options: Any, *, once: str = "", positive: str = "", zeros: str = "", ones: str = "", **known: Collection[str]
) -> None:
    """Checks options. Each argument has names of options, separated by spaces.

    Args:
        options: The dataclass with the options.
        once: Tuples of one or more values, each once. Whole numbers are not negative.
        positive: Finite numbers above 0, or tuples of them.
        zeros: Finite numbers of 0 or more.
        ones: Numbers of 1 or more.
        known: Name of a tuple -> the values that it may have.

    Raises:
        UserError: Names the first option with an invalid value.
    """
    for name in once.split():
        values = getattr(options, name)
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name}={' '.join(map(str, values))}: give one or more, each once")
        if wrong := [value for value in values if isinstance(value, int) and not 0 <= value <= LARGEST]:
            raise UserError(f"{name}={wrong[0]}: give whole numbers from 0 to {LARGEST}")
    for name in positive.split():
        values = getattr(options, name)
        for value in values if isinstance(values, tuple) else (values,):
            if not 0 < value < math.inf:
                raise UserError(f"{name}={value}: give a number above 0")
    for name in zeros.split():
        if not 0 <= getattr(options, name) < math.inf:
            raise UserError(f"{name}={getattr(options, name)}: give a number, 0 or more")
    for name in ones.split():
        if getattr(options, name) < 1:
            raise UserError(f"{name}={getattr(options, name)}: give 1 or more")
    for name, what in known.items():
        if unknown := [value for value in getattr(options, name) if value not in what]:
            raise UserError(f"{name}: {unknown[0]!r} does not exist; choose among {', '.join(what)}")


def require_no_crowd(options: Any) -> None:
    """Raises a UserError if an option asks for more workers than the machine may have processes."""
    most = max(options.workers) if isinstance(options.workers, tuple) else options.workers
    if most > MOST_WORKERS:
        raise UserError(f"workers={most}: give up to {MOST_WORKERS}, because each is a process on this machine")


def require_device(options: Any) -> None:
    """Raises a UserError if the device does not exist."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: this torch finds no CUDA device; use cpu")


# -- tables -----------------------------------------------------------------------------------------------------


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. A row that ends early, such as one that was not run, gets empty cells."""
    lines = [titles, *([*cells, *[""] * (len(titles) - len(cells))] for cells in rows)]
    first, *rest = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([first, "|---" * len(titles) + "|", *rest])


@dataclass(frozen=True)
class Summary:
    """How to show rows: a line for each group of rows that agree in `by`, with the number of its rows.

    Attributes:
        by: Names of entries, separated by spaces. A line shows them as they are.
        show: Name -> format. A line has the mean ± standard deviation over its rows. A name may be a path through
            dicts, such as late.seconds.
    """

    by: str
    show: dict[str, str]

    def lines(self, rows: Iterable[dict[str, Any]]) -> list[list[str]]:
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(tuple(_cell(row.get(name, "")) for name in self.by.split()), []).append(row)
        return [[*key, str(len(some)), *self.figures(some)] for key, some in groups.items()]

    def figures(self, rows: list[dict[str, Any]]) -> Iterator[str]:
        for name, spec in self.show.items():
            values = [value for row in rows if (value := _at(row, name.split("."))) is not None]
            yield mean_sd(values, spec) if values else ""

    def table(self, rows: Iterable[dict[str, Any]]) -> str:
        return table([*self.by.split(), "rows", *self.show], self.lines(rows))


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")  # a bar would end the cell


def _at(found: Any, path: Sequence[str]) -> float | None:
    """The number at the end of a path, if any."""
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def mean_sd(values: Sequence[float], spec: str) -> str:
    """`mean ± sample standard deviation`, each in the format `spec`, or only the value if there is one."""
    return plus_minus(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, spec)


def plus_minus(mean: float, sd: float | None, spec: str) -> str:
    return f"{mean:{spec}}" + ("" if sd is None else f" ± {sd:{spec}}")


class Ratio(NamedTuple):
    """A geometric mean of ratios, the limits of its 95 % interval by Student's t of their logarithms, and the p value
    of "the ratio is 1"."""

    ratio: float
    low: float
    high: float
    p: float


def mean_ratio(ratios: Sequence[float]) -> Ratio:
    """Returns the geometric average of two or more positive ratios."""
    from scipy.stats import t as student  # slow to import

    logs = np.log(ratios)
    mean, error = logs.mean(), logs.std(ddof=1) / math.sqrt(len(logs))
    reach = student.ppf(0.975, len(logs) - 1) * error
    p = 2 * student.sf(abs(mean) / error, len(logs) - 1) if error else float(mean == 0)
    return Ratio(*(float(np.exp(log)) for log in (mean, mean - reach, mean + reach)), float(p))


def paired_ratio(numbers: Mapping[Any, float], others: Mapping[Any, float]) -> Ratio | None:
    """Compares two methods on the same seeds.

    Args:
        numbers: Seed -> a positive number of the method that divides.
        others: The same for the method that is divided.

    Returns:
        The mean of other / number over the common seeds. None for fewer than three seeds.
    """
    seeds = sorted(numbers.keys() & others.keys())
    return mean_ratio([others[seed] / numbers[seed] for seed in seeds]) if len(seeds) >= 3 else None


def holm(p: Sequence[float]) -> list[float]:
    """Returns the p values of a family of comparisons, corrected by Holm for their number."""
    corrected, highest = [1.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda at: p[at])):
        highest = max(highest, min(1.0, (len(p) - rank) * p[place]))
        corrected[place] = highest
    return corrected


# -- where figures come from ------------------------------------------------------------------------------------


def header(module: str, options: Any, packages: Sequence[str] = ("torch",)) -> dict[str, Any]:
    """The first entries of the JSON of `python -m MODULE`. options: a dataclass."""
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


# -- files ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Ctrl-C in the block ends the command. kept: says where the measurements are."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped; {kept}", file=sys.stderr)
        sys.exit(130)


def save(folder: Path, name: str, result: dict[str, Any]) -> None:
    """Writes NAME.json in one piece, by renaming a temporary file."""
    partial = folder / f".{name}.json"
    partial.write_text(json.dumps(result, indent=1, default=str) + "\n")
    partial.rename(folder / f"{name}.json")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON file that an earlier call of the command has written; [] without the file."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(file.read_text()) if file.exists() else []
        rows = found["rows"] if isinstance(found, dict) else found
        if all(isinstance(row, dict) for row in rows):
            return rows
    raise UserError(f"{file} holds no rows of this command: move it away, or give another --out")


class Metrics:
    """The rows of a metrics.jsonl that may still be written."""

    def __init__(self, folder: Path):
        self._path = folder / "metrics.jsonl"
        self._at = 0
        self.rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Returns all rows so far. An incomplete line is left for the next call."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                complete, end, _ = file.read().rpartition(b"\n")
            self._at += len(complete + end)
            rows = [json.loads(line) for line in complete.splitlines()]
            self.rows += [{k: math.nan if v is None else v for k, v in row.items()} for row in rows]
        return self.rows
