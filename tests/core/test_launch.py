"""The elastic launcher: its options, its store, and who belongs to a generation."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from bench.cluster import hold_port
from core import UserError
from core.elastic import launch
from core.elastic.launch import Agent, Coordinator
from core.elastic.members import Members
from core.elastic.sealed import SealedStore
from tests.ports import listening_at


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "the following arguments are required: script, arguments: --help lists the options"),
        ("--rdzv-id 3 train.py", "unrecognized arguments: "),
        ("nothing.py", "nothing.py: there is no such file; give a script, or -m and a module"),
        ("-m core.no.such", "-m core.no.such: there is no such module; "),
        ("-m core.errors.x", "-m core.errors.x: there is no such module; "),
        ("-m core.elastic", "-m core.elastic: there is no such module; "),  # a folder without __main__.py
        ("--nproc-per-node two -m this", "--nproc-per-node two: give 1 to 1024, or gpu"),
        ("--master-port x -m this", "argument --master-port: invalid int value: 'x': --help lists the options"),
        ("--max-restarts x -m this", "argument --max-restarts: invalid int value: 'x': --help lists the options"),
        ("--nnodes 2 -m core.doctor", "--nnodes 2 needs --node-rank and --master-addr: give on each node its number"),
        ("--nnodes 2 --node-rank 0 -m core.doctor", "--nnodes 2 needs --node-rank and --master-addr: "),
        ("--nnodes 2 --master-addr localhost -m core.doctor", "--nnodes 2 needs --node-rank and --master-addr: "),
        ("--nnodes 2 --node-rank 1 --master-addr no..host -m this", "--master-addr no..host: it is no host name: give"),
        ("--nproc-per-node 3 --per-node 2 -m this", "per_node=2 does not divide the 3 ranks of a node: "),
        ("--nproc-per-node 2 --per-node -2 -m this", "per_node=-2 does not divide the 2 ranks of a node: "),
        ("--store a,b,c/run -m this", "--store a,b,c/run: give etcd://HOST,HOST,HOST/RUN"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, said: str, capfd: pytest.CaptureFixture[str]):
    assert launch.main(arguments.split()) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")


def test_torchruns_options_are_checked_alike(monkeypatch: pytest.MonkeyPatch):
    """An unknown host of either option, a taken port, and modules that are found without being imported."""

    def resolve(host: str, *_: Any) -> None:
        if host == "node0":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    assert launch.is_module("core.doctor") and launch.is_module("tests.core.test_launch")
    monkeypatch.setattr(launch.socket, "getaddrinfo", resolve)
    several = get_args_parser().parse_args(["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a", "x.py"])
    several.node_rank = None  # as training.launch has it, of which other backends need none
    with pytest.raises(UserError, match="x.py: there is no such file"):
        launch.check_args(several)
    for option, host in (("--master-addr", "node0"), ("--rdzv-endpoint", "node0:29400")):
        args = get_args_parser().parse_args([option, host, "-m", "this"])
        with pytest.raises(UserError, match=f"^{option} node0: Name or service not known: give the first node's name"):
            launch.check_args(args)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="give a free one"):
        launch.check_free(taken.getsockname()[1])


FIXED = """
import torch, torch.distributed as dist
from core import CO2, CO2Config
dist.init_process_group("gloo")
CO2([torch.ones(2, requires_grad=True)], CO2Config.paper(2))
"""


def test_a_script_that_is_not_elastic_is_one_line_and_is_not_restarted(tmp_path: Path):
    (tmp_path / "fixed.py").write_text(FIXED)
    launch = [sys.executable, "-m", "core.elastic.launch", "--nproc-per-node", "2", "--max-restarts", "2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([*launch, tmp_path / "fixed.py"], env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the elastic launcher restarts workers, and this method's workers cannot join again:")


def test_an_elastic_worker_without_a_launcher_is_one_line(monkeypatch: pytest.MonkeyPatch):
    with hold_port() as held:
        for name, value in {"CO2_WORKER": "0.0", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(held.getsockname()[1]))
        with pytest.raises(UserError, match=r"^no store answers at 127.0.0.1:\d+ \(.*refused\): start"):
            Members.from_env(timeout=3.0)


def nobody(environment: dict[str, str]) -> Any:
    raise AssertionError("no worker is started")


def test_where_the_launchers_store_listens(monkeypatch: pytest.MonkeyPatch):
    """At its address; everywhere where other nodes take its name for loopback, or it is no address of this machine."""
    assert listening_at(Agent(nobody, 1)._served.port) == {"127.0.0.1"}
    assert listening_at(Agent(nobody, 1, nodes=2, host="127.0.1.1")._served.port) & {"::", "0.0.0.0"}
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="a free --master-port"):
        Agent(nobody, 1, port=taken.getsockname()[1])

    def refuse(*_: Any) -> Any:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(launch.socket, "create_server", refuse)
    assert listening_at(Agent(nobody, 1)._served.port) & {"::", "0.0.0.0"}


# -- the coordinator ------------------------------------------------------------------------------------------


class Table:
    """A coordinator over a store of this process, and what workers would write there."""

    def __init__(self) -> None:
        self.store = SealedStore(dist.HashStore(), "")
        self.coordinator, self.beat = Coordinator(self.store, 1), 0
        self.store.set("patience", "1000")

    def look(self, alive: list[str], **keys: str) -> tuple[int, list[str]]:
        """keys: 'came_1_0.0'="failed" is the key came/1/0.0."""
        self.beat += 1
        self.store.set("node/0", json.dumps({"beat": self.beat, "alive": alive}))
        for key, value in keys.items():
            self.store.set(key.replace("_", "/"), value)
        self.coordinator.look()
        return self.coordinator.generation, self.coordinator.members

    def listed(self, number: int) -> dict[str, Any]:
        return json.loads(self.store.get(f"generation/{number}"))


def test_who_belongs_to_a_generation():
    table, three = Table(), ["1.0", "0.0", "10.0"]
    ready = {f"ready_{name}": "" for name in three}
    assert table.look(three, **dict(list(ready.items())[:2])) == (0, [])  # all that were started are waited for
    assert table.look(three, **ready) == (1, ["0.0", "1.0", "10.0"]) and not table.store.has("broken/1")
    table.look(["0.0", "10.0", "1.1"], **{"ready_1.1": ""})  # 1.0 has died, and was started again
    assert table.store.has("broken/1", "waiting/1")
    alive = ["0.0", "10.0", "1.1"]
    assert table.look(alive, **{"came_1_0.0": "failed"})[0] == 1
    assert table.look(alive, **{"came_1_10.0": "failed"}) == (2, ["0.0", "10.0"])  # nobody joins in a failure
    assert not table.listed(2)["planned"]
    table.look(alive, **{"came_2_0.0": "planned"})
    assert table.look(alive, **{"came_2_10.0": "planned"}) == (3, ["0.0", "10.0", "1.1"])
    assert table.listed(3)["planned"]
    # a newcomer whose fetch has failed waits for the next time
    table.look(alive, **{"came_3_1.1": "empty", "ready_1.1": ""})
    assert table.look(alive, **{"came_3_0.0": "failed", "came_3_10.0": "failed"}) == (4, ["0.0", "10.0"])
    assert table.look(["1.1"]) == (5, ["1.1"])  # all that had state are lost: it founds anew


def test_a_signal_ends_a_launcher_whose_other_node_never_came(capfd: pytest.CaptureFixture[str]):
    def sleeper(_: dict[str, str]) -> Any:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    agent = Agent(sleeper, 1, nodes=2)
    assert agent.coordinator is not None
    agent.coordinator._tells_at = 0.0
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    assert agent.run() == 128 + signal.SIGTERM
    assert capfd.readouterr().err == "waiting for the launcher of node 1 (--node-rank 1)\n"


@pytest.mark.parametrize("status", [0, 2])
def test_a_launcher_ends_with_its_worker_if_the_other_node_never_came(status: int):
    """0: a dry run, which takes no part."""

    def ends(_: dict[str, str]) -> Any:
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])

    assert Agent(ends, 1, nodes=2).run() == status
