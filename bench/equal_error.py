"""Bytes that L-GreCo sends for the error of a uniform setting: python -m bench.equal_error [--models gpt2 resnet]

A model is trained in one process without compression; of the sum of its last ten gradients, as in the released code,
the curves are taken and the choices made. Then both settings are sent through the reducers themselves, and their errors
measured: what lands, against what was sent, with nothing held back from before; low rank's Q is warm from four sendings
of the same. Only allocation is measured here, no training with it. Writes lgreco.json, lgreco.md and lgreco.png.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import report
from bench.report import Asked, require
from core import LGrecoConfig
from core.flat import Scalars, make_buckets
from core.lgreco import LGreco
from core.lgreco.choices import RAW, Choice, padded_bytes, sent_bytes
from core.lgreco.curves import curve
from core.lgreco.decide import Decider
from core.lgreco.layout import in_bucket
from training.round_log import picture
from training.script import launch

NAME = "lgreco"
WARM = 5  # sendings of the same, of which the last is measured
LIKES = ("int4", "top0.01", "rank4")
WAYS = {
    "same": LGrecoConfig(),
    "same, squared": LGrecoConfig(error="squared"),
    "same, ranks 1 to 64": LGrecoConfig(lowest_rank=0.25, highest_rank=16.0),
    "same, ranks 1 to 64, squared": LGrecoConfig(lowest_rank=0.25, highest_rank=16.0, error="squared"),
    "any": LGrecoConfig("any"),
    "any, squared": LGrecoConfig("any", error="squared"),
}


@dataclass(frozen=True)
class EqualError(Asked):
    """What is trained, and what of its gradients is compared."""

    models: tuple[str, ...] = ("gpt2", "resnet")
    likes: tuple[str, ...] = LIKES
    workers: tuple[int, ...] = (2, 4)
    """For which the bytes are counted: what everyone gathers, top-k's, costs with more of them."""
    steps: int = 100
    """Of training before the gradients are summed up."""
    summed: int = 10
    """Steps whose gradients are."""
    seed: int = 0

    def check(self) -> None:
        require(self, once="models likes workers", ones="steps summed", models=LOSSES)


# -- gradients --------------------------------------------------------------------------------------------------

Batches = Iterator[Callable[[], Tensor]]


def gpt2(steps: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """The recipe gpt2_pydoc_small, alone."""
    from language.corpora import open_corpus
    from language.data import train_batches
    from language.model import make_optimizer
    from language.recipes import gpt2_pydoc_small
    from language.train import make_model, make_objective

    recipe = replace(gpt2_pydoc_small(), seed=seed)
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    model = make_model(recipe, corpus.pad)
    objective = make_objective(recipe, corpus)
    batches = train_batches(corpus.train, objective, recipe, 0, 1, 0, steps)
    losses = (lambda b=b: F.cross_entropy(model(b[0]).logits.flatten(0, 1), b[1].flatten()) for b in batches)
    return model, make_optimizer(model, recipe.optim), losses


def resnet(steps: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Batches]:
    """The recipe digits_small, alone."""
    from training.optim import make_optimizer
    from vision import data
    from vision.recipes import digits_small
    from vision.train import make_model

    recipe = replace(digits_small(), seed=seed)
    train_set, _ = data.load(recipe.dataset)
    model = make_model(recipe, len(train_set.classes))
    batches = train_set.train_batches(recipe, 0, 1, 0, steps)
    return model, make_optimizer(model, recipe.optim), (lambda b=b: F.cross_entropy(model(b[0]), b[1]) for b in batches)


LOSSES = {"gpt2": gpt2, "resnet": resnet}


def gradients(o: EqualError, name: str) -> tuple[nn.Module, list[Tensor]]:
    """The model, and the sum of its gradients over the last steps, a tensor a parameter."""
    torch.manual_seed(o.seed)
    model, optimizer, losses = LOSSES[name](o.steps + o.summed, o.seed)
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in params]
    for step, loss in enumerate(losses):
        loss().backward()
        if step >= o.steps:
            for total_, p in zip(sums, params, strict=True):
                total_ += p.grad if p.grad is not None else 0.0
        optimizer.step()
        optimizer.zero_grad()
    return model, sums


# -- one comparison ---------------------------------------------------------------------------------------------


class Sender:
    """One worker's reducer over tensors like the given ones, which sends them in any allocation."""

    def __init__(self, tensors: list[Tensor], like: str, config: LGrecoConfig):
        self.scalars = Scalars({"steps": 1, "weight": 1})
        self.buckets = make_buckets([torch.empty_like(t) for t in tensors], [], self.scalars.numel)
        self.scalars.attach(self.buckets[0].scalars)
        self.reducer = LGreco(self.buckets, self.scalars, 0, 1, like, replace(config, rule="uniform"))
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


