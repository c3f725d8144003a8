"""What L-GreCo and other compression save over slow links: python -m bench.slow_links [--rates 50 200] [--models gpt2]

1. Training: each run is gpt2_pydoc_small to its end in bench.time_to_loss's loop, on four workers, one per node. First
we train every method with each learning rate of --lrs, without a slow link and with a separate seed. All other runs
take the one with the lowest loss. With --eval_every, a row has the bytes and the loss of each evaluation, so that
methods can be compared by the bytes to one loss.
2. Bytes at equal error (--models): we train a model in one process and add up its last ten gradients, as the released
code does. L-GreCo chooses its settings for that sum. Then both settings go through the reducers, which measure their
errors: what arrives against what was sent.

Writes slow_links.json after each run. No --methods, or no --models, leaves a part out.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import report, time_to_loss
from bench.cluster import Cluster
from bench.report import FAST, TUNING_SEED, Asked, Summary, require, require_company
from bench.time_to_loss import RUN, Learned, TimeToLoss
from core import LGrecoConfig
from core.flat import Scalars, make_buckets
from core.lgreco.choices import RAW, Choice, padded_bytes
from core.lgreco.choices import sent_bytes as bytes_of
from core.lgreco.decide import Decider, curve
from core.lgreco.reducer import LGreco, in_bucket
from training.script import launch

RECIPE, BATCH, LR = "gpt2_pydoc_small", 32, 4e-3
RECIPE_MODEL, EVAL_TOKENS = "gpt2_tiny", 4096
LGRECO = "ddp:wire=lgreco,first=10,every=40,like="
METHODS = {  # name -> as bench.time_to_loss has it
    "ddp": "ddp",
    "ddp_int4": "ddp:wire=int4",
    "ddp_rank4": f"{LGRECO}rank4,rule=uniform",
    "ddp_rank3": f"{LGRECO}rank3,rule=uniform",
    "ddp_top1": f"{LGRECO}top0.01,rule=uniform",
    "ddp_top03": f"{LGRECO}top0.003,rule=uniform",
    "lgreco_int4": f"{LGRECO}int4",
    "lgreco_rank4": f"{LGRECO}rank4",
    "lgreco_top1": f"{LGRECO}top0.01",
    "co2": "co2_auto",
    "co2_lgreco_rank4": "co2_auto:wire=lgreco,first=3,every=10,like=rank4",
}


@dataclass(frozen=True)
class SlowLinks(Asked):
    """What to train, and over which links."""

    methods: tuple[str, ...] = tuple(METHODS)
    rates: tuple[float, ...] = (50.0, 200.0)
    """Link rates, Mbit/s."""
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Learning rates to choose among, as multiples of the recipe's; one alone is taken without a choice."""
    workers: int = 4
    epochs: int = 5
    epoch_steps: int = 24
    model: str = RECIPE_MODEL
    """The recipe's, or another of the sizes of language.model."""
    batch_size: int = BATCH
    """Samples of all workers together."""
    eval_every: int | None = None
    """Epochs between two evaluations, on 4,096 tokens; None: at the end alone."""
    models: tuple[str, ...] = ("gpt2", "resnet")
    """Whose gradients are compared at equal error."""
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces."""

    def check(self) -> None:
        require(self, once="rates seeds lrs", positive="rates lrs", methods=METHODS, models=MODELS)
        require(self, ones="epochs epoch_steps batch_size")
        require_company(self)

    @property
    def task(self) -> Learned:
        values = {"epochs": self.epochs, "epoch_steps": self.epoch_steps, "model": self.model}
        values |= {"batch_size": self.batch_size} | ({"eval_tokens": EVAL_TOKENS} if self.eval_every else {})
        return Learned("language", RECIPE, 0.0, tuple(report.flags(values)))


# -- training ---------------------------------------------------------------------------------------------------


def measure(o: SlowLinks, cluster: Cluster | None, method: str, rate: float, seed: int, lr: float, log: Path) -> dict:
    """One run to its end: what it measured."""
    steps = o.epochs * o.epoch_steps
    loop = TimeToLoss(
        workers=o.workers,
        eval_every=(o.eval_every or o.epochs) * o.epoch_steps,
        limit_seconds=30.0 * steps,
        throttle=o.throttle,
    )
    asked = f"{METHODS[method]}{',' if ':' in METHODS[method] else ':'}lr={lr * LR}"
    found = time_to_loss.train(loop, cluster, o.task, (seed, rate, RECIPE, asked), log)
    row: dict[str, Any] = {"method": method, "rate_mbit": rate, "seed": seed, "lr": lr}
    if found["ended"] != "not reached":  # its last step
        return row | {"failed": found["reason"] or found["ended"]}
    last = found["trajectory"][-1]
    return row | {
        "loss": last["loss"],
        "samples_per_second": o.batch_size * steps / last["seconds"],
        "bytes_a_step": last["bytes_sent"] / steps,
        "tau": last["tau"],
        "evaluations": [(line["step"], line["bytes_sent"], line["loss"]) for line in found["trajectory"]],
    }


def run_all(o: SlowLinks, session: report.Session) -> None:
    """Tunes, measures, then compares bytes at equal error."""
    result = session.result = session.result | {"verified_mbit": {}, "tuning": [], "rows": []}
    if o.methods:
        o.task.data()  # once, and not in every rank
    (session.folder / "logs").mkdir()

    def rows(runs: Iterable[tuple[str, float, int, float]]) -> Iterator[dict[str, Any]]:
        for run in runs:
            log = "-".join(map(str, run)) + ".txt"
            yield measure(o, cluster, *run, session.folder / "logs" / log)

    with report.network(o.throttle or not o.methods, o.workers, FAST) as cluster:
        tuning = [(m, FAST, TUNING_SEED, lr) for m in o.methods for lr in o.lrs] if len(o.lrs) > 1 else []
        session.take("tuning", rows(tuning))
        result["lrs"] = {m: best_lr(result["tuning"], m) or o.lrs[0] for m in o.methods}
        for seed, rate in itertools.product(o.seeds, o.rates):
            order = list(o.methods)
            random.Random(f"{seed} {rate}").shuffle(order)
            if cluster:
                cluster.shape(rate, result["verified_mbit"])
            session.take("rows", rows([(m, rate, seed, result["lrs"][m]) for m in order]))
    session.take("errors", compare_all(o))


def best_lr(tuning: Iterable[Mapping[str, Any]], method: str) -> float | None:
    """The learning rate of the method's run with the least loss; None where no run ended with a number."""
    ended = {row["lr"]: row["loss"] for row in tuning if row["method"] == method and "loss" in row}
    finite = [lr for lr in ended if math.isfinite(ended[lr])]
    return min(finite, key=lambda lr: ended[lr], default=None)


