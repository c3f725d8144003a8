"""Layouts on an emulated cluster: seconds of a step and bytes of a rank, measured beside what the planner predicts.

python -m bench.layouts [--layouts tp2.pp2.dp2 dp8.fsdp ...] [--rates 50 200 1000] [--repeats 3] [--out FOLDER]

Nodes are network namespaces; ranks of a node talk over its loopback device. Computing is a stand-in, for a core is
shared by several ranks: a block takes layer_ms for each sample at tp1, backward as much longer as the planner counts
products, the head in proportion. As beneath a GPU, what a rank itself computes is part of it. So the planner
(training/plan) knows how fast the device computes; links, and what a block takes of a rank's thread, are measured
before: what is put to the test is how it puts these together.
Bytes are what torch's allocator holds at the peak of a step, of the fullest rank. Writes layouts.json and layouts.md.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from bench import layouts_report, report
from bench.cluster import Cluster, prepare_to_fork, run_ranks
from bench.layouts_report import NAME, SEEN, combine, combine_links, device, predict
from bench.report import read_options, require
from core import CO2Config
from core.flat import local_shard
from language.metrics import token_loss
from training.layouts.layout import Layout
from training.plan.clusters import probed
from training.plan.model import Model, preset_model
from training.script import launch

PRESET, KIND, VOCABULARY = "gpt2-tiny", "gpt2_tiny", 1024  # of the planner, of language.model
BURST_MS = 2.0  # what a link lets pass at once: a stage's activations must take as long as on a link of that rate
TIMEOUT = 600.0  # seconds of one layout
NEW = ("tp4.pp2", "tp2.dp4", "pp2.dp4", "dp2.co2x4", "pp2.co2x4", "tp2.pp2.co2x2")


@dataclass(frozen=True)
class Layouts:
    """What to measure."""

    layouts: tuple[str, ...] = (*SEEN, *NEW)
    """Their names (docs/layouts.md); all of nodes * ranks_per_node processes."""
    rates: tuple[float, ...] = (50.0, 200.0, 1000.0)
    """Each node's link, Mbit/s."""
    nodes: int = 4
    ranks_per_node: int = 2
    batch: int = 32
    """Samples a step, of all workers (global)."""
    context: int = 32
    layer_ms: float = 15.0
    """Milliseconds that the forward pass of one layer takes for one sample at tp1."""
    tau: int = 3
    """Local steps of a round of CO2."""
    steps: int = 1
    """Of each repeat, rounded up to whole rounds."""
    repeats: int = 3
    out: Path | None = None
    """Where to write; runs/layouts-DATE by default."""

    def check(self) -> None:
        require(self, once="layouts rates", ones="nodes ranks_per_node batch context tau steps repeats")
        require(self, positive="rates layer_ms")
        for name in self.layouts:
            layout = Layout.parse(name)
            layout.check_runs()
            layout.check_devices(self.nodes * self.ranks_per_node)
            layout.check_batch(self.batch)

    @property
    def model(self) -> Model:
        return preset_model(PRESET, self.context)

    @property
    def crowd(self) -> float:
        """Ranks that share a core."""
        return max(1.0, self.nodes * self.ranks_per_node / len(os.sched_getaffinity(0)))


# -- on a rank --------------------------------------------------------------------------------------------------------


