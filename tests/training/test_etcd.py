"""Elastic runs whose store is etcd: the store itself, who leads, and the loss of a machine."""

import functools
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench.chaos.crew import write_rounds
from bench.cluster import Cluster
from bench.cluster.etcd import LocalEtcd, program
from core import UserError
from core.elastic.etcd import LEASE, Election, EtcdStore, NotLeading
from tests.runs import logged, rows, summary

needs_etcd = pytest.mark.skipif(program() is None, reason="no etcd here: apt-get install etcd-server")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[LocalEtcd]:
    with LocalEtcd(tmp_path) as members:
        yield members


@pytest.mark.parametrize(
    "url", ["etcd://a,b,c", "etcd:///run", "etcd://a:x/run", "etcd://a:65536/run", "etcd://a,,c/run"]
)
def test_a_wrong_url_is_one_line(url: str):
    with pytest.raises(UserError, match="give etcd://HOST,HOST,HOST/RUN"):
        EtcdStore(url)


@needs_etcd
def test_it_is_a_store_of_torch(etcd: LocalEtcd):
    ours, other = EtcdStore(f"{etcd.url}/ours"), EtcdStore(f"{etcd.url}/other")
    store = dist.PrefixStore("p", ours)
    store.set("a", "1")
    assert store.get("a") == b"1" and store.check(["a"]) and not store.check(["a", "b"])
    assert not dist.PrefixStore("p", other).check(["a"])
    assert store.compare_set("c", "", "x") == b"x" == store.compare_set("c", "", "y")
    assert store.compare_set("c", "x", "y") == b"y"
    assert [store.add("n", amount) for amount in (2, 3, 0)] == [2, 5, 5]
    ours.delete_below("p/")
    assert not store.check(["a"]) and not store.check(["n"])
    etcd.processes[0].kill()
    store.set("after", "a member was lost")
    assert store.get("after") == b"a member was lost"


@needs_etcd
@pytest.mark.slow
def test_a_leader_that_was_stopped_writes_nothing_when_it_wakes(etcd: LocalEtcd):
    led: list[str] = []
    stores = [EtcdStore(f"{etcd.url}/run") for _ in range(2)]
    elections = [Election(store, name, lambda n=name: led.append(n)) for store, name in zip(stores, "ab", strict=True)]
    assert elections[0].leads() and not elections[1].leads() and led == ["a"]
    assert stores[0].compare_set("generation/1", "", "by a") == b"by a"
    time.sleep(LEASE + 2.5)  # "a" is stopped
    assert elections[1].leads() and led == ["a", "b"]
    for write in (lambda: stores[0].set("broken/1", ""), lambda: stores[0].compare_set("generation/2", "", "by a")):
        with pytest.raises(NotLeading):
            write()
    assert not stores[1].check(["broken/1"]) and not stores[1].check(["generation/2"])
    assert not elections[0].leads()
    elections[1].resign()
    time.sleep(1.0)
    assert elections[0].leads() and led == ["a", "b", "a"]


class Machines:
    """Three machines: a member of etcd, a launcher and a worker each.

    Args:
        etcd: Their members.
        folder: Folder of the run and of each launcher's log.
        epochs: Length of the run.
        script: The module that the launchers start, with its first arguments.
    """

    def __init__(self, etcd: LocalEtcd, folder: Path, epochs: int, *script: str):
        self.etcd, self.folder, self.epochs, self.script, self.run = etcd, folder, epochs, script, folder / "run"
        self.launchers = [self.launch(node) for node in range(3)]

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)

    def launch(self, node: int) -> Any:
        started = ["training.launch", "--nnodes", "3", "--node-rank", str(node), "--nproc-per-node", "1"]
        recipe = ["-m", *self.script, "digits_small", "--elastic", "--device", "cpu", "--timeout", "30"]
        recipe += ["--epochs", str(self.epochs), "--batch_size", "60", "--co2.tau", "3", "--log_every", "1"]
        command = [sys.executable, "-m", *started, "--store", f"{self.etcd.url}/run", *recipe, "--out", str(self.run)]
        start = functools.partial(self.etcd.cluster.popen, node) if self.etcd.cluster else subprocess.Popen
        with open(self.folder / f"log{node}", "a") as log:
            return start(command, stdout=log, stderr=log, start_new_session=True)

    def train(self, steps: int) -> None:
        """Waits for some more steps."""
        until, first = time.monotonic() + 240, self.step
        while self.step < first + steps:
            assert time.monotonic() < until and any(one.poll() is None for one in self.launchers), self.logs
            time.sleep(0.2)

    @property
    def step(self) -> int:
        return max((row["step"] for row in rows(self.run)), default=0)

    @property
    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log*")))

    @property
    def leader(self) -> int:
        return int(self.etcd.ask("run", lambda store: store.get("leader")))


