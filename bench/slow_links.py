"""Savings of L-GreCo and other compression over slow links: python -m bench.slow_links [--rates 50 200] [--lrs 0.5 1 2]

Each run is gpt2_pydoc_small to its end in bench.time_to_loss's loop, on four workers, one per node. First we train
every method with each learning rate of --lrs, without a slow link and with a separate seed. All other runs use the
learning rate with the lowest loss. With --eval_every, a row has the bytes and the loss of each evaluation, so that
methods can be compared by the bytes to one loss. Writes slow_links.json after each run.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report, time_to_loss
from bench.cluster import Cluster
from bench.report import FAST, TUNING_SEED, Asked, Summary, require, require_company
from bench.time_to_loss import Learned, TimeToLoss
from training.script import launch

RECIPE, BATCH, LR = "gpt2_pydoc_small", 32, 4e-3
RECIPE_MODEL, EVAL_TOKENS = "gpt2_tiny", 4096
LGRECO = "ddp:compression=lgreco,first=10,every=40,like="
METHODS = {  # name -> as bench.time_to_loss has it
    "ddp": "ddp",
    "ddp_int4": "ddp:compression=int4",
    "ddp_rank4": f"{LGRECO}rank4,rule=uniform",
    "ddp_rank3": f"{LGRECO}rank3,rule=uniform",
    "ddp_top1": f"{LGRECO}top0.01,rule=uniform",
    "ddp_top03": f"{LGRECO}top0.003,rule=uniform",
    "lgreco_int4": f"{LGRECO}int4",
    "lgreco_rank4": f"{LGRECO}rank4",
    "lgreco_top1": f"{LGRECO}top0.01",
    "co2": "co2_auto",
    "co2_lgreco_rank4": "co2_auto:compression=lgreco,first=3,every=10,like=rank4",
}


@dataclass(frozen=True)
class SlowLinks(Asked):
    """What to train, and over which links."""

    methods: tuple[str, ...] = tuple(METHODS)
    rates: tuple[float, ...] = (50.0, 200.0)
    """Link rates, Mbit/s."""
    seeds: tuple[int, ...] = (0, 1, 2)
    lrs: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Learning rates to choose among, as multiples of the recipe's. A single one is used without tuning."""
    workers: int = 4
    epochs: int = 5
    epoch_steps: int = 24
    model: str = RECIPE_MODEL
    """The recipe's model, or another size of language.model."""
    batch_size: int = BATCH
    """Samples of all workers together."""
    eval_every: int | None = None
    """Epochs between two evaluations on 4,096 tokens. None evaluates only at the end."""
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces."""

    def check(self) -> None:
        require(self, once="rates seeds lrs", positive="rates lrs", methods=METHODS)
        require(self, ones="epochs epoch_steps batch_size")
        require_company(self)

    @property
    def task(self) -> Learned:
        values = {"epochs": self.epochs, "epoch_steps": self.epoch_steps, "model": self.model}
        values |= {"batch_size": self.batch_size} | ({"eval_tokens": EVAL_TOKENS} if self.eval_every else {})
        return Learned("language", RECIPE, 0.0, 0.0, tuple(report.flags(values)))


# -- training ---------------------------------------------------------------------------------------------------


def measure(o: SlowLinks, cluster: Cluster | None, method: str, rate: float, seed: int, lr: float, log: Path) -> dict:
    """Trains one run to its end, and returns its row."""
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
    """Tunes, then measures."""
    result = session.result = session.result | {"verified_mbit": {}, "tuning": [], "rows": []}
    o.task.data()  # once, and not in every rank
    (session.folder / "logs").mkdir()

    def rows(runs: Iterable[tuple[str, float, int, float]]) -> Iterator[dict[str, Any]]:
        for run in runs:
            log = "-".join(map(str, run)) + ".txt"
            yield measure(o, cluster, *run, session.folder / "logs" / log)

    with report.network(o.throttle, o.workers, FAST) as cluster:
        tuning = [(m, FAST, TUNING_SEED, lr) for m in o.methods for lr in o.lrs] if len(o.lrs) > 1 else []
        session.take("tuning", rows(tuning))
        result["lrs"] = {m: best_lr(result["tuning"], m) or o.lrs[0] for m in o.methods}
        for seed, rate in itertools.product(o.seeds, o.rates):
            order = list(o.methods)
            random.Random(f"{seed} {rate}").shuffle(order)
            if cluster:
                cluster.shape(rate, result["verified_mbit"])
            session.take("rows", rows([(m, rate, seed, result["lrs"][m]) for m in order]))


def best_lr(tuning: Iterable[Mapping[str, Any]], method: str) -> float | None:
    """The learning rate of the method's run with the lowest loss, or None if no loss is finite."""
    ended = {row["lr"]: row["loss"] for row in tuning if row["method"] == method and "loss" in row}
    finite = [lr for lr in ended if math.isfinite(ended[lr])]
    return min(finite, key=lambda lr: ended[lr], default=None)


SHOWN = {"lr": ".3g", "samples_per_second": ".1f", "loss": ".3f", "bytes_a_step": ".0f", "tau": ".3g"}
RUNS = Summary("rate_mbit method failed", SHOWN)
TABLES = {"tuning": RUNS, "rows": RUNS}


def main() -> None:
    report.run(SlowLinks, "slow_links", run_all, TABLES, forks=lambda o: not o.throttle)


if __name__ == "__main__":
    launch(main)
