"""What a check is, and how one is run: whatever it does ends in a line, in a process that may hang or die."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from core.errors import UserError

Part = Literal["correctness", "costs", "loops", "search"]
PARTS: tuple[Part, ...] = get_args(Part)
Said = str | dict[str, Any]


@dataclass(frozen=True)
class Scope:
    """Where the checks run. tiny: sizes for a test of this command. out: the report's folder."""

    device: str
    out: Path
    tiny: bool = False

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def __call__(self, full: int, tiny: int) -> int:
        """A size."""
        return tiny if self.tiny else full


class NotRun(Exception):
    """Why a check was not run."""


@dataclass(frozen=True)
class Check:
    """run: returns what the line says, words or figures by name; raises AssertionError where something is wrong. cuda:
    whether it needs a GPU. limit: seconds, after which it is killed."""

    part: Part
    name: str
    run: Callable[[Scope], Said]
    cuda: bool
    limit: float


CHECKS: dict[str, Check] = {}


def check(part: Part, *, cases: Iterable[str] = (), cuda: bool = False, limit: float = 120.0) -> Callable[[Any], Any]:
    """Makes a check of f(scope), or one of f(scope, case) for each case. Its name is the function's."""

    def add(f: Any) -> Any:
        name = f.__name__.replace("_", " ")
        for case in cases:
            full = f"{name}: {case}"
            CHECKS[full] = Check(part, full, functools.partial(f, case=case), cuda, limit)
        if not cases:
            CHECKS[name] = Check(part, name, f, cuda, limit)
        return f

    return add


def line(part: str, name: str, state: str, says: str, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    """state: ok, failed or not run."""
    return {"part": part, "name": name, "state": state, "says": says, "seconds": round(seconds, 2)} | more


def outcome(one: Check, scope: Scope) -> dict[str, Any]:
    """Runs a check, and makes its line of whatever comes of it."""
    began = time.monotonic()
    more: dict[str, Any] = {}
    try:
        if one.cuda and not scope.cuda:
            raise NotRun("needs a CUDA device")
        said = one.run(scope)
        state, says = "ok", said if isinstance(said, str) else in_words(said)
        more = {"figures": said} if isinstance(said, dict) else {}
    except NotRun as reason:
        state, says = "not run", str(reason)
    except AssertionError as error:
        state, says = "failed", str(error) or traceback.format_exc()
    except Exception as error:
        state, says = "failed", f"{type(error).__name__}: {error}"
        more = {"traceback": traceback.format_exc()}
    return line(one.part, one.name, state, one_line(says), time.monotonic() - began, **more)


def in_words(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )


def one_line(text: str, most: int = 600) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


# -- for checks -------------------------------------------------------------------------------------------------


def sync(scope: Scope) -> None:
    if scope.cuda:
        torch.cuda.synchronize()


@contextlib.contextmanager
def one_rank(scope: Scope) -> Iterator[None]:
    """A process group of this process alone: NCCL's on a GPU, which takes the whole path of many, else gloo's."""
    dist.init_process_group("nccl" if scope.cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Where calls in the block make the host wait for all that is queued, as torch's sync debug mode tells.

    It does not see Event.synchronize(), by which the step that closes a round waits until the GPU has passed the
    boundary before.
    """
    found: list[str] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # torch says once, too, that the mode "does not yet detect all synchronizing operations"
    found += [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "called a synchronizing" in str(w.message)]


def import_checks() -> None:
    """All of them, in the order of the report."""
    for name in ("equal", "many", "hidden", "trained", "costs", "loops"):
        import_module(f"bench.gpu.{name}")


class Worker:
    """Runs checks in a process of its own, which keeps what torch has loaded from check to check."""

    def __init__(self, scope: Scope):
        self.scope = scope
        self._process: Any = None
        self._pipe: Any = None

    def run(self, one: Check, limit: float) -> dict[str, Any]:
        """The check's line. limit: seconds, after which it is killed."""
        if self._process is None or not self._process.is_alive():
            self.close()
            self._start()
        try:
            self._pipe.send(one.name)
            if self._pipe.poll(limit):
                found, spoilt = self._pipe.recv()
                if spoilt:
                    self.close()
                return found
        except (EOFError, OSError):
            self._process.join()
            died = f"the process died with status {self._process.exitcode}"
            self.close()
            return line(one.part, one.name, "failed", died)
        self.close()
        return line(one.part, one.name, "failed", f"still running after {limit:.0f} s", limit, late=True)

    def facts(self) -> dict[str, Any]:
        """What the checks run on."""
        self._start()
        try:
            self._pipe.send("")
            return self._pipe.recv()[0]
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode
            raise UserError(f"the process that runs the checks ends as it begins, with status {status}") from None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, self.scope))
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """Ends the process, and those that it has started."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.join()
        self._process = None


def serve(pipe: Any, scope: Scope) -> None:
    """The process: a name comes, and its line goes, and whether the process is of no use any more."""
    os.setsid()  # with what it starts, a group that can be killed
    import_checks()
    if not scope.cuda:
        torch.set_num_threads(1)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            return
        found = outcome(CHECKS[name], scope) if name else of_machine(scope)
        error = tidy(scope)
        if error and found.get("state") == "ok":
            found |= {"state": "failed", "says": error}
        pipe.send((found, bool(error)))


def tidy(scope: Scope) -> str:
    """Leaves nothing to the next check. Returns why the device no longer answers, as after an illegal address."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        if scope.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:
        return one_line(f"{type(error).__name__}: {error}")
    return ""


def of_machine(scope: Scope) -> dict[str, Any]:
    """The device and the versions."""
    from training.config import version

    name = "cpu"
    if scope.cuda and torch.cuda.is_available():
        free = torch.cuda.get_device_properties(0).total_memory / (1 << 30)
        name = f"{torch.cuda.get_device_name()}, {free:.0f} GiB"
    return {
        "device": name,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "triton": version("triton"),
    }
