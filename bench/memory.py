"""What CO2 and ZeRO keep in memory: bytes per worker beyond the live parameters, counted and measured.

python -m bench.memory [--parameters 2e7] [--out FOLDER]

Four workers as two nodes of two, on this machine, train a stack of linear layers with AdamW for some steps. Counted are
the bytes of the tensors that each part holds; measured is the growth of a worker's resident memory while CO2 is
built and closes two rounds, with nothing else going on.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench import report
from bench.cluster import run_ranks
from bench.report import MOST_PARAMETERS, Asked
from core import CO2, CO2Config, ShardedCO2, UserError
from core.sharded.mesh import node_mesh
from training import zero
from training.script import launch

WIDTH = 1024
# name -> (workers that synchronise every step, ZeRO stage, share over all workers, outer state on the host)
MODES: dict[str, tuple[int, Any, bool, bool]] = {
    "unshared": (1, 0, False, False),
    "shared over all 4": (1, 0, True, False),
    "shared inside the node": (2, 0, False, False),
    "shared inside the node and over all": (2, 0, True, False),
    "ZeRO-1": (2, 1, False, False),
    "ZeRO-2": (2, 2, False, False),
    "ZeRO-3": (2, 3, False, False),
    "ZeRO-3, shared over all": (2, 3, True, False),
    "offloaded": (1, 0, False, True),
}


@dataclass(frozen=True)
class Bench(Asked):
    """Memory per worker, for each way to share it."""

    parameters: float = 2e7
    """Of the model, float32."""

    def check(self) -> None:
        if not 4 * WIDTH**2 <= self.parameters <= MOST_PARAMETERS:
            least, most = 4 * WIDTH**2, f"{MOST_PARAMETERS:g}"
            raise UserError(
                f"parameters={self.parameters:g}: give {least} to {most}; with fewer the process outweighs the model"
            )


def main() -> None:
    report.run(Bench, "memory", measure_all, text, forks=lambda _: False)


def measure_all(bench: Bench, session: report.Session) -> None:
    ranks = lambda mode: run_ranks(measure, None, 4, 1, int(bench.parameters), mode, timeout=300)  # noqa: E731
    rows = ({"mode": name} | ranks(mode)[0] for name, mode in MODES.items())
    session.take("rows", rows, lambda row: report.row(*cells(row)))


def measure(parameters: int, mode: tuple[int, Any, bool, bool]) -> dict[str, float]:
    """Megabytes that one worker holds."""
    per_node, stage, shard, offload = mode
    dist.init_process_group("gloo")
    mesh = node_mesh("cpu", per_node) if per_node > 1 else None
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters // WIDTH**2))
    model = Stack(layers)
    if mesh is not None:
        zero.shard_model(model, mesh, stage)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    if mesh is not None:
        optimizer = zero.shard_optimizer(optimizer, mesh, stage)
    before = resident()
    method: CO2 | ShardedCO2
    if mesh is not None or shard or offload:
        method = ShardedCO2(model.parameters(), CO2Config(tau=1), mesh=mesh, shard=shard, offload=offload)
    else:
        method = CO2(model.parameters(), CO2Config(tau=1))
    method.step()
    method.step()
    grown = resident() - before
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    moments = [t for s in optimizer.state_dict()["state"].values() for t in s.values() if isinstance(t, Tensor)]
    held = {
        "parameters": megabytes(model.parameters()),
        "gradients": megabytes(gradients),
        "optimiser": megabytes(moments),
        "co2": megabytes([b.flat for b in method.buckets] + method._x + method._m),
        "co2_measured": grown / 1e6,
        "whole_model": 4e-6 * WIDTH**2 * len(layers),
    }
    method.finish()
    return held


class Stack(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def megabytes(tensors: Iterable[Tensor]) -> float:
    """Of this worker's own shards."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local) / 1e6


def resident() -> int:
    """This process's resident bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is freed goes back to the system
    return resident_bytes()


# -- as the kernel counts -----------------------------------------------------------------------------------------


def free_bytes(device: str = "cpu") -> int:
    """What the device, or this machine, can still give away."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else _field("/proc/meminfo", "MemAvailable")


def resident_bytes() -> int:
    """What this process holds now."""
    return _field("/proc/self/status", "VmRSS")


def reset_peak(device: str = "cpu") -> int:
    """Forgets the peak so far; returns what is held now."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes()


def peak_bytes(device: str = "cpu") -> int:
    """The peak since reset_peak: of torch's allocator on CUDA, else of this process's resident memory."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _field("/proc/self/status", "VmHWM")


def _field(path: str, name: str) -> int:
    """What stands behind `name:` in a file of /proc, in kB there."""
    rows = (row.split() for row in Path(path).read_text().splitlines())
    return 1024 * int(next(row[1] for row in rows if row and row[0] == f"{name}:"))


# -- the table --------------------------------------------------------------------------------------------------


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    names = ("parameters", "gradients", "optimiser", "co2", "co2_measured")
    where = " (on the host)" if row["mode"] == "offloaded" else ""
    copies = f"{row['co2'] / row['whole_model']:.2f}{where}"
    return [row["mode"], *(f"{row[name]:.1f}" for name in names), copies]


TITLES = (
    *("2 nodes x 2 workers", "parameters", "gradients", "AdamW", "CO2, counted", "CO2, measured"),
    "CO2 in copies of the model",
)


def text(result: dict[str, Any]) -> str:
    note = (
        f"MB per worker, {result['options']['parameters'] / 1e6:g} M float32 parameters, at rest between steps. "
        "ZeRO-2 gathers them from forward to backward, ZeRO-3 a layer at a time. Offloaded: nothing on a GPU; on a CPU "
        "both are the same memory, and the parameters' copy in transit, one more copy on the host, is not counted."
    )
    return f"{report.table(TITLES, map(cells, result['rows']))}\n\n{note} {report.source(result)}.\n"


if __name__ == "__main__":
    launch(main)
