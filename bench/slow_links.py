"""What L-GreCo and other compression save over slow links: python -m bench.slow_links [--rates 50 200] [--models gpt2]

1. Training: each run is gpt2_pydoc_small's own train script to its end, on four workers, one per node. First we train
every method with each learning rate of --lrs, without a slow link and with a separate seed. All other runs take the one
with the lowest loss. Bytes are what the kernel counts at a node's network device. With --eval_every, a table compares
the bytes that L-GreCo and its uniform setting need to reach one loss.
2. Bytes at equal error (--models): we train a model in one process and add up its last ten gradients, as the released
code does. L-GreCo chooses its settings for that sum. Then both settings go through the reducers, which measure their
errors: what arrives against what was sent.

Writes slow_links.json and slow_links.md after each run. No --methods, or no --models, leaves a part out.
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import report, trainings
from bench.cluster import Cluster, sent_bytes
from bench.report import Asked, mean_sd, require, require_company
from bench.trainings import AUTO, FAST, TUNING_SEED
from core import LGrecoConfig
from core.flat import Scalars, make_buckets
from core.lgreco.choices import RAW, Choice, padded_bytes
from core.lgreco.choices import sent_bytes as bytes_of
from core.lgreco.decide import Decider, curve
from core.lgreco.layout import in_bucket
from core.lgreco.reducer import LGreco
from training.script import launch

RECIPE, LOSS, BATCH, LR = "gpt2_pydoc_small", "val_loss", 32, 4e-3
RECIPE_MODEL, EVAL_TOKENS = "gpt2_tiny", 4096
DDP = ("--ddp_wire.lgreco.first", "10", "--ddp_wire.lgreco.every", "40")
CO2 = ("--co2.wire.lgreco.first", "3", "--co2.wire.lgreco.every", "10")


def ddp(like: str, *more: str) -> tuple[str, ...]:
    return ("--method", "ddp", "--ddp_wire.format", "lgreco", "--ddp_wire.like", like, *DDP, *more)


def co2(like: str, *more: str) -> tuple[str, ...]:
    wire = ("--co2.wire.format", "lgreco", "--co2.wire.like", like, *CO2) if like else ()
    return (*AUTO, *wire, *more)


UNIFORM = ("--ddp_wire.lgreco.rule", "uniform")
METHODS: dict[str, tuple[str, ...]] = {
    "ddp": ("--method", "ddp"),
    "ddp_int4": ("--method", "ddp", "--ddp_wire.format", "int4"),
    "ddp_rank4": ddp("rank4", *UNIFORM),
    "ddp_rank3": ddp("rank3", *UNIFORM),
    "ddp_top1": ddp("top0.01", *UNIFORM),
    "ddp_top03": ddp("top0.003", *UNIFORM),
    "lgreco_int4": ddp("int4"),
    "lgreco_rank4": ddp("rank4"),
    "lgreco_top1": ddp("top0.01"),
    "co2": co2(""),
    "co2_lgreco_rank4": co2("rank4"),
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
        require(self, once="rates seeds lrs", positive="rates lrs", methods=METHODS, models=LOSSES)
        require(self, ones="epochs epoch_steps batch_size")
        require_company(self)

    def command(self, method: str, rate: float, seed: int, lr: float, out: Path) -> list[str]:
        """The train script's arguments."""
        values = {"seed": seed, "out": out, "device": "cpu", "checkpoint_every": 0, "timeout": 300, "optim.lr": lr * LR}
        values |= {"epochs": self.epochs, "epoch_steps": self.epoch_steps, "eval_every": self.eval_every or self.epochs}
        values |= {"model": self.model, "batch_size": self.batch_size}
        values |= {"eval_tokens": EVAL_TOKENS, "log_every": 1} if self.eval_every else {}
        values |= {"link_mbit": rate} if self.throttle else {}
        return [RECIPE, *METHODS[method], *trainings.flags(values)]


# -- one run ----------------------------------------------------------------------------------------------------


