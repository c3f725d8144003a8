"""Trains every method with the same tuning budget, and reports the loss on other seeds and other data.

python -m bench.loss [--tasks bytes digits] [--methods local co2 co2:merge=keep_local,delay=3] [--workers 4] [--tau 24]

A method is NAME or NAME:OPTION=VALUE,... The tuning tries all of VALUE|VALUE. bench/loss/methods.py has the options,
for example co2:merge=keep_local,delay=3,gap=none,beta=0.

A method's configurations are its options' values times --lr_factors. Each is
trained on the tuning seed and evaluated on the tuning split; the best is trained on the other seeds and evaluated on
the test split. Initial weights and batches depend only on the seed. Every run is a line of --rows. A run that has its
line is not repeated, so the same command continues after an interruption. At the end it prints a table of all rows.
"""

import functools
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench.loss.methods import CUTS, METHODS, Gradient, Method, Settings
from bench.loss.tasks import TASKS, Batch, Split, Task, cosine, load_task
from bench.report import (
    FORMAT,
    TUNING_SEED,
    Summary,
    read_options,
    require,
    require_device,
    require_no_crowd,
    split_method,
    stoppable,
)
from core.checkpoint.stored import parse_json
from core.compression.formats import UNIFORM_FORMATS
from core.errors import UserError
from training.folder.settings import commit, version
from training.start.script import launch

Row = dict[str, Any]
TASKS_VERSION = 1  # raise it when a task or a method changes, so that old rows do not count as today's
CHUNK = 256  # held-out samples evaluated at a time


@dataclass(frozen=True)
class Plan:
    """Everything that a run depends on. batch: samples per worker and step. split: on which it is evaluated."""

    task: str
    settings: Settings
    lr: float
    workers: int
    batch: int
    steps: int
    tau: int
    seed: int
    split: Split
    shards: str = "iid"
    """Every worker draws from the whole training set. Old rows have others."""
    clip: str = "task"
    """The largest norm of a gradient: a number, none, or task for the task's own."""


def unflat(row: Tensor, template: dict[str, Tensor]) -> dict[str, Tensor]:
    """[n] -> tensors by name, with the shapes of the template."""
    pieces = row.split([p.numel() for p in template.values()])
    return {k: v.view(p.shape) for (k, p), v in zip(template.items(), pieces, strict=True)}


def vmap_gradient(loss: Callable[..., Tensor], template: dict[str, Tensor]) -> Gradient:
    """The gradient for all workers at once: f(x [workers, n], batch of tensors [workers, ...]) -> [workers, n]. loss:
    (params, *batch) -> 0-d loss of one worker. template: name -> tensor, the shapes of a row's parameters."""

    def of_flat(row: Tensor, batch: tuple[Any, ...]) -> Tensor:
        return loss(unflat(row, template), *batch)

    return torch.vmap(torch.func.grad(of_flat))


