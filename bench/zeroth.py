"""What zeroth-order training gains and costs: python -m bench.zeroth [--parts speed traffic memory ...]

speed: steps/s where a forward pass is a stand-in that takes as long as on a device of its own, on nodes whose links
have --rate Mbit/s and --delay_ms; and of a tiny GPT-2 as fast as it goes. traffic: bytes that the kernel counts at a
node's network device. memory: bytes of blocks on the device, and uploads hidden, over an emulated bus; and the table of
ZO2's README computed. sharing: what each of a node's workers uploads. quality: the tiny GPT-2, trained on Python's
documentation, goes on with WikiText-2's test text (four fifths of it; the rest is held out): MeZO alone, method zo, ddp
with AdamW, and co2 (bench/zeroth_quality.py). tuning: chooses each one's learning rate, on another seed. Writes
zeroth.json and zeroth.md (bench/zeroth_table.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo's warnings about host names; torch reads it when imported

import torch
import torch._dynamo  # noqa: F401 (the first optimiser imports it: once here rather than in every forked worker)
import torch.distributed as dist
import tyro
from torch import Tensor, nn

from bench import report, zeroth_table
from bench.cluster import Cluster, require_namespaces, run_ranks
from bench.lgreco import sent_bytes
from bench.options import require_each_once, require_one_or_more, require_positive
from bench.zeroth_quality import FAST, measure_quality, measure_tuning
from core.errors import UserError
from core.testing import run_distributed
from core.zeroth import ZerothConfig, ZerothOrder
from core.zeroth.blocks import BlockStream
from core.zeroth.weights import digest
from language.model import build_model
from training.script import launch

NAME = "zeroth"
Part = Literal["speed", "traffic", "memory", "sharing", "tuning", "quality"]


@dataclass(frozen=True)
class ZerothBench:
    """What to measure."""

    parts: tuple[Part, ...] = get_args(Part)
    rate: float = 50.0
    """Mbit/s of the links in speed."""
    delay_ms: float = 5.0
    """Of each link in speed, one way."""
    forward_ms: tuple[float, ...] = (500.0, 60.0)
    """Of the whole batch on one device."""
    seconds: float = 10.0
    """Of each measurement of speed."""
    rates: tuple[float, ...] = (50.0, 1000.0)
    """Mbit/s in quality."""
    seeds: tuple[int, ...] = (0, 1, 2)
    epoch_steps: int = 10
    """Steps between two evaluations in quality."""
    epochs: int = 30
    """Evaluations of methods without gradients; the others get a fifth as many steps."""
    base_epochs: int = 3
    """Of the run on Python's documentation whose model goes on."""
    lr: float = 1e-4
    """Of methods without gradients in quality, where tuning is not among the parts."""
    adam_lr: float = 1e-3
    """Of ddp and co2, likewise."""
    lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
    """Those that tuning tries for methods without gradients."""
    adam_lrs: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    """Those that it tries for ddp and co2."""
    tuning_seed: int = 100
    """The seed of tuning, which is none of `seeds`."""
    out: Path | None = None
    """Where to write; runs/zeroth-DATE by default."""

    def check(self) -> None:
        """A UserError names the first option that cannot be."""
        require_each_once(self, "parts", "forward_ms", "rates", "seeds", "lrs", "adam_lrs")
        require_positive(self, "rate", "delay_ms", "forward_ms", "seconds", "rates", "lr", "adam_lr", "lrs", "adam_lrs")
        require_one_or_more(self, "epoch_steps", "epochs", "base_epochs")
        if self.tuning_seed in self.seeds:
            raise UserError(f"tuning_seed={self.tuning_seed} is one of seeds: give another, for figures are of others")


# -- speed ------------------------------------------------------------------------------------------------------

MESHES = {"one process": (1, False), "1 x 2 (a pair)": (2, True), "2 x 1 (data)": (2, False), "2 x 2": (4, True)}


def paced(pairs: bool, forward_seconds: float, delay: Literal[0, 1], steps: int) -> dict[str, float]:
    """One rank: steps whose forward passes end at their deadlines. forward_seconds: of the whole batch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    zo = ZerothOrder(nn.Linear(256, 256), ZerothConfig(pairs=pairs, delay=delay), lr=1e-6, timeout=120)
    x = torch.ones(4, 256)
    deadline = time.perf_counter()

    def loss(model: nn.Module) -> Tensor:
        nonlocal deadline
        found = model(x).square().mean()
        deadline = max(deadline, time.perf_counter() - forward_seconds) + forward_seconds / zo.data_workers
        time.sleep(max(0.0, deadline - time.perf_counter()))
        return found

    zo.step(loss, 4)
    dist.barrier()
    began = deadline = time.perf_counter()
    exposed = 0.0
    for _ in range(steps):
        zo.step(loss, 4)
        exposed += zo.exposed_seconds
        deadline = max(deadline, time.perf_counter())  # what was waited for is not caught up
    zo.finish()
    seconds = time.perf_counter() - began
    zo.close()
    return {"steps_per_second": steps / seconds, "exposed_ms": 1e3 * exposed / steps}


def unpaced(pairs: bool, steps: int) -> dict[str, float]:
    """One rank: a tiny GPT-2, 32 samples of 64 tokens, as fast as it goes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = build_model("gpt2_tiny", vocab_size=1024, context=64, dropout=0.0)
    zo = ZerothOrder(model, ZerothConfig(pairs=pairs), lr=1e-6, timeout=120)
    ids = torch.randint(1024, (32, 64), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())

    zo.step(loss, 32)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        zo.step(loss, 32)
    seconds = time.perf_counter() - began
    zo.close()
    return {"steps_per_second": steps / seconds}


