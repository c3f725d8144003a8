"""A helper process of an emulated cluster, which imports nothing of the project: python guard.py OWNER DESCRIPTOR...

It outlives the owner and kills the processes that it left behind. A process belongs to the cluster if one of the
descriptors refers to its network namespace.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def members(namespaces: Iterable[int]) -> list[int]:
    """The processes inside these namespaces (descriptors), without zombies and the caller."""
    inodes = {os.fstat(namespace).st_ino for namespace in namespaces}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if (folder / "ns/net").stat().st_ino in inodes and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def kill_members(namespaces: Iterable[int], patience: float = 5.0) -> None:
    """SIGKILL to every process inside, repeated while any of them is still forking, `patience` seconds at most."""
    namespaces = list(namespaces)
    deadline = time.monotonic() + patience
    while (pids := members(namespaces)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def guard(owner: int, *namespaces: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(owner)
        if os.getppid() == owner:
            select.select([handle], [], [])  # readable when the owner has ended
    kill_members(namespaces)


if __name__ == "__main__":
    guard(*map(int, sys.argv[1:]))
