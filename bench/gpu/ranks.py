"""Several NCCL ranks on one GPU: bandwidth, and hidden communication.

The ranks have different values of NCCL_HOSTID, so they communicate over sockets on loopback, as machines would. They
take turns on the GPU: a step takes longer than on a GPU of its own, and the link is as slow as a socket. Links of 10
and 1 Gbit/s are paced at the sockets.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bench.gpu.command import Scope, check
from core import CO2Config, CompressionConfig, make_method
from core.comm import new_group, of_all
from core.stats import between, mark
from core.stored import parse_json
from core.testing import run_distributed

RANKS = 2
PACING = getattr(socket, "SO_MAX_PACING_RATE", 47)  # Linux's number, which Python does not name
UNPACED = (1 << 63) - 1
KEEP_LOCAL = CO2Config(gap="none", outer_momentum=0.0, merge="keep_local")
METHODS: dict[str, tuple[str, CO2Config]] = {
    "ddp": ("ddp", CO2Config()),
    "local": ("local", CO2Config()),
    "paper": ("co2", CO2Config()),
    "keep_local": ("co2", KEEP_LOCAL),
    "recommended": ("co2", replace(KEEP_LOCAL, delay="auto")),
    "recommended, int4": ("co2", replace(KEEP_LOCAL, delay="auto", compression=CompressionConfig("int4"))),
}


def on_ranks(scope: Scope, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs fn(rank, ranks, scope, *args) on the ranks, and returns their results."""
    return run_distributed(
        fn, RANKS, scope, *args, timeout=150.0, backend="cpu:gloo,cuda:nccl" if scope.cuda else "gloo"
    )


def device_of(scope: Scope) -> torch.device:
    return torch.device("cuda", 0) if scope.cuda else torch.device("cpu")


# -- bandwidth --------------------------------------------------------------------------------------------------------


@check("ranks")
def ranks_all_reduce(scope: Scope) -> dict[str, float]:
    """Milliseconds and Gbit/s of an all-reduce, by size."""
    return on_ranks(scope, all_reduces)[0]


def all_reduces(rank: int, ranks: int, scope: Scope) -> dict[str, float]:
    group = new_group(None, 60.0, device_of(scope), overlap=True)
    figures = {}
    for mb in (1, 16, 64, 256) if not scope.tiny else (1,):
        flat = torch.ones(mb * 250_000, device=device_of(scope))
        seconds = slowest(scope, flat, group)
        figures |= {f"{mb} MB, ms": 1e3 * seconds, f"{mb} MB, Gbit/s": sent(flat) / seconds / 1e9}
    return figures


def sent(flat: Tensor) -> float:
    """Bits that each rank sends in a ring all-reduce."""
    return 8 * flat.nbytes * 2 * (RANKS - 1) / RANKS


def slowest(scope: Scope, flat: Tensor, group: Any, repeats: int = 4) -> float:
    """Median seconds of an all-reduce on the slowest rank, without the first."""
    took = []
    for _ in range(repeats):
        of_all(None)
        scope.sync()
        began = time.perf_counter()
        dist.all_reduce(flat, group=group)
        scope.sync()
        took.append(max(of_all(time.perf_counter() - began)))
    return statistics.median(took[1:])


def pace(bytes_a_second: float) -> None:
    """Limits every TCP connection of this process to this rate. It needs no privileges."""
    rate = min(int(bytes_a_second), UNPACED).to_bytes(8, sys.byteorder)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):  # another kind of file, or closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                        connection.setsockopt(socket.SOL_SOCKET, PACING, rate)


