"""The command line of the emulated cluster: one torchrun per node.

python -m bench.cluster --nodes 4 --ranks_per_node 1 --rate 200mbit [--verify] -- COMMAND

COMMAND is what would follow torchrun, for example `-m vision.train digits_small --method co2`. Root is not needed
where the kernel lets users make namespaces. Node 0's output is shown. If another node is the first to fail,
its output is shown as well, all nodes are stopped, and the exit status is that node's. Ctrl-C or SIGTERM is passed on,
so that training saves. The second one kills.
"""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cluster.nodes import Cluster, require_namespaces
from bench.report import read_options, require
from core.errors import UserError
from training.start.script import launch

PORT = 29500  # of the rendezvous on node 0, whose namespace is empty
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
UNITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}  # to Mbit/s


@dataclass(frozen=True)
class Launch:
    """Runs COMMAND, which follows `--`, under one torchrun per node of a cluster that is emulated on this machine."""

    rate: str
    """Each node's link, both ways at once: 500kbit, 200mbit, 1gbit."""
    nodes: int = 4
    ranks_per_node: int = 1
    verify: bool = False
    """Measure the link between two nodes first, and stop if it is more than 10 percent off."""

    def check(self) -> None:
        require(self, ones="nodes ranks_per_node")
        if not self.rate_mbit > 0:
            raise UserError(f"rate={self.rate!r}: give more than 0")
        if self.verify and self.nodes < 2:
            raise UserError("--verify measures between two nodes: give --nodes 2 or more")

    @property
    def rate_mbit(self) -> float:
        match = re.fullmatch(rf"(\d+\.?\d*|\.\d+)({'|'.join(UNITS)})", self.rate)
        if not match:
            raise UserError(f"rate={self.rate!r}: give a number and one of {', '.join(UNITS)}, such as 200mbit")
        return float(match[1]) * UNITS[match[2]]


def main() -> None:
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, command = sys.argv[1:end], sys.argv[end + 1 :]
    asked = read_options(Launch, "bench.cluster", args=own, description=__doc__)
    if not command:
        raise UserError("no command: end with `-- COMMAND`, where COMMAND is what follows torchrun")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    require_namespaces()
    sys.exit(emulated(asked, command))


def emulated(asked: Launch, command: list[str]) -> int:
    """One torchrun per namespace; returns the exit status of the first that failed."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    cluster = Cluster(asked.nodes, asked.rate_mbit)
    with tempfile.TemporaryDirectory() as folder, cluster:
        link = f"{asked.nodes} nodes, {asked.rate_mbit:g} Mbit/s each way, network namespaces + tbf"
        print(f"link: {link}", flush=True)
        if asked.verify:
            print(f"link: measured {cluster.verify():.1f} Mbit/s between two nodes", flush=True)
        logs = [Path(folder, f"node{node}.log") for node in range(asked.nodes)]
        processes = [start(cluster, node, asked.ranks_per_node, command, logs[node]) for node in range(asked.nodes)]
        failed, status = wait(processes, signals)
        if status and failed and not signals:
            lines = logs[failed].read_text(errors="replace").splitlines()[-60:]
            print("\n".join(f"[node {failed}] {line}" for line in lines), file=sys.stderr, flush=True)
        return status


def start(cluster: Cluster, node: int, ranks: int, command: list[str], log: Path) -> subprocess.Popen[Any]:
    """Starts torchrun on one node, in its own session, so that Ctrl-C reaches only this process, which passes it on."""
    where = [f"--nnodes={cluster.nodes}", f"--node-rank={node}", f"--nproc-per-node={ranks}"]
    master = [f"--master-addr={cluster.address(0)}", f"--master-port={PORT}", f"--local-addr={cluster.address(node)}"]
    argv = [*TORCHRUN, *where, *master, *command]
    if node == 0:
        return cluster.popen(node, argv, start_new_session=True)
    with log.open("wb") as output:
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        return cluster.popen(node, argv, start_new_session=True, **quiet)


def wait(processes: list[subprocess.Popen[Any]], signals: list[int]) -> tuple[int, int]:
    """Waits for all nodes. Returns which one failed first, and its status.

    A failure or a signal stops all other nodes. They first get SIGTERM, which torchrun passes on, so that training
    saves. They get SIGKILL at the second signal, 10 seconds after a failure, or 40 seconds after a signal, because
    torchrun gives its ranks 30.
    """
    first, status, deadline = 0, 0, math.inf
    while True:
        running = [p for p in processes if p.poll() is None]
        failures = [(node, p.returncode) for node, p in enumerate(processes) if p.returncode]
        if not status and (failures or signals):
            first, status = (0, 128 + signals[0]) if signals else failures[0]
            deadline = time.monotonic() + (40.0 if signals else 10.0)
            for process in running:
                process.terminate()
        if not running:
            return first, status if status >= 0 else 128 - status
        if time.monotonic() > deadline or len(signals) > 1:
            for process in running:  # its ranks, whose sessions are their own, end with the cluster
                process.kill()
        time.sleep(0.02)


if __name__ == "__main__":
    launch(main)
