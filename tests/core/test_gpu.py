"""On a CUDA device: nothing synchronises, offloaded state leaves the device alone, copies and collectives run beside.

`pytest -m gpu`. Ran on one H200, but for what needs two devices.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from core import CO2, CO2Config, LGrecoConfig, ShardedCO2, WireConfig
from core.testing import run_distributed
from tests.problems import Mean

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZE = 1024


def parameters(layers: int = 4) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(SIZE, SIZE, generator=generator).cuda()) for _ in range(layers)]


@torch.no_grad()
def local_steps(params: list[nn.Parameter], co2: CO2 | ShardedCO2, steps: int) -> None:
    """Matrix products, so that the compute stream has work, and a deterministic move."""
    for step in range(steps):
        for p in params:
            p.mul_(0.99).add_(torch.tanh(p @ p) * 1e-3 * (step % 3))
        co2.step()


def trained(**how: Any) -> list[Tensor]:
    params = parameters()
    config = CO2Config(tau=4, outer_momentum=0.3, clip=None)
    co2 = ShardedCO2(params, config, **how) if how else CO2(params, config)
    local_steps(params, co2, 18)
    co2.finish()
    return [p.detach().cpu() for p in params]


@pytest.mark.parametrize("how", [{"offload": True}, {"shard": True}], ids=str)
def test_offloaded_and_shared_state_train_as_unshared(how: dict[str, Any]):
    for a, b in zip(trained(**how), trained(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_offloaded_state_takes_nothing_on_the_device():
    params = parameters()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    co2 = ShardedCO2(params, CO2Config(tau=2), offload=True)
    local_steps(params, co2, 6)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert all(b.flat.is_pinned() for b in co2.buckets)
    co2.finish()


def test_state_dict_takes_nothing_on_the_device():
    params = parameters()
    co2 = CO2(params, CO2Config(tau=2, gap="none", clip=None, merge="keep", delay=1, wire=WireConfig("int4")))
    local_steps(params, co2, 6)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    state = co2.state_dict()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    co2.load_state_dict(state)
    assert torch.cuda.memory_allocated() - before < 1 << 20
    co2.finish()


@pytest.mark.parametrize("how", [None, {"shard": True}, {"offload": True}], ids=str)
def test_a_boundary_does_not_synchronise(how: dict[str, Any] | None):
    params, buffers = parameters(), [torch.zeros(SIZE, device="cuda")]
    config = CO2Config(tau=2)
    co2 = CO2(params, config, buffers=buffers) if how is None else ShardedCO2(params, config, buffers=buffers, **how)
    local_steps(params, co2, 6)  # warmed up: the kernel is compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        local_steps(params, co2, 6)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sent_by_lgreco(device: str, like: str, config: LGrecoConfig) -> tuple[list[str], Tensor]:
    wire = WireConfig("lgreco", like=like, lgreco=config)
    tensors = [torch.zeros(s, dtype=torch.float64, device=device) for s in [(400, 300), (300, 250), (5000,)]]
    mean, landed = Mean(tensors, {"steps": 1, "weight": 1}, wire.reducer), []
    for round in range(5):
        draw = torch.randn(mean.buckets[0].numel, generator=torch.Generator().manual_seed(round), dtype=torch.float64)
        mean.buckets[0].payload.copy_(draw * torch.linspace(0.01, 3, len(draw), dtype=torch.float64) ** 3)
        mean.reduce()
        landed.append(mean.buckets[0].payload.clone().cpu())
    return [str(c) for c in mean.reducer.chosen], torch.stack(landed)


@pytest.mark.parametrize("like", ["int4", "top0.01", "rank4"])
def test_lgreco_chooses_and_sends_as_on_a_cpu(like: str):
    """Of low rank uniformly: its curves begin with draws of the device's own."""
    config = LGrecoConfig(rule="uniform" if like == "rank4" else "lgreco", every=2, first=1)
    (ours, landed), (theirs, expected) = (sent_by_lgreco(device, like, config) for device in ("cuda", "cpu"))
    assert ours == theirs
    torch.testing.assert_close(landed, expected, rtol=1e-6, atol=1e-6)


def streams(params: list[nn.Parameter], co2: CO2 | ShardedCO2, steps: int, trace: Path) -> dict[str, set[int]]:
    """Streams of matrix products, of copies to the host, and of NCCL's kernels."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        local_steps(params, co2, steps)
        torch.cuda.synchronize()
    traced.export_chrome_trace(str(trace))
    co2.finish()
    found: dict[str, set[int]] = {"compute": set(), "copies": set(), "nccl": set()}
    for event in json.loads(trace.read_text())["traceEvents"]:
        stream = event.get("args", {}).get("stream")
        name = str(event.get("name", ""))
        if event.get("cat") == "kernel" and ("gemm" in name or "cutlass" in name):
            found["compute"].add(stream)
        if event.get("cat") == "kernel" and "nccl" in name.lower():
            found["nccl"].add(stream)
        if event.get("cat") == "gpu_memcpy" and "DtoH" in name:
            found["copies"].add(stream)
    return found


def test_offloading_copies_in_a_stream_of_its_own(tmp_path: Path):
    params = parameters()
    co2 = ShardedCO2(params, CO2Config(tau=2), offload=True)
    local_steps(params, co2, 4)
    seen = streams(params, co2, 6, tmp_path / "trace.json")
    assert seen["compute"] and seen["copies"] and not seen["compute"] & seen["copies"], seen


def traced_collective(rank: int, world_size: int, folder: str) -> dict[str, set[int]]:
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    params = parameters()
    co2 = CO2(params, CO2Config(tau=4), group=group)
    local_steps(params, co2, 8)
    return streams(params, co2, 12, Path(folder, f"{rank}.json"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a device for each of two workers")
def test_the_collective_runs_outside_the_compute_stream(tmp_path: Path):
    for seen in run_distributed(traced_collective, 2, str(tmp_path), timeout=300):
        assert seen["compute"] and seen["nccl"] and not seen["compute"] & seen["nccl"], seen
