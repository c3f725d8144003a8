"""A lock on a run folder: two runs must not write to one. The system lets it go with the process that holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO


def take(path: Path) -> tuple[IO[str] | None, str]:
    """The open file that holds the lock until it is closed, or who holds the lock; neither where the file system has
    no locks."""
    file = open(path, "a+")  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, no process inherits it that loads data
    except OSError as error:
        file.seek(0)
        holder = file.read() if error.errno in (errno.EACCES, errno.EAGAIN) else ""
        file.close()
        return None, holder
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file, ""