@needs_etcd
@pytest.mark.slow
def test_a_run_survives_the_machine_that_leads_and_takes_it_back(etcd: LocalEtcd, tmp_path: Path):
    with Machines(etcd, tmp_path, 14, "vision.train") as machines:
        launchers, run = machines.launchers, machines.run
        machines.train(12)
        lost = machines.leader
        os.killpg(launchers[lost].pid, signal.SIGKILL)
        etcd.processes[lost].kill()
        launchers[lost].wait()
        machines.train(12)
        launchers[lost] = machines.launch(lost)
        assert [launcher.wait(240) for launcher in launchers] == [0, 0, 0]
    assert logged(run, "workers") == [f"2 workers: {lost}.0 lost", f"3 workers: {lost}.1 came"]
    assert summary(run)["steps"] == rows(run)[-1]["step"] and set(logged(run, "round/drifted")) == {0.0}
    assert "Traceback" not in machines.logs


@needs_etcd
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("leads", [True, False])
def test_a_machine_that_is_cut_off_stands_still_and_comes_back(tmp_path: Path, leads: bool):
    script = "tests.training.test_etcd", str(tmp_path), "1", "vision.train"  # main() below

    def rounds(name: str) -> list[list[str]]:
        file = tmp_path / f"rounds1.{name}"
        return [line.split() for line in file.read_text().splitlines()] if file.exists() else []

    with (
        Cluster(3, 100) as cluster,
        LocalEtcd(tmp_path, cluster) as etcd,
        Machines(etcd, tmp_path, 1000, *script) as machines,
    ):
        machines.train(12)
        cut = machines.leader if leads else (machines.leader + 1) % 3
        cluster.set_link(cut, up=False)
        since = time.monotonic()
        assert machines.launchers[cut].wait(120) == 1
        machines.train(12)
        cluster.set_link(cut, up=True)
        machines.launchers[cut] = machines.launch(cut)
        until = time.monotonic() + 240
        while len(rounds(f"{cut}.1")) < 6:
            assert time.monotonic() < until, machines.logs
            machines.train(1)
    assert logged(machines.run, "workers") == [f"2 workers: {cut}.0 lost", f"3 workers: {cut}.1 came"]
    late = [when for *_, when in rounds(f"{cut}.0") if float(when) > since]
    assert len(late) <= 1, "the machine that is alone merges at most the sum that had arrived"
    names = [f"{cut}.1", *(f"{node}.0" for node in range(3))]
    digests = {(number, digest) for name in names for _, number, digest, _ in rounds(name)}
    assert len(digests) == len({number for number, _ in digests}) > 8, "equal bit for bit"
    assert "Traceback" not in machines.logs
    assert "the run's store is gone" in (tmp_path / f"log{cut}").read_text()


def main() -> None:
    """Runs `python -m MODULE ARGUMENTS`, and writes its rounds, for the command line FOLDER RUN MODULE ARGUMENTS."""
    folder, run, module, *arguments = sys.argv[1:]
    write_rounds(Path(folder), run, os.environ["CO2_WORKER"])
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
