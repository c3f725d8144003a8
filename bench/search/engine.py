"""The tasks by name, and one run: all workers in this process, their parameters the rows of one tensor."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bench.reference import unflat, vmap_gradient
from bench.search import pictures, texts
from bench.search.methods import Method, Settings
from bench.search.task import Batch, Shards, Split, Task, cosine

CHUNK = 256  # held-out samples evaluated at a time
TASKS: dict[str, Callable[[], Task]] = {
    "digits": pictures.digits,
    "cifar": pictures.cifar,
    "cifar_vit": pictures.cifar_vit,
    "segmentation": pictures.segmentation,
    "surfaces": pictures.surfaces,
    "bytes": lambda: texts.bytes_("bytes", 48, "0.07"),
    "bytes_narrow": lambda: texts.bytes_("bytes_narrow", 24, "0.02"),
    "bytes_wide": lambda: texts.bytes_("bytes_wide", 96, "0.25"),
    "bytes_3m": lambda: texts.bytes_("bytes_3m", 256, "3.2", layers=4, lr=2e-3),
    "bytes_10m": lambda: texts.bytes_("bytes_10m", 416, "10.6", layers=5, lr=1.2e-3),
    "bytes_muon": lambda: texts.with_muon(texts.bytes_("bytes", 48, "0.07")),
    "gpt2": texts.gpt2,
    "gpt2_small": texts.gpt2_small,
    "transnormer": texts.transnormer,
    "roberta": texts.roberta,
}


@functools.cache
def load_task(name: str) -> Task:
    return TASKS[name]()


@dataclass(frozen=True)
class Plan:
    """Everything that a run depends on: equal plans give equal rows."""

    task: str
    settings: Settings
    lr: float
    workers: int
    batch: int
    """Samples per worker and step."""
    steps: int
    tau: int
    shards: Shards
    seed: int
    split: Split
    """On which the end is evaluated."""


@dataclass(frozen=True)
class Result:
    """The end of a run; None where it is not finite."""

    loss: float | None
    """Of the model that all workers share once everything in flight is applied."""
    loss_of_mean: float | None
    """Of the mean of the workers' models before that."""
    seconds: float
    device: str = "cpu"


class Stack:
    """A model's parameters as rows. Buffers are kept as they are: no task has any that training changes."""

    def __init__(self, task: Task, device: str = "cpu"):
        self.task, self.device = task, device
        with torch.device(device):
            self.model = task.build()
        self.template = {name: p.detach() for name, p in self.model.named_parameters()}
        self.gradient = vmap_gradient(self.loss, self.template)

    def start(self, seed: int) -> Tensor:
        """The initial weights, [n]."""
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(self.task.build().parameters()).detach().to(self.device)

    def loss(self, params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(torch.func.functional_call(self.model, params, (inputs,)), targets)

    @torch.no_grad()
    def held_out_loss(self, flat: Tensor, data: Batch) -> float | None:
        """The mean loss of the model with parameters `flat`, [n]; None where it is not finite."""
        params = unflat(flat, self.template)
        parts = zip(*(tensor.split(CHUNK) for tensor in data), strict=True)
        total = sum(float(self.loss(params, *self.upload(part))) * len(part[0]) for part in parts)
        value = total / len(data[0])
        return value if abs(value) < float("inf") else None  # NaN compares false

    def upload(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.device), targets.to(self.device)


stack_of = functools.lru_cache(maxsize=1)(Stack)  # one for all runs of a task


def train(task: Task, plan: Plan, device: str = "cpu") -> tuple[Stack, Method]:
    """Trains up to the last step, before `finish`."""
    stack = stack_of(task, device)
    x = stack.start(plan.seed).expand(plan.workers, -1).clone()
    method = plan.settings.make(x, plan.tau)
    inner = task.inner.start(x)
    for step in range(plan.steps):
        batch = stack.upload(task.draw(plan.seed, step, plan.workers, plan.batch, plan.shards))
        method.train_step(stack.gradient, batch, inner, plan.lr * cosine(step, plan.steps))
    return stack, method


def run(task: Task, plan: Plan, device: str = "cpu") -> Result:
    """device: where all workers lie; the start and the batches are drawn on the host, and so are the same on every
    device."""
    began = time.monotonic()
    stack, method = train(task, plan, device)
    data = task.held_out[plan.split]
    loss_of_mean = stack.held_out_loss(method.x.mean(dim=0), data)
    method.finish()
    loss = stack.held_out_loss(method.x[0], data)
    return Result(loss, loss_of_mean, time.monotonic() - began, device)
