"""The doctor on real processes."""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.doctor import command, measure
from core.doctor.report import screen
from core.testing import run_distributed
from tests.scripts import Mistakes, run_script


class Ended(Exception):
    """In place of the process's end."""


def doctor(rank: int, world_size: int, port: int, folder: str, change: str, *argv: str) -> tuple[int, str]:
    """The command on this worker, two to a node; its exit status. change: what is wrong."""

    def end(status: int) -> None:
        raise Ended(status)

    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.readlink = lambda path: str(rank // 2)  # of the network's namespace
    measure.MOST_BYTES, measure.MOST_ALONE = 1 << 20, 1 << 16
    exits, os._exit, sys.exit = (os._exit, sys.exit), end, end  # pyright: ignore
    if change == "version" and rank == 1:
        command.__version__ = "0.0.9"
    if change == "nan":
        reduce, dist.all_reduce = dist.all_reduce, lambda x, **_: (reduce(x), x.fill_(float("nan")))
    if change == "broken":

        def broken(x: torch.Tensor, **_: Any) -> None:
            raise RuntimeError("Connection reset by peer\nby the network")

        dist.all_reduce = broken
    sys.argv = ["doctor", "--params", "2e5", *argv]
    said = Path(folder, f"said{rank}")
    before, sys.stdout = sys.stdout, said.open("w")
    try:
        command.main()
        status = -1
    except Ended as ended:
        status = ended.args[0]
    finally:
        os._exit, sys.exit = exits
        sys.stdout.close()
        sys.stdout = before
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/after", rank=rank, world_size=world_size)
    return status, said.read_text()


def on_two_nodes(folder: Path, change: str, *argv: str) -> tuple[list[int], str]:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = held.getsockname()[1]
        found = run_distributed(doctor, 4, port, str(folder), change, *argv, timeout=120.0)
    assert [text for _, text in found[1:]] == ["", "", ""], "rank 0 alone speaks"
    return [status for status, _ in found], found[0][1]


def test_the_command_on_two_nodes_of_two(tmp_path: Path):
    file = tmp_path / "cluster.json"
    status, said = on_two_nodes(tmp_path, "", "--step_ms", "50", "--out", str(file))
    assert status == [0, 0, 0, 0], said
    found = json.loads(file.read_text())
    assert screen(found) == said.rstrip("\n")
    lines = said.splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 100, said
    assert lines[-1] == "result       nothing found that would make a run fail"
    assert {name: link["workers"] for name, link in found["links"].items()} == {"within": 2, "across": 2, "all": 4}
    for link in found["links"].values():
        assert link["bandwidth_bits_per_second"] > 0 and 0 < link["latency_seconds"] < 1
    assert (found["format"], found["workers"], found["workers_per_node"], found["params"]) == (1, 4, 2, 200000)
    assert set(found["wires"]) == {"float32", "int8", "int4"}
    (settings,) = found["settings"]
    assert settings["step_seconds"] == 0.05 and settings["tau"] >= 1 and settings["wire"] in ("int4", "float32")
    assert settings["float32_ratio"] == found["wires"]["float32"]["seconds"] / 0.05
    assert not found["failures"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("version", ["FAILS        co2 differs: 0.1.0 on rank 0, 2, 3; 0.0.9 on rank 1", "a run would fail"]),
        ("nan", ["FAILS        an all-reduce of cpu tensors makes nan of 10"]),
        ("broken", ["FAILS        rank 0: Connection reset by peer by the network"]),
    ],
)
def test_what_fails_on_one_worker_is_told_by_the_first(tmp_path: Path, change: str, says: list[str]):
    """Versions before anything is measured; then what collectives do."""
    status, said = on_two_nodes(tmp_path, change)
    assert status == [1, 1, 1, 1] and all(text in said for text in says), said


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """The command in this process: its exit status, what it prints, and what it says on stderr."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def run(*argv: str, **env: str) -> tuple[int, str, str]:
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run_script("core.doctor", *argv)
        return (ended.value.code or 0, *capfd.readouterr())  # pyright: ignore

    return run


def test_one_process_says_that_it_is_alone(ends: Any, tmp_path: Path):
    status, out, err = ends("--params", "1e4", "--out", str(tmp_path / "cluster.json"))
    assert (status, err) == (0, "")
    assert "workers      one process" in out and "alone: links and tau are measured with several" in out
    found = json.loads((tmp_path / "cluster.json").read_text())
    assert (found["workers"], found["settings"], found["links"]["all"]) == (1, [], None)
    assert found["device"]["memory_bytes_per_worker"] > 1 << 30 and not found["wires"]


@pytest.mark.parametrize(("rank", "says"), [("0", "1/2 clients joined"), ("1", "timed out after 1000ms")])
def test_a_rank_that_does_not_come(ends: Any, rank: str, says: str):
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    began = time.monotonic()
    env = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    status, out, err = ends("--params", "1e4", "--timeout", "1", **env)
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (status, out, len(told)) == (1, "", 1) and says in told[0], err
    assert told[0].startswith(f"error: rank {rank}: ") and time.monotonic() - began < 30


def test_a_variable_that_is_no_number_is_one_line(ends: Any):
    status, out, err = ends("--params", "1e4", RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="zz")
    assert (status, out, err.count("\n")) == (1, "", 1) and "'zz'" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--params 0", "argument --params: 0: give a number above 0, such as 125e6"),
        ("--params abc", "argument --params: abc: give a number above 0"),
        ("--params -5", "argument --params: -5: give a number above 0"),
        ("--params inf", "argument --params: inf: give a number above 0"),
        ("--params 1e6 --step_ms 0", "argument --step_ms/--step-ms: 0: give a number above 0"),
        ("--params 1e6 --timeout x", "argument --timeout: x: give a number above 0"),
        ("--params 1e6 --out /nowhere/x.json", "--out /nowhere/x.json: there is no folder /nowhere"),
        ("--parms 1e6", "the following arguments are required: --params (--help lists the options)"),
        ("--params 1e6 --nodes 2", "unrecognized arguments: --nodes 2"),
    ],
)
def test_a_mistake_is_one_line(mistake: Mistakes, options: str, says: str):
    said = mistake("core.doctor", *options.split())
    assert said.startswith(f"error: {says}") and said.count("\n") == 1
