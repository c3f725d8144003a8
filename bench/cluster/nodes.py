"""A cluster emulated on one machine: a network namespace per node, joined by links of a set rate.

The namespaces have no names: each exists as long as a file descriptor or a process refers to it. So the kernel removes
them, with every interface inside, when their owner ends, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from bench.cluster.guard import kill_members
from core.errors import UserError

CLONE_NEWNET = 0x40000000  # linux/sched.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
SBIN = "/usr/sbin:/sbin"  # where tc is, and a user's PATH often is not
PROBE = "{ip} link add pv0 type veth peer name pv1 && {tc} qdisc add dev pv0 root tbf rate 1mbit burst 9kb latency 9ms"
REMEDY = "throttle the link in software (--throttle of a benchmark, --link_mbit of a train script)"

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
    """Returns if this process may make network namespaces. If not, runs the same command again in a user namespace.

    Raises:
        UserError: If the kernel allows neither.
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
    """Runs fn() inside the namespace. A socket that it makes stays there, wherever it is used."""

    def run() -> T:
        enter(namespace)
        return fn()

    return _in_thread(run)


def sent_bytes(interface: str) -> int:
    """Bytes that the calling process's node has sent through the interface so far, by the kernel's count."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.strip().partition(":")
        if name == interface:
            return int(counters.split()[8])
    raise OSError(f"no interface {interface} in this node")


def die_with(parent: int) -> None:
    """Has the kernel kill this process once its parent, process number `parent`, is gone."""
    _check(_libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def _check(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _in_thread(fn: Callable[[], T]) -> T:
    """Runs fn() in its own thread. A namespace belongs to a thread, so the caller keeps its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


BURST_SECONDS = 0.0125  # of the rate, which a token bucket lets through at once
BURSTS = 32_000, 256_000  # bytes: the least and the most; at 100 Mbit/s gloo runs too slow with the least
TRIES = 3  # to find a link at its rate: what else the machine does can only slow one down
HEADERS = 1514 / 1448  # bytes on an Ethernet wire per byte of TCP payload, full frames with time stamps
GUARD = str(Path(__file__).parent / "guard.py")


def burst_bytes(rate_mbit: float) -> int:
    """The bytes that an idle link lets through at once. A message must be several times as long to take its time."""
    least, most = BURSTS
    return round(min(max(BURST_SECONDS * rate_mbit * 1e6 / 8, least), most))


