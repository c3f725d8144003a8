"""A run of a small model whose workers, of one or two ranks, may be harmed."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.chaos.crew import wrap
from core import CO2Config
from core.checkpoint import runs as checkpoint
from tests.runs import Loop
from training.data.samples import generator, train_keys
from training.elastic import repeated
from training.folder.run_folder import RunFolder
from training.loop.kinds import open_run
from training.optim import OptimConfig
from training.recipe import Recipe

STEPS, SAMPLES, EPOCH = 48, 96, 6


@dataclass(frozen=True)
class Toy(Recipe):
    co2: CO2Config = CO2Config(tau=2)
    optim: OptimConfig = OptimConfig(lr=0.02)
    batch_size: int = 16
    log_every: int = 1
    per_node: int = 2
    timeout: float = 60.0
    device: str = "cpu"  # pyright: ignore


def toy(
    folder: str,
    elastic: bool,
    harm: tuple[str, int, int] | None = None,
    comes: bool = False,
    linear: bool = False,
    **more: Any,
) -> None:
    """A rank's run.

    harm: the first process of this RANK, or of each, sends itself the signal after the step, or ends, for signal 0.
    comes: its worker comes back. linear: the model has as many outputs as the sum that it learns, and no BatchNorm.
    """
    recipe = Toy(name="toy", out=Path(folder, "run"), elastic=elastic, **more)
    name, place = os.environ.get("CO2_WORKER", ""), os.environ["RANK"]
    where, number, after = harm or ("", 0, 0)
    workers = int(os.environ["WORLD_SIZE"])

    def harmed(here: str) -> None:
        if where in (f"{here} {place}", here) and name.endswith(".0") and run.step >= after:
            os.kill(os.getpid(), number) if number else os._exit(0)

    publish = checkpoint.publish
    checkpoint.publish = lambda *paths: (harmed("checkpoint"), publish(*paths))
    if elastic:  # who leads after the first worker is late for the next sum, by more than workers have to connect
        wrap(RunFolder, "lead", lambda *_: time.sleep(float(name != "0.0")))

    def batches(recipe: Toy, rank: int, world_size: int, start: int, total: int) -> Any:
        for _, keys in train_keys(recipe, SAMPLES, rank, world_size, start, total):
            yield torch.stack([torch.randn(4, generator=generator(i)) for *_, i in keys]).to(run.device)

    @repeated
    def evaluate() -> float:
        harmed("evaluation")
        total, count = run.sum(sum(p.sum().item() for p in loop.model.parameters()), 1.0)
        run.folder.log(run.step, {"mean": total / count})
        return total / count

    trace, seen = {}, list[Any]()
    with open_run(recipe) as run:
        torch.manual_seed(int(os.environ["RANK"]))  # rank 0's parameters go to all
        if name.endswith(".1"):
            Path(folder, "came").touch()
        layers = [nn.Linear(4, 1)] if linear else [nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)]
        model = nn.Sequential(*layers)
        loop = Loop(run, model, STEPS, EPOCH, SAMPLES)
        for x in run.batches(batches):
            harmed("step")
            while comes and run.step == 14 and not Path(folder, "came").exists():
                time.sleep(0.05)
            if comes and 14 < run.step < 40 and run.world_size < workers:
                time.sleep(0.5)  # until the worker has joined
            due = loop.step((loop.wrapped(x) - x.sum(1, keepdim=True)).square().mean(), last=run.at_last_step)
            seen.append((run.step, x.flatten().tolist()))
            if loop.method.at_boundary:
                trace[run.step] = [v for p in model.parameters() for v in p.flatten().tolist()]
            if due.evaluation:
                evaluate()
            if due.checkpoint:
                run.save()
            if due.stop:
                return run.stop()
        loop.method.finish()
        held = [[v for t in kind for v in t.flatten().tolist()] for kind in (model.parameters(), model.buffers())]
        run.end({"mean": evaluate()})
    Path(folder, f"{name}of{place}.json").write_text(json.dumps({"held": held, "trace": trace, "seen": seen}))
