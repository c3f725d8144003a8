"""The command line of bench.gpu: which checks run, what is kept between calls, and the report that is written."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from bench import report
from bench.gpu.checks import CHECKS, PARTS, Check, Part, Scope, Worker, import_checks, line
from core.errors import UserError

import_checks()

NAME = "gpu"
LEAST = 15.0  # seconds that must be left for another check, or as many as its other cases took
SAME = ("device", "torch", "triton", "tiny")  # of one report, and the commit without --keep


@dataclass(frozen=True)
class Options:
    """The report of a GPU; what has a line is not run again."""

    parts: tuple[Part, ...] = PARTS
    """In this order; correctness takes under 6 minutes."""
    checks: tuple[str, ...] = ()
    """Only those whose names hold one of these, again where they have a line."""
    minutes: float = math.inf
    """After these, from the start of the command, what runs is cut off and left for the next call; nothing is begun
    that would likely end later."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: what of the checks needs no GPU, to test this command."""
    tiny: bool = False
    """Sizes for a test of this command."""
    out: Path = Path("results")
    commit: str = ""
    """Of the code, where there is no git."""
    keep: bool = False
    """Lines of other commits stay, with their commit; without, another commit begins anew."""

    def check(self) -> None:
        if not self.parts:
            raise UserError(f"parts: give one or more of {', '.join(PARTS)}")
        if not self.minutes > 0:
            raise UserError(f"minutes={self.minutes}: give a number above 0")
        if self.checks and not self.chosen():
            parts = ", ".join(self.parts)
            raise UserError(f"checks={' '.join(self.checks)}: no check of {parts} has such a name; leave it out")

    def chosen(self) -> list[Check]:
        """In the order of the parts."""
        words = self.checks or ("",)
        return [
            one
            for part in PARTS
            for one in CHECKS.values()
            if part in self.parts and one.part == part and any(word in one.name for word in words)
        ]


def main() -> None:
    began = time.monotonic()
    o = report.read_options(Options, "bench.gpu")
    o.out.mkdir(parents=True, exist_ok=True)
    if o.device == "cuda" and not torch.cuda.is_available():
        result = without_device(o)
        print("this torch finds no CUDA device: every check is not run", file=sys.stderr)
    else:
        result = run(o, began + 60 * o.minutes)
    rows = write(o, result)
    count = {state: sum(row["state"] == state for row in rows) for state in ("ok", "failed", "not run")}
    print(f"{', '.join(f'{n} {state}' for state, n in count.items())}; written to {o.out}/{NAME}.md and {NAME}.json")
    sys.exit(count["failed"] > 0)


def without_device(o: Options) -> dict[str, Any]:
    """A report in which nothing was run; never in place of one in which something was."""
    if any(row["state"] != "not run" for row in read(o).get("rows", [])):
        raise UserError(f"device=cuda: this torch finds no CUDA device, and {o.out} holds a GPU's report, which stays")
    facts = {"device": "", "torch": str(torch.__version__), "cuda": "", "triton": ""}
    return begin(o, facts) | {"rows": []}


def begin(o: Options, facts: dict[str, Any]) -> dict[str, Any]:
    """A report without lines."""
    result = report.header("bench.gpu", o) | {"tiny": o.tiny} | facts
    result["commit"] = o.commit or result["commit"]
    return result


def run(o: Options, until: float) -> dict[str, Any]:
    """Runs what has no line yet until all is there or the time is up."""
    worker = Worker(Scope(o.device, o.out.resolve(), o.tiny))
    try:
        result = begin(o, worker.facts())
        result["rows"] = kept(o, result)
        done = {row["name"] for row in result["rows"]}
        for one in o.chosen():
            left = until - time.monotonic()
            if one.name in done and not o.checks:
                continue
            if left < expected(one, result["rows"]):
                print(f"stopped: minutes={o.minutes:g}; the same command goes on from here", flush=True)
                break
            row = worker.run(one, min(one.limit, left))
            if row.pop("late", False) and left < one.limit:
                row |= {
                    "state": "not run",
                    "says": f"cut off by minutes={o.minutes:g}: the same command begins it anew",
                }
            row["commit"] = result["commit"]
            result["rows"] = [r for r in result["rows"] if r["name"] != one.name] + [row]
            write(o, result)
            print(f"{row['state']:8}{row['seconds']:6.1f} s  {row['name']}: {row['says']}", flush=True)
        return result
    finally:
        worker.close()


