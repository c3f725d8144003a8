"""Speed, traffic and memory of zeroth-order training: python -m bench.zeroth [--parts speed traffic limit]

- speed: steps/s on nodes whose links have --rate Mbit/s and --delay_ms. The forward pass is a stand-in that takes as
  long as on a device of its own.
- traffic: bytes that the kernel counts at a node's network interface.
- limit: the least memory in which a GPT-2 of --shape (layers, width) takes two steps. A process may grow by a limit of
  private writable memory (RLIMIT_DATA); the limits are a ladder. Weights that are streamed lie in a mapped file, which
  does not count, as a host's memory does not count as a GPU's.
"""

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import ctypes
import functools
import itertools
import os
import resource
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from bench import report
from bench.cluster import Cluster, run_ranks, sent_bytes
from bench.report import FAST, Asked, Summary, require
from core.errors import UserError
from language.zeroth import ZerothConfig, ZerothOrder
from language.zeroth.blocks import BlockStream
from training.data import generator
from training.script import launch

FORWARD_MS = (500.0, 60.0)  # of the whole batch on one device, in speed
MESHES = {"one process": (1, False), "1 x 2 (a pair)": (2, True), "2 x 1 (data)": (2, False), "2 x 2": (4, True)}
WAYS = ("AdamW", "AdamW, recomputation", "zo", "zo, offload")
LADDER = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0)
"""Limits, in units of the weights."""


@dataclass(frozen=True)
class ZerothBench(Asked):
    """What to measure."""

    parts: tuple[str, ...] = ("speed", "traffic", "limit")
    rate: float = 50.0
    """For speed: Mbit/s of the links."""
    delay_ms: float = 5.0
    """For speed: one-way delay of each link."""
    seconds: float = 10.0
    """For speed: duration of each measurement."""
    shape: tuple[int, int] = (12, 512)
    """For limit: layers and width."""
    batch: int = 4
    """For limit: windows of 64 tokens in a step."""

    def check(self) -> None:
        require(self, once="parts", positive="rate delay_ms seconds", ones="batch", parts=MEASURES)
        layers, width = self.shape
        if layers < 1 or width < 64 or width % 64:
            raise UserError(f"shape={layers} {width}: give layers, 1 or more, and a width that 64 divides")


# -- speed ------------------------------------------------------------------------------------------------------------


def on_rank(model: nn.Module, config: ZerothConfig, timeout: float = 120.0) -> ZerothOrder:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return ZerothOrder(model, config, lr=1e-6, timeout=timeout)


def paced(pairs: bool, forward_seconds: float, steps: int) -> dict[str, float]:
    """One rank: forward passes that end at their deadlines. forward_seconds: of the whole batch."""
    zo = on_rank(nn.Linear(256, 256), ZerothConfig(pairs=pairs))
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
        deadline = max(deadline, time.perf_counter())  # waiting is not caught up
    zo.finish()
    seconds = time.perf_counter() - began
    zo.close()
    return {"steps_per_second": steps / seconds, "exposed_ms": 1e3 * exposed / steps}


def measure_speed(o: ZerothBench) -> Iterator[dict[str, Any]]:
    with Cluster(4, o.rate, o.delay_ms) as cluster:
        for forward_ms, (mesh, (workers, pairs)) in itertools.product(FORWARD_MS, MESHES.items()):
            steps = max(3, round(o.seconds / (2e-3 * forward_ms / workers)))
            job = pairs, forward_ms / 1e3, steps
            found = run_ranks(paced, cluster, 1, workers, *job, timeout=60 + 10 * o.seconds)
            yield {"forward_ms": forward_ms, "mesh": mesh, "steps": steps} | found[0]


# -- traffic ----------------------------------------------------------------------------------------------------------


def counted(width: int, steps: int) -> float:
    """One rank: bytes a step that its node has sent. A model of width^2 parameters."""
    zo = on_rank(nn.Linear(width, width, bias=False), ZerothConfig(), timeout=300.0)
    zo.step(lambda m: m.weight[0].sum(), 1)
    dist.barrier()
    time.sleep(0.5)
    before = sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])
    for _ in range(steps):
        zo.step(lambda m: m.weight[0].sum(), 1)
    sent = sent_bytes(os.environ["GLOO_SOCKET_IFNAME"]) - before
    dist.barrier()
    return sent / steps


def measure_traffic(_: ZerothBench) -> Iterator[dict[str, Any]]:
    with Cluster(4, FAST) as cluster:
        for width, steps in ((1000, 20), (10_000, 4)):
            sent = run_ranks(counted, cluster, 1, 4, width, steps, timeout=300)
            yield {"parameters": width**2, "workers": 4, "bytes_a_step": max(sent)}


# -- limit ------------------------------------------------------------------------------------------------------------

VOCABULARY, CONTEXT = 1024, 64
NO_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's mallopt


@dataclass(frozen=True)
class Job:
    """A training in one of WAYS, from a file of weights. limit: of memory, in units of the weights, or None."""

    way: str
    shape: tuple[int, int]
    base: Path
    batch: int = 4
    steps: int = 2
    limit: float | None = None

    @property
    def weights_mb(self) -> float:
        return sum(p.numel() for p in blank(self.shape).parameters()) * 4e-6


def blank(shape: tuple[int, int]) -> GPT2LMHeadModel:
    """A model without memory."""
    layers, width = shape
    sizes = {"vocab_size": VOCABULARY, "n_positions": CONTEXT}
    sizes |= {"n_layer": layers, "n_head": width // 64, "n_embd": width}
    rest = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"use_cache": False}
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(**sizes, **rest, bos_token_id=None, eos_token_id=None))


