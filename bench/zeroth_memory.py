"""Blocks that pass through a device, for bench/zeroth.py: what lies there, what is hidden, what neighbours share."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import report
from core.testing import run_distributed
from language.zeroth import ZerothConfig, ZerothOrder
from language.zeroth.blocks import BlockStream
from language.zeroth.weights import digest

# -- memory -----------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """Blocks whose computation takes a set time."""

    def __init__(self, blocks: int, width: int, seconds: float):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 64, bias=False)
        for block in self.blocks:
            block.register_forward_hook(lambda *_: time.sleep(seconds))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


IDS = torch.arange(32)[None]


def next_token(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(IDS)[0], IDS[0])


def measure_memory() -> Iterator[dict[str, Any]]:
    """A block's upload takes 20 ms; it computes twice as long, as long, and half as long, on both sides together."""
    for compute_ms in (40.0, 20.0, 10.0):
        model = Stack(12, 512, compute_ms / 2e3)
        make = functools.partial(BlockStream, blocks=list(model.blocks), hold=lambda nbytes: time.sleep(0.02))
        zo = ZerothOrder(model, lr=1e-6, make_forward=make)
        stream: Any = zo._forward
        steps = 5
        for step in range(steps + 1):
            if step == 1:
                waited, uploaded = stream.window.waited, stream.window.upload.seconds
            zo.step(next_token, 1)
        waited, uploaded = stream.window.waited - waited, stream.window.upload.seconds - uploaded
        yield {
            "compute_ms": compute_ms,
            "upload_ms": 20.0,
            "blocks_on_device": stream.device_bytes / max(b.nbytes for b in stream.blocks),
            "of_blocks": len(model.blocks),
            "hidden": 1 - waited / uploaded,
        }


# -- sharing ----------------------------------------------------------------------------------------------------


def uploaded(rank: int, workers: int, steps: int) -> tuple[float, str]:
    """One rank: bytes of blocks that it uploads a step, and the weights at the end. The workers make a node."""
    group = dist.new_group(list(range(workers))) if workers > 1 else None
    torch.manual_seed(0)
    model = Stack(6, 256, 0.0)
    make = functools.partial(BlockStream, blocks=list(model.blocks), share=group)
    zo = ZerothOrder(model, ZerothConfig(pairs=False), lr=1e-6, timeout=120, make_forward=make)
    stream: Any = zo._forward
    for step in range(steps + 1):
        if step == 1:
            before = stream.window.upload.bytes
        zo.step(next_token, 1)
    sent = stream.window.upload.bytes - before
    zo.finish()
    zo.close()
    return sent / steps, digest(list(model.parameters()))


def measure_sharing() -> Iterator[dict[str, Any]]:
    """All workers take the same samples, so that the weights must be the same for any number of them."""
    for workers in (1, 2, 4):
        found = run_distributed(uploaded, workers, 5, timeout=300)
        weights = {name for _, name in found}
        yield {"workers": workers, "bytes_a_step": max(sent for sent, _ in found), "weights": sorted(weights)}


# -- OPT --------------------------------------------------------------------------------------------------------

# (layers, width) of OPT (arXiv 2205.01068), and the GB of device memory that ZO2's README gives for it
OPT = {
    "1.3B": (24, 2048, 3.75),
    "2.7B": (32, 2560, 4.14),
    "6.7B": (32, 4096, 4.99),
    "13B": (40, 5120, 6.18),
    "30B": (48, 7168, 8.86),
    "66B": (64, 9216, 12.07),
    "175B": (96, 12288, 18.04),
}
OPT_VOCABULARY, OPT_POSITIONS = 50272, 2050


def opt_table() -> Iterator[dict[str, Any]]:
    """GB of embedding, head and three blocks in float16; and with what is no weight, as large as in the first row."""
    rest = None
    for name, (_, width, published) in OPT.items():
        block = 12 * width**2 + 13 * width
        ends = (2 * OPT_VOCABULARY + OPT_POSITIONS) * width
        computed = 2 * (ends + 3 * block) / 1e9
        rest = published - computed if rest is None else rest
        row = {"model": f"OPT-{name}", "published_gb": published, "weights_gb": computed}
        yield row | {"with_rest_gb": computed + rest}


def opt_text(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        [
            row["model"],
            f"{row['published_gb']:.2f}",
            f"{row['weights_gb']:.2f}",
            f"{row['with_rest_gb']:.2f}",
            f"{row['with_rest_gb'] / row['published_gb'] - 1:+.1%}" if i else "fitted",
        ]
        for i, row in enumerate(rows)
    ]
    titles = ("model", "ZO2's README, GB", "embedding, head, 3 blocks", "and the first row's rest", "off by")
    return report.table(titles, cells) + (
        "\n\nWeights in float16, embedding and head both counted. They alone are less than the published cells, which "
        "hold activations and the CUDA context, too; the last columns add what these are in the first row to all."
    )


# -- the tables -------------------------------------------------------------------------------------------------


def memory_text(rows: Sequence[dict[str, Any]]) -> str:
    names = ("compute_ms", "upload_ms", "blocks_on_device", "of_blocks")
    cells = [[*(f"{row[name]:g}" for name in names), f"{row['hidden']:.1%}"] for row in rows]
    return report.table(("compute a block, ms", "upload, ms", "blocks on the device", "of", "uploads hidden"), cells)


def sharing_text(rows: Sequence[dict[str, Any]]) -> str:
    alike = len({tuple(row["weights"]) for row in rows}) == 1
    cells = [[row["workers"], f"{row['bytes_a_step']:,.0f}"] for row in rows]
    told = f"The weights are {'the same, bit for bit' if alike else 'not the same'}."
    return f"{report.table(('workers', 'bytes that each uploads a step'), cells)}\n\n{told}"