def captured(gradient: Gradient) -> Gradient:
    """The gradient as one CUDA graph for each shape. A call overwrites the result of the call before."""
    graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def replay(x: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        shapes = x.shape, *(tensor.shape for tensor in batch)
        if shapes not in graphs:
            inputs = [tensor.clone() for tensor in (x, *batch)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries make their workspaces before the capture
                for _ in range(3):
                    gradient(inputs[0], inputs[1:])
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = gradient(inputs[0], inputs[1:])
            graphs[shapes] = graph, inputs, found
        graph, inputs, found = graphs[shapes]
        for to, tensor in zip(inputs, (x, *batch), strict=True):
            to.copy_(tensor)
        graph.replay()
        return found

    return replay


class Stack:
    """A model whose parameters are the rows of one tensor. Buffers keep their initial values."""

    def __init__(self, task: Task, device: str = "cpu"):
        self.task, self.device = task, device
        with torch.device(device):
            self.model = task.build()
        self.template = {name: p.detach() for name, p in self.model.named_parameters()}
        gradient = vmap_gradient(self.loss, self.template)
        self.gradient = captured(gradient) if device == "cuda" else gradient

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
    sizes = [tensor.numel() for tensor in stack.template.values()]
    method, inner = plan.settings.make(x, plan.tau, sizes), replace(task.inner, clip=limit).start(x)
    for step in range(plan.steps):
        batch = stack.upload(task.draw(plan.seed, step, plan.workers, plan.batch))
        method.train_step(stack.gradient, batch, inner, plan.lr * cosine(step, plan.steps))
    return stack, method


def run(task: Task, plan: Plan, device: str = "cpu") -> Row:
    """Returns the loss of the model that all workers share after `finish`. It is None if not finite."""
    began = time.monotonic()
    stack, method = train(task, plan, device)
    method.finish()
    loss = stack.held_out_loss(method.x[0], task.held_out[plan.split])
    return {"loss": loss, "seconds": time.monotonic() - began, "device": device}


# -- the file: one JSON object a line -------------------------------------------------------------------------------

GROUP = ("task", "workers", "batch", "steps", "tau", "shards", "clip", "tuning")  # a table's choices agree in these
PLAN = ("task", "method", "options", "lr", "workers", "batch", "steps", "tau", "shards", "seed", "split", "clip")


def describe(plan: Plan) -> Row:
    """A plan as in the file."""
    values = vars(plan) | {"method": plan.settings.name, "options": dict(plan.settings.options)}
    del values["settings"]
    return {"kind": "run", "format": FORMAT, "tasks_version": TASKS_VERSION} | values


def key_of(row: Row, **changes: Any) -> str:
    """Identifies the result of a run. A choice is followed by the runs of its settings."""
    values = {name: row[name] for name in PLAN if name not in changes} | changes
    method = METHODS.get(row["method"], Method)
    values["options"] = method.options | values["options"]  # an older row lacks a newer option
    if not method.has_rounds:
        values["tau"] = None
    return json.dumps(values, sort_keys=True)


class Rows:
    """The rows of a file, including removed tasks and methods, and new rows. A row is a run (a plan and its result), or
    a choice: the settings that the tuning gave a method. Several processes may append to one file. Each sees its own
    rows and the rows that were there when it began."""

    def __init__(self, path: Path):
        self.path = path
        self.source = {"commit": commit(), "torch": version("torch")}  # as of now, when the code is read
        self.runs: dict[str, Row] = {}  # the last row of each plan
        self.repeated: dict[str, list[Row]] = {}  # all of them
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
        if row["kind"] == "run":
            self.runs[key_of(row)] = row
            self.repeated.setdefault(key_of(row), []).append(row)
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

    def all_of(self, plan: Plan) -> list[Row]:
        return self.repeated.get(key_of(describe(plan)), [])

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


# -- the command ------------------------------------------------------------------------------------------------------


WORDS = {
    "gap": ("elementwise", "norm", "none"),
    "merge": ("restart", "keep_local"),
    "cut": CUTS,
    "compression": tuple(UNIFORM_FORMATS),
}


@dataclass(frozen=True)
class Options:
    """What to train, and how much tuning each method gets."""

    tasks: tuple[str, ...] = ("digits", "bytes")
    """digits; with data in CO2_DATA also cifar, bytes, gpt2, bytes_muon and gpt2_muon."""
    methods: tuple[str, ...] = ("ddp", "local", "diloco", "co2", "co2:merge=keep_local,delay=3,gap=none")
    """NAME or NAME:OPTION=VALUE,... The tuning tries all of VALUE|VALUE, such as co2:beta=0|0.5."""
    workers: tuple[int, ...] = (4,)
    steps: int = 480
    """Local steps of every worker."""
    tau: int = 24
    """Local steps per round, for every method that has rounds."""
    batch: int | None = None
    """Samples per worker and step. The task's own by default."""
    clip: str = "task"
    """Clip gradients to this norm, or none. `task` is the task's own limit. Each worker clips its own gradient, and
    ddp clips the averaged gradient."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to report."""
    lr_factors: tuple[float, ...] = (1.0, 2.0, 0.5)
    """Multiples of the task's learning rate to try. A method with one configuration is not tuned."""
    rows: Path = Path("results/search.jsonl")
    device: Literal["cpu", "cuda"] = "cpu"
    """Holds all workers of a run. On cuda, products are in TF32, as in the train scripts."""

    def check(self) -> None:
        require(self, once="tasks methods workers seeds lr_factors", positive="workers lr_factors", tasks=TASKS)
        require(self, ones="steps tau")
        require_no_crowd(self)
        require_device(self)
        if self.batch is not None and self.batch < 1:
            raise UserError(f"batch={self.batch}: give 1 or more, or leave it out")
        if self.clip not in ("task", "none") and not 0 < number(self.clip) < math.inf:
            raise UserError(f"clip={self.clip}: give a number above 0, none, or task")
        if TUNING_SEED in self.seeds:
            raise UserError(f"seeds={TUNING_SEED}: it is the tuning seed; report other seeds")
        for asked in self.methods:
            self.candidates(asked)

    @property
    def tuning(self) -> str:
        """The tuning budget, in words."""
        return f"learning rate {', '.join(f'{factor:g}' for factor in self.lr_factors)} times the task's"

    def candidates(self, asked: str) -> list[tuple[Settings, float]]:
        """A method's configurations: settings, and the factor of the task's learning rate."""
        all_settings = parse(asked)
        for settings in all_settings:
            settings.make(torch.zeros(2, 1), self.tau)  # raises for a delay above tau
        return [(settings, factor) for factor in self.lr_factors for settings in all_settings]

    def plans(self, task: str, workers: int, asked: str) -> list[Plan]:
        """A method's runs of the tuning."""
        t = load_task(task)
        rest = workers, self.batch or t.batch, self.steps, self.tau, TUNING_SEED, "tuning"
        return [
            Plan(task, settings, t.inner.lr * factor, *rest, clip=self.clip)
            for settings, factor in self.candidates(asked)
        ]


def parse(text: str) -> list[Settings]:
    """All settings that a method of the command line stands for."""
    name, asked = split_method(text)
    if name not in METHODS:
        raise UserError(f"method {name!r} does not exist; choose among {', '.join(METHODS)}")
    method = METHODS[name]
    settable = [key for key in method.options if key not in method.fixed]
    values = {key: (value,) for key, value in method.options.items()}
    for key, given in asked.items():
        if key not in settable:
            raise UserError(f"method {text!r}: {name} has no option {key!r}; it has: {', '.join(settable)}")
        values[key] = tuple(_value(text, key, method.options[key], one) for one in given.split("|"))
    return [Settings(name, tuple(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]


def _value(text: str, key: str, default: Any, given: str) -> Any:
    """The value of an option, with the type of its default."""
    words = ("true", "false") if isinstance(default, bool) else WORDS.get(key)
    if words is not None:
        if given not in words:
            raise UserError(f"method {text!r}: {key}={given!r}; choose among {', '.join(words)}")
        return given == "true" if isinstance(default, bool) else given
    if (key, given) in (("phi", "none"), ("delay", "round")):
        return given
    whole = key in ("delay", "fragments")
    found = number(given, int if whole else float)
    if not 0 <= found < math.inf:
        raise UserError(f"method {text!r}: {key}={given!r}; give a {'whole ' * whole}number, 0 or more")
    return found


def number(text: str, kind: Callable[[str], float] = float) -> float:
    """The text as a number, or NaN."""
    try:
        return kind(text)
    except ValueError:
        return math.nan


def search(o: Options, rows: Rows) -> None:
    """Runs everything that has no row: each method's tuning, then its best configuration on the reported seeds."""
    new = 0

    def loss(plan: Plan) -> float:
        nonlocal new
        row = rows.find(plan)
        if row is None:
            row, new = rows.add_run(plan, run(load_task(plan.task), plan, o.device)), new + 1
            what = f"{plan.task}, {plan.workers} workers, {plan.settings}, lr {plan.lr:g}, seed {plan.seed}"
            print(f"{new} {what}, {plan.split} loss {row['loss']} ({row['seconds']:.1f} s)", flush=True)
        return math.inf if row["loss"] is None else row["loss"]

    for task, workers, asked in itertools.product(o.tasks, o.workers, o.methods):
        tried = o.plans(task, workers, asked)
        best = min(tried, key=loss) if len(tried) > 1 else tried[0]
        rows.add_choice(asked, o.tuning, best, len(tried))
        for seed in o.seeds:
            loss(replace(best, seed=seed, split="test"))
    print(f"complete; {new} runs were new")


def main() -> None:
    o = read_options(Options, "bench.loss")
    torch.set_num_threads(1)  # the operations are small: more threads cost more than they gain
    if o.device == "cuda":
        torch.set_float32_matmul_precision("high")
    rows = Rows(o.rows)
    with stoppable(f"the runs that ended are in {o.rows}"):
        search(o, rows)
    print("\n" + rows.table())


if __name__ == "__main__":
    launch(main)
