"""Several NCCL ranks on one GPU: the same results as over gloo, nobody's host waits, and what a lost peer does.

Each process has another NCCL_HOSTID, so NCCL takes them for machines and talks over sockets on loopback. The processes
take turns on the GPU. Without a GPU the same functions run over gloo on the CPU, which tests the tests.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from core import CO2, CO2Config, CompressionConfig, load, make_method, node_mesh, save
from core.guards.workers import forget
from core.testing import run_distributed

PAPER = CO2Config(tau=4)
RECOMMENDED = CO2Config(4, outer_momentum=0.0, gap="none", merge="keep_local", delay=2)
NCCL = "cpu:gloo,cuda:nccl"
STEPS = 26
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, int8": ("ddp", {"ddp_compression": CompressionConfig("int8")}),
    "ddp, bfloat16": ("ddp", {"ddp_compression": CompressionConfig("bfloat16")}),
    "paper": ("co2", {"co2": PAPER}),
    "recommended": ("co2", {"co2": RECOMMENDED}),
    "recommended, int4": ("co2", {"co2": replace(RECOMMENDED, compression=CompressionConfig("int4"))}),
    "int8": ("co2", {"co2": CO2Config(tau=4, compression=CompressionConfig("int8"))}),
    "bfloat16": ("co2", {"co2": CO2Config(tau=4, compression=CompressionConfig("bfloat16"))}),
    "lgreco": ("co2", {"co2": CO2Config(tau=4, compression=CompressionConfig("lgreco", like="int4"))}),
    "sharded": ("co2", {"co2": PAPER, "shard": True}),
    "offload": ("co2", {"co2": PAPER, "offload": True}),
    "delay 0": ("co2", {"co2": CO2Config(4, gap="none", delay=0)}),
    "nodes of two": ("co2", {"co2": PAPER, "per_node": 2}),
    "local": ("local", {"co2": PAPER}),
    "overlap_local": ("overlap_local", {"co2": PAPER}),
    "slowmo": ("slowmo", {"co2": PAPER, "lr": lambda: 0.05}),
}
LATE = 4.0  # seconds
EXACT_RESUME = ("paper", "recommended", "recommended, int4", "sharded")
WITH_NAN = ("paper", "recommended")
gpu = pytest.mark.gpu


def device_of(backend: str) -> str:
    return "cuda:0" if "nccl" in backend else "cpu"


class Trained:
    """A small network with BatchNorm, its optimizer and a method."""

    def __init__(self, name: str, device: str, rank: int, timeout: float = 40.0):
        kind, how = METHODS[name]
        how = dict(how)
        if per_node := how.pop("per_node", 0):
            how["mesh"] = node_mesh(device.partition(":")[0], per_node)
        self.mover = rank // per_node if per_node else rank
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 8))
        self.net = net.to(device, torch.float64)
        self.device = device
        self.forward, self.method = make_method(kind, self.net, timeout=timeout, **how)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)

    def go(self, steps: range, of: int = STEPS) -> None:
        for step in steps:
            random = torch.Generator().manual_seed(1000 * self.mover + step)
            x = torch.randn(16, 24, generator=random, dtype=torch.float64)
            y = (x[:, :8].sin() + 0.1 * self.mover).to(self.device)
            (self.forward(x.to(self.device)) - y).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.method.step(last=step == of - 1)

    def end(self) -> torch.Tensor:
        self.method.finish()
        tensors = (*self.net.parameters(), *(b for b in self.net.buffers() if b.is_floating_point()))
        flat = torch.cat([t.detach().reshape(-1).cpu() for t in tensors])
        self.method.close()
        return flat


def train_all(rank: int, ranks: int, backend: str, folder: str) -> dict[str, Any]:
    """Every method. The methods of EXACT_RESUME also with ranks that end at different steps, and resumed in mid-round
    with an all-reduce in flight. The methods of WITH_NAN also leave out a rank. FSDP2 inside nodes of two, resumed."""
    found: dict[str, Any] = {}
    for name in METHODS:
        trained = Trained(name, device_of(backend), rank)
        trained.go(range(STEPS))
        found[name] = trained.end()
    for name in EXACT_RESUME:
        trained, steps = Trained(name, device_of(backend), rank), STEPS - 7 * (rank == ranks - 1)
        trained.go(range(steps), steps)
        found[f"{name}, uneven"] = trained.end()
    for name in WITH_NAN:
        trained = Trained(name, device_of(backend), rank)
        trained.method.on_excluded = forget(trained.optimizer)
        trained.go(range(6))
        if rank == ranks - 1:
            trained.net[0].weight.data.fill_(float("nan"))
        trained.go(range(6, STEPS))
        found[f"{name}, NaN"] = trained.end()
    if ranks == 4:
        for kind in ("fsdp2", "fsdp2, resumed"):
            found[kind] = fsdp2(rank, device_of(backend), Path(folder, "fsdp2"), resumes=kind != "fsdp2")
    for name in EXACT_RESUME:
        first = Trained(name, device_of(backend), rank)
        first.go(range(14))
        at = Path(folder, name)
        save(at, first.net, first.optimizer, first.method, step=14)
        first.method.leave()
        second = Trained(name, device_of(backend), rank)
        assert load(at, second.net, second.optimizer, second.method) == 14
        second.go(range(14, STEPS))
        found[f"{name}, resumed"] = second.end()
    return found


def fsdp2(rank: int, device: str, folder: Path, *, resumes: bool) -> torch.Tensor:
    """FSDP2 inside nodes of two ranks, over a mesh of torchtitan's names, and CO2 between the nodes; AdamW's moments
    are shards, too. It saves in mid-round, or goes on from there."""
    mesh = init_device_mesh(device.partition(":")[0], (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(int(resumes))
    net = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 8)).to(device, torch.float64)
    fully_shard(net, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    method = CO2(net.parameters(), PAPER, mesh=mesh, timeout=40.0)
    first = load(folder, net, optimizer, method) if resumes else 0
    assert first == 14 * resumes
    for step in range(first, STEPS):
        random = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(16, 24, generator=random, dtype=torch.float64).to(device)
        (net(x) - x[:, :8].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()
        if step == 13 and not resumes:
            save(folder, net, optimizer, method, step=14)
    method.finish()
    full = torch.cat([p.full_tensor().flatten().cpu() for p in net.parameters()])  # pyright: ignore[reportAttributeAccessIssue]
    method.close()
    return full


def check(ends: list[dict[str, Any]], name: str, reference: dict[str, Any] | None) -> None:
    assert all(torch.equal(end[name], ends[0][name]) for end in ends), "ranks differ"
    assert ends[0][name].isfinite().all()
    if f"{name}, resumed" in ends[0]:
        assert torch.equal(ends[0][f"{name}, resumed"], ends[0][name]), "a resumed run differs"
    if reference is not None:
        torch.testing.assert_close(ends[0][name], reference[name], rtol=1e-9, atol=1e-12)


COUNTS = (2, 4)
NAMES = [*METHODS, *(f"{name}, uneven" for name in EXACT_RESUME), *(f"{name}, NaN" for name in WITH_NAN)]
CASES = [*((ranks, name) for ranks in COUNTS for name in NAMES), (4, "fsdp2")]


@functools.cache
def ends(ranks: int, backend: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_distributed(train_all, ranks, backend, folder, timeout=300, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_the_methods_agree_over_gloo(ranks: int, name: str):
    check(ends(ranks, "gloo"), name, None)


@gpu
@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_nccl_ranks_agree_with_each_other_with_a_resume_and_with_gloo(ranks: int, name: str):
    check(ends(ranks, NCCL), name, ends(ranks, "gloo")[0])


# -- a peer that comes late, or not at all ---------------------------------------------------------------------------


def first_calls(rank: int, ranks: int, backend: str, name: str) -> float:
    """Rank 1 arrives LATE seconds late in its first round: the longest call of rank 0's step()."""
    trained = Trained(name, device_of(backend), rank)
    if rank == 1:
        time.sleep(LATE)
    longest = 0.0
    for _ in range(4):
        for p in trained.net.parameters():
            p.data.mul_(0.999)
        began = time.perf_counter()
        trained.method.step()
        longest = max(longest, time.perf_counter() - began)
    trained.method.finish()
    return longest


