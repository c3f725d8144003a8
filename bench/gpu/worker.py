"""The process in which checks run, one after the other: it may hang or die, and another takes its place."""

from __future__ import annotations

import multiprocessing
import os
import signal
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from bench.gpu.checks import CHECKS, Check, Scope, line, one_line, outcome
from core.errors import UserError


def import_checks() -> None:
    """All of them, in the order of the report."""
    for name in ("equal", "many", "hidden", "memory", "trained", "costs", "loops", "searched"):
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
