"""core.doctor: what it makes of known times and facts, its one screen, and how it ends."""

import socket
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.doctor import facts
from core.doctor.choose import choose, memory, recommended
from core.doctor.facts import Facts, failures, own_facts, ranks_text, warnings
from core.doctor.measure import Line, Link, Wire

CPU = torch.device("cpu")
FACT = Facts(
    rank=0,
    host="a",
    hostname="a",
    local_workers=1,
    versions={"python": "3.11", "torch": "2.9", "co2": "0.1.0"},
    device="cpu",
    device_name="cpu",
    memory=1 << 34,
    problems=[],
    variables={},
    interface="eth0",
    address="10.0.0.1",
    interfaces=["eth0"],
    locked=-1,
    infiniband=[],
    pins=True,
)
OTHER = replace(FACT, rank=1, host="b", hostname="b", address="10.0.0.2")


# -- what follows from times ----------------------------------------------------------------------------------------


def ring(workers: int, rate: float, swallowed: float = 0.0, latency: float = 1e-3) -> Link:
    """Of `rate` bits a second, `swallowed` bytes of which cost nothing."""
    sizes = [4, *(1 << e for e in range(12, 25))]
    sent = 2 * (workers - 1) / workers * 8
    return Link(workers, [(n, latency + max(0.0, n - swallowed) * sent / rate) for n in sizes])


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("rate", [10e6, 1e9])
def test_a_links_rate_and_latency(workers: int, rate: float):
    link = ring(workers, rate, swallowed=1 << 20)
    assert link.bandwidth == pytest.approx(rate, rel=1e-6) and link.latency == pytest.approx(1e-3)


def test_a_line_is_never_below_nothing():
    assert Line.through([(4, 2.0)]) == Line(0.0, 0.5)
    noise = Line.through([(4, 2.0), (5, 1.0)])
    assert noise.slope > 0 and noise.at(10) == pytest.approx(2.0)
    assert Line(-1.0, 1e-3).at(1) > 0


def test_a_sample_is_extrapolated_by_the_links_rate_and_its_own_work():
    link = ring(2, 100e6)  # 8e-8 s a byte
    small = Wire(bytes_each=0.5, params=1_000_000, measured=0.001 + 0.04 + 0.01, copies=5.5, among=link)
    assert small.seconds(1_000_000) == small.measured
    assert small.seconds(100_000_000) == pytest.approx(0.001 + 4.0 + 1.0)
    assert replace(small, measured=0.03).seconds(100_000_000) == pytest.approx(4.001), "a burst"


def of_wires(link: Link) -> dict[str, Wire]:
    bytes_each = {"float32": 4.0, "int8": 1.02, "int4": 0.52}
    return {name: Wire(each, 1, link.line.at(each), 5.5, link) for name, each in bytes_each.items()}


def test_tau_is_what_the_tuner_says():
    """int4 takes 0.416 s of 1e7 parameters: with a margin of 1.5, 10.4 steps of 0.1 s; a mean is awaited after 5.2."""
    slow = choose(recommended(2, None), 2, 0.1, of_wires(ring(2, 100e6, latency=0)), 0.0, 10_000_000)
    assert (slow.tau, slow.wire, slow.awaited, slow.exposed_share) == (11, "int4", 6, 0.0)
    assert slow.float32_tau == 80 and slow.ddp_share == pytest.approx(1 - 0.1 / 3.2)
    assert "11 steps outlast it by 150%" in slow.reason
    fast = choose(recommended(2, None), 2, 0.1, of_wires(ring(2, 100e9, latency=0)), 0.0, 10_000_000)
    assert (fast.tau, fast.wire, fast.merge) == (1, "float32", "keep"), "a mean that comes within a step"
    capped = choose(recommended(2, 2), 2, 0.1, of_wires(ring(2, 100e6, latency=0)), 0.0, 10_000_000)
    assert capped.tau == 2 and capped.exposed_share == pytest.approx(1 - 0.2 / 0.416) and "tau_max=2" in capped.reason
    work = choose(recommended(2, None), 2, 0.1, of_wires(ring(2, 100e9, latency=0)), 0.05, 10_000_000)
    assert work.tau == 10 and work.boundary_share == pytest.approx(0.05 / 1.05)


def test_what_does_not_fit_is_a_failure_and_what_hardly_does_a_warning():
    least, most = (memory(5.5, 1000, has) for has in (30e3, 38e3))
    assert (least.co2_bytes, least.parameters_and_gradients_bytes, least.adam_bytes) == (22e3, 8e3, 8e3)
    (nothing, (hardly,)), (fails, others) = least.judge(), memory(5.5, 1000, 29e3).judge()
    assert nothing == others == [] and most.judge() == ([], []) and "with AdamW" in hardly
    assert "parameters, gradients and CO2 take" in fails[0]


