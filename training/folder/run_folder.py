"""The run folder: its lock, config.json, the measurements and the summary."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from core.checkpoint.runs import finished, new_attempt
from core.checkpoint.stored import parse_json, regular, write_flushed
from core.errors import UserError
from core.groups import of_all
from training.counters import Stopwatch
from training.folder.settings import describe, resumed
from training.folder.tracker import Tracker
from training.recipe import Recipe, flat
from training.start.errors import explained

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# how a result's name ends -> (factor, unit) for the screen
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
    """The run folder. Rank 0 writes config.json, metrics.jsonl, TensorBoard's events and summary.json.

    Attributes:
        attempt: The name of this start, see core/checkpoint/runs.py. The workers of one start share it.
        extends: Whether the length of the run may change when it resumes.
        writer: TensorBoard's writer, on rank 0.
    """

    writer: SummaryWriter

    def __init__(self, path: Path, rank: int, clock: Stopwatch):
        self.path, self.clock = path.expanduser(), clock
        self.checkpoints = self.path / "checkpoints"
        self.attempt = ""
        self.extends = True
        self.writes = rank == 0
        self._lock: IO[str] | None = None
        self._resumed: dict[str, Any] | None = None  # new content of config.json, if the run resumes
        self._metrics: IO[str] | None = None
        self._tracker: Tracker | None = None

    def open(self, recipe: Recipe, world_size: int, device: torch.device) -> None:
        """Locks the folder for this run.

        Raises:
            UserError: On all workers, if the folder holds another run, or a run in progress.
        """
        refusal = ""
        if self.writes:
            try:
                with explained(f"{self.path} cannot be written", "choose another --out"):
                    self._take(recipe, world_size, device, resume=recipe.resume)
                    self.attempt = new_attempt(self.checkpoints)
            except UserError as error:
                refusal = str(error)
        refusal, self.attempt, self.extends = of_all((refusal, self.attempt, self.extends))[0]
        if refusal:
            self.close()
            raise UserError(refusal)

    def lead(self, recipe: Recipe, world_size: int, device: torch.device, *, goes_on: bool) -> None:
        """Makes this elastic worker write the folder from now on.

        If it `goes_on`, it replaces a lost worker, which may still hold the lock.
        """
        self.writes = True
        self.attempt = new_attempt(self.checkpoints)
        resume = recipe.resume or goes_on
        try:
            self._take(recipe, world_size, device, resume=resume, force=goes_on)
        except UserError:
            self.close()
            raise

    def _take(
        self, recipe: Recipe, world_size: int, device: torch.device, *, resume: bool, force: bool = False
    ) -> None:
        """Locks the folder, and writes config.json for a new run."""
        made_of = describe(recipe, world_size, device)
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (".lock", "config.json", "metrics.jsonl"):
            regular(self.path / name)
        self._lock, holder = _lock(self.path / ".lock")
        if holder and not force:
            raise UserError(
                f"{self.path} is in use by {holder}: wait for its end, choose another --out or, where that machine is "
                "gone, remove the folder's .lock"
            )
        file = self.path / "config.json"
        if self._holds_a_run() and not resume:
            raise UserError(f"{self.path} holds a run: add --resume to continue it, or choose another --out")
        if self._holds_a_run() and file.exists():
            self._resumed = resumed(file, made_of, type(recipe), saved=bool(finished(self.checkpoints)))
        else:
            write_whole(file, _json(made_of))  # replaces the file of a failed start
        self.extends = made_of["recipe"]["extend"]
        if recipe.tracker:
            self._tracker = Tracker(recipe.tracker, self.path, made_of, resume=self._resumed is not None)

    def _holds_a_run(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        measured = metrics.exists() and metrics.stat().st_size > 0
        return measured or any(self.checkpoints.glob("step*"))

    def begin(self, step: int, total: int, before: int | None = None) -> None:
        """Continues after `step` of `total` steps: removes later lines of the log, and the summary.

        `before` is the total that the checkpoint holds, if there is one.

        Raises:
            UserError: If `total` is less than `step`, or another one than before.
        """
        if step > total:
            remedy = "give more --epochs with --extend, or choose another --out"
            raise UserError(f"{self.path} has done {step} steps, and a run of this length has {total}: {remedy}")
        if before not in (None, total) and not self.extends:
            raise UserError(
                f"{self.path} is a run of {before} steps, which its learning rate has followed, and with these data it "
                f"has {total}: restore the data, add --extend to stretch the schedule from here on, or choose another "
                "--out"
            )
        if not self.writes:
            return
        from torch.utils.tensorboard import SummaryWriter  # imported here, because only rank 0 needs it

        (self.path / "summary.json").unlink(missing_ok=True)
        if self._resumed is not None:
            self._resumed["history"][-1]["step"] = step
            write_whole(self.path / "config.json", _json(self._resumed))
        _cut(self.path / "metrics.jsonl", step)
        self.writer = SummaryWriter(str(self.path), purge_step=step + 1 if self._resumed else None)
        self._metrics = open(self.path / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115

    def close(self) -> None:
        """Writes what is still in memory, and releases the folder."""
        if self._metrics is not None:
            self.writer.close()
            self._metrics.close()
        if self._tracker is not None:
            self._tracker.close(complete=(self.path / "summary.json").exists())
        if self._lock is not None:
            self._lock.close()

    def log(self, step: int, scalars: Mapping[str, float | Tensor], of_model: str = "") -> None:
        """Writes one line of metrics.jsonl, with null for numbers that are not finite, and scalars to the trackers.

        For an evaluation, of_model is `shared` or `own`.
        """
        if not self.writes:
            return
        values = {name: float(value) for name, value in scalars.items()}
        self._write_line(step, values | ({"of_model": of_model} if of_model else {}))
        shown = {f"own/{name}" if of_model == "own" else name: value for name, value in values.items()}
        for name, value in shown.items():
            self.writer.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(step, shown)

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
        """Writes and prints summary.json, with null for non-finite numbers. TensorBoard gets recipe and summary."""
        if not self.writes:
            return
        known = {name: value if math.isfinite(value) else None for name, value in summary.items()}
        write_whole(self.path / "summary.json", _json(known))
        known_types = (bool, int, float, str)  # types that TensorBoard supports
        settings = {k: v if isinstance(v, known_types) else str(v) for k, v in flat(dataclasses.asdict(recipe)).items()}
        results = {f"summary/{k}": v for k, v in summary.items()}
        self.writer.add_hparams(settings, results, run_name=".")
        if self._tracker is not None:
            self._tracker.log(int(summary.get("steps", 0)), results)
        print(f"{recipe.name} {recipe.method}: {self.path}\n{table(summary)}", flush=True)
        if unknown := [name for name, value in known.items() if value is None]:
            print(f"warning: no finite number, null in summary.json: {', '.join(unknown)}", file=sys.stderr, flush=True)


def _cut(file: Path, step: int) -> None:
    """Removes the lines after `step`, and a last line that is incomplete because its writer was killed."""
    if file.exists():
        lines = file.read_text(errors="replace").splitlines(keepends=True)
        write_whole(file, "".join(line for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """Returns the step of a line, or infinity for a line that is incomplete or not ours."""
    try:
        step = parse_json(line)["step"]
        return step if line.endswith("\n") and type(step) is int else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, default=str)


def write_whole(file: Path, text: str) -> None:
    """Writes a file such that it is complete at any moment, also after a power cut."""
    fresh = file.with_name(f"{file.name}.tmp")
    write_flushed(fresh, text.encode())
    os.replace(fresh, file)


def _lock(path: Path) -> tuple[IO[str] | None, str]:
    """Returns the open file with the folder's lock, or its holder, or neither if the file system has no locks.

    In the last case it prints a warning.
    """
    file = open(path, "a+")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # loading processes do not inherit this lock, unlike flock's
    except OSError as error:
        file.seek(0)
        taken = error.errno in (errno.EACCES, errno.EAGAIN)
        holder = (file.read() or "another process") if taken else ""  # which may not have written its name yet
        file.close()
        if not taken:
            print(f"warning: {path} cannot be locked ({error.strerror}): start no second run there", file=sys.stderr)
        return None, holder
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file, ""


def table(summary: Mapping[str, float]) -> str:
    """Returns a line for each result, with its name, value and unit. summary.json keeps the exact values."""
    lines = []
    for name, value in summary.items():
        factor, unit = next((shown for ending, shown in UNITS.items() if name.endswith(ending)), (1, ""))
        number = f"{value * factor:,.0f}" if isinstance(value, int) and factor == 1 else f"{value * factor:,.4g}"
        lines.append(f"  {name.replace('_', ' '):24}{number:>12} {unit}".rstrip())
    return "\n".join(lines)
