"""Layouts on an emulated cluster: seconds a step and bytes a rank as measured, beside what was predicted.

python -m bench.layouts --layouts tp2.pp2.dp2 pp4.dp2 dp8.fsdp tp2.dp2.co2x2 --nodes 4 --ranks_per_node 2 --rate 200
[--predicted FILE.json] [--repeats 3] [--out FOLDER]

FILE.json: {"tp2.pp2.dp2": {"seconds": 0.4, "bytes": 1.2e7}, ...}, of any layouts, either number or both. Nodes are
network namespaces; ranks of a node talk over its loopback device. A layer's computing is a stand-in: each block takes
layer_ms for each sample at tp1, twice as long backward, and sleeps for what is left of that. Bytes are counted:
parameters, gradients, the optimiser's state and CO2's, and the most that the backward pass had kept, of the fullest
rank. Without --rate all ranks are on loopback. Writes layouts.json and layouts.md.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.cluster import Cluster, prepare_to_fork, run_ranks
from bench.report import mean_sd, read_options, require_each_once, require_one_or_more, require_positive
from core import CO2Config
from core.checkpoints.untrusted import parse_json
from core.errors import UserError
from training.layouts.layout import Layout
from training.script import launch

NAME, VOCABULARY, WARM_UP = "layouts", 1024, 2
STATES = ("parameters", "gradients", "optimiser", "co2", "kept")
TIMEOUT = 600.0  # seconds of one layout


@dataclass(frozen=True)
class Layouts:
    """What to measure."""

    layouts: tuple[str, ...]
    """Their names (docs/layouts.md); all of nodes * ranks_per_node processes."""
    nodes: int = 4
    ranks_per_node: int = 2
    rate: float | None = None
    """Each node's link, Mbit/s; None: all ranks on loopback."""
    model: str = "gpt2_tiny"
    """Of language.model, GPT-2's sizes."""
    batch: int = 32
    """Samples a step, of all workers (global)."""
    context: int = 64
    layer_ms: float = 2.0
    """Milliseconds that the forward pass of one layer takes for one sample at tp1; 0: what it takes here."""
    tau: int = 6
    """Local steps of a round of CO2."""
    steps: int = 12
    """Of each repeat, rounded up to whole rounds."""
    repeats: int = 3
    predicted: Path | None = None
    out: Path | None = None
    """Where to write; runs/layouts-DATE by default."""

    def check(self) -> None:
        """A UserError names the first option that cannot be."""
        require_each_once(self, "layouts")
        require_one_or_more(self, "nodes", "ranks_per_node", "batch", "context", "tau", "steps", "repeats")
        require_positive(self, *(["rate"] if self.rate is not None else []))
        for name in self.layouts:
            layout = Layout.parse(name)
            layout.check_runs()
            layout.check_devices(self.nodes * self.ranks_per_node)
            layout.check_batch(self.batch)

    def predictions(self) -> dict[Layout, dict[str, float]]:
        """What was handed in, by layout. UserError for a file that is none."""
        if self.predicted is None:
            return {}
        try:
            found = parse_json(self.predicted.read_text())
            return {Layout.parse(name): {key: float(n) for key, n in of.items()} for name, of in found.items()}
        except UserError:
            raise
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise UserError(
                f'predicted={self.predicted}: {error}; give {{"tp2.pp2": {{"seconds": 0.4, "bytes": 1e7}}}}'
            ) from None


# -- on a rank --------------------------------------------------------------------------------------------------------


