"""A Slurm cluster on this machine: munged, slurmctld and a slurmd for each emulated node, all under one folder.

The nodes share the machine's cores, and their GPUs are empty files. Needs root, and Debian's packages slurm-wlm and
munge.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol", "squeue", "scancel")

GPUS = 8  # of a node

CONF = """ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,sched_min_interval=100000,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdTimeout=10
KillWait=30
MinJobAge=600
NodeName=node[0-{last}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=64 RealMemory=500000 Gres=gpu:8
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=2
"""


def missing() -> str:
    """Why there can be no cluster here, or nothing."""
    if os.geteuid() != 0:
        return "not root, as which slurmd and munged run here"
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    return f"no {', '.join(absent)}: apt-get install --no-install-recommends slurm-wlm munge" if absent else ""


class Cluster:
    """Use it as a context manager. Attributes: folder, of all its files; nodes; env, with which Slurm's commands find
    it, and by which all its processes are known."""

    def __init__(self, folder: Path, nodes: int):
        self.folder, self.nodes = folder, [f"node{i}" for i in range(nodes)]
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "CO2_", "PYTEST_"))}
        self.env = kept | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        folder = self.folder
        for name in ("log", "state"):
            (folder / name).mkdir()
        port, *others = free_ports(1 + len(self.nodes))
        more = dict(host=socket.gethostname(), folder=folder, last=len(self.nodes) - 1)
        (folder / "slurm.conf").write_text(CONF.format(port=port, ports=",".join(map(str, others)), **more))
        for i in range(GPUS):
            (folder / f"gpu{i}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key": key, "socket": "munge.sock", "pid": "munged.pid", "log": "log/munged.log", "seed": "munge.seed"}
        names = {"socket": "--socket"} | {name: f"--{name}-file" for name in ("key", "pid", "log", "seed")}
        self("munged", *(f"{names[name]}={folder / file}" for name, file in files.items()))
        self("slurmctld", "-i")
        for node in self.nodes:
            self.start_node(node)
        wait_until(
            lambda: self("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").strip() == str(len(self.nodes)), 60
        )

    def start_node(self, node: str) -> None:
        self("slurmd", "-N", node, EMULATED_NODE=node)

    def __call__(self, *command: str, **variables: str) -> str:
        """Runs one of Slurm's commands in the repository's root; returns what it prints."""
        env = self.env | variables
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, f"{command}: {ended.stdout}{ended.stderr}"
        return ended.stdout

    def submit(self, *arguments: str, **variables: str) -> str:
        """The number of a job of `sbatch arguments`."""
        output = self.folder / "log" / "job%j.out"
        return self("sbatch", "--parsable", f"--output={output}", *arguments, **variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        return dict(re.findall(r"(\S+?)=(\S*)", self("scontrol", "-o", "show", "job", number)))

    def output(self, number: str) -> str:
        file = self.folder / "log" / f"job{number}.out"
        return file.read_text(errors="replace") if file.exists() else f"job {number} has not started"

    def wait(self, number: str, seconds: float = 240) -> str:
        """The state in which a job ends."""

        def ended() -> bool:
            return self.job(number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")

        assert wait_until(ended, seconds), f"{self.job(number)}\n{self.output(number)}"
        return self.job(number)["JobState"]

    def processes(self, node: str | None = None) -> list[int]:
        """All that the cluster has started and that still live, or those of one node."""
        wanted = [f"SLURM_CONF={self.env['SLURM_CONF']}"]
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if (variables := _environment(path))
            and wanted[0] in variables
            and (node is None or {f"EMULATED_NODE={node}", f"SLURMD_NODENAME={node}"} & variables)
        ]

    def kill(self, node: str | None, *signals: signal.Signals) -> None:
        """Sends the signals to all processes of a node, or of the cluster."""
        for number in signals:
            for process in self.processes(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

    def stop(self) -> None:
        """Ends every process that the cluster has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self.kill(None, signal.SIGCONT, number)
            wait_until(lambda: not self.processes(), 5)
        assert not self.processes(), "some of Slurm's processes cannot be killed"


def _environment(path: Path) -> set[str]:
    try:
        return set(path.read_text(errors="replace").split("\0"))
    except OSError:  # it has ended
        return set()


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it has become true within so many seconds."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """In a folder of its own with a short name, as the path of a socket must have."""
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # munged asks for it
        with Cluster(Path(folder), nodes) as running:
            yield running
