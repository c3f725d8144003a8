"""The run folder: the settings (config.json), the measurements, the communication of each round, and the summary."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import importlib.metadata
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from core.baselines.table import REGISTRY, Method
from core.checkpoint.runs import finished, new_attempt
from core.checkpoint.stored import parse_json, regular, write_flushed
from core.compression.lgreco.choices import Allocation
from core.compression.lgreco.reducer import LGreco
from core.errors import UserError
from core.groups import of_all
from core.local_update import LocalUpdateMethod
from core.stats import RoundStats, defer
from core.tau import AdaptiveTau
from training.progress import Stopwatch
from training.recipe import Recipe, flat
from training.tracker import Tracker
from training.workers import rank

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PACKAGES = ("torch", "torchvision", "timm", "numpy", "transformers", "onedl-mmsegmentation")

# Settings that a resumed run may change, because they do not change its numbers.
FREE = {
    "out", "resume", "extend", "dry_run", "device", "timeout", "link_mbit", "trace", "eval_every", "checkpoint_every",
    "light_checkpoints", "log_every", "recompute", "gpu_gb", "loader_workers", "eval_tokens",
    "wikitext2", "eval_samples", "emd_points", "init_from", "tracker",
}  # fmt: skip
LENGTH = {"epochs", "epoch_steps"}  # set the run's length and its learning rate; --extend allows a change


def describe(recipe: Recipe, world_size: int, device: torch.device) -> dict[str, Any]:
    """Returns the content of config.json: the recipe, the command, the commit and the versions."""
    return {
        "recipe": dataclasses.asdict(recipe),
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "command": sys.argv,
        "commit": commit(),
        "versions": {p: v for p in PACKAGES if (v := version(p))},
    }


def settings(recipe: Any) -> dict[str, Any]:
    """Returns the fields of a recipe, or of config.json's recipe, by their command-line names, as JSON values."""
    nested = dataclasses.asdict(recipe) if dataclasses.is_dataclass(recipe) else recipe
    return flat(json.loads(json.dumps(nested, default=str)))


