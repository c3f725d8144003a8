"""A train script of a soak, whose worker writes its rounds and harms itself: see bench.chaos.soak."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench.chaos.crew import wrap, write_rounds
from core.testing.link import ThrottledLink

ORDERS = ("nan", "slow disk", "clock", "slow link", "link down")  # what a worker does to itself


def main() -> None:
    """Runs `python -m MODULE ARGUMENTS`, for the command line FOLDER RUN MODULE ARGUMENTS."""
    folder, run, module, *arguments = sys.argv[1:]
    name = os.environ["CO2_WORKER"]
    partial = Path(folder, f".pid{name}")
    partial.write_text(str(os.getpid()))
    partial.rename(Path(folder, f"pid{name.partition('.')[0]}"))

    write_rounds(Path(folder), run, name)
    threading.Thread(target=obey, args=(Path(folder, f"order{os.getpid()}"),), daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def obey(order: Path) -> None:
    """Waits for orders in this file."""
    slow_until = link_until = shift = 0.0
    poisoned = link_down = False
    clock = time.time

    def sync(*_: Any) -> None:
        time.sleep(3.0 if time.monotonic() < slow_until else 0.0)

    def poison(loss: torch.Tensor, *_: Any) -> None:
        nonlocal poisoned
        if poisoned:
            poisoned = False
            loss.register_hook(lambda gradient: gradient * float("nan"))

    def reserve(link: ThrottledLink, nbytes: float) -> None:
        now = time.perf_counter()
        if now < link_until:  # a tenth of the rate, or nothing until the link is up again
            link._free_at = link_until if link_down else max(link._free_at, now) + 9 * nbytes / link.bytes_per_second

    wrap(os, "fsync", sync)
    wrap(ThrottledLink, "reserve", reserve)
    wrap(torch.Tensor, "backward", poison)
    time.time = lambda: clock() + shift  # pyright: ignore[reportAttributeAccessIssue]
    while True:
        time.sleep(0.2)
        if not order.exists():
            continue
        what = order.read_text()
        order.unlink()
        if what == "nan":
            poisoned = True
        elif what == "slow disk":
            slow_until = time.monotonic() + 20
        elif what == "clock":
            shift += 3600
        else:
            link_until, link_down = time.perf_counter() + 8, what == "link down"


if __name__ == "__main__":
    main()
