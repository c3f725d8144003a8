"""Network namespaces without names: each lives as long as a file descriptor or a process refers to it.

So the kernel itself removes them, with every interface inside, when their owner is gone, however it went.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from core.errors import UserError

CLONE_NEWNET = 0x40000000  # linux/sched.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SBIN = "/usr/sbin:/sbin"  # where tc is, and a user's PATH often is not
PROBE = "{ip} link add pv0 type veth peer name pv1 && {tc} qdisc add dev pv0 root tbf rate 1mbit burst 9kb latency 9ms"
REMEDY = "run with --throttle for a link that is throttled in software"

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


def tool(name: str) -> str:
    """The path of `ip`, `tc`, `unshare` or `nsenter`."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")
    if path is None:
        package = "iproute2" if name in ("ip", "tc") else "util-linux"
        raise UserError(f"no command {name!r} here: install {package}, or {REMEDY}")
    return path


def require_namespaces() -> None:
    """Returns where this process may make network namespaces; else runs this very command again in a user namespace.

    UserError where the kernel allows neither.
    """
    probe = PROBE.format(ip=tool("ip"), tc=tool("tc"))
    unshare = tool("unshare")
    reasons = []
    for flags in ("-n", "-Urn"):  # with the rights of root; as root of a user namespace of one's own
        tried = subprocess.run([unshare, flags, "sh", "-c", probe], capture_output=True, text=True)
        if tried.returncode == 0 and flags == "-n":
            return
        if tried.returncode == 0:
            sys.stdout.flush()
            os.execv(unshare, [unshare, flags, "--", sys.executable, *sys.orig_argv[1:]])
        reasons.append((tried.stderr.strip().splitlines() or ["no reason given"])[-1])
    raise UserError(f"the kernel grants no network namespace with a shaped link ({'; '.join(reasons)}): {REMEDY}")


def new_namespace() -> int:
    """A descriptor of a new network namespace, empty but for `lo`, which is down."""

    def make() -> int:
        _check(_libc.unshare(CLONE_NEWNET))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(make)


def enter(namespace: int) -> None:
    """Moves the calling thread, and what it starts from now on, into the namespace."""
    _check(_libc.setns(namespace, CLONE_NEWNET))


def inside(namespace: int, fn: Callable[[], T]) -> T:
    """fn(), run inside the namespace; a socket that it makes stays there wherever it is used."""

    def run() -> T:
        enter(namespace)
        return fn()

    return _in_thread(run)


def sent_bytes(interface: str) -> int:
    """What the calling process's node has sent through the interface so far, as the kernel counts."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == interface:
            return int(counters.split()[8])
    raise OSError(f"no interface {interface} in this node")


def die_with(parent: int, signum: int = signal.SIGKILL) -> None:
    """Has the kernel send this process `signum` once its parent, process number `parent`, is gone."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(fn: Callable[[], T]) -> T:
    """fn() in a thread of its own: a namespace belongs to a thread, so the caller's stays as it is."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(fn())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