@gpu
@pytest.mark.parametrize("name", ["paper", "recommended, int4", "int8", "lgreco", "sharded"])
def test_the_first_launch_does_not_wait_for_a_late_peer(name: str):
    longest = run_distributed(first_calls, 2, NCCL, name, timeout=90, backend=NCCL)[0]
    assert longest < LATE / 2, f"a call of step() took {longest:.2f} s"


def lost(rank: int, ranks: int, how: str, folder: str) -> Any:
    """The last rank goes in mid-round; another trains until something ends it."""
    trained = Trained("paper", device_of(NCCL), rank, timeout=10.0)
    for step in range(100_000):
        trained.go(range(step, step + 1))
        if step == 9 and rank == ranks - 1:
            Path(folder, "gone").write_text(str(time.time()))
            if how == "leave":
                trained.method.leave()
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        torch.cuda.synchronize()
        time.sleep(0.01)


@gpu
@pytest.mark.parametrize(("how", "within"), [("kill", 15.0), ("leave", 20.0), ("stop", 30.0)])
def test_a_lost_peer_ends_the_others(how: str, within: float, tmp_path: Path):
    """torch's watchdog, or CO2's own error, ends the process; nobody waits for ever."""
    with pytest.raises((RuntimeError, TimeoutError)) as failure:
        run_distributed(lost, 2, how, str(tmp_path), timeout=within + 30, expect_death=(1,), backend=NCCL)
    if how == "stop":  # all that still runs, 15 s after rank 0 has died, is rank 1
        within += 15
        assert str(failure.value).startswith("rank 1 still running")
    else:
        assert "rank 0" in str(failure.value) and "still" not in str(failure.value)
    after = time.time() - float((tmp_path / "gone").read_text())
    assert after < within, f"{after:.0f} s"