class Trainer:
    """One rank's part of a model under a layout, and its steps."""

    def __init__(self, o: Layouts, layout: Layout):
        from language.model import build_model
        from training.layouts.parallel import Parallel
        from training.zero import shard_optimizer

        torch.manual_seed(0)
        model = build_model(KIND, vocab_size=VOCABULARY, context=o.context, dropout=0.0)
        self.layout, self.parallel = layout, Parallel(model, layout, torch.device("cpu"))
        samples = o.batch // layout.data_workers
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-4)
        if layout.zero == 1:
            self.optimizer = shard_optimizer(self.optimizer, self.parallel.mesh, 1)
        config = CO2Config(tau=o.tau, outer_momentum=0.0)
        self.co2 = self.parallel.co2(config) if layout.islands > 1 else None
        self.tokens = torch.randint(VOCABULARY, (samples, o.context))
        dist.broadcast(self.tokens, group_src=0, group=self.parallel.island)
        self.round = o.tau if self.co2 else 1

    def pace(self, o: Layouts) -> None:
        """From now on computing takes as long as the stand-in's device takes."""
        part = len(self.tokens) / self.layout.parts / self.layout.tp
        seconds, backward, head = (x * part for x in layers(o))
        stand_in = StandIn()
        for own in self.parallel.parts:
            for block in own.blocks:
                stand_in.takes(block, seconds, backward)
            if own.head is not None:
                stand_in.takes(own.head, head, 2 * head)

    def step(self) -> None:
        def loss(logits: Any, tokens: Any) -> Any:
            return token_loss(logits, tokens) / self.layout.parts

        self.parallel.backward(self.tokens, self.tokens, loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.co2:
            self.co2.step()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def layers(o: Layouts) -> tuple[float, float, float]:
    """Seconds of a block forward and backward, for one sample at tp1; of the head forward."""
    m, forward = o.model, o.layer_ms / 1e3
    whole = m.linear_flops + m.attention_flops
    return forward, (2 + 0.5 * m.attention_flops / whole) * forward, m.head_flops / whole * forward


def measure(o: Layouts, name: str, asked: Path) -> dict[str, Any]:
    """Of this rank: bytes that the allocator holds at the peak of a step; by rate, seconds a step of each repeat, and
    what its own computing took of one. asked: a file in which rank 0 asks for the next rate."""
    peaks: list[int] = []
    with joined():
        trainer = Trainer(o, Layout.parse(name))
        trainer.run(max(2, trainer.round))
        held = held_bytes(trainer)
        for _ in range(3):  # the least counts: gloo's threads drop what they have sent sooner or later
            with peak_bytes() as most:
                trainer.run(trainer.round)
            peaks.append(most[0])
        trainer.pace(o)  # whose hooks would keep more
        times = [time_steps(o, trainer, rate, asked) for rate in o.rates]
        if trainer.co2:
            trainer.co2.finish()
            trainer.co2.close()
    return {"bytes": held + min(peaks), "times": times}


def time_steps(o: Layouts, trainer: Trainer, rate: float, asked: Path) -> dict[str, Any]:
    many = math.ceil(o.steps / trainer.round) * trainer.round
    if trainer.co2:
        trainer.co2.flight.settle()
    dist.barrier()
    if dist.get_rank() == 0:
        asked.write_text(f"{rate}")
        while asked.exists():
            time.sleep(0.01)
    dist.barrier()
    trainer.run(trainer.round)
    busy = time.process_time()
    seconds = [timed(lambda: trainer.run(many)) / many for _ in range(o.repeats)]
    return {"seconds": seconds, "busy": (time.process_time() - busy) / (many * o.repeats)}


def probe_links(o: Layouts) -> dict[str, float]:
    """Bytes/s and a hop's seconds, of a ring in a node and of one across nodes, as core.doctor measures them."""
    found: dict[str, float] = {}
    with joined():
        world, g = range(o.nodes * o.ranks_per_node), o.ranks_per_node
        inside, _ = dist.new_subgroups_by_enumeration([[*world[i : i + g]] for i in world[::g]])
        across, _ = dist.new_subgroups_by_enumeration([[*world[i::g]] for i in range(g)])
        for rate, latency, group, rings in (("inside", "inside_latency", inside, 1), ("across", "latency", across, g)):
            n = dist.get_world_size(group)
            hop, whole = (allreduce_seconds(*of, group) / max(1, 2 * (n - 1)) for of in ((1, 50), (1 << 18, 4)))
            found |= {latency: hop, rate: rings * (1 << 20) / n / max(whole - hop, 1e-9)}
    return found


def allreduce_seconds(elements: int, repeats: int, group: Any) -> float:
    """Of one of so many in a row; the median of three rows."""
    payload = torch.zeros(elements)

    def some() -> None:
        for _ in range(repeats):
            dist.all_reduce(payload, group=group)

    return statistics.median(timed(some) for _ in range(3)) / repeats


def measure_calls(o: Layouts) -> tuple[float, float, float]:
    """Of two ranks: seconds of a thread for a block's two passes and its update; more with TP; more with FSDP2."""
    with joined():
        plain, cut, sharded = (thread_seconds(o, name) for name in ("dp2", "tp2", "dp2.fsdp"))
    return plain, max(0.0, cut - plain), max(0.0, sharded - plain)


def thread_seconds(o: Layouts, name: str, steps: int = 10) -> float:
    trainer = Trainer(o, Layout.parse(name))
    trainer.run(2)
    began = time.thread_time()
    trainer.run(steps)
    return (time.thread_time() - began) / steps / o.model.layers


@contextlib.contextmanager
def joined() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def timed(act: Callable[[], Any]) -> float:
    """Seconds until the last rank has done it."""
    dist.barrier()
    began = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - began


class StandIn:
    """A device that computes beneath its rank's own thread, as a GPU: after a module's pass it sleeps for what of the
    module's seconds the thread's own computing since the last one has left. So communication comes on top."""

    def __init__(self):
        self._ahead, self._since = 0.0, computed()

    def takes(self, module: Any, forward: float, backward: float) -> None:
        """From now on the module's passes take so many seconds."""
        module.register_forward_hook(lambda *_: self._work(forward))
        module.register_full_backward_hook(lambda *_: self._work(backward))

    def _work(self, seconds: float) -> None:
        left = seconds - self._ahead - (computed() - self._since)
        time.sleep(max(0.0, left))
        self._ahead, self._since = max(0.0, -left), computed()


def computed() -> float:
    """Seconds that this thread has run, or was ready to run while others had the cores."""
    waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1])  # nanoseconds: man 5 proc
    return time.thread_time() + waited / 1e9


