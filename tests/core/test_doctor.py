"""core.doctor: what it makes of known times and facts, and on real processes."""

import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import CO2Config
from core.doctor import __main__ as command
from core.doctor import measure
from core.doctor.__main__ import failures, header, own_facts
from core.doctor.measure import Link, extrapolated
from core.doctor.report import choose, place, screen
from core.testing import run_distributed
from tests.scripts import Mistakes, run_script

FACT: dict[str, Any] = {
    "rank": 0,
    "host": "a",
    "hostname": "a",
    "alike": {"torch": "2.9", "co2": "0.1.0", "device": "cpu"},
    "device": "cpu",
    "memory": 1 << 34,
    "infiniband": "",
}


def ring(workers: int, rate: float, swallowed: float = 0.0, latency: float = 1e-3) -> Link:
    """Of `rate` bits a second, `swallowed` bytes of which cost nothing."""
    sizes = [4, *(1 << e for e in range(12, 25))]
    sent = 2 * (workers - 1) / workers * 8
    return Link(workers, [(n, latency + max(0.0, n - swallowed) * sent / rate) for n in sizes])


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("rate", [10e6, 1e9])
def test_a_links_rate_and_latency(workers: int, rate: float):
    link = ring(workers, rate, swallowed=1 << 20)
    assert link.bandwidth == pytest.approx(rate, rel=1e-6)
    assert link.as_dict()["latency_seconds"] == pytest.approx(1e-3)


def test_a_line_is_never_below_nothing():
    noise = Link(2, [(4, 2.0), (5, 1.0)])
    assert noise.line[1] > 0 and noise.seconds(10) == pytest.approx(2.0) and Link(2, [(4, 2.0)]).line == (0.0, 0.5)


def test_a_sample_is_extrapolated_by_the_links_rate_and_its_own_work():
    link = ring(2, 100e6)  # 8e-8 s a byte
    took = 0.001 + 0.04 + 0.01
    assert extrapolated(took, 1_000_000, 1_000_000, 0.5, link) == took
    assert extrapolated(took, 1_000_000, 100_000_000, 0.5, link) == pytest.approx(0.001 + 4.0 + 1.0)
    assert extrapolated(0.03, 1_000_000, 100_000_000, 0.5, link) == pytest.approx(4.001), "a burst"


def seconds(rate: float) -> dict[str, float]:
    """Of the means of 1e7 parameters."""
    link = ring(2, rate, latency=0)
    return {name: link.seconds(each * 1e7) for name, each in {"float32": 4.0, "int8": 1.02, "int4": 0.52}.items()}


def test_tau_is_what_the_tuner_says():
    """int4 takes 0.416 s of 1e7 parameters: 4.16 steps of 0.1 s, 15 % and one more; 3 parts take 1.39."""
    config = CO2Config.recommended()
    slow = choose(config, 2, 0.1, seconds(100e6), 0.0)
    assert (slow["tau"], slow["compression"], slow["fragments"], slow["exposed_share"]) == (6, "int4", 3, 0.0)
    assert slow["late"] == pytest.approx(4.16 / 3)
    assert slow["take"] == "CO2" and slow["float32_tau"] == 80 and slow["ddp_share"] == pytest.approx(1 - 0.3 / 9.7)
    assert slow["ddp_int4_share"] == pytest.approx(1 - 0.1 / (0.1 + 0.416 - 0.2 / 3))
    assert slow["float32_ratio"] == pytest.approx(32) and "6 steps outlast it by 39%" in slow["reason"]
    fast = choose(config, 2, 0.1, seconds(100e9), 0.0)
    assert (fast["tau"], fast["compression"], fast["merge"]) == (1, "float32", "keep_local"), (
        "a mean that comes within a step"
    )
    between = choose(config, 2, 0.7, seconds(100e6), 0.02)
    assert between["take"] == "DDP, int4", "whose all-reduce of 0.416 s hides behind a backward pass of 0.467 s"
    capped = choose(replace(config, tau_max=2), 2, 0.1, seconds(100e6), 0.0)
    assert capped["tau"] == 2 and capped["exposed_share"] == pytest.approx(1 - 0.2 / 0.416)
    assert "tau_max=2" in capped["reason"]
    work = choose(config, 2, 0.1, seconds(100e9), 0.05)
    assert work["take"] == "DDP", "which hides its all-reduce under the step, and has no boundary"
    assert work["tau"] == 10 and work["boundary_share"] == pytest.approx(0.05 / 1.05)