def train(module: ModuleType, argv: list[str], log: Path) -> int:
    """One rank: the train script; bytes that its node has sent meanwhile."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    before = sent_bytes(interface)
    trainings.run_script(module, argv, log)
    return sent_bytes(interface) - before


def measure(o: SlowLinks, cluster: Cluster | None, module: ModuleType, run: tuple[Any, ...], folder: Path) -> dict:
    """One run to its end: what it measured."""
    method, rate, seed, lr = run
    argv, steps = o.command(method, rate, seed, lr, folder), o.epochs * o.epoch_steps
    row: dict[str, Any] = {"method": method, "rate_mbit": rate, "seed": seed, "lr": lr}
    found = trainings.train(train, cluster, o.workers, folder, module, argv, timeout=120 + 30 * steps)
    if "failed" in found:
        return row | found
    summary, rows = found["summary"], found["rows"]
    return row | {
        "loss": summary[LOSS],
        "samples_per_second": summary["steps_per_second"] * o.batch_size,
        "bytes_a_step": statistics.fmean(found["ranks"]) / steps if cluster else summary["bytes_sent"] / steps,
        "tau": next((r["round/tau"] for r in reversed(rows) if "round/tau" in r), 1),
        "deciding_share": sum(r.get("lgreco/seconds", 0.0) for r in rows) / summary["seconds"],
        "evaluations": evaluations(rows, LOSS) if o.eval_every else [],
    }


# -- all of them ------------------------------------------------------------------------------------------------


def run_all(o: SlowLinks, session: report.Session) -> None:
    """Tunes, measures, then compares bytes at equal error."""
    result = session.result = session.result | {"verified_mbit": {}, "tuning": [], "rows": []}
    module = importlib.import_module("language.train")

    def take(runs: Sequence[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
        for run in runs:
            number = len(result["tuning"]) + len(result["rows"])
            began = time.monotonic()
            row = measure(o, cluster, module, run, session.folder / "runs" / f"{number:03d}-{run[0]}")
            yield row | {"wall_seconds": time.monotonic() - began}

    with trainings.network(o.throttle, o.workers, FAST) as cluster:
        tuning = [(m, FAST, TUNING_SEED, lr) for m in o.methods for lr in o.lrs] if len(o.lrs) > 1 else []
        session.take("tuning", take(tuning))
        result["lrs"] = {m: trainings.best_lr(result["tuning"], m) or o.lrs[0] for m in o.methods}
        for seed, rate in itertools.product(o.seeds, o.rates):
            order = list(o.methods)
            random.Random(f"{seed} {rate}").shuffle(order)
            if cluster:
                cluster.shape(rate, result["verified_mbit"])
            session.take("rows", take([(m, rate, seed, result["lrs"][m]) for m in order]))
    session.take("errors", compare_all(o))


TITLES = ("method", "lr", "samples/s", "x ddp", "final loss", "MB sent a step and worker", "tau", "deciding")


def text(result: dict[str, Any]) -> str:
    model = result["options"].get("model", RECIPE_MODEL)
    name = "GPT-2 (tiny)" if model == RECIPE_MODEL else model
    lines = [f"{name} on {result['options']['workers']} workers. {report.source(result)}", ""]
    for rate in result["options"]["rates"]:
        rows = [r for r in result["rows"] if r["rate_mbit"] == rate]
        lines += [f"## {rate:g} Mbit/s", "", report.table(TITLES, table(rows)), ""]
    lines.append(
        "Means and standard deviations over seeds; tau is the last seed's. Learning rates are multiples of the "
        "recipe's. The paper (abstract) reports 2.5 x in speed and up to 5 x in compression, on other models and "
        "networks: no cell here compares with them. Over any link slow enough a ratio of speeds is one of bytes."
    )
    parts = text_of_pairs(result["rows"]), text_of_errors(result.get("errors", ()))
    return "\n\n".join(["\n".join(lines), *filter(None, parts)])


def table(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """A row a method, in the order in which they are named."""
    groups = {m: [r for r in rows if r["method"] == m and "loss" in r] for m in METHODS}
    failed = {r["method"]: r["failed"] for r in rows if "failed" in r}
    plain = [r["samples_per_second"] for r in groups["ddp"]]
    for method, group in groups.items():
        if method in failed:
            yield [method, f"failed: {failed[method]}"]
        if not group:
            continue
        speeds = [r["samples_per_second"] for r in group]
        losses = [r["loss"] for r in group if r["loss"] is not None]
        sent, deciding = (statistics.fmean(r[name] for r in group) for name in ("bytes_a_step", "deciding_share"))
        times = f"{statistics.fmean(speeds) / statistics.fmean(plain):.2f}" if plain else ""
        head = [method, f"{group[0]['lr']:g}", mean_sd(speeds, ".1f"), times]
        loss = mean_sd(losses, ".3f") if losses else "not finite"
        yield [*head, loss, f"{sent / 1e6:.3f}", f"{group[-1]['tau']:g}", f"{deciding:.2%}"]


# -- bytes to one loss --------------------------------------------------------------------------------------------

PAIRS = (
    ("lgreco_int4", "ddp_int4"),
    ("lgreco_rank4", "ddp_rank4"),
    ("lgreco_rank4", "ddp_rank3"),
    ("lgreco_top1", "ddp_top1"),
    ("lgreco_top1", "ddp_top03"),
)
"""L-GreCo's methods, each with the uniform setting that it is like, or one that sends about as many bytes."""
PAIR_TITLES = ("uniform", "L-GreCo", "seeds", "the target", "MB, uniform", "MB, L-GreCo", "ratio")
Evaluation = Sequence[float]  # step, bytes that a worker has sent, loss


def evaluations(rows: Sequence[Mapping[str, Any]], loss: str) -> list[Evaluation]:
    """Of a run's metrics, which name the bytes of each reduction."""
    sent, found = 0.0, []
    for row in rows:
        sent += row.get("round/bytes_sent", 0.0)
        if loss in row:
            found.append((row["step"], sent, row[loss]))
    return found