def held_bytes(trainer: Trainer) -> int:
    """Of all tensors that lie here between two steps, and of DistributedDataParallel's buckets."""
    gc.collect()  # the whole model is in circles
    found = [local_shard(t).untyped_storage() for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in found if storage.device.type == "cpu"}
    buckets = [ddp._get_ddp_logging_data()["bucket_sizes"] for ddp in trainer.parallel._ddp]
    return sum(sizes.values()) + sum(int(size) for of in buckets for size in of.split(","))


@contextlib.contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """The most that torch's allocator has given out meanwhile and not got back."""
    found: list[int] = []
    with profile(profile_memory=True) as prof:
        yield found
    events = [e for e in prof.kineto_results.events() if e.name() == "[memory]"]  # pyright: ignore
    found.append(max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))))


def answer(cluster: Cluster, asked: Path) -> bool:
    """Sets the rate that the ranks ask for; they go on."""
    if asked.exists() and (rate := asked.read_text()):
        cluster.set_rate(float(rate))
        asked.unlink()
    return False


def main() -> None:
    o = read_options(Layouts, "bench.layouts", description=__doc__)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's, which counts bytes
    prepare_to_fork(namespaces=True)
    import language.model  # noqa: F401
    import training.layouts.parallel  # noqa: F401, both once, and not in every rank

    folder = report.new_folder(NAME, o.out)
    found = report.header("bench.layouts", o, ("torch", "transformers")) | {"bytes": {}, "rows": [], "links": {}}

    with Cluster(o.nodes, o.rates[0], burst_ms=BURST_MS) as cluster, tempfile.TemporaryDirectory() as shared:
        asked = Path(shared, "rate")

        def on_ranks(act: Callable[..., Any], *more: Any) -> list[Any]:
            return run_ranks(
                act, cluster, o.ranks_per_node, o.nodes, o, *more, timeout=TIMEOUT, until=lambda: answer(cluster, asked)
            )

        found["calls"] = run_ranks(measure_calls, None, 2, 1, replace(o, batch=2, context=8), timeout=TIMEOUT)[0]
        made = device(o, probed("").bandwidth / o.crowd, found["calls"])
        for rate in o.rates:
            cluster.set_rate(rate)
            found["links"][f"{rate:g}"] = combine_links(on_ranks(probe_links))
        for name in o.layouts:
            of_all = on_ranks(measure, name, asked)
            said = [predict(o, name, links, made) for links in found["links"].values()]
            found["bytes"][name] = max(of["bytes"] for of in of_all), said[0][1]
            for i, rate in enumerate(o.rates):
                found["rows"].append(combine(name, rate, [of["times"][i] for of in of_all], said[i][0]))
                print(layouts_report.line(found["rows"][-1]), flush=True)
            report.save(folder, NAME, found)
    report.conclude(folder, NAME, found, layouts_report.text(found))


if __name__ == "__main__":
    launch(main)