def two_groups(rank: int, ranks: int, backend: str) -> bool:
    """DDP-like all-reduces of the model's own beside CO2's hidden ones: all sums are right."""
    trained = Trained("paper", device_of(backend), rank)
    own = dist.new_group()
    right = True
    for step in range(20):
        trained.go(range(step, step + 1))
        x = torch.full((1000,), float(rank + step), device=device_of(backend))
        dist.all_reduce(x, group=own)
        right &= bool((x == sum(r + step for r in range(ranks))).all())
    trained.method.finish()
    return right


@pytest.mark.parametrize("backend", ["gloo", pytest.param(NCCL, marks=gpu)])
def test_two_communicators_side_by_side(backend: str):
    assert run_distributed(two_groups, 2, backend, timeout=60, backend=backend) == [True, True]


# -- train scripts ----------------------------------------------------------------------------------------------------

RUNS = {  # the metric, and how much it may differ: NCCL's run is on a GPU, gloo's on the CPU
    "vision.train digits_small --no_tf32": ("test_loss", 0.02),
    "language.train gpt2_pydoc_small": ("val_loss", 0.02),
    "pointcloud.train surfaces_small": ("test_chamfer", 0.05),
    "segmentation.train digits_small": ("val_aAcc", 0.05),
}
HOW = "--epochs 1 --method co2 --no_recommended --co2.tau 4 --checkpoint_every 0"


def two_launchers(command: str, device: str, folder: Path) -> dict[str, float]:
    """The summary of a run of two torchruns with one worker each, as on two machines (docs/gpus.md)."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    module, *options = f"{command} {HOW}".split()
    env = os.environ | {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_MNNVL_ENABLE": "0", "OMP_NUM_THREADS": "1"}
    launchers = []
    for node in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        torchrun += ["--nproc-per-node=1", "--master-addr=localhost", f"--master-port={port}", "-m", module]
        torchrun += [*options, "--device", device, "--out", str(folder / device)]
        how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launchers.append(subprocess.Popen(torchrun, env=env | {"NCCL_HOSTID": f"node{node}"}, **how))
    said = [launcher.communicate(timeout=400)[0] for launcher in launchers]
    assert not any(launcher.returncode for launcher in launchers), "\n".join(text[:3000] for text in said)
    return json.loads((folder / device / "summary.json").read_text())


@gpu
@pytest.mark.parametrize("command", RUNS)
def test_train_scripts_between_nccl_ranks(command: str, tmp_path: Path):
    if command.startswith("segmentation"):
        pytest.importorskip("mmseg")
    metric, tolerance = RUNS[command]
    ours, theirs = (two_launchers(command, device, tmp_path) for device in ("cuda", "cpu"))
    print(command, ours, theirs)
    assert ours[metric] == pytest.approx(theirs[metric], rel=tolerance) and ours["rounds"] == theirs["rounds"]
