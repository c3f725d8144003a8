"""Three members of etcd on this machine, for tests and demos: python -m bench.cluster.etcd [FOLDER]"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from bench.cluster.nodes import Cluster, hold_port
from core.elastic.etcd import EtcdStore
from core.errors import UserError
from training.start.script import launch, parse_options

MEMBERS = 3
T = TypeVar("T")


def program() -> str | None:
    """Returns the path of etcd: the environment variable ETCD, or the program on the PATH."""
    return shutil.which(os.environ.get("ETCD", "etcd"))


class LocalEtcd:
    """Members of etcd that listen only at 127.0.0.1, or one on each of a cluster's nodes. Use it as a context manager.

    Args:
        folder: Folder for their data and logs.
        cluster: An emulated cluster of three nodes, if any.

    Attributes:
        url: The value of --store, without the run's name.
        processes: The members.
    """

    def __init__(self, folder: Path, cluster: Cluster | None = None):
        if (etcd := program()) is None:
            raise UserError("no etcd here: apt-get install etcd-server, or name the program with the variable ETCD")
        held = [hold_port() for _ in range(2 * MEMBERS)]
        hosts = [cluster.address(i) if cluster else "127.0.0.1" for i in range(MEMBERS)]
        ports = [[one.getsockname()[1] for one in held[i::2]] for i in range(2)]
        clients, peers = ([f"{host}:{port}" for host, port in zip(hosts, some, strict=True)] for some in ports)
        self.cluster = cluster
        self.url = f"etcd://{','.join(clients)}"
        initial = ",".join(f"m{i}=http://{peer}" for i, peer in enumerate(peers))
        self.processes: list[subprocess.Popen[bytes]] = []
        for i in range(MEMBERS):
            client, peer = f"http://{clients[i]}", f"http://{peers[i]}"
            options = ["--name", f"m{i}", "--data-dir", str(folder / f"m{i}"), "--initial-cluster", initial]
            options += ["--listen-client-urls", client, "--advertise-client-urls", client]
            options += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            options += ["--heartbeat-interval", "200", "--election-timeout", "2000"]  # milliseconds, for busy machines
            options += ["--auto-compaction-mode", "revision", "--auto-compaction-retention", "1000"]
            with open(folder / f"m{i}.log", "wb") as log:
                start = functools.partial(cluster.popen, i) if cluster else subprocess.Popen
                self.processes.append(start([etcd, *options], stdout=log, stderr=log, env={"LANG": "C"}))
        for one in held:
            one.close()

    def __enter__(self) -> LocalEtcd:
        self.ask("start", lambda store: store.set("started", ""))
        return self

    def ask(self, run: str, question: Callable[[EtcdStore], T], node: int = 0) -> T:
        """Returns the answer to a question about a run, asked from a node of the cluster, if there is one."""
        store = EtcdStore(f"{self.url}/{run}")
        return self.cluster.inside(node, lambda: question(store)) if self.cluster else question(store)

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def serve(folder: Annotated[Path | None, tyro.conf.Positional] = None) -> None:
    """Runs three members of etcd on this machine until Ctrl-C.

    Args:
        folder: Where they keep data and logs. The default is a temporary folder.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the members
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        with LocalEtcd(place) as etcd:
            print(f"three members run until Ctrl-C: --store {etcd.url}/NAME", flush=True)
            signal.pause()


if __name__ == "__main__":
    launch(lambda: parse_options(serve, prog="python -m bench.cluster.etcd"))
