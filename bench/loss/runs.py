"""One run with all workers in this process, the file of runs, and its table."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.loss.methods import METHODS, Gradient, Method, Settings
from bench.loss.tasks import Batch, Shards, Split, Task, cosine
from bench.report import FORMAT, Summary
from bench.trainings import TUNING_SEED
from core.checkpoints.untrusted import parse_json
from core.errors import UserError
from training.config import commit, version

Row = dict[str, Any]
TASKS_VERSION = 1  # raise it when a task or a method changes, so that old rows do not count as today's
CHUNK = 256  # held-out samples evaluated at a time


@dataclass(frozen=True)
class Plan:
    """Everything that a run depends on. batch: samples per worker and step. split: evaluates the final model."""

    task: str
    settings: Settings
    lr: float
    workers: int
    batch: int
    steps: int
    tau: int
    shards: Shards
    seed: int
    split: Split
    clip: str = "task"
    """The largest norm of a gradient: a number, none, or task for the task's own."""


def unflat(row: Tensor, template: dict[str, Tensor]) -> dict[str, Tensor]:
    """[n] -> tensors by name, with the shapes of the template."""
    pieces = row.split([p.numel() for p in template.values()])
    return {k: v.view(p.shape) for (k, p), v in zip(template.items(), pieces, strict=True)}


def vmap_gradient(loss: Callable[..., Tensor], template: dict[str, Tensor]) -> Gradient:
    """The gradient for all workers at once: f(x [workers, n], batch of tensors [workers, ...]) -> [workers, n].

    loss: (params, *batch) -> 0-d loss of one worker. template: name -> tensor, the shapes of a row's parameters.
    """

    def of_flat(row: Tensor, batch: tuple[Any, ...]) -> Tensor:
        return loss(unflat(row, template), *batch)

    return torch.vmap(torch.func.grad(of_flat))


