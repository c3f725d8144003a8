"""Tunes every method with the same small budget, and reports it on other seeds and other data.

python -m bench.search [--tasks bytes digits] [--methods local co2 co2:merge=keep,delay=3] [--workers 4] [--tau 24]
python -m bench.search --report

A method is NAME or NAME:OPTION=VALUE,...; two or more values, VALUE|VALUE, are tried in the tuning. With co2 these are
the options of bench.reference.LateReference, whatever is combined: co2:merge=mix,kappa=0.5,delay=3,gap=none,beta=0.

A method's configurations are its options' values times learning rates, as many of these as --configurations allows.
Each is trained on the tuning seed and evaluated on the tuning split; the best is trained on the other seeds and
evaluated on the test split. Initial weights and batches depend on the seed alone: they are the same for all methods.
Every run is a line of --rows, and one that is there is not run again: a search goes on where it was stopped. The tables
are in the .md beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bench import report
from bench.report import read_options, require, require_device, require_no_crowd
from bench.search.engine import TASKS, Plan, load_task, run
from bench.search.methods import KINDS, Settings
from bench.search.rows import Rows, markdown
from bench.search.task import Shards
from bench.trainings import TUNING_SEED
from core.errors import UserError
from core.wires.formats import WIRES
from training.script import launch

FACTORS = (1.0, 2.0, 0.5, 1.414, 0.707, 4.0, 0.25, 2.828, 0.354, 8.0, 0.125)
METHODS = (
    *("ddp", "dpu", "acco", "local", "slowmo", "diloco", "overlap_local", "co2"),
    *("streaming", "des_loc"),
    *("co2:merge=mix", "co2:merge=mix,delay=3,gap=none", "co2:merge=keep,gap=none", "co2:merge=keep,delay=3,gap=none"),
)


@dataclass(frozen=True)
class Search:
    """What to train, and how much tuning each method is given."""

    tasks: tuple[str, ...] = ("digits", "bytes")
    """Among digits, segmentation and surfaces; and, with data in CO2_DATA, cifar, cifar_vit, bytes, bytes_narrow,
    bytes_wide, bytes_3m and bytes_10m (3.2 and 10.6 M parameters), bytes_muon, gpt2, gpt2_small (124 M, for a GPU),
    transnormer and roberta."""
    methods: tuple[str, ...] = METHODS
    """NAME or NAME:OPTION=VALUE,...; VALUE|VALUE are both tried in the tuning."""
    workers: tuple[int, ...] = (4,)
    steps: int = 480
    """Local steps of every worker."""
    tau: int = 24
    """Local steps of a round, of every method that has rounds."""
    batch: int | None = None
    """Samples per worker and step; the task's own by default."""
    shards: Shards = "iid"
    """sorted: each worker draws from its own part of the training set, by label or, for bytes, its own books."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Reported."""
    configurations: int = 6
    """That each method may try."""
    lr_factors: tuple[float, ...] = ()
    """Of the task's learning rate, in place of as many as `configurations` allows; a method with one configuration is
    not tuned."""
    rows: Path = Path("results/search.jsonl")
    device: Literal["cpu", "cuda"] = "cpu"
    """Where all workers of a run lie; on cuda products are in TF32, as in the train scripts."""
    report: bool = False
    """Make the tables from the rows that are there; run nothing."""

    def check(self) -> None:
        require(self, once="tasks methods workers seeds", positive="workers lr_factors", tasks=TASKS)
        require_no_crowd(self)
        require(self, ones="steps tau configurations")
        require_device(self)
        if self.batch is not None and self.batch < 1:
            raise UserError(f"batch={self.batch}: give 1 or more, or leave it out")
        if TUNING_SEED in self.seeds:
            raise UserError(f"seeds={TUNING_SEED}: it is the tuning seed; report other seeds")
        for asked in self.methods:
            self.candidates(asked)
        if "acco" in self.methods and self.batch is not None and self.batch % 2:
            raise UserError(f"batch={self.batch}: acco halves it; give an even number")

    @property
    def tuning(self) -> str:
        """What each method is given, in words."""
        if self.lr_factors:
            return f"learning rate {', '.join(f'{factor:g}' for factor in self.lr_factors)} times the task's"
        return f"each method tuned over {self.configurations} configurations"

    def candidates(self, asked: str) -> list[tuple[Settings, float]]:
        """A method's configurations: settings, and the factor of the task's learning rate."""
        all_settings = parse(asked)
        for settings in all_settings:
            settings.make(torch.zeros(2, self.tau), self.tau)  # a delay above tau, say
        count = self.configurations // len(all_settings)
        if not count:
            raise UserError(
                f"method {asked!r}: its options alone make {len(all_settings)} configurations; allow as many with "
                "--configurations, or give fewer values"
            )
        factors = self.lr_factors or FACTORS[:count]
        return [(settings, factor) for factor in factors for settings in all_settings]


# -- methods as they are written --------------------------------------------------------------------------------

WORDS = {"gap": ("elementwise", "norm", "none"), "merge": ("outer", "mix", "keep"), "wire": WIRES}


