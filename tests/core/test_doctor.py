"""core.doctor: what it makes of known times and facts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core import CO2Config
from core.doctor import command
from core.doctor.command import Facts, failures, header, own_facts
from core.doctor.measure import Link, extrapolated
from core.doctor.report import choose, screen

FACT = Facts(
    rank=0,
    host="a",
    hostname="a",
    alike={"torch": "2.9", "co2": "0.1.0", "device": "cpu"},
    device="cpu",
    device_name="cpu",
    memory=1 << 34,
)
OTHER = replace(FACT, rank=1, host="b", hostname="b")


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
    assert link.bandwidth == pytest.approx(rate, rel=1e-6)
    assert link.as_dict()["latency_seconds"] == pytest.approx(1e-3)


def test_a_line_is_never_below_nothing():
    assert Link(2, [(4, 2.0)]).line == (0.0, 0.5)
    noise = Link(2, [(4, 2.0), (5, 1.0)])
    assert noise.line[1] > 0 and noise.seconds(10) == pytest.approx(2.0)
    assert Link(2, [(4, 0.1), (5, 1.0)]).seconds(1) > 0


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
    """int4 takes 0.416 s of 1e7 parameters: with a margin of 1.5, 10.4 steps of 0.1 s; a mean is awaited after 5.2."""
    config = CO2Config.recommended(2)
    slow = choose(config, 2, 0.1, seconds(100e6), 0.0)
    assert (slow["tau"], slow["wire"], slow["awaited"], slow["exposed_share"]) == (11, "int4", 6, 0.0)
    assert slow["take"] == "CO2" and slow["float32_tau"] == 80 and slow["ddp_share"] == pytest.approx(1 - 0.1 / 3.2)
    assert slow["float32_ratio"] == pytest.approx(32) and "11 steps outlast it by 150%" in slow["reason"]
    fast = choose(config, 2, 0.1, seconds(100e9), 0.0)
    assert (fast["tau"], fast["wire"], fast["merge"]) == (1, "float32", "keep"), "a mean that comes within a step"
    capped = choose(replace(config, tau_max=2), 2, 0.1, seconds(100e6), 0.0)
    assert capped["tau"] == 2 and capped["exposed_share"] == pytest.approx(1 - 0.2 / 0.416)
    assert "tau_max=2" in capped["reason"]
    work = choose(config, 2, 0.1, seconds(100e9), 0.05)
    assert work["take"] == "DDP", "which hides its all-reduce under the step, and has no boundary"
    assert work["tau"] == 10 and work["boundary_share"] == pytest.approx(0.05 / 1.05)


# -- the facts ------------------------------------------------------------------------------------------------------


def test_nodes_are_hosts():
    apart = [replace(FACT, rank=rank, host="ab"[rank % 2]) for rank in range(4)]
    found = header(apart, 1e6)
    assert [node["ranks"] for node in found["nodes"]] == [[0, 2], [1, 3]] and found["workers_per_node"] == 2
    assert header(apart[:3], 1e6)["workers_per_node"] is None, "nodes of unlike numbers"
    assert "workers      4 on 2 nodes (a), gloo" in screen(found) and not found["failures"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"torch": "2.8"}, "torch differs: 2.9 on rank 0, 2; 2.8 on rank 1: take the same on all nodes"),
        ({"device": "cuda"}, "device differs: cpu on rank 0, 2; cuda on rank 1"),
    ],
)
def test_what_would_make_a_run_fail(change: dict[str, Any], says: str):
    (found,) = failures([FACT, replace(OTHER, alike=FACT.alike | change), replace(OTHER, rank=2)])
    assert found.startswith(says)


def test_a_worker_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """A stand-in for CUDA: the calls as torch documents them."""
    properties, chosen = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30), list[int]()
    for name, stand_in in (
        ("is_available", lambda: True),
        ("set_device", chosen.append),
        ("current_device", lambda: chosen[-1]),
        ("get_device_properties", lambda device: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(command, "no_infiniband", lambda env: "libibverbs finds no device")
    found = own_facts({"LOCAL_RANK": "3"})
    assert (found.rank, found.device, found.device_name, found.memory) == (0, "cuda", "NVIDIA H100", 80 << 30)
    assert chosen == [3] and header([found], 1e6)["backend"] == "nccl"
    (line,) = [line for line in screen(header([found], 1e6)).splitlines() if "NCCL" in line]
    assert line == "InfiniBand   on rank 0, libibverbs finds no device; NCCL takes TCP there"


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
def test_why_nccl_finds_no_infiniband(
    library: int | None, device: str, disabled: str, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