def random_base(path: Path, shape: tuple[int, int]) -> Path:
    """Writes a file of initial weights."""
    model = blank(shape).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    with path.open("wb") as file:
        for p in model.parameters():
            file.write(p.detach().contiguous().numpy().tobytes())
    return path


def opened(path: Path, shape: tuple[int, int], streamed: bool) -> GPT2LMHeadModel:
    """A model with the file's weights: copies in memory, but for blocks that are streamed, which stay mapped."""
    model, start = blank(shape), 0
    flat = torch.from_file(str(path), shared=True, size=sum(p.numel() for p in model.parameters()))
    for name, p in list(model.named_parameters()):
        view = flat[start : start + p.numel()].view(p.shape)
        owner, _, leaf = name.rpartition(".")
        weight = view if streamed and ".h." in name else view.clone()
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight))
        start += p.numel()
    model.lm_head.weight = model.transformer.wte.weight
    return model.train()


def mapped(folder: str) -> Callable[[int], Tensor]:
    """Makes memory in files of the folder, for BlockStream."""
    numbers = itertools.count()
    return lambda n: torch.from_file(f"{folder}/{next(numbers)}", shared=True, size=n, dtype=torch.uint8)


def train(job: Job) -> dict[str, Any]:
    """One rank: whether the memory suffices, the processor's seconds, and the last step's loss."""
    torch.set_num_threads(1)
    if job.limit is not None:
        restrict(round(job.limit * job.weights_mb * 1e6))
    try:
        return {"fits": True} | _train(job)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(text in str(error) for text in NO_MEMORY):
            return {"fits": False}
        raise


def _train(job: Job) -> dict[str, float]:
    streamed = "offload" in job.way
    with tempfile.TemporaryDirectory() as folder:
        model = opened(job.base, job.shape, streamed)
        shape = job.steps, job.batch, CONTEXT + 1
        batches = torch.randint(VOCABULARY, shape, generator=generator(1))
        loss_of = lambda m, x: cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten())  # noqa: E731
        if job.way.startswith("zo"):
            stream = functools.partial(BlockStream, blocks=list(model.transformer.h), make_host=mapped(folder))
            zo = ZerothOrder(model, ZerothConfig(), lr=1e-6, **({"make_forward": stream} if streamed else {}))

            def step(x: Tensor) -> Any:
                return zo.step(lambda m: loss_of(m, x), len(x)).loss
        else:
            if "recomputation" in job.way:
                for block in model.transformer.h:
                    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

            def step(x: Tensor) -> Any:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                optimizer.step()
                return loss.detach()

        began = time.process_time()
        loss = [float(step(x)) for x in batches][-1]
        return {"cpu_seconds": time.process_time() - began, "loss": loss}


def restrict(nbytes: int) -> None:
    """Limits how many more bytes of private writable memory the process may take.

    Stacks are small, there is one arena, and freed memory goes back at once. So the limit counts tensors.
    """
    libc = ctypes.CDLL(None)
    for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 1 << 16), (M_TRIM_THRESHOLD, 1 << 16)):
        libc.mallopt(option, value)
    libc.malloc_trim(0)
    threading.stack_size(1 << 18)
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmData:")[2].split()[0]) << 10
    libc.mallinfo2.restype = MallInfo
    free = libc.mallinfo2().fordblks  # in the heap, where it is taken before the limit counts
    resource.setrlimit(resource.RLIMIT_DATA, (now - free + nbytes, resource.RLIM_INFINITY))


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def run(job: Job) -> dict[str, Any] | None:
    """Runs the job in its own process. None if the memory did not suffice."""
    found = run_ranks(train, None, 1, 1, job, timeout=7200.0)[0]
    return found if found["fits"] else None


def smallest(job: Job) -> tuple[float | None, dict[str, Any] | None]:
    """The least limit of the ladder in which the job runs, and what it measured there."""
    found: dict[float, dict[str, Any] | None] = {}

    def suffices(limit: float) -> bool:
        found[limit] = run(replace(job, limit=limit))
        return found[limit] is not None

    at = bisect_left(LADDER, True, key=suffices)
    return (LADDER[at], found[LADDER[at]]) if at < len(LADDER) else (None, None)


def measure_limit(o: ZerothBench) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        tiny = random_base(Path(scratch) / "tiny", (1, 64))
        for way in WAYS:  # imports of a first step are no part of a model's memory
            _train(Job(way, (1, 64), tiny, 1, 1))
        base = random_base(Path(scratch) / "base", o.shape)
        for way in WAYS:
            job = Job(way, o.shape, base, o.batch)
            limit, found = smallest(job)
            seconds = found["cpu_seconds"] / job.steps if found else None
            row = {"way": way, "shape": o.shape, "weights_mb": job.weights_mb}
            yield row | {"limit": limit, "cpu_seconds_a_step": seconds}


# -- all of it --------------------------------------------------------------------------------------------------------

MEASURES = {"speed": measure_speed, "traffic": measure_traffic, "limit": measure_limit}
TABLES = {
    "speed": Summary("forward_ms mesh", {"steps_per_second": ".2f", "exposed_ms": ".1f"}),
    "traffic": Summary("parameters workers", {"bytes_a_step": ".0f"}),
    "limit": Summary("way", {"limit": ".3g", "weights_mb": ".1f", "cpu_seconds_a_step": ".2f"}),
}


def measure(o: ZerothBench, session: report.Session) -> None:
    for part in o.parts:
        session.take(part, MEASURES[part](o))


def main() -> None:
    forks = lambda o: bool(set(o.parts) & {"speed", "traffic"})  # noqa: E731
    report.run(ZerothBench, "zeroth", measure, TABLES, packages=("torch", "transformers"), forks=forks)


if __name__ == "__main__":
    launch(main)
