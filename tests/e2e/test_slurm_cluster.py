"""The Slurm scripts on a real Slurm: emulated nodes on this machine's CPUs, which have files for GPUs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from core.checkpoint import runs as checkpoint
from tests import runs
from tests.imports import ROOT
from tests.runs import rows

# -- a cluster on this machine, all of it under one folder; needs root, slurm-wlm and munge ---------------------------


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
MinJobAge=3600
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


# -- jobs -------------------------------------------------------------------------------------------------------------


pytestmark = pytest.mark.slurm

SMALL = {
    "vision_a100": "digits_small",
    "segmentation_3090": "digits_small",
    "pointcloud_a100": "surfaces_small",
    "gpt2_3090": "gpt2_pydoc_small",
    "roberta_a100": "roberta_pydoc_small",
}
# our reading of the paper's rule: no two runs with the recommended ones are alike, for they follow measured times
VISION = ("--no_recommended", "--device", "cpu", "--log_every", "1", "--checkpoint_every", "0", "--epochs")
SLOW_LINK = ("--link_mbit", "5")  # the job waits for it, and leaves the cores to others


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"no real Slurm here: {reason}")
    with cluster(nodes=4) as running:
        yield running


LAST_TWO = "--nodelist=node[2-3]"


def submit(slurm: Cluster, script: str, run: str, *options: str, asks=(LAST_TWO,), **variables: str) -> str:
    """The number of a job of two workers on two nodes; the run folder is `run`."""
    asks = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "--mem=1000", "--time=60", *asks)
    settings = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "VENV": "",
        "RDZV_HOST": "127.0.0.1",  # the nodes' names are no machines'
        "RECIPE": SMALL.get(script, "digits_small"),
        "BATCH_SIZE": "",
        "TAU": "6",
        "OUT": str(folder(slurm, run)),
        "CO2_DATA": str(slurm.folder),  # an empty one: the recipes bring their data
    }
    return slurm.submit(*asks, f"slurm/{script}.sh", *options, **settings | variables)


def folder(slurm: Cluster, run: str) -> Path:
    return slurm.folder / "runs" / run


def summary(slurm: Cluster, run: str) -> dict[str, float]:
    """What a run has written at its end, which may come a moment after its job's."""
    assert wait_until((folder(slurm, run) / "summary.json").exists, 60), f"no summary of {run}"
    return runs.summary(folder(slurm, run))


def losses(slurm: Cluster, run: str) -> list[tuple[int, float]]:
    """(step, training loss) of every line that has one, in the file's order."""
    return [(row["step"], row["train_loss"]) for row in rows(folder(slurm, run)) if "train_loss" in row]


def reaches(slurm: Cluster, job: str, run: str, step: int) -> None:
    """Waits until the run has taken so many steps."""
    came = wait_until(lambda: len(losses(slurm, run)) >= step, 120)
    assert came, f"{slurm.job(job)}\n{slurm.output(job)}"


def same_end(slurm: Cluster, run: str, other: str) -> None:
    """Two runs of two workers have the same losses and end with the same parameters, bit for bit."""
    assert losses(slurm, run) == losses(slurm, other)
    found = [checkpoint.load_newest(folder(slurm, name) / "checkpoints", rank=0) for name in (run, other)]
    one, two = (state["model"] for state, _ in filter(None, found))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def at_limits(slurm: Cluster) -> dict[str, str]:
    """Two jobs that come to their time limits while the other tests run."""
    run, nodes = (*VISION, "10000", *SLOW_LINK), "--nodelist=node[0-1]"
    return {
        "warned": submit(slurm, "vision_3090", "warned", *run, asks=(nodes, "--time=4", "--signal=B:USR1@120")),
        "unwarned": submit(slurm, "vision_3090", "unwarned", *run, asks=(nodes, "--time=2", "--signal=B:CONT@1")),
    }


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster) -> str:
    """A run of six epochs, 132 steps."""
    job = submit(slurm, "vision_a100", "undisturbed", *VISION, "6")
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    return "undisturbed"


