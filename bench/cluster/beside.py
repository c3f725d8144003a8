"""Two helper processes of an emulated cluster, which import nothing of the project.

`python beside.py guard OWNER DESCRIPTOR...` outlives the owner and kills the processes that it left behind. A process
belongs to the cluster if one of the descriptors refers to its network namespace.

`python beside.py switch DELAY_MS NODES NICS` is the switch of a cluster with delayed frames, and runs in its namespace.
Kernels without netem cannot delay frames, so this forwards them between p0, p1, ... through packet sockets. Frames keep
the header in which the kernel notes segments not cut and checksums not computed yet (PACKET_VNET_HDR).
"""

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

# -- the guard ------------------------------------------------------------------------------------------------


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


# -- the switch -----------------------------------------------------------------------------------------------

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33  # asm-generic/socket.h
ETH_P_ALL = 3
VNET_HEADER = 10  # bytes ahead of every frame
LARGEST = 70_000  # bytes: an uncut segment of 64 KiB and its headers
BUFFER = 8 << 20  # bytes: more than the 0.1 s that tbf queues at 500 Mbit/s


def open_port(name: str) -> socket.socket:
    """A packet socket that receives what a node sends into its link, and sends what the node is to receive."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    with contextlib.suppress(PermissionError):  # root of a user namespace keeps what the system grants anyone
        port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER)
        port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    port.setblocking(False)
    port.bind((name, ETH_P_ALL))
    return port


def targets(frame: bytes, source: int, count: int) -> Sequence[int]:
    """The ports by which a frame leaves.

    Node i has the address `02:00:00:00:00:(i+1)`. A broadcast goes to all other nodes. The ports of the next network
    follow, and the fifth byte of its addresses is 1. count: ports of one network, one per node.
    """
    destination, network = frame[VNET_HEADER : VNET_HEADER + 6], source // count
    if destination[0] & 1:
        return [port for port in range(network * count, (network + 1) * count) if port != source]
    node = destination[5] - 1
    return [network * count + node] if destination[:5] == bytes([2, 0, 0, 0, network]) and 0 <= node < count else []


def forward(ports: list[socket.socket], delay: float, count: int) -> None:
    """Sends every frame on `delay` seconds after its arrival. A full queue drops it, as in any switch. count: nodes."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # (when due, source, frame), in order of arrival
    index = {port: number for number, port in enumerate(ports)}
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select(ports, [], [], timeout)
        for port in readable:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):  # not forever, because other frames become due
                    frame = port.recv(LARGEST)
                    waiting.append((time.monotonic() + delay, index[port], frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, source, frame = waiting.popleft()
            for target in targets(frame, source, count):
                with contextlib.suppress(OSError):
                    ports[target].send(frame)


def switch(delay_ms: str, nodes: str, nics: str) -> None:
    ports = [open_port(f"p{number}") for number in range(int(nodes) * int(nics))]
    print("ready", flush=True)
    forward(ports, float(delay_ms) / 1e3, int(nodes))


if __name__ == "__main__":
    switch(*sys.argv[2:]) if sys.argv[1] == "switch" else guard(*map(int, sys.argv[2:]))