def with_defaults(old: dict[str, Any], kind: type[Recipe]) -> dict[str, Any]:
    """Returns the settings of a file with the defaults of fields that are newer than the file."""
    return settings(kind()) | old


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Returns the changed settings, as "optim.lr: 0.05 -> 0.5", without settings that only one of the two has."""
    return [f"{key}: {old[key]} -> {new[key]}" for key in old if key in new and old[key] != new[key]]


def of_other_methods(method: str) -> set[str]:
    """Returns the groups of settings that have no effect on a run with this method."""
    return {entry.settings.key for entry in REGISTRY.values() if entry.settings and entry.name != method}


def resumed(
    file: Path, config: dict[str, Any], kind: type[Recipe], *, saved: bool = True
) -> tuple[dict[str, Any], str]:
    """Returns the new content of config.json for a run that resumes, or an error message if it cannot resume.

    Without a saved checkpoint, the run begins again, so init_from must stay.
    """
    try:
        old = parse_json(file.read_text())
        config["recipe"]["extend"] = bool(config["recipe"].get("extend") or old["recipe"].get("extend"))  # stays set
        changed = differences(with_defaults(settings(old["recipe"]), kind), settings(config["recipe"]))
        history = [*old.get("history", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = "restore it, or remove it and resume with the settings of this run"
        return {}, f"{file} is damaged ({error!r}): {remedy}"
    free = (FREE if saved else FREE - {"init_from"}) | (LENGTH if config["recipe"]["extend"] else set())
    if not kind.batch_norm and not config["recipe"].get("dropout"):
        free |= {"accumulate"}  # otherwise statistics and masks of other micro-batches change the numbers
    if old["recipe"].get("layout") and config["recipe"].get("layout"):
        free |= {"layout"}  # a run may resume from another layout, but not from a run without one
    unread = of_other_methods(config["recipe"]["method"])
    names = {change: change.partition(":")[0] for change in changed}
    if refused := [c for c in changed if names[c] not in free and names[c].split(".")[0] not in unread]:
        what = ", ".join(refused)
        if {names[change] for change in refused} <= LENGTH:
            return {}, (
                f"{file.parent} is a run of another length ({what}), which its learning rate has followed: resume with "
                "that length, add --extend to stretch the schedule from here on, or choose another --out"
            )
        return {}, f"{file.parent} holds another run ({what}): resume with its settings, or choose another --out"
    line = {key: config[key] for key in ("command", "commit", "world_size")} | {"changed": changed}
    return old | {"recipe": config["recipe"], "history": [*history, line]}, ""


@functools.cache  # takes 10 ms per package
def version(package: str) -> str:
    """Returns the installed version, or "" if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """Returns the commit of this checkout, marked if its code has changes, or "" outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        head = subprocess.run([*git, "describe", "--always"], capture_output=True, text=True, timeout=10)
        but_results = [*git, "diff", "--quiet", "HEAD", "--", ".", ":(exclude)results"]  # measurements write there
        changed = subprocess.run(but_results, capture_output=True, timeout=10).returncode == 1
        return head.stdout.strip() + ("-dirty" if changed else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""


# -- the folder -------------------------------------------------------------------------------------------------------


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

    Args:
        path: The folder.
        rank: This worker's rank. Only rank 0 writes.
        clock: Measures the seconds of training.

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
        refusal = attempt = ""
        if self.writes:
            try:
                refusal = self._take(recipe, world_size, device, resume=recipe.resume)
                attempt = new_attempt(self.checkpoints)
            except UserError as error:
                refusal = str(error)
            except (OSError, ValueError) as error:  # ValueError for a name that no file can have
                reason = getattr(error, "strerror", None) or error
                refusal = f"{self.path} cannot be written ({reason}): choose another --out"
        refusal, self.attempt, self.extends = of_all((refusal, attempt, self.extends))[0]
        if refusal:
            self.close()
            raise UserError(refusal)

    def lead(self, recipe: Recipe, world_size: int, device: torch.device, *, goes_on: bool) -> None:
        """Makes this elastic worker write the folder from now on.

        Args:
            recipe: The run's recipe.
            world_size: Number of workers.
            device: This worker's device.
            goes_on: Whether it replaces a lost worker, which may still hold the lock.
        """
        self.writes = True
        self.attempt = new_attempt(self.checkpoints)
        resume = recipe.resume or goes_on
        if refusal := self._take(recipe, world_size, device, resume=resume, force=goes_on):
            self.close()
            raise UserError(refusal)

    def _take(self, recipe: Recipe, world_size: int, device: torch.device, *, resume: bool, force: bool = False) -> str:
        """Locks the folder, and writes config.json for a new run. Returns an error message, or ""."""
        made_of = describe(recipe, world_size, device)
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (".lock", "config.json", "metrics.jsonl"):
            regular(self.path / name)
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
            self._resumed, refusal = resumed(file, made_of, type(recipe), saved=bool(finished(self.checkpoints)))
            if refusal:
                return refusal
        else:
            _replace(file, _json(made_of))  # replaces the file of a failed start
        self.extends = made_of["recipe"]["extend"]
        if recipe.tracker:
            self._tracker = Tracker(recipe.tracker, self.path, made_of, resume=self._resumed is not None)
        return ""

    def _holds_a_run(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        measured = metrics.exists() and metrics.stat().st_size > 0
        return measured or any(self.checkpoints.glob("step*"))

    def begin(self, step: int, total: int, before: int | None = None) -> None:
        """Continues after `step`: removes later lines of the log, and the summary.

        Args:
            step: Number of steps taken.
            total: Number of steps of the run.
            before: The total that the checkpoint holds, if there is one.

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
            _replace(self.path / "config.json", _json(self._resumed))
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

        Args:
            step: Number of the step.
            scalars: Values by name.
            of_model: `shared` or `own`, for an evaluation.
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
        _replace(self.path / "summary.json", _json(known))
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
        _replace(file, "".join(line for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """Returns the step of a line, or infinity for a line that is incomplete or not ours."""
    try:
        step = parse_json(line)["step"]
        return step if line.endswith("\n") and type(step) is int else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, default=str)


def _replace(file: Path, text: str) -> None:
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


# -- rounds -----------------------------------------------------------------------------------------------------------


@dataclass
class Overlap:
    """The communication of a whole run, added up over rounds, in seconds and bytes."""

    rounds: int = 0
    exposed_seconds: float = 0.0
    allreduce_seconds: float = 0.0
    bytes_sent: float = 0.0

    def add(self, stats: dict[str, float]) -> None:
        self.rounds += 1
        self.exposed_seconds += stats["exposed_seconds"]
        self.allreduce_seconds += stats["allreduce_seconds"]
        self.bytes_sent += stats["bytes_sent"]

    @property
    def hidden_seconds(self) -> float:
        """Time of all-reduces during which the loop did not wait."""
        return max(0.0, self.allreduce_seconds - self.exposed_seconds)

    @property
    def hidden_share(self) -> float:
        """hidden_seconds as a share of the all-reduces' time, or 1 if there was none."""
        return self.hidden_seconds / self.allreduce_seconds if self.allreduce_seconds else 1.0

    @property
    def link_mbit(self) -> float:
        """Rate at which this worker sent during all-reduces, in Mbit/s."""
        return self.bytes_sent * 8e-6 / self.allreduce_seconds if self.allreduce_seconds else 0.0

    def summary(self) -> dict[str, float]:
        names = ("rounds", "exposed_seconds", "hidden_seconds", "allreduce_seconds", "hidden_share", "bytes_sent")
        return {name: getattr(self, name) for name in (*names, "link_mbit")}


class RoundLog:
    """Reads and logs the rounds of a run.

    Attributes:
        overlap: The communication of all rounds that were read so far.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, device: torch.device):
        self.overlap = Overlap()
        self._folder = folder
        self._allocation: Allocation | None = None  # L-GreCo's last decision
        self._log_every = recipe.log_every
        self._on_gpu = device.type == "cuda"
        self._synchronous = False
        self._unread: list[tuple[int, RoundStats]] = []  # rounds whose times a GPU may not have measured yet
        self._unlogged: list[tuple[int, dict[str, Any]]] = []  # scalars that are being copied from a GPU
        self._trace: Trace | None = None
        if recipe.trace and rank() == 0:
            first = 6 if recipe.co2.tau == "auto" else 2  # by then tau has been chosen
            self._trace = Trace(folder.path / "trace.json", cuda=self._on_gpu, first=first)

    def close_round(self, step: int, method: Method) -> None:
        """Call it when a round has closed. On a GPU it reads the round before, so that the host does not wait."""
        self._synchronous = method.tau == 1
        self._unread.append((step, method.stats))
        self.read(leave=int(self._on_gpu))
        pacing = method.sync_schedule if isinstance(method, LocalUpdateMethod) else None
        if isinstance(pacing, AdaptiveTau) and (decision := pacing.decision):
            sent = f"{method.stats.bytes_sent / 1e6:.3g} MB a round, {decision.exposed_share:.0%} of the time exposed"
            new = f"tau {decision.old} -> {decision.new}, compression {decision.compression}"
            self._folder.note(step, "tau", f"{new}: {decision.reason}; {sent}")
        self._note_allocation(step, method)
        if self._trace and self._trace.go_on():
            self._folder.note(step, "trace", f"trace in {self._trace.path}")

    def log(self, step: int, scalars: Mapping[str, float | Tensor]) -> dict[str, float] | None:
        """Logs scalars, on a GPU the scalars of the last call. Returns the scalars that it logged last, or None."""
        self._unlogged.append((step, defer(scalars)))
        return self._log(leave=int(self._on_gpu))

    def read(self, leave: int = 0) -> None:
        """Adds up and logs all rounds but the newest `leave`, and with `leave` 0 all scalars.

        If every step is a round, it logs every log_every-th round only.
        """
        while len(self._unread) > leave:
            step, stats = self._unread.pop(0)
            values = stats.as_dict()
            self.overlap.add(values)
            if not self._synchronous or self.overlap.rounds % self._log_every == 0:
                self._folder.log(step, {f"round/{name}": value for name, value in values.items()})
        if not leave:
            self._log(leave)

    def _log(self, leave: int) -> dict[str, float] | None:
        values = None
        while len(self._unlogged) > leave:
            step, scalars = self._unlogged.pop(0)
            values = {name: float(value) for name, value in scalars.items()}
            self._folder.log(step, values)
        return values

    def finish(self, step: int) -> None:
        """Reads the remaining rounds, and ends the trace."""
        self.read()
        if self._trace and self._trace.go_on(last=True):
            self._folder.note(step, "trace", f"trace in {self._trace.path}")
        elif self._trace and not self._trace.wrote:
            self._folder.note(step, "trace", f"no trace, which begins when {self._trace.first} rounds have closed")

    def _note_allocation(self, step: int, method: Method) -> None:
        """Logs L-GreCo's newest decision once."""
        reducer = (
            method.reducer if isinstance(method, LocalUpdateMethod) else getattr(method.compression, "reducer", None)
        )
        found = reducer.allocation if isinstance(reducer, LGreco) else None
        if found is None or found is self._allocation:
            return
        self._allocation = found
        self._folder.note(step, "lgreco", f"L-GreCo: {found.reason}")
        if self._folder.writes:
            self._folder.writer.add_text("lgreco/layers", found.table(), step)
        numbers = {"bytes": sum(found.bytes), "uniform_bytes": found.uniform_bytes}
        self._folder.log(step, {f"lgreco/{name}": value for name, value in numbers.items()})


class Trace:
    """A torch.profiler trace of some rounds, for https://ui.perfetto.dev.

    gloo's all-reduce has its own thread (`gloo:all_reduce`), and NCCL's has its own stream.

    Args:
        path: The file to write.
        cuda: Whether to trace a GPU.
        first: Number of rounds before the trace, 1 or more.
        rounds: Number of rounds in the trace.
    """

    def __init__(self, path: Path, *, cuda: bool = False, first: int = 2, rounds: int = 2):
        self.path, self.first = path, first
        self.wrote = False
        self._profile: Any = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda,
            schedule=schedule(wait=first - 1, warmup=1, active=rounds, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def _write(self, finished: Any) -> None:
        finished.export_chrome_trace(str(self.path))
        self.wrote = True

    def go_on(self, *, last: bool = False) -> bool:
        """Call it when a round has closed, and at the end with `last`. Returns True when it has written the trace."""
        before = self.wrote
        (self._profile.stop if last else self._profile.step)()
        return self.wrote and not before