# -- the facts ------------------------------------------------------------------------------------------------------


def test_alike_workers_are_well():
    assert failures([FACT, OTHER]) == warnings([FACT, OTHER]) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": FACT.versions | {"torch": "2.8"}}, "torch is unlike: 2.9 on rank 0; 2.8 on rank 1"),
        ({"versions": FACT.versions | {"NCCL": "2.27"}}, "NCCL is unlike: none on rank 0; 2.27 on rank 1"),
        ({"device": "cuda"}, "device is unlike: cpu on rank 0; cuda on rank 1"),
        ({"problems": ["no NCCL"]}, "rank 1: no NCCL"),
    ],
)
def test_what_would_make_a_run_fail(change: dict[str, Any], says: str):
    (found,) = failures([FACT, replace(OTHER, **change)])
    assert found.startswith(says)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device_name": "A100"}, "devices are unlike: cpu on rank 0; A100 on rank 1"),
        ({"local_workers": 2}, "LOCAL_WORLD_SIZE is not the number of workers on the node, on rank 1"),
        ({"address": "127.0.1.1"}, "gloo takes the loopback on rank 1, "),
        ({"interfaces": ["eth0", "ib0"]}, "several interfaces (eth0, ib0) and no GLOO_SOCKET_IFNAME: gloo took eth0"),
        ({"infiniband": ["mlx5_0"], "locked": 1 << 16}, "ulimit -l is 64 KiB on rank 1"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO is unlike: unset on rank 0; Ring on rank 1"),
        ({"pins": False}, "the host's memory cannot be pinned on rank 1"),
    ],
)
def test_what_is_worth_a_warning(change: dict[str, Any], says: str):
    (found,) = warnings([FACT, replace(OTHER, **change)])
    assert found.startswith(says)


def test_variables_that_all_workers_have():
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "NCCL_P2P_DISABLE": "1"}
    first, second = warnings([replace(f, variables=env) for f in (FACT, OTHER)])
    assert "would leave the others hanging" in first and "NCCL_P2P_DISABLE" in second


def test_ranks_that_a_node_does_not_hold_in_a_row():
    apart = [replace(FACT, rank=rank, host="ab"[rank % 2], local_workers=2) for rank in range(4)]
    (found,) = warnings(apart)
    assert "not consecutive" in found
    unequal = [replace(f, host="aaab"[f.rank], local_workers=3 - 2 * (f.rank == 3)) for f in apart]
    assert warnings(unequal) == ["the nodes have 3, 1 workers: node_mesh needs equally many"]
    assert ranks_text([5, 0, 1, 2]) == "rank 0-2, 5"


def test_the_interface_that_gloo_takes(monkeypatch: pytest.MonkeyPatch):
    found = {"lo": "127.0.0.1", "eth0": "10.0.0.1"}
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {"well": "10.0.0.1", "debian": "127.0.1.1"}[name])
    assert facts.taken(found, {"GLOO_SOCKET_IFNAME": "eth0,ib0"}, "well") == ("eth0", "10.0.0.1")
    assert facts.taken(found, {}, "well") == ("eth0", "10.0.0.1")
    assert facts.taken(found, {}, "debian") == ("lo", "127.0.1.1")
    assert facts.addresses()["lo"] == "127.0.0.1"


def test_a_worker_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for CUDA: the calls as torch documents them."""
    properties, chosen = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30), list[int]()
    for owner, name, stand_in in (
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 4),
        (torch.cuda, "set_device", chosen.append),
        (torch.cuda, "current_device", lambda: chosen[-1]),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch.version, "cuda", "12.8"),
        (facts.nccl, "version", lambda: (2, 27, 3)),
        (dist, "is_nccl_available", lambda: True),
        (facts, "_pins", lambda: True),
    ):
        monkeypatch.setattr(owner, name, stand_in)
    env = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3", "NCCL_DEBUG": "INFO", "HOME": "/"}
    found = own_facts(7, env)
    assert (found.device, found.device_name, found.memory, chosen) == ("cuda", "NVIDIA H100", 80 << 30, [3])
    assert found.versions["NCCL"] == "2.27.3" and found.versions["CUDA"] == "12.8"
    assert (found.variables, found.problems) == ({"NCCL_DEBUG": "INFO"}, [])
    many = own_facts(7, env | {"LOCAL_WORLD_SIZE": "8", "TORCH_NCCL_BLOCKING_WAIT": "1", "GLOO_SOCKET_IFNAME": "none9"})
    assert [text.partition(":")[0] for text in many.problems] == [
        "8 workers on a node with 4 GPUs",
        "TORCH_NCCL_BLOCKING_WAIT is set",
        "GLOO_SOCKET_IFNAME=none9",
    ]
