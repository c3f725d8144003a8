"""A worker of the campaign: a train script, and the harm that is planned for it."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Action = Callable[..., None]
PHASES = ("local", "boundary", "flight", "checkpoint", "evaluation")  # in which a worker may be killed


def work(module: str, arguments: Sequence[str], harm: dict[str, Any], log: str) -> None:
    """Runs `python -m module arguments`. harm: worker, its name, as the elastic launcher gives it, or RANK.ATTEMPT;
    phase, one of PHASES, "disk" or "nan"; step, after which it happens. log: the file for what the worker writes."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    name = os.environ.get("CO2_WORKER") or f"{os.environ['RANK']}.{os.environ['CO2_ATTEMPT']}"
    if harm.get("worker") == name:
        arm(harm["phase"], harm["step"], Path(f"{log}.harm"))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def arm(phase: str, after: int, trace: Path) -> None:
    """Lets the harm happen in this process, once, in the first `phase` after step `after`. trace: a file that is there
    once it has happened."""
    import torch

    from core.flight import Flight
    from training.run import Run

    step = 0

    def due(*phases: str) -> bool:
        found = phase in phases and step > after and not trace.exists()
        if found:
            trace.write_text(f"{phase} {step}")
        return found

    def die_in(where: str) -> None:
        if due(where):
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(run: Run, closed: bool, *_: Any) -> None:
        nonlocal step
        step = run.step + 1
        if closed:
            die_in("boundary")

    def saves(*_: Any) -> None:
        if due("disk"):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))

    def learns(loss: torch.Tensor, *_: Any) -> None:
        die_in("local")
        if due("nan"):
            loss.register_hook(lambda gradient: gradient * float("nan"))

    wrap(Run, "after_step", stepped)
    wrap(torch.Tensor, "backward", learns)
    wrap(Run, "save", saves)
    wrap(os, "fsync", lambda *_: die_in("checkpoint"))  # the file is whole, but does not have its name yet
    wrap(Run, "sum_tensor", lambda *_: die_in("evaluation"))
    wrap(Flight, "_begin", behind=lambda *_: die_in("flight"))


def wrap(owner: Any, name: str, before: Action = lambda *_: None, behind: Action = lambda *_: None) -> None:
    """From now on owner.name calls `before` and `behind` as well, with its own arguments."""
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = inner(*args, **kwargs)
        behind(*args)
        return result

    setattr(owner, name, outer)