class Choosing:
    """L-GreCo's choice for tensors like the given ones. took: seconds of the curves, and of the programme."""

    def __init__(self, tensors: list[Tensor], like: str, way: str, workers: int):
        self.sender = Sender(tensors, like, WAYS[way])
        self.decider = Decider(self.sender.reducer.layers, like, WAYS[way], workers)
        layers = self.decider.layers
        pieces = in_bucket(self.sender.sent, layers, range(len(layers)))
        began = time.perf_counter()
        rows = zip(pieces, layers, self.decider.offered.tolist(), strict=True)
        curves = torch.stack([curve(g, z, self.decider.choices, ok, i) for i, (g, z, ok) in enumerate(rows)])
        taken = time.perf_counter()
        self.found = self.decider.decide(curves, torch.zeros(len(pieces)), self.decider.uniform, 0)
        self.took = taken - began, time.perf_counter() - taken


def compare(model: str, tensors: list[Tensor], like: str, way: str, workers: int) -> dict[str, Any]:
    """Bytes and measured errors of the uniform setting and of L-GreCo's."""
    chosen = Choosing(tensors, like, way, workers)
    decider, choices = chosen.decider, list(chosen.found.choices)
    row = {"model": model, "like": like, "way": way, "workers": workers, "layers": len(decider.layers)}
    plain = sum(sent_bytes(z, RAW, workers) for z in decider.layers)
    for name, each in (("uniform", decider.uniform), ("lgreco", choices)):
        errors = chosen.sender.errors(each)
        sent = sum(padded_bytes(decider.layers, each, workers))
        row |= {
            f"{name}_bytes": sent,
            f"{name}_ratio": plain / sent,
            f"{name}_error_sum": sum(errors),
            f"{name}_error": sum(e * e for e in errors) ** 0.5,
        }
    row |= {"gain": row["uniform_bytes"] / row["lgreco_bytes"], "choices": [str(c) for c in choices]}
    return row | dict(zip(("curve_seconds", "programme_seconds"), chosen.took, strict=True))


TITLES = (
    *("model", "uniform", "choices", "workers", "uniform's ratio", "L-GreCo's", "bytes, uniform / L-GreCo"),
    *("measured error, summed norms", "as one vector", "curves, s", "programme, s"),
)


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table; errors as a share of the uniform setting's."""
    shares = (row[f"lgreco_{e}"] / row[f"uniform_{e}"] if row[f"uniform_{e}"] else 1.0 for e in ("error_sum", "error"))
    head = [row["model"], row["like"], row["way"], str(row["workers"])]
    numbers = [f"{row['uniform_ratio']:.1f}", f"{row['lgreco_ratio']:.1f}", f"{row['gain']:.2f}"]
    return [
        *head,
        *numbers,
        *(f"{s:.2f}" for s in shares),
        f"{row['curve_seconds']:.2f}",
        f"{row['programme_seconds']:.3f}",
    ]


def text(result: dict[str, Any]) -> str:
    o = result["options"]
    return (
        f"Bytes for the error of a uniform setting, of the sum of the gradients of steps {o['steps'] + 1} to "
        f"{o['steps'] + o['summed']}; allocation only, no training. {report.source(result)}\n\n"
        f"{report.table(TITLES, map(cells, result['rows']))}\n\n"
        "The ratios are of float32's bytes. The errors are L-GreCo's as a share of the uniform setting's, measured on "
        "what the reducers land: above 1 where one power iteration a reduction finds less than the curve's five, or "
        "where the second rounding of the ints adds to the first. The paper (abstract) says up to 5 x in compression; "
        "its tables are unknown to us. Seconds are of this machine, with whatever else ran on it.\n"
    )


def main() -> None:
    report.run(EqualError, NAME, measure_all, text, module="bench.equal_error")


def measure_all(o: EqualError, session: report.Session) -> None:
    for model in o.models:
        net, tensors = gradients(o, model)
        names = [name for name, p in net.named_parameters() if p.requires_grad]
        ways = [(like, w) for like in o.likes for w in WAYS if "ranks" not in w or like.startswith("rank")]
        rows = (compare(model, tensors, *way, workers) for way in ways for workers in o.workers)
        session.take("rows", rows, lambda row: report.row(*cells(row)))
        show(session.folder, model, tensors, names)


def show(folder: Path, model: str, tensors: list[Tensor], names: list[str]) -> None:
    """A picture of the bits by layer, of any family within the error of rank 4."""
    found = Choosing(tensors, "rank4", "any", 4).found
    picture(found, names).savefig(folder / f"{NAME}_{model}.png", dpi=100)


if __name__ == "__main__":
    launch(main)
