"""The run folder: what a run was made of, what it measured, and its summary."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from core.checkpoints.untrusted import parse_json
from core.errors import UserError
from core.groups import of_all
from training import config
from training.progress import Stopwatch
from training.recipe import Recipe, flat

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# how a result's name ends -> (factor, unit) of what is shown
UNITS = {
    "steps_per_second": (1, "steps/s"),
    "seconds": (1, "s"),
    "share": (100, "%"),
    "top1": (100, "%"),
    "top5": (100, "%"),
    "mIoU": (1, "%"),
    "bytes_sent": (1e-6, "MB"),
    "link_mbit": (1, "Mbit/s"),
}


class RunFolder:
    """Rank 0 writes config.json, metrics.jsonl, TensorBoard's events and summary.json; the other workers write nothing.

    attempt: a text that workers share which were started together. writer: TensorBoard's, on rank 0.
    """

    writer: SummaryWriter

    def __init__(self, path: Path, rank: int, clock: Stopwatch):
        self.path, self.clock = path.expanduser(), clock
        self.checkpoints = self.path / "checkpoints"
        self.attempt = ""
        self.writes = rank == 0
        self._lock: IO[str] | None = None
        self._resumed: dict[str, Any] | None = None  # config.json, once the run has gone on
        self._metrics: IO[str] | None = None

    def open(self, recipe: Recipe, world_size: int, device: torch.device) -> None:
        """Takes the folder for this run; all workers raise UserError where it holds another run, or one in progress."""
        refusal = ""
        if self.writes:
            try:
                refusal = self._take(recipe, world_size, device, resume=recipe.resume)
            except (OSError, ValueError) as error:  # the latter of a name that no file can have
                reason = getattr(error, "strerror", None) or error
                refusal = f"{self.path} cannot be written ({reason}): choose another --out"
        refusal, self.attempt = of_all((refusal, secrets.token_hex(4)))[0]
        if refusal:
            self.close()
            raise UserError(refusal)

    def lead(self, recipe: Recipe, world_size: int, device: torch.device, *, goes_on: bool) -> None:
        """This elastic worker writes from now on; goes_on: in place of a lost one, which may still hold the lock."""
        self.writes = True
        resume = recipe.resume or goes_on
        if refusal := self._take(recipe, world_size, device, resume=resume, force=goes_on):
            self.close()
            raise UserError(refusal)

    def _take(self, recipe: Recipe, world_size: int, device: torch.device, *, resume: bool, force: bool = False) -> str:
        """Locks the folder, and writes config.json for a fresh run; why it cannot be taken, or nothing."""
        made_of = config.describe(recipe, world_size, device)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock, holder = _lock(self.path / ".lock")
        if holder and not force:
            return (
                f"{self.path} is in use by {holder}: wait for its end, choose another --out or, where that machine is "
                "gone, remove the folder's .lock"
            )
        file = self.path / "config.json"
        if self._holds_a_run() and not resume:
            return f"{self.path} holds a run: add --resume to continue it, or choose another --out"
        if self._holds_a_run() and file.exists():
            self._resumed, refusal = config.resumed(file, made_of, type(recipe))
            return refusal
        _replace(file, _json(made_of))  # in place of what a failed start has left
        return ""

    def _holds_a_run(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        measured = metrics.exists() and metrics.stat().st_size > 0
        return measured or any(self.checkpoints.glob("step*"))

    def begin(self, step: int, total: int) -> None:
        """Goes on after `step`: drops later lines of the log, and the summary. UserError where total is less."""
        if step > total:
            remedy = "give more --epochs with --extend, or choose another --out"
            raise UserError(f"{self.path} has done {step} steps, and a run of this length has {total}: {remedy}")
        if not self.writes:
            return
        from torch.utils.tensorboard import SummaryWriter  # here, because only rank 0 needs it

        (self.path / "summary.json").unlink(missing_ok=True)
        if self._resumed is not None:
            self._resumed["history"][-1]["step"] = step
            _replace(self.path / "config.json", _json(self._resumed))
        _cut(self.path / "metrics.jsonl", step)
        self._metrics = open(self.path / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self.writer = SummaryWriter(str(self.path), purge_step=step + 1 if self._resumed else None)

    def close(self) -> None:
        """Writes what is still in memory, and lets others have the folder."""
        if self._metrics is not None:
            self.writer.close()
            self._metrics.close()
        if self._lock is not None:
            self._lock.close()

    def log(self, step: int, scalars: Mapping[str, float | Tensor], of_model: str = "") -> None:
        """Writes one line of metrics.jsonl, with null for what is not finite, and TensorBoard's scalars.

        of_model: `shared` or `own`, of evaluations.
        """
        if not self.writes:
            return
        values = {name: float(value) for name, value in scalars.items()}
        self._write_line(step, values | ({"of_model": of_model} if of_model else {}))
        for name, value in values.items():
            self.writer.add_scalar(f"own/{name}" if of_model == "own" else name, value, step)

    def note(self, step: int, name: str, text: str) -> None:
        """Writes a line of text to the screen, to metrics.jsonl and to TensorBoard."""
        if not self.writes:
            return
        tqdm.write(f"step {step}: {text}", file=sys.stderr)
        self._write_line(step, {name: text})
        self.writer.add_text(name, text, step)

    def _write_line(self, step: int, values: dict[str, Any]) -> None:
        assert self._metrics is not None, "begin() comes first"
        line = {"step": step, "seconds": round(self.clock.seconds, 3), **values}
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")

    def summarise(self, recipe: Recipe, summary: dict[str, float]) -> None:
        """Writes and prints summary.json, with null for what is not finite; gives TensorBoard recipe and summary."""
        if not self.writes:
            return
        known = {name: value if math.isfinite(value) else None for name, value in summary.items()}
        _replace(self.path / "summary.json", _json(known))
        known_types = (bool, int, float, str)  # to TensorBoard
        settings = {k: v if isinstance(v, known_types) else str(v) for k, v in flat(dataclasses.asdict(recipe)).items()}
        self.writer.add_hparams(settings, {f"summary/{k}": v for k, v in summary.items()}, run_name=".")
        print(f"{recipe.name} {recipe.method}: {self.path}\n{table(summary)}", flush=True)
        if unknown := [name for name, value in known.items() if value is None]:
            print(f"warning: no finite number, null in summary.json: {', '.join(unknown)}", file=sys.stderr, flush=True)


def _cut(file: Path, step: int) -> None:
    """Leaves out the lines after `step`, and one that was torn when its writer was killed."""
    if file.exists():
        lines = file.read_text(errors="replace").splitlines(keepends=True)
        _replace(file, "".join(line for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """Infinity for a line that is torn, or none of ours."""
    try:
        step = parse_json(line)["step"]
        return step if line.endswith("\n") and type(step) is int else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, default=str)


def _replace(file: Path, text: str) -> None:
    """Writes a file that is whole at any moment."""
    fresh = file.with_name(f"{file.name}.tmp")
    fresh.write_text(text)
    os.replace(fresh, file)


def _lock(path: Path) -> tuple[IO[str] | None, str]:
    """The open file that holds the folder's lock, or who holds it; neither where the file system has no locks."""
    file = open(path, "a+")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no process inherits it that loads data
    except OSError as error:
        file.seek(0)
        holder = file.read() if error.errno in (errno.EACCES, errno.EAGAIN) else ""
        file.close()
        return None, holder
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file, ""


def table(summary: Mapping[str, float]) -> str:
    """A line for each result: its name, its value, its unit; summary.json keeps the values as they are."""
    lines = []
    for name, value in summary.items():
        factor, unit = next((shown for ending, shown in UNITS.items() if name.endswith(ending)), (1, ""))
        number = f"{value * factor:,.0f}" if isinstance(value, int) and factor == 1 else f"{value * factor:,.4g}"
        lines.append(f"  {name.replace('_', ' '):24}{number:>12} {unit}".rstrip())
    return "\n".join(lines)
