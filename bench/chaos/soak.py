"""Elastic runs under all faults at once, and whether they stay right: python -m bench.chaos.soak [--minutes 120] ...

Random times, victims and faults follow from the seed. A worker is killed, or two are. A whole machine is lost, with its
launcher. A worker is stopped for some seconds, or for longer than the timeout. A gradient is NaN, a disk is slow, a
clock jumps, the emulated link is slow or down. Dead workers and machines come back. The whole run is stopped and
resumed. A full disk ends a run, and bench.chaos starts it again. The last worker survives the first half of the time,
so that its memory can be watched.

Each worker writes a checksum of the outer iterate of every round. All checksums of a round must be equal. The report
has these rounds, the longest pause, and the memory and open files of the workers that lived longest. It is written to
soak_TASK.json. The exit status is 0 if there were rounds, none of them differed, no worker printed a traceback, and all
launchers ended with the status of a stopped run, 143.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.chaos.worker import ORDERS
from bench.cluster.etcd import LocalEtcd, program
from bench.report import header, read_options, save, table
from core.errors import UserError
from training.script import launch

FAULTS = ("kill", "two kills", "machine", "stop", "long stop", "resume", *ORDERS)
DEADLY = ("kill", "two kills", "machine", "long stop", "resume")
RUNS = {
    "vision": ("vision.train", "digits_small"),
    "language": ("language.train", "gpt2_pydoc_small"),
}
TIMEOUT = 20  # seconds of silence after which a worker is left out
STOPS = {"stop": 5.0, "long stop": TIMEOUT + 10.0}  # seconds
STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Soak:
    """How long, and with how many workers."""

    minutes: float = 120.0
    workers: int = 4
    machines: int = 1
    """Launchers, which share the workers evenly. More than one need etcd, and only then are machines lost."""
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
        if self.machines < 1 or self.workers % self.machines:
            raise UserError(f"machines={self.machines}: give a number that divides {self.workers} workers")
        if self.machines > 1 and program() is None:
            raise UserError(f"machines={self.machines} need etcd: apt-get install etcd-server, or give --machines 1")
        if not min(self.minutes, self.every, self.link_mbit) > 0:
            raise UserError(
                f"minutes={self.minutes:g}, every={self.every:g}, link_mbit={self.link_mbit:g}: give numbers above 0"
            )
        if unknown := {*self.faults} - {*FAULTS} or (not self.faults and {"none"}):
            raise UserError(f"faults={sorted(unknown)[0]}: give some of {', '.join(FAULTS)}")


class Weather:
    """Machines, their workers, and the faults that happen to them.

    Args:
        asked: The options.
        folder: A folder for the runs, their logs and checksums.
        etcd: The store of several machines, if any.
    """

    def __init__(self, asked: Soak, folder: Path, etcd: LocalEtcd | None):
        self.asked, self.folder, self.etcd, self.rng = asked, folder, etcd, random.Random(asked.seed)
        self.began = time.monotonic()
        self.next, self.sampled = self.began + 30.0, 0.0
        self.later: list[tuple[float, int, int]] = []  # a signal for a process at a time
        self.runs, self.stopping = 0, False
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.back: dict[int, float] = {}  # lost machines, and when they come back
        self.done: collections.Counter[str] = collections.Counter()
        self.samples: dict[int, list[tuple[float, int, int]]] = {}  # by process: time, KiB of memory, open files

    @property
    def over(self) -> bool:
        return time.monotonic() - self.began > 60 * self.asked.minutes

    @property
    def each(self) -> int:
        """Number of workers of a machine."""
        return self.asked.workers // self.asked.machines

    def start(self, machine: int) -> subprocess.Popen[bytes]:
        """Starts a machine's launcher, in a process group of its own."""
        module, recipe = RUNS[self.asked.task]
        options = [recipe, "--device", "cpu", "--elastic", "--timeout", str(TIMEOUT), "--epochs", "100000"]
        options += ["--log_every", "10", "--eval_every", "50", "--checkpoint_every", "50"]
        options += ["--link_mbit", str(self.asked.link_mbit), "--out", str(self.folder / "run")]
        options += [*shlex.split(self.asked.run), *(["--resume"] if self.runs > 1 else [])]
        where = ["--nproc-per-node", str(self.each), "--max-restarts", "1000000"]
        if self.etcd:
            where += ["--nnodes", str(self.asked.machines), "--node-rank", str(machine)]
            where += ["--store", f"{self.etcd.url}/run{self.runs}"]
        command = [sys.executable, "-m", "training.launch", *where, "-m", "bench.chaos.worker", str(self.folder)]
        with open(self.folder / "log", "a") as log:
            return subprocess.Popen(
                [*command, str(self.runs), module, *options], stdout=log, stderr=log, start_new_session=True
            )

    def soak(self) -> int:
        """Starts runs until the time is over. Returns the first exit status of a launcher that was not stopped."""
        late = self.began + 60 * self.asked.minutes + 300
        while not self.over:
            self.runs, self.stopping = self.runs + 1, False
            self.launchers = [self.start(machine) for machine in range(self.asked.machines)]
            while any(one.poll() is None for one in self.launchers) or self.back:
                time.sleep(0.05)
                self.look(time.monotonic())
                if time.monotonic() > late:
                    return -1
            if failed := [one.returncode for one in self.launchers if one.returncode != STOPPED]:
                return failed[0]
        return STOPPED

    def end(self) -> None:
        """Kills what is left."""
        for launcher in self.launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)

    def look(self, now: float) -> None:
        """Causes the fault that is due, and ends faults whose time is over."""
        for due in [entry for entry in self.later if entry[0] < now]:
            self.later.remove(due)
            tell(*due[1:])
        for machine in [one for one, when in self.back.items() if when < now]:
            del self.back[machine]
            self.launchers[machine] = self.start(machine)
        if now - self.sampled > 10:
            self.sampled = now
            self.sample(now)
        if self.over and not self.stopping and not self.back:
            self.stop()
        elif now > self.next and not self.stopping:
            self.next = now + self.rng.expovariate(1 / self.asked.every)
            self.strike(now)

    def stop(self) -> None:
        self.stopping = True
        for launcher in self.launchers:
            tell(launcher.pid, signal.SIGTERM)

    def workers(self) -> list[int]:
        """Returns the processes of the workers that live, in the order of their places."""
        files = [self.folder / f"pid{place}" for place in range(self.asked.workers)]
        pids = [int(file.read_text()) for file in files if file.exists()]
        return [pid for pid in pids if Path(f"/proc/{pid}/statm").exists() and Path(f"/proc/{pid}/cmdline").read_text()]

    def strike(self, now: float) -> None:
        """Causes a fault, unless the last one is not over. Two kills and a machine's loss are one fault each."""
        workers, n = self.workers(), self.asked.workers
        fault = self.rng.choice(self.asked.faults)
        spared = now - self.began < 30 * self.asked.minutes and fault in DEADLY
        victims = self.rng.sample(range(n - spared), min(2, n - spared))[: 2 if fault == "two kills" else 1]
        machine = victims[0] // self.each
        if len(workers) < n or self.later or self.back or (spared and fault == "resume"):
            return
        if fault == "two kills" and len(victims) < 2:
            return
        if fault == "machine" and (self.etcd is None or (spared and machine == self.asked.machines - 1)):
            return
        self.done[fault] += 1
        if fault == "resume":
            self.stop()
        elif fault == "machine":
            os.killpg(self.launchers[machine].pid, signal.SIGKILL)
            self.launchers[machine].wait()
            self.back[machine] = now + 10
        for victim in victims if fault not in ("resume", "machine") else []:
            pid = workers[victim]
            if "kill" in fault:
                tell(pid, signal.SIGKILL)
            elif fault in STOPS:
                tell(pid, signal.SIGSTOP)
                self.later.append((now + STOPS[fault], pid, signal.SIGCONT))
            else:
                partial = self.folder / f".order{pid}"
                partial.write_text(fault)
                partial.rename(self.folder / f"order{pid}")

    def sample(self, now: float) -> None:
        for pid in self.workers():
            with contextlib.suppress(OSError):
                memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024
                files = len(os.listdir(f"/proc/{pid}/fd"))
                self.samples.setdefault(pid, []).append((now, memory, files))

    def lived(self) -> list[dict[str, Any]]:
        """Returns the memory and open files of the four workers that lived longest, nine times each."""
        longest = sorted(self.samples.values(), key=lambda seen: seen[0][0] - seen[-1][0])[:4]
        nine = [[seen[(len(seen) - 1) * i // 8] for i in range(9)] for seen in longest]
        return [
            {"seconds": s[-1][0] - s[0][0], "memory_mib": [x[1] // 1024 for x in s], "files": [x[2] for x in s]}
            for s in nine
        ]


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
    asked.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # ends all processes
    with tempfile.TemporaryDirectory(prefix="soak") as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        etcd = stack.enter_context(LocalEtcd(folder)) if asked.machines > 1 else None
        weather = Weather(asked, folder, etcd)
        stack.callback(weather.end)
        status = weather.soak()
        row = {"task": asked.task, "workers": asked.workers, "minutes": (time.monotonic() - weather.began) / 60}
        row |= {"status": status, "hung": status < 0, "faults": dict(weather.done)} | judged(folder)
        row |= {"longest_lived": weather.lived()}
        result = header("bench.chaos.soak", asked) | row
        log = (folder / "log").read_text(errors="replace")
        if failed := row["different_rounds"] or not row["rounds"] or "Traceback" in log or status != STOPPED:
            result["log"] = log.splitlines()[-40:]
            shutil.copy(folder / "log", asked.out / "soak.log")
        save(asked.out, f"soak_{asked.task}", result)
    print(table(("figure", "value"), [[name, str(value)] for name, value in row.items()]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    launch(main)
