"""Which sockets of this machine listen, as Linux tells."""

import socket
import struct
from pathlib import Path


def listening_at(port: int) -> set[str]:
    """The IPv4 addresses at which a socket listens on this port; "::" for one of IPv6."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, number = local.split(":")
            if state == "0A" and int(number, 16) == port:
                four = len(address) == 8
                found.add(socket.inet_ntoa(struct.pack("=I", int(address, 16))) if four else "::")
    return found
