"""Trains every method with the same tuning budget, and reports the loss on other seeds and other data.

python -m bench.loss [--tasks bytes digits] [--methods local co2 co2:merge=keep,delay=3] [--workers 4] [--tau 24]

A method is NAME or NAME:OPTION=VALUE,... The tuning tries all of VALUE|VALUE. bench/loss/methods.py has the options,
for example co2:merge=mix,kappa=0.5,delay=3,gap=none,beta=0.

A method's configurations are its options' values times learning rates, as many as --configurations allows. Each is
trained on the tuning seed and evaluated on the tuning split; the best is trained on the other seeds and evaluated on
the test split. Initial weights and batches depend on the seed alone. Every run is a line of --rows; a run that has its
line is not repeated, so the same command continues after an interruption. At the end it prints a table of all rows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench.loss.methods import METHODS, Settings
from bench.loss.runs import Plan, Rows, run
from bench.loss.tasks import TASKS, Shards, load_task
from bench.report import read_options, require, require_device, require_no_crowd, stoppable
from bench.trainings import TUNING_SEED
from core.errors import UserError
from core.wires.formats import WIRES
from training.script import launch

FACTORS = (1.0, 2.0, 0.5, 1.414, 0.707, 4.0, 0.25, 2.828, 0.354, 8.0, 0.125)
WORDS = {"gap": ("elementwise", "norm", "none"), "merge": ("outer", "mix", "keep"), "wire": WIRES}


@dataclass(frozen=True)
class Options:
    """What to train, and how much tuning each method gets."""

    tasks: tuple[str, ...] = ("digits", "bytes")
    """digits; with data in CO2_DATA also cifar, bytes, bytes_narrow, bytes_wide, bytes_3m and bytes_10m (3.2 and 10.6 M
    parameters), gpt2, gpt2_small (124 M, for a GPU)."""
    methods: tuple[str, ...] = (*METHODS, "co2:merge=keep,gap=none", "co2:merge=keep,delay=3,gap=none")
    """NAME or NAME:OPTION=VALUE,...; the tuning tries all of VALUE|VALUE."""
    workers: tuple[int, ...] = (4,)
    steps: int = 480
    """Local steps of every worker."""
    tau: int = 24
    """Local steps per round, for every method that has rounds."""
    batch: int | None = None
    """Samples per worker and step; the task's own by default."""
    shards: Shards = "iid"
    """sorted: each worker draws from its own part of the training set, by label or by book."""
    clip: str = "task"
    """Clip gradients to this norm, or none; task: the task's own limit. Each worker clips its own gradient, and ddp
    clips the mean."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds to report."""
    configurations: int = 6
    """Configurations that each method may try."""
    lr_factors: tuple[float, ...] = ()
    """Multiples of the task's learning rate to try, in place of as many as `configurations` allows. A method with one
    configuration is not tuned."""
    rows: Path = Path("results/search.jsonl")
    device: Literal["cpu", "cuda"] = "cpu"
    """Holds all workers of a run. On cuda, products are in TF32, as in the train scripts."""

    def check(self) -> None:
        require(self, once="tasks methods workers seeds", positive="workers lr_factors", tasks=TASKS)
        require_no_crowd(self)
        require(self, ones="steps tau configurations")
        require_device(self)
        if self.batch is not None and self.batch < 1:
            raise UserError(f"batch={self.batch}: give 1 or more, or leave it out")
        if self.clip not in ("task", "none") and not number_above_0(self.clip):
            raise UserError(f"clip={self.clip}: give a number above 0, none, or task")
        if TUNING_SEED in self.seeds:
            raise UserError(f"seeds={TUNING_SEED}: it is the tuning seed; report other seeds")
        for asked in self.methods:
            self.candidates(asked)

    @property
    def tuning(self) -> str:
        """The tuning budget, in words."""
        if self.lr_factors:
            return f"learning rate {', '.join(f'{factor:g}' for factor in self.lr_factors)} times the task's"
        return f"each method tuned over {self.configurations} configurations"

    def candidates(self, asked: str) -> list[tuple[Settings, float]]:
        """A method's configurations: settings, and the factor of the task's learning rate."""
        all_settings = parse(asked)
        for settings in all_settings:
            settings.make(torch.zeros(2, self.tau), self.tau)  # raises for a delay above tau
        count = self.configurations // len(all_settings)
        if not count:
            raise UserError(
                f"method {asked!r}: its options alone make {len(all_settings)} configurations; allow as many with "
                "--configurations, or give fewer values"
            )
        factors = self.lr_factors or FACTORS[:count]
        return [(settings, factor) for factor in factors for settings in all_settings]

    def plans(self, task: str, workers: int, asked: str) -> list[Plan]:
        """A method's runs of the tuning."""
        t = load_task(task)
        rest = workers, self.batch or t.batch, self.steps, self.tau, self.shards, TUNING_SEED, "tuning", self.clip
        return [Plan(task, settings, t.inner.lr * factor, *rest) for settings, factor in self.candidates(asked)]


def number_above_0(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def parse(text: str) -> list[Settings]:
    """All settings that a method of the command line stands for. An option without a value is tried at the values of
    `Method.tried`, or has its default."""
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise UserError(f"method {name!r} does not exist; choose among {', '.join(METHODS)}")
    method = METHODS[name]
    settable = [key for key in method.options if key not in method.fixed]
    values = {key: (value,) for key, value in method.options.items()} | method.tried
    for part in filter(None, rest.split(",")):
        key, _, given = part.partition("=")
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
    try:
        number = int(given) if key == "delay" else float(given)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(f"method {text!r}: {key}={given!r}; give a {'whole ' * (key == 'delay')}number, 0 or more")
    return number


def search(o: Options, rows: Rows) -> None:
    """Runs what has no row: each method's tuning, then its best configuration on the reported seeds."""
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
