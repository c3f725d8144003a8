"""Elastic runs under all faults at once, and whether they stay right: python -m bench.chaos.soak [--minutes 120] ...

Random times, victims and faults follow from the seed. A worker is killed, or two are. A worker is stopped for some
seconds, or for longer than the timeout. A gradient is NaN, a disk is slow, a clock jumps, the emulated link is slow or
down. Dead workers come back. The whole run is stopped and resumed. A full disk ends a run, and bench.chaos starts it
again. The last worker survives the first half of the time, so that its memory can be watched.

Each worker writes a checksum of the outer iterate of every round. All checksums of a round must be equal. The report
has these rounds, the longest pause, and the memory and open files of the workers that lived longest.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.chaos.__main__ import PRELOAD
from bench.chaos.crew import Crew, work, wrap
from bench.report import header, read_options, save, table
from core.errors import UserError
from training.script import launch

FAULTS = ("kill", "two kills", "stop", "long stop", "nan", "slow disk", "clock", "slow link", "link down", "resume")
RUNS = {
    "vision": ("vision.train", "digits_small"),
    "language": ("language.train", "gpt2_pydoc_small"),
}
TIMEOUT = 20  # seconds of silence after which a worker is left out
STOPS = {"stop": 5.0, "long stop": TIMEOUT + 10.0}  # seconds


@dataclass(frozen=True)
class Soak:
    """How long, and with how many workers."""

    minutes: float = 120.0
    workers: int = 4
    task: Literal["vision", "language"] = "vision"
    every: float = 20.0
    """Mean seconds between two faults."""
    link_mbit: float = 100.0
    """Rate of the emulated link in Mbit/s."""
    run: str = ""
    """More options of the train script, for example "--co2.merge keep_local"."""
    faults: tuple[str, ...] = FAULTS
    seed: int = 0
    out: Path = Path("results")

    def check(self) -> None:
        if not 2 <= self.workers <= 64:
            raise UserError(f"workers={self.workers}: give 2 to 64")
        if not min(self.minutes, self.every, self.link_mbit) > 0:
            raise UserError(
                f"minutes={self.minutes:g}, every={self.every:g}, link_mbit={self.link_mbit:g}: give numbers above 0"
            )
        if unknown := {*self.faults} - {*FAULTS} or (not self.faults and {"none"}):
            raise UserError(f"faults={sorted(unknown)[0]}: give some of {', '.join(FAULTS)}")


def watched(module: str, arguments: tuple[str, ...], folder: str, run: int) -> None:
    """Runs a worker that writes its rounds, and does to itself what its order file says."""
    name = os.environ["CO2_WORKER"]
    threading.Thread(target=obey, args=(Path(folder, f"order{os.getpid()}"),), daemon=True).start()
    from core.local_update import LocalUpdateMethod

    def closed(method: LocalUpdateMethod, *_: Any) -> None:
        state = method._state["outer_iterate"]
        digest = hashlib.sha1(b"".join(flat.detach().cpu().numpy().tobytes() for flat in state)).hexdigest()
        with open(Path(folder, f"rounds{run}.{name}"), "a") as file:
            file.write(f"{run} {method.rounds} {digest} {time.monotonic()}\n")

    wrap(LocalUpdateMethod, "_boundary", behind=closed)
    work(module, arguments, {}, str(Path(folder, "log")))


def obey(order: Path) -> None:
    """Waits for orders: nan, slow disk, clock, slow link or link down."""
    import torch

    from core.testing.link import ThrottledLink

    slow_until, shift, poisoned = 0.0, 0.0, False
    link_until, link_down = 0.0, False
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
        elif "link" in what:
            link_until, link_down = time.perf_counter() + 8, what == "link down"


class Weather:
    """Causes faults at random times. Called again and again by the launcher's loop."""

    def __init__(self, asked: Soak, folder: Path):
        self.asked, self.folder, self.rng = asked, folder, random.Random(asked.seed)
        self.began, self.crew = time.monotonic(), None
        self.next, self.continues = self.began + 30.0, list[tuple[float, int]]()
        self.done: collections.Counter[str] = collections.Counter()
        self.samples: dict[int, list[tuple[float, int, int]]] = {}  # by process: time, KiB of memory, open files
        self.sampled = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began > 60 * self.asked.minutes

    def __call__(self) -> None:
        now = time.monotonic()
        for when, pid in [pair for pair in self.continues if pair[0] < now]:
            self.continues.remove((when, pid))
            tell(pid, signal.SIGCONT)
        if self.crew is None:
            return
        if now - self.sampled > 10:
            self.sampled = now
            self.sample(now)
        if self.over:
            if not self.crew.signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            return
        if now > self.next:
            self.next = now + self.rng.expovariate(1 / self.asked.every)
            self.strike(now)

    def strike(self, now: float) -> None:
        processes = [p.process.pid for p in self.crew.processes.values() if p.poll() is None]
        fault = self.rng.choice(self.asked.faults)
        spared = now - self.began < 30 * self.asked.minutes and ("kill" in fault or fault in ("long stop", "resume"))
        victims = self.rng.sample(range(self.asked.workers - spared), 2)[: 2 if fault == "two kills" else 1]
        if len(processes) < self.asked.workers or self.continues or (spared and fault == "resume"):
            return  # a fault at a time, except for two kills
        self.done[fault] += 1
        if fault == "resume":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        for victim in victims:
            pid = processes[victim]
            if "kill" in fault:
                tell(pid, signal.SIGKILL)
            elif fault in STOPS:
                tell(pid, signal.SIGSTOP)
                self.continues.append((now + STOPS[fault], pid))
            else:
                partial = self.folder / f".order{pid}"
                partial.write_text(fault)
                partial.rename(self.folder / f"order{pid}")

    def sample(self, now: float) -> None:
        for process in self.crew.processes.values():
            pid = process.process.pid
            try:
                memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
                files = len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
            self.samples.setdefault(pid, []).append((now, memory, files))