def expected(one: Check, rows: list[dict[str, Any]]) -> float:
    """Seconds that a check will likely take."""
    kind = one.name.partition(":")[0]
    return max([LEAST, *(row["seconds"] for row in rows if row["name"].partition(":")[0] == kind)])


def kept(o: Options, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the calls before, where they are of the same device and, without --keep, of the same code."""
    before = read(o)
    rows = [row for row in before.get("rows", []) if row["name"] in CHECKS and row["state"] != "not run"]
    rows = [{"commit": before.get("commit")} | row for row in rows]
    changed = [name for name in SAME + ("commit",) * (not o.keep) if before.get(name) != result[name]]
    if changed and rows:
        said = ", ".join(f"{name} {before.get(name)!r}, now {result[name]!r}" for name in changed)
        print(f"the report begins anew: its lines are of {said}", flush=True)
    return [] if changed else rows


def read(o: Options) -> dict[str, Any]:
    """The report that is there; empty without one."""
    path = o.out / f"{NAME}.json"
    if not path.exists():
        return {}
    try:
        before = json.loads(path.read_text())
        assert all(isinstance(row[key], str) for row in before["rows"] for key in ("name", "state", "says"))
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{path} is no report of bench.gpu: remove it, or choose another --out") from None
    return before


def write(o: Options, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Both files, with a line for every check; returns the lines."""
    known = {row["name"]: row for row in result["rows"]}
    rows = [known.get(one.name) or line(one.part, one.name, "not run", "") for one in CHECKS.values()]
    options = json.loads(json.dumps(asdict(o), default=str))
    report.save(o.out, NAME, result | {"options": options, "rows": rows}, markdown(result, rows))
    return rows


TITLES = ("check", "", "figure or error", "seconds")
ABOUT: dict[Part, str] = {
    "correctness": "Correctness",
    "costs": "Costs",
    "loops": "Real loops",
    "search": "GPT-2 Small, 1,000 steps",
}


def markdown(result: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The report: a table for each part, with every check of it, run or not."""
    versions = result["versions"] | {"CUDA": result["cuda"] or "none", "triton": result["triton"] or "none"}
    head = [
        "# On a GPU",
        "Written by `make gpu-report`; [bench/gpu](../bench/gpu/__init__.py) says how to run it.",
        report.bullets(
            [
                f"Device: {result['device'] or 'none was at hand'}"
                + ", tiny sizes: a test of the command" * result["tiny"],
                ", ".join(f"{name} {value}" for name, value in versions.items()),
                f"Commit {result['commit'] or 'unknown'}, {result['date']}; a line of another commit names it",
            ]
        ),
    ]
    return "\n\n".join([*head, *(section(part, rows, result["commit"]) for part in PARTS)]) + "\n"


def section(part: Part, rows: list[dict[str, Any]], commit: str) -> str:
    lines = [row for row in rows if row["part"] == part]
    failed, not_run = (sum(row["state"] == state for row in lines) for state in ("failed", "not run"))
    seconds = sum(row["seconds"] for row in lines)
    title = f"## {ABOUT[part]}: {len(lines)} checks, {failed} failed, {not_run} not run, {seconds:.0f} s"
    return f"{title}\n\n{report.table(TITLES, [cells(row, commit) for row in lines])}"


def cells(row: dict[str, Any], commit: str) -> list[str]:
    state = f"**{row['state']}**" if row["state"] == "failed" else row["state"]
    state += f" ({row['commit']})" if row.get("commit", commit) != commit else ""
    return [row["name"], state, row["says"].replace("|", "\\|"), f"{row['seconds']:.1f}" if row["seconds"] else ""]
