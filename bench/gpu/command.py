"""The command line of bench.gpu: the choice of measurements, and the rows kept between calls."""

import functools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from bench import report
from core.errors import UserError
from training.folder import version

NAME = "gpu"
Part = Literal["ranks", "costs"]
PARTS: tuple[Part, ...] = ("ranks", "costs")
SAME = ("commit", "device", "torch")  # of a row that is not measured again


@dataclass(frozen=True)
class Scope:
    """Where a measurement runs. out: the report's folder. tiny: small sizes, to test the command."""

    device: str
    out: Path
    tiny: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def __call__(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def sync_stream(self) -> None:
        """Waits for the current stream only, not for a collective in a stream of its own."""
        if self.cuda:
            torch.cuda.current_stream().synchronize()


Measure = Callable[[Scope], dict[str, Any]]  # returns figures by name; raises AssertionError where one cannot be
CHECKS: dict[str, tuple[Part, Measure]] = {}


def check(part: Part, cases: Iterable[str] = ("",)) -> Callable[[Any], Any]:
    """Makes a measurement of f(scope, case) for each case. Its name is the function's, and the case."""

    def add(f: Any) -> Any:
        for case in cases:
            name = f.__name__.replace("_", " ") + f": {case}" * bool(case)
            CHECKS[name] = part, functools.partial(f, case=case) if case else f
        return f

    return add


def measured(name: str, scope: Scope) -> dict[str, Any]:
    """Runs a measurement and returns its row. state: ok or failed."""
    began, (part, measure) = time.monotonic(), CHECKS[name]
    try:
        figures = measure(scope)
        says = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
        row: dict[str, Any] = {"state": "ok", "says": says, "figures": figures}
    except Exception as error:
        says = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        row = {"state": "failed", "says": says, "traceback": traceback.format_exc()}
    return {"part": part, "name": name} | row | {"seconds": round(time.monotonic() - began, 2)}


@dataclass(frozen=True)
class Options:
    """The report of a GPU. A measurement that has a row of this commit, device and torch is not repeated."""

    parts: tuple[Part, ...] = PARTS
    checks: tuple[str, ...] = ()
    """Only measurements whose names contain one of these words, even if they have a row."""
    device: Literal["cuda", "cpu"] = "cuda"
    tiny: bool = False
    """Small sizes that a CPU can run, too, to test the command."""
    out: Path = Path("results")
    commit: str = ""
    """The commit of the code, if there is no git."""

    def check(self) -> None:
        report.require_device(self)
        if not self.chosen():
            raise UserError(f"checks={' '.join(self.checks)}: no measurement of {', '.join(self.parts)} has that name")

    def chosen(self) -> list[str]:
        for module in ("ranks", "measures"):
            import_module(f"bench.gpu.{module}")
        words = self.checks or ("",)
        return [name for name, (part, _) in CHECKS.items() if part in self.parts and any(w in name for w in words)]


def main() -> None:
    o = report.read_options(Options, "bench.gpu")
    o.out.mkdir(parents=True, exist_ok=True)
    file = o.out / f"{NAME}.json"
    rows = json.loads(file.read_text())["rows"] if file.exists() else []  # also of checks that are tests now
    result = report.header("bench.gpu", o) | facts(o) | {"rows": rows}
    now = {key: result[key] for key in SAME}
    for name in o.chosen():
        known = {row["name"]: row for row in result["rows"]}
        if not o.checks and now.items() <= known.get(name, {}).items():
            continue
        known[name] = row = measured(name, Scope(o.device, o.out.resolve(), o.tiny)) | now
        result["rows"] = list(known.values())
        report.save(o.out, NAME, result)
        print(f"{row['state']:8}{row['seconds']:6.1f} s  {name}", flush=True)
    rows = [row for row in result["rows"] if row["name"] in CHECKS]
    titles = ("name", "state", "says", "commit", "device")
    print(report.table(titles, [[row.get(title, "") for title in titles] for row in rows]))
    sys.exit(any(row["state"] == "failed" for row in rows))


def facts(o: Options) -> dict[str, Any]:
    """The device and the versions."""
    name = "cpu"
    if o.device == "cuda":
        name = f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / (1 << 30):.0f} GiB"
    found = {"device": name + ", tiny sizes: a test of the command" * o.tiny, "torch": str(torch.__version__)}
    found |= {"cuda": torch.version.cuda or "none", "triton": version("triton") or "none"}
    return found | ({"commit": o.commit} if o.commit else {})