def test_nodes_are_taken_where_they_lose_less_with_ddp_inside():
    config = CO2Config.recommended()
    alone = choose(replace(config, tau_max=2), 4, 0.1, seconds(100e6), 0.0)  # exposed: 1 - 0.2 / 0.416
    nodes = choose(config, 2, 0.1, seconds(100e6), 0.0)  # exposed: 0
    fast, slow = place(nodes, alone, 0.06), place(nodes, alone, 1.0)
    assert (fast["take"], fast["inside_share"]) == ("nodes", 0.0), "hidden by a backward pass of 0.067 s"
    wait = 1.0 - 0.2 / 3
    assert slow["take"] == alone["take"] and slow["inside_share"] == pytest.approx(wait / (0.1 + wait))
    report = {"workers": 4, "nodes": [{"hostname": "a", "device": "x"}] * 2, "backend": "gloo", "infiniband": ""}
    report |= {"device": {"type": "cpu", "memory_bytes_per_worker": 1 << 30}, "workers_per_node": 2, "failures": []}
    report |= {"links": {"all": None}, "compressions": {}, "params": 1, "per_node": 2, "settings": [alone] * 2}
    mesh = 'buffers=model.buffers(), mesh=node_mesh("cpu", 2))'
    for of_nodes, call in (([fast] * 2, mesh), ([fast, slow], f"{mesh}, with mesh= where nodes are taken")):
        wide = [c | {"take": "DDP, int4", "float32_ratio": 1234.5, "late": 10.25} for c in of_nodes]
        lines = screen(report | {"node_settings": of_nodes}).splitlines()
        assert " ".join(" ".join(lines).split("  call ")[1].split()).startswith("CO2(model.parameters(), CO2Config.re")
        assert call + " result" in " ".join(" ".join(lines).split())
        lines += screen(report | {"settings": wide, "node_settings": wide}).splitlines()
        assert max(map(len, lines)) <= 100 and all("late" in line for line in lines if "100 ms" in line), lines


def test_nodes_are_hosts():
    apart = [FACT | {"rank": rank, "host": "ab"[rank % 2]} for rank in range(4)]
    found = header(apart, 1e6)
    assert [node["ranks"] for node in found["nodes"]] == [[0, 2], [1, 3]] and found["workers_per_node"] == 2
    assert header(apart[:3], 1e6)["workers_per_node"] is None, "nodes of unlike numbers"
    assert "workers      4 on 2 nodes (a), gloo" in screen(found) and not found["failures"]


def test_what_would_make_a_run_fail():
    other = FACT | {"rank": 1, "alike": FACT["alike"] | {"torch": "2.8", "device": "cuda"}}
    assert failures([FACT, other, FACT | {"rank": 2}]) == [
        "torch differs: 2.9 on rank 0, 2; 2.8 on rank 1: use the same on all nodes",
        "device differs: cpu on rank 0, 2; cuda on rank 1: use the same on all nodes",
    ]