class Stack:
    """A model whose parameters are the rows of one tensor. Buffers keep their initial values."""

    def __init__(self, task: Task, device: str = "cpu"):
        self.task, self.device = task, device
        with torch.device(device):
            self.model = task.build()
        self.template = {name: p.detach() for name, p in self.model.named_parameters()}
        self.gradient = vmap_gradient(self.loss, self.template)

    def start(self, seed: int) -> Tensor:
        """The initial weights, [n]. Drawn on the CPU, so they are the same on every device."""
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(self.task.build().parameters()).detach().to(self.device)

    def loss(self, params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(torch.func.functional_call(self.model, params, (inputs,)), targets)

    @torch.no_grad()
    def held_out_loss(self, flat: Tensor, data: Batch) -> float | None:
        """The mean loss with parameters `flat`, [n]; None if not finite."""
        params = unflat(flat, self.template)
        parts = zip(*(tensor.split(CHUNK) for tensor in data), strict=True)
        total = sum(float(self.loss(params, *self.upload(part))) * len(part[0]) for part in parts)
        return total / len(data[0]) if math.isfinite(total) else None

    def upload(self, batch: Batch) -> Batch:
        inputs, targets = batch
        return inputs.to(self.device), targets.to(self.device)


stack_of = functools.lru_cache(maxsize=1)(Stack)  # shared by all runs of a task


def train(task: Task, plan: Plan, device: str = "cpu") -> tuple[Stack, Method]:
    """Trains up to the last step, before `finish`. device: holds all workers."""
    stack = stack_of(task, device)
    x = stack.start(plan.seed).expand(plan.workers, -1).clone()
    clips = {"task": task.inner.clip, "none": None}
    limit = clips[plan.clip] if plan.clip in clips else float(plan.clip)
    method, inner = plan.settings.make(x, plan.tau), replace(task.inner, clip=limit).start(x)
    for step in range(plan.steps):
        batch = stack.upload(task.draw(plan.seed, step, plan.workers, plan.batch, plan.shards))
        method.train_step(stack.gradient, batch, inner, plan.lr * cosine(step, plan.steps))
    return stack, method


def run(task: Task, plan: Plan, device: str = "cpu") -> Row:
    """loss: of the model that all workers share after `finish`. loss_of_mean: of their average before. None if not
    finite."""
    began, (stack, method), data = time.monotonic(), train(task, plan, device), task.held_out[plan.split]
    loss_of_mean = stack.held_out_loss(method.x.mean(dim=0), data)
    method.finish()
    found = {"loss": stack.held_out_loss(method.x[0], data), "loss_of_mean": loss_of_mean}
    return found | {"seconds": time.monotonic() - began, "device": device}


# -- the file: one JSON object a line -------------------------------------------------------------------------------

GROUP = (
    "task",
    "workers",
    "batch",
    "steps",
    "tau",
    "shards",
    "clip",
    "tuning",
)  # the choices of one table agree in these
PLAN = ("task", "method", "options", "lr", "workers", "batch", "steps", "tau", "shards", "seed", "split", "clip")
REMOVED = {  # options of older rows, with the value that has no effect
    **{"sync_steps": 0, "clip_by": "element", "policy": "penalty", "taylor": 0.5},
    **{"fragments": 1, "first_every": 0, "second_every": 0},
}


def describe(plan: Plan) -> Row:
    """A plan as in the file."""
    values = vars(plan) | {"method": plan.settings.name, "options": dict(plan.settings.options)}
    del values["settings"]
    return {"kind": "run", "format": FORMAT, "tasks_version": TASKS_VERSION} | values


def key_of(row: Row, **changes: Any) -> str:
    """What the result of a run depends on. A choice is followed by the runs of its settings."""
    values = {name: row[name] for name in PLAN if name not in changes} | changes
    if not METHODS.get(row["method"], Method).has_rounds:
        values["tau"] = None
    return json.dumps(values, sort_keys=True)


class Rows:
    """The rows of a file, including removed tasks and methods, and new rows.

    A row is a run (a plan and its result), or a choice: the settings that the tuning gave a method. Several processes
    may append to one file. Each sees its own rows and those that were there when it began.
    """

    def __init__(self, path: Path):
        self.path = path
        self.source = {"commit": commit(), "torch": version("torch")}  # as of now, when the code is read
        self.runs: dict[str, Row] = {}
        self.choices: dict[tuple[Any, ...], Row] = {}
        try:
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise UserError(f"rows={path}: {error.strerror}; name a file") from None
        complete, _, partial = data.rpartition(b"\n")
        self.partial = len(partial)  # bytes of a last line that a killed run left incomplete
        for number, line in enumerate(complete.splitlines(), start=1):
            try:
                row = parse_json(line)
                if (row["format"], row["tasks_version"]) == (FORMAT, TASKS_VERSION):
                    self._add(row)
            except (ValueError, KeyError, TypeError, AttributeError):
                what = f"rows={path}: line {number} is no row of this command"
                raise UserError(f"{what}; mend or remove it, or name another file") from None

    def _add(self, row: Row) -> None:
        row.setdefault("clip", "task")  # an older row
        given = {key: value for key, value in row["options"].items() if REMOVED.get(key) != value}
        defaults = METHODS[row["method"]].options if row["method"] in METHODS else {}
        row["options"] = defaults | given  # an option newer than the row had its default value
        if row["kind"] == "run":
            self.runs[key_of(row)] = row
        else:
            self.choices[tuple(row[name] for name in (*GROUP, "asked"))] = row

    def _append(self, row: Row) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+") as file:
            if self.partial:
                file.truncate(file.tell() - self.partial)
                self.partial = 0
            file.write(json.dumps(row).encode() + b"\n")
        self._add(json.loads(json.dumps(row)))

    def find(self, plan: Plan) -> Row | None:
        return self.runs.get(key_of(describe(plan)))

    def add_run(self, plan: Plan, result: Row) -> Row:
        row = describe(plan) | result | {"date": time.strftime("%Y-%m-%d %H:%M:%S")} | self.source
        self._append(row)
        return row

    def add_choice(self, asked: str, tuning: str, plan: Plan, tried: int) -> None:
        """asked: the method as on the command line. tuning: the budget, in words. plan: has the chosen settings."""
        row = describe(plan) | {"kind": "choice", "asked": asked, "tuning": tuning, "tried": tried}
        row["tuning_seeds"] = [TUNING_SEED]
        del row["seed"], row["split"]
        if self.choices.get(tuple(row[name] for name in (*GROUP, "asked"))) != row:
            self._append(row)

    def table(self) -> str:
        """The test losses of every choice."""
        seeds = sorted({row["seed"] for row in self.runs.values() if row["split"] == "test"})
        lines = []
        for choice in self.choices.values():
            chosen = Settings(choice["method"], tuple(choice["options"].items()))
            for seed in seeds:
                if row := self.runs.get(key_of(choice, seed=seed, split="test")):
                    lines.append(choice | {"chosen": chosen, "loss": row["loss"], "diverged": row["loss"] is None})
        return TABLE.table(lines)


TABLE = Summary(" ".join((*GROUP, "asked chosen lr tried")), {"loss": ".4f", "diverged": ".0%"})