def tell(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def judged(folder: Path) -> dict[str, Any]:
    """Counts rounds, rounds with different outer iterates, and the longest pause between two rounds."""
    digests: dict[tuple[str, int], set[str]] = {}  # by run, which may be stopped and resumed, and round
    times: dict[tuple[str, int], float] = {}
    for file in folder.glob("rounds*"):
        for line in file.read_text().splitlines():
            run, number, digest, when = line.split()
            key = run, int(number)
            digests.setdefault(key, set()).add(digest)
            times[key] = max(times.get(key, 0.0), float(when))
    ended = sorted((run, when) for (run, _), when in times.items())
    pauses = [b - a for (one, a), (other, b) in zip(ended, ended[1:], strict=False) if one == other]
    different = sorted(f"{run}.{number}" for (run, number), found in digests.items() if len(found) > 1)
    return {"rounds": len(digests), "different_rounds": different, "longest_pause_seconds": max(pauses, default=0.0)}


def main() -> None:
    asked = read_options(Soak, "bench.chaos.soak", description=__doc__)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "language.train"])
    asked.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak"))
    module, recipe = RUNS[asked.task]
    options = ("--device", "cpu", "--elastic", "--timeout", str(TIMEOUT), "--epochs", "100000", "--log_every", "10")
    options += ("--eval_every", "50", "--checkpoint_every", "50", "--out", str(folder / "run"))
    options += ("--link_mbit", str(asked.link_mbit), *shlex.split(asked.run))
    weather = Weather(asked, folder)
    late, status, runs = 60 * asked.minutes + 300, 128 + signal.SIGTERM, 0
    while status == 128 + signal.SIGTERM and not weather.over:
        resume = ("--resume",) if runs else ()
        target = (module, (recipe, *options, *resume), str(folder), runs := runs + 1)
        crew = weather.crew = Crew(context, watched, target, asked.workers, 1 << 20, late=late, watch=weather)
        status = crew.run()
    longest = sorted(weather.samples.values(), key=lambda seen: seen[0][0] - seen[-1][0])[:4]
    lived = [
        {
            "seconds": s[-1][0] - s[0][0],
            "memory_mib": [s[(len(s) - 1) * i // 8][1] // 1024 for i in range(9)],
            "files": [s[(len(s) - 1) * i // 8][2] for i in range(9)],
        }
        for s in longest
    ]
    row = {"task": asked.task, "workers": asked.workers, "minutes": (time.monotonic() - weather.began) / 60}
    row |= {"status": status, "hung": crew.timed_out, "faults": dict(weather.done)} | judged(folder)
    result = header("bench.chaos.soak", asked) | row | {"longest_lived": lived}
    if failed := row["different_rounds"] or row["hung"] or status != 128 + signal.SIGTERM:
        result["log"] = (folder / "log").read_text(errors="replace").splitlines()[-40:]
    save(asked.out, f"soak_{asked.task}", result)
    print(table(("figure", "value"), [[name, str(value)] for name, value in (row | {"longest_lived": lived}).items()]))
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    launch(main)
