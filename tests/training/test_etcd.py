"""Elastic runs whose store is etcd: the store itself, who leads, and the loss of a machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bench.cluster.etcd import LocalEtcd, program
from core import UserError
from core.elastic.etcd import LEASE, Election, EtcdStore, NotLeading
from tests.runs import logged, rows, summary

needs_etcd = pytest.mark.skipif(program() is None, reason="no etcd here: apt-get install etcd-server")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[LocalEtcd]:
    with LocalEtcd(tmp_path) as members:
        yield members


@pytest.mark.parametrize("url", ["etcd://a,b,c", "etcd:///run", "etcd://a:x/run", "a,b,c/run", "etcd://a,,c/run"])
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


@needs_etcd
@pytest.mark.slow
def test_a_run_survives_the_machine_that_leads_and_takes_it_back(etcd: LocalEtcd, tmp_path: Path):
    """Three machines: a member of etcd, a launcher and a worker each."""
    run, url = tmp_path / "run", f"{etcd.url}/run"

    def launch(node: int) -> Any:
        started = ["training.launch", "--nnodes", "3", "--node-rank", str(node), "--nproc-per-node", "1"]
        recipe = ["-m", "vision.train", "digits_small", "--elastic", "--device", "cpu", "--timeout", "30"]
        recipe += ["--epochs", "14", "--batch_size", "60", "--co2.tau", "3", "--log_every", "1", "--out", str(run)]
        log = open(tmp_path / f"log{node}", "a")  # noqa: SIM115
        command = [sys.executable, "-m", *started, "--store", url, *recipe]
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def trained_until(step: int) -> None:
        until = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or rows(run)[-1:] == [] or rows(run)[-1]["step"] < step:
            assert time.monotonic() < until, [path.read_text()[-2000:] for path in tmp_path.glob("log*")]
            time.sleep(0.2)

    launchers = [launch(node) for node in range(3)]
    try:
        trained_until(12)
        lost = int(EtcdStore(url).get("leader"))
        os.killpg(launchers[lost].pid, signal.SIGKILL)
        etcd.processes[lost].kill()
        launchers[lost].wait()
        trained_until(rows(run)[-1]["step"] + 12)
        launchers[lost] = launch(lost)
        assert [launcher.wait(240) for launcher in launchers] == [0, 0, 0]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
    assert logged(run, "workers") == [f"2 workers: {lost}.0 lost", f"3 workers: {lost}.1 came"]
    assert summary(run)["steps"] == rows(run)[-1]["step"] and set(logged(run, "round/drifted")) == {0.0}
    assert "Traceback" not in "".join(path.read_text() for path in tmp_path.glob("log*"))
