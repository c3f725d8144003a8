"""The file of a search: one JSON object a line, appended as soon as it is known.

A run: what engine.Plan holds, and its result. A choice: which settings a method was given by its tuning, out of how
many.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.report import FORMAT
from bench.search.engine import Plan, Result
from bench.search.methods import KINDS, Settings
from core.errors import UserError
from training.config import commit, version
from training.untrusted import parse_json

TASKS_VERSION = 1  # raise it when a task or the engine changes, so that rows of before are not taken for today's


@dataclass(frozen=True)
class Group:
    """What the runs of one table have in common, beside the tuning that each method was given."""

    task: str
    workers: int
    batch: int
    steps: int
    tau: int
    shards: str


def group_of(plan: Plan | dict[str, Any]) -> Group:
    values = plan if isinstance(plan, dict) else vars(plan)
    return Group(*(values[name] for name in Group.__dataclass_fields__))


def describe(plan: Plan) -> dict[str, Any]:
    """A plan as in the file."""
    values = vars(plan) | {"method": plan.settings.name, "options": dict(plan.settings.options)}
    del values["settings"]
    return {"kind": "run", "format": FORMAT, "tasks_version": TASKS_VERSION} | values


def settings_of(row: dict[str, Any]) -> Settings:
    return Settings(row["method"], tuple(row["options"].items()))


class Rows:
    """The rows of a file, and those to come. Several processes may append to one file; each sees its own rows and
    those that were there when it began."""

    def __init__(self, path: Path):
        self.path = path
        self.source = {"commit": commit(), "torch": version("torch")}  # as it is when the code is read
        self.half = 0  # bytes of a line at the end that a run which was killed has left incomplete
        self.runs: dict[str, dict[str, Any]] = {}
        self.choices: dict[tuple[Group, str, str], dict[str, Any]] = {}
        for row in self._read():
            self._add(row)

    def _read(self) -> list[dict[str, Any]]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"rows={self.path}: {error.strerror}; name a file") from None
        complete, end, half = data.rpartition(b"\n")
        self.half = len(half)
        rows = []
        for number, line in enumerate((complete + end).splitlines(), start=1):
            try:
                row = parse_json(line)
                if (row["format"], row["tasks_version"]) == (FORMAT, TASKS_VERSION):
                    rows.append(row)
            except (ValueError, KeyError, TypeError):
                what = f"rows={self.path}: line {number} is no row of a search"
                raise UserError(f"{what}; mend or remove it, or name another file") from None
        return rows

    def _add(self, row: dict[str, Any]) -> None:
        row["options"] = KINDS[row["method"]].options | row["options"]  # an option that is newer had its usual value
        if row["kind"] == "run":
            self.runs[_key(row)] = row
        else:
            self.choices[_choice_key(row)] = row

    def find(self, plan: Plan) -> dict[str, Any] | None:
        return self.runs.get(_key(describe(plan)))

    def add_run(self, plan: Plan, result: Result) -> None:
        self._append(describe(plan) | asdict(result) | {"date": time.strftime("%Y-%m-%d %H:%M:%S")} | self.source)

    def add_choice(self, asked: str, tuning: str, plan: Plan, tried: int, tuning_seeds: tuple[int, ...]) -> None:
        """asked: the method as on the command line; tuning: what each method was given, in words; plan: with the
        settings and lr that came of it."""
        row = describe(plan) | {"kind": "choice", "asked": asked, "tuning": tuning, "tried": tried}
        row["tuning_seeds"] = list(tuning_seeds)
        del row["seed"], row["split"]
        if self.choices.get(_choice_key(row)) != row:
            self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            if self.half:
                file.truncate(file.tell() - self.half)
                self.half = 0
            file.write(json.dumps(row).encode() + b"\n")
        self._add(json.loads(json.dumps(row)))


IDENTITY = ("task", "method", "options", "lr", "workers", "batch", "steps", "tau", "shards", "seed", "split")


def identity(row: dict[str, Any]) -> dict[str, Any]:
    """What a run's result depends on."""
    values = {name: row[name] for name in IDENTITY}
    return values if settings_of(row).has_rounds else values | {"tau": None}


def _key(row: dict[str, Any]) -> str:
    return json.dumps(identity(row), sort_keys=True)


def _choice_key(row: dict[str, Any]) -> tuple[Group, str, str]:
    return group_of(row), row["tuning"], row["asked"]