class Cluster:
    """Nodes on one machine: a network namespace each, joined by veth pairs and a bridge, each link shaped by tbf.

    Every node sends and receives `rate_mbit` Mbit/s at the same time, through e0. A context manager, for a process that
    may make namespaces (require_namespaces). The bridge has its own namespace, so the machine's network stays untouched
    and two clusters never meet.
    """

    interface: str = "e0"

    def __init__(self, nodes: int, rate_mbit: float):
        if not 1 <= nodes <= 250:
            raise UserError(f"nodes={nodes}: give 1 to 250")
        self.nodes, self.rate_mbit = nodes, _positive(rate_mbit)
        self._namespaces: list[int] = []  # descriptors: the nodes', then the bridge's
        self._processes: list[subprocess.Popen[Any]] = []
        self._guard: subprocess.Popen[Any] | None = None

    def __enter__(self) -> Cluster:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kills every process inside and removes all that the cluster is made of."""
        kill_members(self._namespaces)
        for process in self._processes:
            process.wait()
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
        for namespace in self._namespaces:
            os.close(namespace)
        self._namespaces, self._processes, self._guard = [], [], None

    def address(self, node: int) -> str:
        """The node's IPv4 address."""
        return f"10.0.0.{node + 1}"

    def set_rate(self, rate_mbit: float) -> None:
        """Shapes all links anew, both ends, while processes run."""
        self.rate_mbit = _positive(rate_mbit)
        for node in range(self.nodes):
            self._configure("tc", node, [self._tbf(self.interface)])
        self._configure("tc", -1, [self._tbf(f"p{node}") for node in range(self.nodes)])

    def enter(self, node: int) -> None:
        """Moves the calling process, a forked child with a single thread, into the node."""
        enter(self._namespaces[node])

    def path(self, node: int) -> str:
        """The node's network namespace, for setns, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._namespaces[node]}"

    def inside(self, node: int, fn: Callable[[], Any]) -> Any:
        """Runs fn() in a thread inside the node. A socket that it makes stays there."""
        return inside(self._namespaces[node], fn)

    def popen(self, node: int, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Starts a command inside a node; it is killed with the cluster."""
        env = dict(kwargs.pop("env", None) or os.environ)
        env |= {"GLOO_SOCKET_IFNAME": self.interface, "TP_SOCKET_IFNAME": self.interface}
        process = subprocess.Popen([*self._nsenter(node), *argv], env=env, **kwargs)
        self._processes.append(process)
        return process

    def set_link(self, node: int, *, up: bool) -> None:
        """Takes a node's link down, or up again, while processes run."""
        self._configure("ip", -1, [f"link set p{node} {'up' if up else 'down'}"])

    def verify(self) -> float:
        """Measures the rate between the first two nodes with one TCP stream, in Mbit/s on Ethernet.

        Raises:
            UserError: If it stays 10 % off.
        """
        measured = 0.0
        try:
            for _ in range(TRIES):
                measured = self._transfer(source=0, target=1)
                if abs(measured / self.rate_mbit - 1) <= 0.1:
                    return measured
        except OSError as error:
            raise UserError(f"nothing crosses the link: {error}") from error
        raise UserError(f"the link carries {measured:.1f} Mbit/s, over 10 % off the {self.rate_mbit:g} asked for")

    # -- inside ---------------------------------------------------------------------------------------------

    def _build(self) -> None:
        for _ in range(self.nodes + 1):
            self._namespaces.append(new_namespace())
        guard = [sys.executable, "-ES", GUARD, str(os.getpid()), *map(str, self._namespaces)]
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._guard = subprocess.Popen(guard, pass_fds=self._namespaces, start_new_session=True, cwd="/", **quiet)
        lines = ["link add br0 type bridge", "link set br0 up"]
        for node in range(self.nodes):
            peer = f"name {self.interface} address 02:00:00:00:00:{node + 1:02x} netns {self.path(node)}"
            lines += [f"link add p{node} type veth peer {peer}", f"link set p{node} addrgenmode none up"]
            lines += [f"link set p{node} master br0"]
        self._configure("ip", -1, lines)
        for node in range(self.nodes):
            address = f"addr add {self.address(node)}/24 dev {self.interface}"
            self._configure("ip", node, ["link set lo up", f"link set {self.interface} addrgenmode none up", address])
        self.set_rate(self.rate_mbit)

    def _tbf(self, interface: str) -> str:
        rate = f"{self.rate_mbit * 1e6:.0f}bit burst {burst_bytes(self.rate_mbit)}"
        return f"qdisc replace dev {interface} root tbf rate {rate} latency 100ms"

    def _configure(self, command: str, node: int, lines: list[str]) -> None:
        """Runs lines of `ip` or `tc` in a node, or in the bridge's namespace (-1)."""
        argv = [*self._nsenter(node), tool(command), "-batch", "-"]
        done = subprocess.run(argv, input="\n".join(lines) + "\n", capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{command} failed: {' '.join(done.stderr.split())}")

    def _nsenter(self, node: int) -> list[str]:
        return [tool("nsenter"), f"--net={self.path(node)}", "--"]

    def _transfer(self, source: int, target: int) -> float:
        """Mbit/s on Ethernet of a stream of about 0.7 s, without its slow start and the token buckets' burst."""
        server = self.inside(target, lambda: socket.create_server((self.address(target), 0)))
        client = self.inside(source, socket.socket)
        second = self.rate_mbit * 1e6 / 8
        warm = int(max(512e3, second * 0.3))
        total = warm + int(max(256e3, second * 0.7))  # no less: up to 64 KiB arrive at once
        with server, client:
            server.settimeout(10.0)
            client.settimeout(10.0)
            client.connect(server.getsockname())
            stream, _ = server.accept()
            stream.settimeout(10.0)
            sender = threading.Thread(target=_send, args=(client, total), daemon=True)
            sender.start()
            with stream:
                skipped, started = _receive(stream, warm)
                count, ended = _receive(stream, total - skipped)
            sender.join()
        return count * 8 / 1e6 * HEADERS / (ended - started)


def _positive(rate_mbit: float) -> float:
    if not rate_mbit > 0:
        raise UserError(f"rate_mbit={rate_mbit}: give a positive number of Mbit/s")
    return rate_mbit


def _send(sock: socket.socket, size: int) -> None:
    data = bytes(1 << 16)
    with contextlib.suppress(OSError):  # the receiver reports what went wrong
        for start in range(0, size, len(data)):
            sock.sendall(data[: size - start])


def _receive(sock: socket.socket, least: int) -> tuple[int, float]:
    """Reads at least `least` bytes; returns how many came and when the last of them did."""
    count, buffer = 0, bytearray(1 << 18)
    while count < least:
        received = sock.recv_into(buffer)
        if not received:
            raise UserError("the link broke while its rate was measured")
        count += received
    return count, time.monotonic()


# -- ranks, forked from a process that has imported torch once --------------------------------------------------------


POLL = 0.2  # seconds between two looks at the ranks
GRACE = 2.0  # seconds that all other ranks have to report errors, once one has failed


def run_ranks(
    fn: Callable[..., Any],
    cluster: Cluster | None,
    ranks_per_node: int,
    nodes: int,
    *args: Any,
    timeout: float,
    until: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Runs fn(*args) on `nodes` * `ranks_per_node` forked processes; returns their results in rank order.

    Each rank runs in its node, or all use loopback if cluster is None. It finds RANK, WORLD_SIZE, MASTER_ADDR and so on
    in its environment, and fn calls init_process_group itself. The caller has imported torch and started no threads,
    because threads do not survive a fork.
    until() is called again and again. Once it returns True, the rest is not needed and nothing is returned. All ranks
    are killed at the end.

    Raises:
        UserError: The first UserError of any rank.
        RuntimeError: Any other first error of a rank, with its traceback.
        TimeoutError: After `timeout` seconds.
    """
    if cluster is not None and nodes > cluster.nodes:
        raise UserError(f"nodes={nodes}: the cluster has {cluster.nodes}")
    context = multiprocessing.get_context("fork")
    held = cluster.inside(0, hold_port) if cluster else hold_port()
    with held, tempfile.TemporaryDirectory() as folder:
        environment = _environment(cluster, ranks_per_node, nodes, held.getsockname()[1])
        jobs = [(rank, fn, args, cluster, environment, Path(folder)) for rank in range(nodes * ranks_per_node)]
        workers = [context.Process(target=_rank, args=(os.getpid(), *job), daemon=True) for job in jobs]
        try:
            for worker in workers:
                worker.start()
            late = _wait(workers, time.monotonic() + timeout, until)
        finally:
            for worker in workers:
                if worker.pid is not None:
                    worker.kill()
                    worker.join()
        if late is None:
            return []
        errors, results = [], []
        for path in Path(folder).glob("error*"):
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # a .tmp, cut short by the kill
                errors.append(pickle.loads(path.read_bytes()))
        if errors:
            raise min(errors, key=lambda error: error[0])[1]
        if late:
            raise TimeoutError(f"rank {', '.join(map(str, late))} still running after {timeout:g} s")
        for rank, worker in enumerate(workers):
            if not (path := Path(folder, f"result{rank}")).exists():
                status = worker.exitcode
                raise RuntimeError(f"rank {rank} died without a result or an error, exit status {status}")
            results.append(pickle.loads(path.read_bytes()))
        return results


def hold_port() -> socket.socket:
    """A socket bound to a free TCP port, for a server that another process will start there.

    While it is open, the system gives the port neither to outgoing connections nor to a process that asks for any free
    port. A server that asks for this number gets it if it sets SO_REUSEADDR, as TCPStore does.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _environment(cluster: Cluster | None, ranks_per_node: int, nodes: int, port: int) -> dict[str, str]:
    """The environment that all ranks share, as torchrun would set it."""
    address, interface = (cluster.address(0), cluster.interface) if cluster else ("127.0.0.1", "lo")
    return {
        "WORLD_SIZE": str(nodes * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
    }


def _rank(
    parent: int,
    rank: int,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    cluster: Cluster | None,
    environment: dict[str, str],
    folder: Path,
) -> None:
    try:
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the caller's handler
        local_world_size = int(environment["LOCAL_WORLD_SIZE"])
        if cluster is not None:
            cluster.enter(rank // local_world_size)
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank % local_world_size))
        _write(folder / f"result{rank}", pickle.dumps(fn(*args)))
    except BaseException as error:
        message = error if isinstance(error, UserError) else RuntimeError(f"rank {rank}:\n{traceback.format_exc()}")
        _write(folder / f"error{rank}", pickle.dumps((time.time(), message)))
        os._exit(1)


def _write(path: Path, data: bytes) -> None:
    path.with_suffix(".tmp").write_bytes(data)
    path.with_suffix(".tmp").rename(path)


def _wait(workers: list[Any], deadline: float, until: Callable[[], bool]) -> list[int] | None:
    """Waits for all; returns the ranks that still run at the deadline, or a while after one has failed. None: until()
    has ended the waiting."""
    failed = False
    while running := [w for w in workers if w.exitcode is None]:
        if time.monotonic() > deadline:
            break
        if until():
            return None
        wait([w.sentinel for w in running], timeout=POLL)
        if not failed and any(w.exitcode for w in workers):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
    return [] if failed else [rank for rank, w in enumerate(workers) if w.exitcode is None]
