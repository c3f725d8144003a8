"""Processes of an emulated cluster for tests: started, looked for, and run to their end."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.imports import ROOT

ENV = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}

# What a node runs in these tests: it says that it has started, then does what it is told.
WORKER = """
import os, signal, sys, time
from pathlib import Path
mode, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"started{rank}").write_text(os.readlink("/proc/self/ns/net"))
if mode == "crash" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "fail" and rank == "1":
    sys.exit("rank 1 has had enough")
time.sleep(0 if mode == "pass" else 300)
print("rank", rank, "of", os.environ["WORLD_SIZE"], "ends", sys.argv[3:])
"""


def python(*argv: object, timeout: float = 300.0, skips: bool = False, **env: str) -> str:
    """`python *argv`, in a process of its own, to its end; returns what it prints. skips: the test, where the kernel
    grants no namespaces."""
    command = [sys.executable, *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, env=ENV | env, capture_output=True, text=True, timeout=timeout)
    if skips and ("grants no network namespace" in done.stderr or "no command" in done.stderr):
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def script(folder: Path, code: str) -> str:
    """Runs code in a process of its own, as run_ranks forks one that has no threads; returns its output."""
    (folder / "script.py").write_text(textwrap.dedent(code))
    return python(folder / "script.py", timeout=120)


@contextlib.contextmanager
def worker(folder: Path, mode: str, *options: str):
    """`python -m bench.cluster` with two ranks of WORKER, which have started."""
    (folder / "worker.py").write_text(WORKER)
    argv = ["--nodes", "2", "--rate", "100mbit", *options, "--", str(folder / "worker.py"), mode, str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-m", "bench.cluster", *argv], cwd=ROOT, env=ENV, text=True, **pipes)
    try:
        deadline = time.monotonic() + 60
        while not all((folder / f"started{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline and process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        for pid in left(folder, process.pid):  # after a failure
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def assert_gone(folder: Path, owner: int) -> None:
    """No rank, torchrun, switch or guard of the run is left; a guard may take a moment when its owner was killed."""
    deadline = time.monotonic() + 10
    while pids := left(folder, owner):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def left(folder: Path, owner: int) -> list[int]:
    """The processes that name the test's folder, and the guard of `owner`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command or f"guard.py {owner} " in command:
                found.append(int(path.parent.name))
    return found


def network() -> str:
    """The machine's own interfaces and named namespaces."""
    listings = (["ip", "netns"], ["ip", "-brief", "link"])
    return "".join(subprocess.run(argv, capture_output=True, text=True, check=True).stdout for argv in listings)