class Trainer:
    """One rank's part of a model under a layout, and its steps."""

    def __init__(self, o: Layouts, layout: Layout):
        import torch
        import torch.distributed as dist

        from language.model import build_model
        from training.layouts.parallel import Parallel

        torch.manual_seed(0)
        model = build_model(o.model, vocab_size=VOCABULARY, context=o.context, dropout=0.0)  # pyright: ignore
        self.layout, self.parallel = layout, Parallel(model, layout, torch.device("cpu"))
        samples = o.batch // layout.data_workers
        for part in self.parallel.parts if o.layer_ms else []:
            for block in part.blocks:
                pace(block, o.layer_ms / 1e3 * samples / layout.parts / layout.tp)
        self.optimizer = torch.optim.AdamW(self.parallel.parameters(), lr=1e-4)
        config = CO2Config(tau=o.tau, outer_momentum=0.0)
        self.co2 = self.parallel.co2(config) if layout.islands > 1 else None
        self.tokens = torch.randint(VOCABULARY, (samples, o.context))
        dist.broadcast(self.tokens, group_src=0, group=self.parallel.island)
        self.round = o.tau if self.co2 else 1
        self.bytes: dict[str, int] = {}

    def step(self, *, count: bool = False) -> None:
        """count: notes what the backward pass keeps and leaves."""
        from language.metrics import token_loss

        with kept_bytes(self.parallel.parameters(), self.bytes) if count else contextlib.nullcontext():
            self.parallel.backward(self.tokens, self.tokens, lambda x, y: token_loss(x, y) / self.layout.parts)
        if count:
            self.bytes["gradients"] = sum_bytes(p.grad for p in self.parallel.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.co2:
            self.co2.step()

    def count(self) -> dict[str, int]:
        """Bytes that lie here after a round that counts them."""
        for _ in range(self.round):
            self.step(count=True)
        flats = [b.flat for b in self.co2.buckets] if self.co2 else []
        flats += [flat for of in self.co2.state.values() for flat in of] if self.co2 else []
        states = [t for of in self.optimizer.state.values() for t in of.values()]
        held = {"parameters": self.parallel.parameters(), "optimiser": states, "co2": flats}
        return self.bytes | {name: sum_bytes(tensors) for name, tensors in held.items()}


def work(o: Layouts, name: str) -> dict[str, Any]:
    """Seconds a step of each repeat, and the counted bytes, of this rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    trainer, seconds = Trainer(o, Layout.parse(name)), []
    many = math.ceil(o.steps / trainer.round) * trainer.round
    for _ in range(max(WARM_UP, trainer.round)):
        trainer.step()
    for _ in range(o.repeats):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(many):
            trainer.step()
        dist.barrier()
        seconds.append((time.perf_counter() - began) / many)
    counted = trainer.count()
    if trainer.co2:
        trainer.co2.finish()
        trainer.co2.close()
    dist.destroy_process_group()
    return {"seconds": seconds, "bytes": counted}


def sum_bytes(tensors: Any) -> int:
    """Of what lies here, DTensors' shards."""
    from core.flat import local_shard

    return sum(local_shard(t).nbytes for t in tensors if hasattr(t, "nbytes"))


def pace(block: Any, seconds: float) -> None:
    """Has a block take so long forward, and twice as long backward: it sleeps for what its computing leaves."""
    began: list[float] = []

    def start(*_: Any) -> None:
        began.append(time.perf_counter())

    def stop(times: int) -> None:
        time.sleep(max(0.0, times * seconds - (time.perf_counter() - began.pop())))

    block.register_forward_pre_hook(start)
    block.register_forward_hook(lambda *_: stop(1))
    block.register_full_backward_pre_hook(start)
    block.register_full_backward_hook(lambda *_: stop(2))


class Saved:
    """A tensor that the graph keeps. alive: where memory lies -> how many of these hold it; tally: bytes now, most."""

    def __init__(self, tensor: Any, alive: dict[int, int], tally: list[int]):
        from core.flat import local_shard

        storage = local_shard(tensor).untyped_storage()
        self.tensor, self._alive, self._tally = tensor, alive, tally
        self._where, self._size = storage.data_ptr(), storage.nbytes()
        alive[self._where] = alive.get(self._where, 0) + 1
        tally[0] += self._size if alive[self._where] == 1 else 0
        tally[1] = max(tally)

    def __del__(self) -> None:
        self._alive[self._where] -= 1
        self._tally[0] -= 0 if self._alive[self._where] else self._size


@contextlib.contextmanager
def kept_bytes(parameters: Any, found: dict[str, int]) -> Iterator[None]:
    """found["kept"]: the most bytes that the graph held at once for the backward pass, each memory once, without the
    parameters, but with those that FSDP2 has gathered."""
    from torch.autograd.graph import saved_tensors_hooks

    from core.flat import local_shard

    alive = {local_shard(p).untyped_storage().data_ptr(): 1 for p in parameters}
    tally = [0, 0]

    def pack(tensor: Any) -> Any:
        return tensor if tensor.device.type == "meta" else Saved(tensor, alive, tally)

    with saved_tensors_hooks(pack, lambda held: held.tensor if isinstance(held, Saved) else held):
        yield
    found["kept"] = max(tally[1], found.get("kept", 0))


# -- the report -------------------------------------------------------------------------------------------------------


def combine(name: str, per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """A layout's row: seconds of the slowest rank, bytes of the fullest."""
    seconds = [max(times) for times in zip(*(of["seconds"] for of in per_rank), strict=True)]
    fullest = max((of["bytes"] for of in per_rank), key=lambda of: sum(of.values()))
    return {"layout": str(Layout.parse(name)), "seconds": seconds, "bytes": fullest}


def text(result: dict[str, Any], predictions: dict[Layout, dict[str, float]]) -> str:
    """The table, and how well the predictions order the layouts."""
    rows, pairs = [], []
    for row in result["rows"]:
        said = predictions.get(Layout.parse(row["layout"]), {})
        mean, total = statistics.fmean(row["seconds"]), sum(row["bytes"].values())
        seconds, size = said.get("seconds"), said.get("bytes")
        pairs += [(mean, seconds)] if seconds is not None else []
        cells = [row["layout"], mean_sd(row["seconds"], ".4f"), *beside(mean, seconds, 1, ".4f")]
        cells += [f"{total / 1e6:.2f}", *beside(total, size, 1e6, ".2f")]
        rows.append(cells + [f"{row['bytes'][part] / 1e6:.2f}" for part in STATES])
    titles = ["layout", "s a step", "predicted", "error", "MB", "predicted", "error", *(f"{p}, MB" for p in STATES)]
    o = result["options"]
    link = f"{o['rate']:g} Mbit/s a node" if o["rate"] else "loopback"
    lines = [
        f"{o['model']}, batch {o['batch']} x {o['context']} tokens, {o['nodes']} nodes of {o['ranks_per_node']} ranks, "
        f"{link}, {o['layer_ms']:g} ms a layer and sample, CO2 with tau {o['tau']}, seed 0, {o['repeats']} repeats of "
        f"{o['steps']} steps; {report.source(result)}. Seconds: mean ± standard deviation over the repeats.",
        report.table(titles, rows),
    ]
    if len(pairs) > 1:
        lines.append(f"Kendall's tau of predicted and measured seconds, {len(pairs)} layouts: {kendall(pairs):.2f}")
    return "\n\n".join(lines) + "\n"


def beside(measured: float, predicted: float | None, unit: float, spec: str) -> tuple[str, str]:
    """The prediction and its error, or that there is none."""
    if predicted is None:
        return "none", ""
    return f"{predicted / unit:{spec}}", f"{predicted / measured - 1:+.1%}"


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau-a: the share of pairs in the same order less that in the other; equal ones count as neither."""
    signs = [
        math.copysign(1, (a - c) * (b - d)) if (a - c) * (b - d) else 0.0
        for i, (a, b) in enumerate(pairs)
        for c, d in pairs[:i]
    ]
    return sum(signs) / len(signs)


def main() -> None:
    o = read_options(Layouts, "bench.layouts", description=__doc__)
    predictions = o.predictions()
    prepare_to_fork(namespaces=o.rate is not None)
    import language.model  # noqa: F401
    import training.layouts.parallel  # noqa: F401, both once, and not in every rank

    folder = report.new_folder(NAME, o.out)
    result = report.header("bench.layouts", o, ("torch", "transformers")) | {"rows": []}
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(o.nodes, o.rate)) if o.rate else None
        for name in o.layouts:
            per_rank = run_ranks(work, cluster, o.ranks_per_node, o.nodes, o, name, timeout=TIMEOUT)
            result["rows"].append(combine(name, per_rank))
            print(f"{name}: {mean_sd(result['rows'][-1]['seconds'], '.4f')} s a step", flush=True)
            report.save(folder, NAME, result)
    report.conclude(folder, NAME, result, text(result, predictions))


if __name__ == "__main__":
    launch(main)