def reached(evaluated: Sequence[Evaluation], target: float) -> tuple[float, float] | None:
    """Steps and bytes until the loss first was the target, on straight lines between evaluations; None: never, or at
    the first one already."""
    for before, after in zip(evaluated, evaluated[1:], strict=False):
        if before[2] > target >= after[2]:
            share = (before[2] - target) / (before[2] - after[2])
            return before[0] + share * (after[0] - before[0]), before[1] + share * (after[1] - before[1])
    return None


def text_of_pairs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty where no run was evaluated on its way, or no pair is there.

    The target is the higher of the two last losses, so that both reach it. We leave out the evaluation at the end,
    which takes more of the text than the others.
    """
    by = {(r["method"], r["seed"], r["rate_mbit"]): r["evaluations"][:-1] for r in rows if r.get("evaluations")}
    cells = []
    for own, uniform in PAIRS:
        found = []
        for _, *run in (key for key in by if key[0] == uniform and (own, *key[1:]) in by):
            both = by[uniform, *run], by[own, *run]
            if min(map(len, both)) < 2:
                continue
            target = max(each[-1][2] for each in both)
            ends = [reached(each, target) for each in both]
            if ends[0] and ends[1]:
                found.append((target, ends[0][1] / 1e6, ends[1][1] / 1e6, ends[0][1] / ends[1][1]))
        if found:
            targets, *figures = zip(*found, strict=True)
            cells.append([uniform, own, len(found), mean_sd(targets, ".3f"), *(mean_sd(f, ".2f") for f in figures)])
    about = "The target is the higher of a pair's two last losses, seed by seed. MB: what a worker has sent until then."
    return f"## Bytes to one loss\n\n{report.table(PAIR_TITLES, cells)}\n\n{about}\n" if cells else ""


# -- bytes at equal error ---------------------------------------------------------------------------------------

STEPS, SUMMED = 100, 10  # steps before the gradients are added up; steps whose gradients are
WARM = 5  # times that the same tensors are sent, of which the last is measured: low rank needs a warm Q
LIKES = ("int4", "top0.01", "rank4")
Batches = Iterator[Callable[[], Tensor]]


def gpt2(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """The recipe gpt2_pydoc_small, alone."""
    from language.corpora import open_corpus
    from language.data import train_batches
    from language.model import make_optimizer
    from language.recipes import gpt2_pydoc_small
    from language.train import make_model, make_objective

    recipe = gpt2_pydoc_small()
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    model = make_model(recipe, corpus.pad)
    objective = make_objective(recipe, corpus)
    batches = train_batches(corpus.train, objective, recipe, 0, 1, 0, steps)
    losses = (lambda b=b: F.cross_entropy(model(b[0]).logits.flatten(0, 1), b[1].flatten()) for b in batches)
    return model, make_optimizer(model, recipe.optim), losses


def resnet(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """The recipe digits_small, alone."""
    from training.optim import make_optimizer
    from vision import data
    from vision.recipes import digits_small
    from vision.train import make_model

    recipe = digits_small()
    train_set, _ = data.load(recipe.dataset)
    model = make_model(recipe, len(train_set.classes))
    batches = train_set.train_batches(recipe, 0, 1, 0, steps)
    return model, make_optimizer(model, recipe.optim), (lambda b=b: F.cross_entropy(model(b[0]), b[1]) for b in batches)


LOSSES = {"gpt2": gpt2, "resnet": resnet}


def gradients(name: str, steps: int = STEPS, summed: int = SUMMED) -> list[Tensor]:
    """The sum of a model's gradients over the last steps, a tensor a parameter."""
    torch.manual_seed(0)
    model, optimizer, losses = LOSSES[name](steps + summed)
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    for step, loss in enumerate(losses):
        loss().backward()
        for total, p in zip(sums, params, strict=True):
            if step >= steps and p.grad is not None:
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
        tensors = gradients(model)
        for like, workers in itertools.product(LIKES, sorted({2, o.workers})):
            yield compare(model, tensors, like, workers)


ERROR_TITLES = ("model", "uniform", "workers", "uniform: times fewer bytes", "L-GreCo", "ratio", "error")


def text_of_errors(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty without rows."""
    cells = []
    for r in rows:
        fewer = [f"{r['plain_bytes'] / r[f'{who}_bytes']:.1f}" for who in ("uniform", "lgreco")]
        error = r["lgreco_error"] / r["uniform_error"] if r["uniform_error"] else 1.0
        gain = r["uniform_bytes"] / r["lgreco_bytes"]
        cells.append([r["model"], r["like"], r["workers"], *fewer, f"{gain:.2f}", f"{error:.2f}"])
    about = (
        f"The tensors are the sum of the gradients of steps {STEPS + 1} to {STEPS + SUMMED}. We measure L-GreCo's "
        "summed error on what the reducers return, relative to the uniform setting's. It exceeds 1 where one power "
        "iteration finds less than the curve's five, or where int formats round twice."
    )
    return f"## Bytes at equal error\n\n{report.table(ERROR_TITLES, cells)}\n\n{about}\n" if rows else ""


def main() -> None:
    report.run(SlowLinks, "slow_links", run_all, text, forks=lambda o: not o.throttle and bool(o.methods))


if __name__ == "__main__":
    launch(main)
