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
from typing import Any

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
    """Lets the harm happen in this process, once, in the first `phase` after step `after`; `trace` then tells where:
    `step`, how many steps this worker had taken, and `sent`, up to which of them it had sent what it learned."""
    import torch

    from core.flight import Flight
    from training.run import Run

    now = {"step": 0, "sent": 0}

    def tell() -> None:
        trace.write_text(json.dumps({"step": now["step"], "sent": now["sent"]}))

    def die() -> None:
        tell()
        os.kill(os.getpid(), signal.SIGKILL)

    def wrap(owner: Any, name: str, before: Callable[..., None], behind: Callable[..., None] = lambda *_: None) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            before(*args)
            result = inner(*args, **kwargs)
            behind(*args)
            return result

        setattr(owner, name, outer)

    def due() -> bool:
        return now["step"] > after

    def stepped(run: Run, closed: bool, *_: Any) -> None:
        now["step"] = run.step + 1
        if due() and phase == "boundary" and closed:
            die()

    def in_flight(*_: Any) -> None:
        if due() and phase == "flight":
            now["step"] += 1  # which after_step would count
            die()

    def saves(*_: Any) -> None:
        if due() and phase == "disk" and not trace.exists():
            tell()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))

    def learns(loss: torch.Tensor, *_: Any) -> None:
        if due() and phase == "local":
            die()
        if due() and phase == "nan" and not trace.exists():
            tell()
            loss.register_hook(lambda gradient: gradient * float("nan"))

    wrap(Run, "after_step", stepped)
    wrap(torch.Tensor, "backward", learns)
    wrap(Run, "save", saves)
    wrap(os, "fsync", lambda *_: die() if phase == "checkpoint" and due() else None)  # whole, but without its name
    wrap(Run, "sum_tensor", lambda *_: die() if phase == "evaluation" and due() else None)
    wrap(Flight, "launch", lambda *_: None, lambda *_: now.update(sent=now["step"] + 1))
    wrap(Flight, "_begin", lambda *_: None, in_flight)