def parse(text: str) -> list[Settings]:
    """All settings that a method of the command line stands for, the usual ones first; a UserError says what is wrong.

    What it leaves open of `Kind.tried` is tried.
    """
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise UserError(f"method {name!r} does not exist; choose among {', '.join(KINDS)}")
    kind = KINDS[name]
    values = {key: (value,) for key, value in kind.options.items()} | kind.tried
    for part in filter(None, rest.split(",")):
        key, _, given = part.partition("=")
        settable = kind.options if kind.settable is None else kind.settable
        if key not in settable:
            raise UserError(f"method {text!r}: {name} has no option {key!r}; it has: {', '.join(settable) or 'none'}")
        values[key] = tuple(_value(text, key, kind.options[key], one) for one in given.split("|"))
    return [Settings(name, tuple(zip(values, chosen, strict=True))) for chosen in itertools.product(*values.values())]


def _value(text: str, key: str, usual: Any, given: str) -> Any:
    """The value of an option, of the type that its usual value has."""
    if key in WORDS:
        if given not in WORDS[key]:
            raise UserError(f"method {text!r}: {key}={given!r}; choose among {', '.join(WORDS[key])}")
        return given
    if isinstance(usual, bool):
        if given not in ("true", "false"):
            raise UserError(f"method {text!r}: {key}={given!r}; choose true or false")
        return given == "true"
    if (key, given) in (("phi", "none"), ("delay", "round")):
        return given
    whole = isinstance(usual, int) or key == "delay"
    try:
        number = int(given) if whole else float(given)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UserError(f"method {text!r}: {key}={given!r}; give a {'whole ' if whole else ''}number, 0 or more")
    return number


# -- what is to be run ------------------------------------------------------------------------------------------


def plans(o: Search, task: str, workers: int, asked: str) -> list[Plan]:
    """A method's configurations."""
    t = load_task(task)
    rest = workers, o.batch or t.batch, o.steps, o.tau, o.shards, TUNING_SEED, "tuning"
    return [Plan(task, settings, t.inner.lr * factor, *rest) for settings, factor in o.candidates(asked)]


def pending(o: Search, rows: Rows) -> Iterator[Plan]:
    """The runs that have no row yet. A method's own are tuned first; the caller adds each row before it asks on."""
    for task in o.tasks:
        for workers in o.workers:
            for asked in o.methods:
                tried = plans(o, task, workers, asked)
                if len(tried) > 1:
                    yield from missing(rows, tried)
                best = min(tried, key=lambda p: tuning_loss(rows, p)) if len(tried) > 1 else tried[0]
                rows.add_choice(asked, o.tuning, best, len(tried))
                yield from missing(rows, [replace(best, seed=s, split="test") for s in o.seeds])


def missing(rows: Rows, wanted: list[Plan]) -> Iterator[Plan]:
    return (plan for plan in wanted if rows.find(plan) is None)


def tuning_loss(rows: Rows, plan: Plan) -> float:
    """Infinite where the run has diverged."""
    row = rows.find(plan)
    return math.inf if row is None or row["loss"] is None else row["loss"]


def at_most(o: Search) -> int:
    """How many runs a search from nothing is."""
    count = 0
    for asked in o.methods:
        tried = len(o.candidates(asked))
        count += len(o.seeds) + (tried if tried > 1 else 0)
    return count * len(o.tasks) * len(o.workers)


def search(o: Search, rows: Rows) -> None:
    """Runs what has no row."""
    print(f"{at_most(o)} runs, of which those in {o.rows} are not run again", flush=True)
    count = 0
    for count, plan in enumerate(pending(o, rows), start=1):
        result = run(load_task(plan.task), plan, o.device)
        rows.add_run(plan, result)
        loss = "diverged" if result.loss is None else f"{result.loss:.4f}"
        what = f"{plan.task}, {plan.workers} workers, {plan.settings}, lr {plan.lr:g}, seed {plan.seed}"
        print(f"{count} {what}, {plan.split} loss {loss} ({result.seconds:.1f} s)", flush=True)
    print(f"complete; {count} runs were new")


def conclude(o: Any, searches: Sequence[Search], text: Callable[[Rows], str]) -> None:
    """Runs what the file of rows lacks, unless the report alone is asked for, and writes the tables beside it."""
    rows = Rows(o.rows)
    if o.report and not rows.choices:
        raise UserError(f"rows={o.rows}: no rows to report; run the search first")
    with report.stoppable(f"the runs that ended are in {o.rows}"):
        for one in searches if not o.report else ():
            search(one, rows)
    tables = text(rows)
    report.write(o.rows.with_suffix(".md"), tables)
    print("\n" + tables)


def main() -> None:
    o = read_options(Search, "bench.search")
    torch.set_num_threads(1)  # many small operations: more threads cost more than they bring
    if o.device == "cuda":
        torch.set_float32_matmul_precision("high")
    conclude(o, [o], markdown)


if __name__ == "__main__":
    launch(main)