# -- bytes at equal error ---------------------------------------------------------------------------------------

STEPS, SUMMED = 100, 10  # steps before the gradients are added up; steps whose gradients are
WARM = 5  # times that the same tensors are sent, of which the last is measured: low rank needs a warm Q
LIKES = ("int4", "top0.01", "rank4")
MODELS = {"gpt2": Learned("language", RECIPE, 0.0), "resnet": Learned("vision", "digits_small", 0.0)}


def gradients(of: Learned, steps: int = STEPS, summed: int = SUMMED) -> list[Tensor]:
    """The sum of a model's gradients over the last steps, a tensor a parameter. One process trains it."""
    torch.manual_seed(0)
    recipe = of.parse()
    model = of.model(recipe).train()
    optimizer = of.script.make_optimizer(model, recipe.optim)
    params = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    for number, batch in zip(range(steps + summed), of.batches(recipe, 0, 1)[1], strict=False):
        of.script.backward(RUN, recipe, model, *batch)
        for total, p in zip(sums, params, strict=True):
            if number >= steps and p.grad is not None:
                total += p.grad
        optimizer.step()
        optimizer.zero_grad()
    return sums


class Sender:
    """One worker's reducer over tensors like the given ones, which sends them in any allocation."""

    def __init__(self, tensors: list[Tensor], like: str):
        self.scalars = Scalars({"steps": 1, "weight": 1})
        self.buckets = make_buckets([torch.empty_like(t) for t in tensors], [], self.scalars.numel)
        self.scalars.attach(self.buckets[0].scalars)
        self.reducer = LGreco(self.buckets, self.scalars, 0, 1, like, LGrecoConfig(rule="uniform"))
        self.sent = torch.cat([t.flatten() for t in tensors])

    def errors(self, choices: list[Choice]) -> list[float]:
        """||G_l - what lands|| of each layer."""
        self.reducer._switch(choices)
        for number in range(WARM):
            for name in ("error_feedback", "mean_error_feedback"):
                for flat in self.reducer.state[name]:
                    flat.zero_()
            self.buckets[0].payload.copy_(self.sent)
            self.scalars.set("steps", 1.0)
            self.scalars.set("weight", 1.0)
            for _ in self.reducer.stages(None, number):
                pass
        lost = self.buckets[0].payload - self.sent
        views = in_bucket(lost, self.reducer.layers, range(len(self.reducer.layers)))
        return [float(view.double().norm()) for view in views]


def compare(model: str, tensors: list[Tensor], like: str, workers: int) -> dict[str, Any]:
    """Bytes and measured errors of the uniform setting and of L-GreCo's choice."""
    sender = Sender(tensors, like)
    decider = Decider(sender.reducer.layers, like, LGrecoConfig(), workers)
    layers = decider.layers
    pieces = zip(in_bucket(sender.sent, layers, range(len(layers))), layers, decider.offered.tolist(), strict=True)
    curves = torch.stack([curve(g, z, decider.choices, ok, i) for i, (g, z, ok) in enumerate(pieces)])
    choices = list(decider.decide(curves, decider.uniform, 0).choices)
    row: dict[str, Any] = {"model": model, "like": like, "workers": workers, "layers": len(layers)}
    row["plain_bytes"] = sum(bytes_of(z, RAW, workers) for z in layers)
    for name, each in (("uniform", decider.uniform), ("lgreco", choices)):
        row[f"{name}_bytes"] = sum(padded_bytes(layers, each, workers))
        row[f"{name}_error"] = sum(sender.errors(each))
    return row | {"choices": [str(c) for c in choices]}


def compare_all(o: SlowLinks) -> Iterator[dict[str, Any]]:
    for model in o.models:
        tensors = gradients(MODELS[model])
        for like, workers in itertools.product(LIKES, sorted({2, o.workers})):
            yield compare(model, tensors, like, workers)


SHOWN = {"lr": ".3g", "samples_per_second": ".1f", "loss": ".3f", "bytes_a_step": ".0f", "tau": ".3g"}
RUNS = Summary("rate_mbit method failed", SHOWN)
BYTES = ("plain_bytes", "uniform_bytes", "lgreco_bytes")
ERRORS = Summary("model like workers", dict.fromkeys(BYTES, ".0f") | {"uniform_error": ".3g", "lgreco_error": ".3g"})
TABLES = {"tuning": RUNS, "rows": RUNS, "errors": ERRORS}


def main() -> None:
    report.run(SlowLinks, "slow_links", run_all, TABLES, forks=lambda o: not o.throttle and bool(o.methods))


if __name__ == "__main__":
    launch(main)
