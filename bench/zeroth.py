"""What zeroth-order training gains and costs: python -m bench.zeroth [--parts speed traffic memory ...]

speed: steps/s where a forward pass is a stand-in that takes as long as on a device of its own, on nodes whose links
have --rate Mbit/s and --delay_ms; and of a tiny GPT-2 as fast as it goes. traffic: bytes that the kernel counts at a
node's network device. memory: bytes of blocks on the device, and uploads hidden, over an emulated bus; and the table of
ZO2's README computed. sharing: what each of a node's workers uploads. quality: the tiny GPT-2, trained on Python's
documentation, goes on with WikiText-2's test text (four fifths of it; the rest is held out): MeZO alone, method zo, ddp
with AdamW, and co2 (bench/zeroth_quality.py). tuning: chooses each one's learning rate, on another seed. Writes
zeroth.json and zeroth.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import report
from bench.cluster import Cluster, run_ranks, sent_bytes
from bench.report import require
from bench.trainings import FAST
from bench.zeroth_memory import measure_memory, measure_sharing, memory_text, opt_table, opt_text, sharing_text
from bench.zeroth_quality import Quality, measure_quality, measure_tuning, quality_text, tuning_text
from core.errors import UserError
from language.model import build_model
from language.zeroth import ZerothConfig, ZerothOrder
from training.script import launch

FORWARD_MS = (500.0, 60.0)  # of the whole batch on one device, in speed
Part = Literal["speed", "traffic", "memory", "sharing", "tuning", "quality"]


@dataclass(frozen=True)
class ZerothBench(Quality):
    """What to measure."""

    parts: tuple[Part, ...] = get_args(Part)
    rate: float = 50.0
    """Mbit/s of the links in speed."""
    delay_ms: float = 5.0
    """Of each link in speed, one way."""
    seconds: float = 10.0
    """Of each measurement of speed."""

    def check(self) -> None:
        require(self, once="parts", positive="rate delay_ms seconds")
        super().check()
        if "quality" in self.parts and "tuning" not in self.parts:
            raise UserError("parts: quality takes the learning rates of tuning; name both")


# -- speed ------------------------------------------------------------------------------------------------------

MESHES = {"one process": (1, False), "1 x 2 (a pair)": (2, True), "2 x 1 (data)": (2, False), "2 x 2": (4, True)}


def on_rank(model: nn.Module, config: ZerothConfig, timeout: float = 120.0) -> ZerothOrder:
    """This rank's, in a group of all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return ZerothOrder(model, config, lr=1e-6, timeout=timeout)


def paced(pairs: bool, forward_seconds: float, steps: int) -> dict[str, float]:
    """One rank: steps whose forward passes end at their deadlines. forward_seconds: of the whole batch."""
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
        deadline = max(deadline, time.perf_counter())  # what was waited for is not caught up
    zo.finish()
    seconds = time.perf_counter() - began
    zo.close()
    return {"steps_per_second": steps / seconds, "exposed_ms": 1e3 * exposed / steps}


def unpaced(pairs: bool, steps: int) -> dict[str, float]:
    """One rank: a tiny GPT-2, 32 samples of 64 tokens, as fast as it goes."""
    zo = on_rank(build_model("gpt2_tiny", vocab_size=1024, context=64, dropout=0.0), ZerothConfig(pairs=pairs))
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


def measure_speed(o: ZerothBench) -> Iterator[dict[str, Any]]:
    with Cluster(4, o.rate, o.delay_ms) as cluster:
        for forward_ms in FORWARD_MS:
            for mesh, (workers, pairs) in MESHES.items():
                steps = max(3, round(o.seconds / (2e-3 * forward_ms / workers)))
                job = (pairs, forward_ms / 1e3, steps)
                found = run_ranks(paced, cluster, 1, workers, *job, timeout=60 + 10 * o.seconds)
                yield {"forward_ms": forward_ms, "mesh": mesh, "delay": 0, "steps": steps} | found[0]
    with Cluster(2, FAST) as cluster:
        for mesh, (workers, pairs) in list(MESHES.items())[:2]:
            found = run_ranks(unpaced, cluster, 1, workers, pairs, 40, timeout=300)
            yield {"forward_ms": None, "mesh": mesh, "delay": 0, "steps": 40} | found[0]