def test_a_preempted_job_is_requeued_and_resumes_bit_for_bit(slurm: Cluster, at_limits: dict, undisturbed: str):
    job = submit(slurm, "vision_a100", "preempted", *VISION, "6")
    reaches(slurm, job, "preempted", 12)
    urgent = slurm.submit("--partition=high", "--exclusive", "--nodelist=node2", "--wrap", "sleep 1")
    assert slurm.wait(urgent) == "COMPLETED", slurm.output(job)
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    assert slurm.job(job)["Restarts"] == "1", slurm.output(job)
    assert "was told to stop, and its run has saved: back into the queue" in slurm.output(job)
    assert "Traceback" not in slurm.output(job)
    same_end(slurm, "preempted", undisturbed)


@pytest.mark.parametrize("script", SMALL)
def test_every_task_runs_its_small_recipe(script: str, slurm: Cluster, at_limits: dict):
    job = submit(slurm, script, script, "--device", "cpu", "--epochs", "1")
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    assert summary(slurm, script)["steps"] > 0


def test_a_job_in_a_container_saves_when_it_is_signalled(slurm: Cluster):
    """A script plays apptainer: what it starts begins in /, with a PATH of its own and nothing else of the job's."""
    image, path = slurm.folder / "co2.sif", f"{Path(sys.executable).parent}:/usr/bin:/bin"
    image.touch()
    apptainer = slurm.folder / "apptainer"
    apptainer.write_text(
        f'#!/bin/bash\nwhile [[ "$1" != *.sif ]]; do shift; done\nshift\ncd /\nexec env -i PATH={path} "$@"\n'
    )
    apptainer.chmod(0o755)
    inside = {"CONTAINER": str(image), "VENV": "/nowhere", "PATH": f"{slurm.folder}:{os.environ['PATH']}"}
    asks = (LAST_TWO, "--signal=B:CONT@1")
    job = submit(slurm, "vision_a100", "contained", *VISION, "10000", *SLOW_LINK, asks=asks, **inside)
    reaches(slurm, job, "contained", 6)
    slurm("scancel", job)
    assert slurm.wait(job) == "CANCELLED", slurm.output(job)
    assert summary(slurm, "contained")["stopped_by_signal"] == signal.SIGTERM, slurm.output(job)


def test_a_job_that_is_warned_of_its_limit_stops_and_goes_on(slurm: Cluster, at_limits: dict):
    job = at_limits["warned"]
    assert wait_until(lambda: slurm.job(job)["Restarts"] != "0", 240), slurm.output(job)
    assert "was told to stop, and its run has saved: back into the queue" in slurm.output(job)
    stopped = len(losses(slurm, "warned"))
    reaches(slurm, job, "warned", stopped + 6)
    slurm("scancel", "--batch", "--signal=USR1", job)  # of another warning, which a requeue would follow
    slurm("scancel", job)
    assert slurm.wait(job) == "CANCELLED"
    steps = [step for step, _ in losses(slurm, "warned")]
    assert stopped > 0 and steps == list(range(1, len(steps) + 1)), "it went on where it stopped"
    assert summary(slurm, "warned")["stopped_by_signal"] in (signal.SIGUSR1, signal.SIGTERM), "it has saved"


def test_a_job_that_hits_its_limit_has_saved(slurm: Cluster, at_limits: dict):
    job = at_limits["unwarned"]
    assert slurm.wait(job) == "TIMEOUT", slurm.output(job)
    assert slurm.job(job)["Restarts"] == "0"
    ended = summary(slurm, "unwarned")
    assert ended["stopped_by_signal"] == signal.SIGTERM and ended["steps"] > 0


def test_a_job_outlives_the_loss_of_a_node(slurm: Cluster, undisturbed: str):
    """The node stops answering, as one without power does: its peers hear nothing, and Slurm requeues the job."""
    job = submit(slurm, "vision_a100", "bereft", *VISION, "6", "--checkpoint_every", "1", asks=("--exclude=node0",))
    reaches(slurm, job, "bereft", 24)
    lost = slurm("scontrol", "show", "hostnames", slurm.job(job)["NodeList"]).split()[1]
    slurm.kill(lost, signal.SIGSTOP)
    assert wait_until(lambda: slurm.job(job)["Restarts"] == "1", 120), slurm.output(job)
    slurm.kill(lost, signal.SIGKILL)
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    same_end(slurm, "bereft", undisturbed)