def test_a_worker_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    properties, chosen = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30), list[int]()
    for name, stand_in in (
        ("is_available", lambda: True),
        ("set_device", chosen.append),
        ("device_count", lambda: 4),
        ("current_device", lambda: chosen[-1]),
        ("get_device_properties", lambda device: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(command, "no_infiniband", lambda env: "libibverbs finds no device")
    found = own_facts({"LOCAL_RANK": "3"})
    assert (found["rank"], found["device"], found["memory"]) == (0, "NVIDIA H100", 80 << 30)
    assert chosen == [3] and header([found], 1e6)["backend"] == "nccl"
    (line,) = [line for line in screen(header([found], 1e6)).splitlines() if "NCCL" in line]
    assert line == "InfiniBand   on rank 0, libibverbs finds no device; NCCL uses TCP there"


@pytest.mark.parametrize(
    ("library", "device", "disabled", "says"),
    [
        (None, "uverbs0", "0", "libibverbs.so.1 is missing: install libibverbs1"),
        (0, "uverbs0", "0", "libibverbs finds no device"),
        (2, "rdma_cm", "0", "MELLANOX_VISIBLE_DEVICES=all"),
        (2, "uverbs0", "0", None),
        (None, "rdma_cm", "1", None),
    ],
)
def test_why_nccl_finds_no_infiniband(library, device, disabled, says, tmp_path, monkeypatch):
    def devices(count: Any) -> int:
        count._obj.value = library
        return 1

    def load(name: str) -> SimpleNamespace:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(ibv_get_device_list=devices)

    monkeypatch.setattr(command.ctypes, "CDLL", load)
    (tmp_path / device).touch()
    found = command.no_infiniband({"NCCL_IB_DISABLE": disabled}, tmp_path)
    assert says in found if says else found == ""


class Ended(Exception):
    """In place of the process's end."""


def doctor(rank: int, world_size: int, port: int, folder: str, change: str, *argv: str) -> tuple[int, str]:
    """The command on this worker, two to a node; its exit status. change: what is wrong."""

    def end(status: int) -> None:
        raise Ended(status)

    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
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


@pytest.mark.slow
def test_the_command_on_two_nodes_of_two(tmp_path: Path):
    file = tmp_path / "cluster.json"
    status, said = on_two_nodes(tmp_path, "", "--step_ms", "50", "--per_node", "2", "--out", str(file))
    assert status == [0, 0, 0, 0], said
    found = json.loads(file.read_text())
    assert screen(found) == said.rstrip("\n")
    lines = said.splitlines()
    assert len(lines) <= 22 and max(map(len, lines)) <= 100, said
    assert lines[-1] == "result       nothing found that would make a run fail"
    assert {name: link["workers"] for name, link in found["links"].items()} == {"within": 2, "across": 2, "all": 4}
    for link in found["links"].values():
        assert link["bandwidth_bits_per_second"] > 0 and 0 < link["latency_seconds"] < 1
    assert (found["format"], found["workers"], found["workers_per_node"], found["params"]) == (1, 4, 2, 200000)
    assert set(found["compressions"]) == {"float32", "int4"}
    (settings,), (of_nodes,) = found["settings"], found["node_settings"]
    assert (
        found["per_node"] == 2
        and of_nodes["take"] in ("nodes", settings["take"])
        and "  nodes      of 2, with DDP inside" in said
    )
    assert settings["step_seconds"] == 0.05 and settings["tau"] >= 1 and settings["compression"] in ("int4", "float32")
    assert settings["float32_ratio"] == found["compressions"]["float32"]["seconds"] / 0.05
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
    assert "workers      one process" in out and "links and tau are measured with several processes" in out
    found = json.loads((tmp_path / "cluster.json").read_text())
    assert (found["workers"], found["settings"], found["links"]["all"]) == (1, [], None)
    assert found["device"]["memory_bytes_per_worker"] > 1 << 30 and not found["compressions"]


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


def test_more_workers_than_gpus_are_one_line(ends: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    status, out, err = ends("--params", "1e4", LOCAL_RANK="2")
    said = "error: rank 0: LOCAL_RANK=2: torch sees 2 CUDA devices here; start as many workers a node\n"
    assert (status, out, err) == (1, "", said)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--params 0", "argument --params: 0: give a number above 0"),
        ("--params 1e6 --step_ms 0", "argument --step_ms/--step-ms: 0: give a number above 0"),
        ("--params 1e6 --out /nowhere/x.json", "--out /nowhere/x.json: there is no folder /nowhere"),
        ("--params 1e6 --out /", "--out /: it is a folder"),
        ("--parms 1e6", "the following arguments are required: --params (--help lists the options)"),
        ("--params 1e6 --nodes 2", "unrecognized arguments: --nodes 2"),
    ],
)
def test_a_mistake_is_one_line(mistake: Mistakes, options: str, says: str):
    said = mistake("core.doctor", *options.split())
    assert said.startswith(f"error: {says}") and said.count("\n") == 1