def measure_speed(o: ZerothBench, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with Cluster(4, o.rate, o.delay_ms) as cluster:
        for forward_ms in o.forward_ms:
            for mesh, (workers, pairs) in MESHES.items():
                for delay in (0, 1) if workers > 1 else (0,):
                    steps = max(3, round(o.seconds / (2e-3 * forward_ms / workers)))
                    job = (pairs, forward_ms / 1e3, delay, steps)
                    found = run_ranks(paced, cluster, 1, workers, *job, timeout=60 + 10 * o.seconds)
                    yield {"forward_ms": forward_ms, "mesh": mesh, "delay": delay, "steps": steps} | found[0]
    with Cluster(2, FAST) as cluster:
        for mesh, (workers, pairs) in list(MESHES.items())[:2]:
            found = run_ranks(unpaced, cluster, 1, workers, pairs, 40, timeout=300)
            yield {"forward_ms": None, "mesh": mesh, "delay": 0, "steps": 40} | found[0]


# -- traffic ----------------------------------------------------------------------------------------------------


def counted(width: int, steps: int) -> float:
    """One rank: bytes a step that its node has sent. A model of width^2 parameters."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    zo = ZerothOrder(nn.Linear(width, width, bias=False), lr=1e-6, timeout=300)
    zo.step(lambda m: m.weight[0].sum(), 1)
    dist.barrier()
    time.sleep(0.5)
    before = sent_bytes()
    for _ in range(steps):
        zo.step(lambda m: m.weight[0].sum(), 1)
    sent = sent_bytes() - before
    dist.barrier()
    return sent / steps


def measure_traffic(o: ZerothBench, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with Cluster(4, FAST) as cluster:
        for width, steps in ((1000, 20), (10_000, 4)):
            sent = run_ranks(counted, cluster, 1, 4, width, steps, timeout=300)
            yield {"parameters": width**2, "workers": 4, "bytes_a_step": max(sent)}


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


def measure_memory(o: ZerothBench, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A block's upload takes 20 ms; it computes twice as long, as long, and half as long, on both sides together."""
    ids = torch.arange(32)[None]
    for compute_ms in (40.0, 20.0, 10.0):
        model = Stack(12, 512, compute_ms / 2e3)
        make = functools.partial(BlockStream, blocks=list(model.blocks), hold=lambda nbytes: time.sleep(0.02))
        zo = ZerothOrder(model, lr=1e-6, make_forward=make)
        stream: Any = zo._forward
        steps = 5
        for step in range(steps + 1):
            if step == 1:
                waited, uploaded = stream.window.waited, stream.window.upload.seconds
            zo.step(lambda m: nn.functional.cross_entropy(m(ids)[0], ids[0]), 1)
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
    ids = torch.arange(32)[None]
    for step in range(steps + 1):
        if step == 1:
            before = stream.window.upload.bytes
        zo.step(lambda m: nn.functional.cross_entropy(m(ids)[0], ids[0]), 1)
    sent = stream.window.upload.bytes - before
    zo.finish()
    zo.close()
    return sent / steps, digest(list(model.parameters()))


def measure_sharing(o: ZerothBench, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All workers take the same samples, so that the weights must be the same for any number of them."""
    for workers in (1, 2, 4):
        found = run_distributed(uploaded, workers, 5, timeout=300)
        weights = {name for _, name in found}
        yield {"workers": workers, "bytes_a_step": max(sent for sent, _ in found), "weights": sorted(weights)}


# -- all of it --------------------------------------------------------------------------------------------------


def run_all(o: ZerothBench, folder: Path) -> dict[str, Any]:
    result = report.header("bench.zeroth", o, ("torch", "transformers")) | {
        "verified_mbit": {},
        "opt": list(zeroth_table.opt_table()),
    }
    of: dict[Part, Callable] = {
        "speed": measure_speed,
        "traffic": measure_traffic,
        "memory": measure_memory,
        "sharing": measure_sharing,
        "tuning": functools.partial(measure_tuning, folder=folder),
        "quality": functools.partial(measure_quality, folder=folder),
    }
    for part in (part for part in get_args(Part) if part in o.parts):  # tuning before quality
        result[part] = []
        for row in of[part](o, result):
            result[part].append(row)
            print(part, {k: v for k, v in row.items() if k != "losses"}, flush=True)
            report.save(folder, NAME, result, zeroth_table.text(result))
    return result


def main() -> None:
    o = tyro.cli(ZerothBench, prog="python -m bench.zeroth", use_underscores=True)
    o.check()
    if set(o.parts) - {"memory", "sharing"}:
        require_namespaces()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    torch.set_num_threads(1)  # before any work: the ranks are forked, and threads do not survive that
    folder = report.new_folder(NAME, o.out)
    try:
        print("\n" + zeroth_table.text(run_all(o, folder)))
    except KeyboardInterrupt:
        print(f"stopped; what was measured is in {folder / NAME}.json", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        launch(main)