# -- a loop -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Loop:
    """A GPT of 63 M parameters (254 MB), and steps on 8 random sequences of 512 tokens."""

    def __init__(self, scope: Scope, rank: int):
        layers, width, heads, vocab, context = (8, 768, 12, 8192, 512) if not scope.tiny else (1, 32, 2, 64, 16)
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab, width)
        blocks = [Block(width, heads) for _ in range(layers)]
        self.net = nn.Sequential(self.embed, *blocks, nn.LayerNorm(width), nn.Linear(width, vocab, bias=False))
        self.net[-1].weight = self.embed.weight
        self.forward: Any = self.net.to(device_of(scope))
        random = torch.Generator().manual_seed(rank)
        self.ids = torch.randint(vocab, (scope(8, 2), context + 1), generator=random).to(device_of(scope))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-4, fused=scope.cuda)
        self.scope = scope

    def step(self) -> None:
        with torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.scope.cuda):
            logits = self.forward(self.ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), self.ids[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds(self, steps: int) -> float:
        """Seconds of a step."""
        self.scope.sync()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.scope.sync()
        return (time.perf_counter() - began) / steps


LINKS = {"free link": 0.0, "10 Gbit/s": 10.0, "1 Gbit/s": 1.0}


@check("ranks", LINKS)
def ranks_rounds(scope: Scope, case: str) -> dict[str, Any]:
    """Each method's rounds. The tau local steps of a round take 1.5 times as long as the all-reduce.

    hidden: the share of the all-reduce's time that is not exposed, by CO2's statistics, by events around the boundary
    (minus a boundary that waits for nobody), and by a profiler's trace of NCCL's kernels.
    """
    return on_ranks(scope, rounds, LINKS[case])[0]


def rounds(rank: int, ranks: int, scope: Scope, gbit: float) -> dict[str, Any]:
    loop, device = Loop(scope, rank), device_of(scope)
    group = new_group(None, 60.0, device, overlap=True)
    flat = torch.ones(sum(p.numel() for p in loop.net.parameters()), device=device)
    loop.seconds(scope(8, 2))
    of_all(None)
    step = max(of_all(loop.seconds(scope(16, 2))))
    slowest(scope, flat, group, 2)
    figures: dict[str, Any] = {"step ms": 1e3 * step, "model MB": flat.nbytes / 1e6}
    if gbit:
        figures |= {"link Gbit/s": set_link(scope, flat[: scope(1 << 22, 1 << 12)], group, gbit)}
    seconds = slowest(scope, flat, group, 3)
    tau = max(4, math.ceil(1.5 * seconds / step))
    figures |= {"all-reduce alone ms": 1e3 * seconds, "tau": tau}
    alone = boundary_alone(scope, loop)
    for name, (kind, config) in METHODS.items():
        if gbit == 1.0 and name in ("keep_local", "recommended"):
            continue  # they take as long as the paper's rule, and the report has eight minutes
        loop.forward, method = make_method(kind, loop.net, co2=replace(config, tau=tau), timeout=60.0)
        if gbit:  # a new communicator has new connections
            set_link(scope, flat[: scope(1 << 22, 1 << 12)], group, gbit)
        figures[name] = of_rounds(scope, loop, method, 1 if name == "ddp" else tau, alone if kind == "co2" else 0.0)
        if name == "paper" and scope.cuda:
            figures[name] |= traced(scope, loop, method, tau)
        method.finish()
        method.close()
        loop.forward = loop.net
    return figures


def set_link(scope: Scope, flat: Tensor, group: Any, gbit: float) -> float:
    """Paces the connections so that an all-reduce runs at this rate, and returns the rate that it then has."""
    rate = gbit * 1e9 / 8
    pace(rate)
    found = sent(flat) / slowest(scope, flat, group, 3) / 1e9
    if found > 1.05 * gbit:  # several connections carry the all-reduce
        pace(rate * gbit / found)
        found = sent(flat) / slowest(scope, flat, group, 3) / 1e9
    return found


def boundary_alone(scope: Scope, loop: Loop) -> float:
    """Seconds of a boundary of one worker, which waits for nobody."""
    own = [dist.new_group([r]) for r in range(RANKS)][dist.get_rank()]
    _, method = make_method("co2", loop.net, co2=CO2Config(tau=2), group=own, timeout=60.0)
    seconds = of_rounds(scope, loop, method, 2, 0.0)["boundary ms"] / 1e3
    method.finish()
    method.close()
    return seconds


def of_rounds(scope: Scope, loop: Loop, method: Any, tau: int, alone: float) -> dict[str, float]:
    """Medians over rounds, without the first ones."""
    stats, held, walls = [], [], []
    first, count = (1, 2) if tau > 64 else (2, 3)
    for _ in range(first + count):
        began = time.perf_counter()
        steps = []
        for _ in range(tau):
            loop.step()
            before = mark(device_of(scope))
            method.step()
            steps.append(between(before, mark(device_of(scope))))
        held.append(steps)
        stats.append(method.stats)
        scope.sync_stream()  # not the all-reduce, which the next round's steps hide
        walls.append(time.perf_counter() - began)
    seen = [s.as_dict() for s in stats[first:]]
    s = {key: statistics.median(row[key] for row in seen) for key in seen[0]}
    busy, boundary = s["allreduce_seconds"], statistics.median(sum(map(float, steps)) for steps in held[first:])
    figures = {
        "seconds a step": statistics.median(walls[first:]) / tau,
        "all-reduce ms": 1e3 * busy,
        "exposed ms": 1e3 * s["exposed_seconds"],
        "boundary ms": 1e3 * boundary,  # with a merge in mid-round
        "bytes sent": s["bytes_sent"],
        "merged after": s["merged_after"],
    }
    if busy and tau > 1:
        figures["hidden, statistics"] = 1 - min(1.0, s["exposed_seconds"] / busy)
        figures["hidden, events"] = 1 - min(1.0, max(0.0, boundary - alone) / busy)
    return figures


def traced(scope: Scope, loop: Loop, method: Any, tau: int) -> dict[str, Any]:
    """From a profiler's trace: NCCL's kernels, and the share of their time before the local steps' last kernel ends."""
    for _ in range(tau - 2):
        loop.step()
        method.step()
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(tau + 1):  # two steps, a boundary, and all steps of the next round but one
                loop.step()
                method.step()
            scope.sync()
        file = Path(folder, "trace.json")
        seen.export_chrome_trace(str(file))
        events = parse_json(file.read_text())["traceEvents"]
    return of_trace([e for e in events if e.get("cat") == "kernel"])


def of_trace(kernels: list[dict[str, Any]]) -> dict[str, Any]:
    """A collective is exposed from the end of the last other kernel that starts before it ends.

    If another kernel runs as the collective ends, nothing is exposed. Times are microseconds.
    """
    nccl = [e for e in kernels if "nccl" in e["name"].lower()]
    streams = {e["args"].get("stream") for e in nccl}
    others = sorted((e["ts"], e["ts"] + e["dur"]) for e in kernels if e["args"].get("stream") not in streams)
    busy = exposed = 0.0
    for start, end in ((e["ts"], e["ts"] + e["dur"]) for e in nccl):
        last = max((stop for begin, stop in others if begin < end), default=start)
        busy += end - start
        exposed += max(0.0, end - max(start, last))
    assert busy, f"{len(kernels)} kernels in the trace, none of NCCL's"
    blocks = sorted({e["args"]["grid"][0] for e in nccl if "grid" in e["args"]})
    return {"hidden, trace": 1 - exposed / busy, "NCCL kernels ms": busy / 1e3, "thread blocks": blocks}