# -- traffic ----------------------------------------------------------------------------------------------------


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


def measure_traffic() -> Iterator[dict[str, Any]]:
    with Cluster(4, FAST) as cluster:
        for width, steps in ((1000, 20), (10_000, 4)):
            sent = run_ranks(counted, cluster, 1, 4, width, steps, timeout=300)
            yield {"parameters": width**2, "workers": 4, "bytes_a_step": max(sent)}


# -- all of it --------------------------------------------------------------------------------------------------


def run_all(o: ZerothBench, session: report.Session) -> None:
    session.result |= {"verified_mbit": {}, "opt": list(opt_table())}
    of: dict[Part, Callable[[], Iterator[dict[str, Any]]]] = {
        "speed": lambda: measure_speed(o),
        "traffic": measure_traffic,
        "memory": measure_memory,
        "sharing": measure_sharing,
        "tuning": lambda: measure_tuning(o, session.folder),
        "quality": lambda: measure_quality(o, session.result, session.folder),
    }
    for part in (part for part in get_args(Part) if part in o.parts):  # tuning before quality
        session.take(part, of[part](), lambda row: {k: v for k, v in row.items() if k != "losses"})


# -- the tables -------------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    o = result["options"]
    titles: dict[str, tuple[str, Callable[[Any], str]]] = {
        "speed": (f"Speed at {o['rate']:g} Mbit/s and {o['delay_ms']:g} ms", speed_text),
        "traffic": ("Traffic", traffic_text),
        "memory": ("Blocks, over an emulated bus", memory_text),
        "sharing": ("Uploads shared by the workers of a node", sharing_text),
        "opt": ("Device memory of OPT, computed, beside ZO2's README", opt_text),
        "tuning": ("Learning rates", tuning_text),
        "quality": ("Quality", quality_text),
    }
    lines = [f"Zeroth-order training. {report.source(result)}", ""]
    for part, (title, written) in titles.items():
        lines += [f"## {title}", "", written(result[part]), ""] if result.get(part) else []
    return "\n".join(lines)


def speed_text(rows: Sequence[dict[str, Any]]) -> str:
    alone = {row["forward_ms"]: row["steps_per_second"] for row in rows if row["mesh"] == "one process"}
    cells = [
        [
            f"{row['forward_ms']:g} ms" if row["forward_ms"] else "a tiny GPT-2, unpaced",
            row["mesh"],
            row["delay"],
            f"{row['steps_per_second']:.2f}",
            f"{row['steps_per_second'] / alone[row['forward_ms']]:.2f}",
            f"{row['exposed_ms']:.1f}" if "exposed_ms" in row else "",
        ]
        for row in rows
    ]
    titles = ("forward, whole batch", "mesh", "delay", "steps/s", "x one process", "waited, ms a step")
    note = "One process takes both forward passes of the whole batch, as ZO2 does. Ideal: 2, and 4 for 2 x 2."
    return f"{report.table(titles, cells)}\n\n{note}"


def traffic_text(rows: Sequence[dict[str, Any]]) -> str:
    cells = [[f"{row['parameters']:,}", row["workers"], f"{row['bytes_a_step']:.0f}"] for row in rows]
    return report.table(("parameters", "workers", "bytes a step and worker"), cells)


def main() -> None:
    forks = lambda o: bool(set(o.parts) - {"memory", "sharing"})  # noqa: E731
    report.run(ZerothBench, "zeroth", run_all, text, packages=("torch", "transformers"), forks=forks)


if __name__ == "__main__":
    launch(main)
