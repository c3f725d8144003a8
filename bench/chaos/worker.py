"""A worker of the campaign: a train script, and the harm that is planned for it."""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from training.run import Run

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
    """Lets the harm happen in this process, once, in the first `phase` after step `after`; see Harm."""
    import torch

    from core.flight import Flight
    from training.run import Run

    harm = Harm(phase, after, trace)
    wrap(Run, "after_step", harm.stepped)
    wrap(torch.Tensor, "backward", harm.learns)
    wrap(Run, "save", harm.saves)
    wrap(os, "fsync", lambda *_: harm.die_in("checkpoint"))  # whole, but without its name
    wrap(Run, "sum_tensor", lambda *_: harm.die_in("evaluation"))
    wrap(Flight, "launch", behind=harm.launched)
    wrap(Flight, "_begin", behind=harm.in_flight)


def wrap(owner: Any, name: str, before: Action = lambda *_: None, behind: Action = lambda *_: None) -> None:
    """From now on owner.name calls `before` and `behind` as well, with its own arguments."""
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        before(*args)
        result = inner(*args, **kwargs)
        behind(*args)
        return result

    setattr(owner, name, outer)


class Harm:
    """What is to happen, and where this worker is. trace: a file that then tells `step`, how many steps this worker had
    taken, and `sent`, up to which of them it had sent what it learned."""

    def __init__(self, phase: str, after: int, trace: Path):
        self.phase, self.after, self.trace = phase, after, trace
        self.step = self.sent = 0

    def due(self, phase: str) -> bool:
        return self.phase == phase and self.step > self.after

    def tell(self) -> None:
        self.trace.write_text(json.dumps({"step": self.step, "sent": self.sent}))

    def die_in(self, phase: str) -> None:
        if self.due(phase):
            self.tell()
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self, run: Run, closed: bool, *_: Any) -> None:
        self.step = run.step + 1
        if closed:
            self.die_in("boundary")

    def launched(self, *_: Any) -> None:
        self.sent = self.step + 1

    def in_flight(self, *_: Any) -> None:
        if self.due("flight"):
            self.step += 1  # which after_step would count
            self.die_in("flight")

    def saves(self, *_: Any) -> None:
        if self.due("disk") and not self.trace.exists():
            self.tell()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))

    def learns(self, loss: torch.Tensor, *_: Any) -> None:
        self.die_in("local")
        if self.due("nan") and not self.trace.exists():
            self.tell()
            loss.register_hook(lambda gradient: gradient * float("nan"))
