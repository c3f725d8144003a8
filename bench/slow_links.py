"""Samples/s and final loss with each way of compressing, over slow links: python -m bench.slow_links [--rates 50 200]

Each run is gpt2_pydoc_small's own train script to its end, on four workers, a node each. First, without a slow link,
every method is trained with each learning rate of --lrs and a seed of its own; what ends with the least loss is the
method's for all other runs. Bytes are those that the kernel counts at a node's network device, over the whole run.
Writes slow_links.json and slow_links.md after each run; what was stopped goes on where the same command is given again,
with the --out of the first time. With --eval_every a table of bytes to one loss follows, of L-GreCo and the uniform
setting that it is like: over a link so slow that the rest of a step takes no time, a run's seconds are its bytes over
the link's rate, so that a ratio of speeds at equal loss is one of bytes, and depends on no clock.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch.nn.parallel import DistributedDataParallel

from bench import report, trainings
from bench.cluster import Cluster, sent_bytes
from bench.report import Asked, mean_sd, require, require_company
from bench.trainings import AUTO, FAST, TUNING_SEED
from core import UserError
from training.script import launch

RECIPE, LOSS, BATCH, LR = "gpt2_pydoc_small", "val_loss", 32, 4e-3
RECIPE_MODEL, EVAL_TOKENS = "gpt2_tiny", 4096
POWERSGD = "torch_powersgd"
DDP = ("--ddp_wire.lgreco.first", "10", "--ddp_wire.lgreco.every", "40")
CO2 = ("--co2.wire.lgreco.first", "3", "--co2.wire.lgreco.every", "10")


def ddp(like: str, *more: str) -> tuple[str, ...]:
    return ("--method", "ddp", "--ddp_wire.format", "lgreco", "--ddp_wire.like", like, *DDP, *more)


def co2(like: str, *more: str) -> tuple[str, ...]:
    wire = ("--co2.wire.format", "lgreco", "--co2.wire.like", like, *CO2) if like else ()
    return (*AUTO, *wire, *more)


RULES = ("uniform", "bench.rules.Accordion", "bench.rules.Legacy")
UNIFORM, ACCORDION, LEGACY = (("--ddp_wire.lgreco.rule", rule) for rule in RULES)
ANY = ("--ddp_wire.lgreco.family", "any")
METHODS: dict[str, tuple[str, ...]] = {
    "ddp": ("--method", "ddp"),
    "ddp_int4": ("--method", "ddp", "--ddp_wire.format", "int4"),
    "ddp_int3": ("--method", "ddp", "--ddp_wire.format", "int3"),
    "ddp_rank4": ddp("rank4", *UNIFORM),
    "ddp_rank3": ddp("rank3", *UNIFORM),
    "ddp_top1": ddp("top0.01", *UNIFORM),
    "ddp_top03": ddp("top0.003", *UNIFORM),
    POWERSGD: ("--method", "ddp"),
    "accordion_rank4": ddp("rank4", *ACCORDION),
    "accordion_top1": ddp("top0.01", *ACCORDION),
    "legacy_top1": ddp("top0.01", *LEGACY),
    "lgreco_int4": ddp("int4"),
    "lgreco_rank4": ddp("rank4"),
    "lgreco_top1": ddp("top0.01"),
    "lgreco_any": ddp("rank4", *ANY),
    "co2": co2(""),
    "co2_lgreco_rank4": co2("rank4"),
    "co2_lgreco_any": co2("rank4", "--co2.wire.lgreco.family", "any"),
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
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces; torch's PowerSGD is not held back."""

    def check(self) -> None:
        require(self, once="methods rates seeds lrs", positive="rates lrs", methods=METHODS)
        require(self, ones="epochs epoch_steps batch_size")
        require_company(self)
        if self.throttle and POWERSGD in self.methods:
            raise UserError(f"throttle with {POWERSGD}: its hook is not held back; leave one of them out")

    def command(self, method: str, rate: float, seed: int, lr: float, out: Path) -> list[str]:
        """The train script's arguments."""
        values = {"seed": seed, "out": out, "device": "cpu", "checkpoint_every": 0, "timeout": 300, "optim.lr": lr * LR}
        values |= {"epochs": self.epochs, "epoch_steps": self.epoch_steps, "eval_every": self.eval_every or self.epochs}
        values |= {"model": self.model, "batch_size": self.batch_size}
        values |= {"eval_tokens": EVAL_TOKENS, "log_every": 1} if self.eval_every else {}
        values |= {"link_mbit": rate} if self.throttle else {}
        return [RECIPE, *METHODS[method], *trainings.flags(values)]


# -- one run ----------------------------------------------------------------------------------------------------


def train(module: ModuleType, argv: list[str], method: str, log: Path) -> int:
    """One rank: the train script; bytes that its node has sent meanwhile."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    before = sent_bytes(interface)
    with torch_powersgd() if method == POWERSGD else contextlib.nullcontext():
        trainings.run_script(module, argv, log)
    return sent_bytes(interface) - before


@contextlib.contextmanager
def torch_powersgd() -> Iterator[None]:
    """DistributedDataParallel gets torch's own hook, rank 4 for every matrix, in place of ours.

    And one bucket: with several its callbacks start gloo's collectives in another order on each worker, which aborts.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hooks

    register, make = DistributedDataParallel.register_comm_hook, DistributedDataParallel.__init__

    def make_with_one_bucket(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        make(self, *args, **options, bucket_cap_mb=1 << 14)

    def register_theirs(self: DistributedDataParallel, *_: Any) -> None:
        state = hooks.PowerSGDState(self.process_group, matrix_approximation_rank=4, start_powerSGD_iter=2)
        register(self, state, hooks.powerSGD_hook)

    with (
        mock.patch.object(DistributedDataParallel, "register_comm_hook", register_theirs),
        mock.patch.object(DistributedDataParallel, "__init__", make_with_one_bucket),
    ):
        yield


def measure(o: SlowLinks, cluster: Cluster | None, module: ModuleType, run: tuple[Any, ...], folder: Path) -> dict:
    """One run to its end: what it measured."""
    method, rate, seed, lr = run
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    argv, steps = o.command(method, rate, seed, lr, folder), o.epochs * o.epoch_steps
    row: dict[str, Any] = {"method": method, "rate_mbit": rate, "seed": seed, "lr": lr}
    found = trainings.train(train, cluster, o.workers, folder, module, argv, method, timeout=120 + 30 * steps)
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
    """Tunes, then measures, but for what the folder holds."""
    result = session.result = {"verified_mbit": {}, "lrs": {}, "tuning": [], "rows": []} | session.result
    module = importlib.import_module("language.train")

    def take(runs: Sequence[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
        for run in runs:
            number = len(result["tuning"]) + len(result["rows"])
            began = time.monotonic()
            row = measure(o, cluster, module, run, session.folder / "runs" / f"{number:03d}-{run[0]}")
            yield row | {"wall_seconds": time.monotonic() - began}

    with trainings.network(o.throttle, o.workers, FAST) as cluster:
        tuning = [(m, FAST, TUNING_SEED, lr) for m in o.methods for lr in o.lrs] if len(o.lrs) > 1 else []
        session.take("tuning", take(left(tuning, result["tuning"])))
        result["lrs"] = {m: trainings.best_lr(result["tuning"], m) or o.lrs[0] for m in o.methods}
        for seed, rate in itertools.product(o.seeds, o.rates):
            order = list(o.methods)
            random.Random(f"{seed} {rate}").shuffle(order)
            runs = left([(m, rate, seed, result["lrs"][m]) for m in order], result["rows"])
            if cluster and runs:
                cluster.shape(rate, result["verified_mbit"])
            session.take("rows", take(runs))


def left(runs: Sequence[tuple[Any, ...]], rows: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The runs (method, rate, seed, learning rate) that no row is of."""
    done = {(r["method"], r["rate_mbit"], r["seed"], r["lr"]) for r in rows}
    return [run for run in runs if run not in done]


TITLES = ("method", "lr", "samples/s", "x ddp", "final loss", "MB sent a step and worker", "tau", "deciding")


def text(result: dict[str, Any]) -> str:
    model = result["options"].get("model", RECIPE_MODEL)
    name = "GPT-2 (tiny)" if model == RECIPE_MODEL else model
    renamed = " (bench.slow_links was called bench.lgreco then)" if "bench.lgreco" in result.get("command", "") else ""
    lines = [f"{name} on {result['options']['workers']} workers. {report.source(result)}{renamed}", ""]
    for again in result.get("resumed", ()):
        lines[0] += f"; gone on with at commit {again['commit']}, {again['date']}"
    for rate in result["options"]["rates"]:
        rows = [r for r in result["rows"] if r["rate_mbit"] == rate]
        lines += [f"## {rate:g} Mbit/s", "", report.table(TITLES, table(rows)), ""]
    lines.append(
        "Means and standard deviations over seeds; tau is the last seed's. Learning rates are multiples of the "
        "recipe's. The paper (abstract) reports 2.5 x in speed and up to 5 x in compression, on other models and "
        "networks: no cell here compares with them. Over any link slow enough a ratio of speeds is one of bytes."
    )
    return "\n".join([*lines, *([""] if (bytes_to_one := text_of_pairs(result["rows"])) else []), bytes_to_one])


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
        times = f"{statistics.fmean(speeds) / statistics.fmean(plain):.2f}" if plain else ""
        losses = [r["loss"] for r in group if r["loss"] is not None]
        sent = statistics.fmean(r["bytes_a_step"] for r in group) / 1e6
        deciding = f"{statistics.fmean(r['deciding_share'] for r in group):.2%}"
        loss = mean_sd(losses, ".3f") if losses else "not finite"
        yield [
            method,
            f"{group[0]['lr']:g}",
            mean_sd(speeds, ".1f"),
            times,
            loss,
            f"{sent:.3f}",
            f"{group[-1]['tau']:g}",
            deciding,
        ]


# -- bytes to one loss --------------------------------------------------------------------------------------------

PAIRS = (
    ("lgreco_int4", "ddp_int4"),
    ("lgreco_int4", "ddp_int3"),
    ("lgreco_rank4", "ddp_rank4"),
    ("lgreco_rank4", "ddp_rank3"),
    ("lgreco_any", "ddp_rank4"),
    ("lgreco_top1", "ddp_top1"),
    ("lgreco_top1", "ddp_top03"),
)
"""L-GreCo's methods of bench.slow_links, and uniform settings: the one that it is like, and one of about its bytes."""
PAIR_TITLES = (
    *("uniform", "L-GreCo", "seeds", "uniform's last loss", "L-GreCo's", "the target"),
    *("uniform: steps to it", "MB", "L-GreCo: steps", "MB", "times as fast where bytes decide"),
)
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


def pairs(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(L-GreCo's method, the uniform one, a comparison for each seed and rate that both have); the target is the higher
    of the two last losses, so that both come to it. The evaluation at the end is left out: it takes more of the text
    than the others."""
    by = {(r["method"], r["seed"], r["rate_mbit"]): r["evaluations"][:-1] for r in rows if r.get("evaluations")}
    for method, uniform in PAIRS:
        found = []
        for (name, *run), theirs in by.items():
            ours = by.get((method, *run), [])
            if name != uniform or len(theirs) < 2 or len(ours) < 2:
                continue
            target = max(theirs[-1][2], ours[-1][2])
            ends = reached(theirs, target), reached(ours, target)
            if ends[0] and ends[1]:
                final = theirs[-1][2], ours[-1][2]
                found.append({"target": target, "final": final, "uniform": ends[0], "own": ends[1]})
        if found:
            yield method, uniform, found


def text_of_pairs(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; empty where no run was evaluated on its way, or no pair is there."""
    cells = []
    for method, uniform, found in pairs(rows):
        finals = [mean_sd([f["final"][i] for f in found], ".3f") for i in range(2)]
        ends = [
            f(statistics.fmean(each[who][i] for each in found))
            for who in ("uniform", "own")
            for i, f in enumerate((lambda steps: f"{steps:.0f}", lambda sent: f"{sent / 1e6:.1f}"))
        ]
        gain = mean_sd([each["uniform"][1] / each["own"][1] for each in found], ".2f")
        target = mean_sd([each["target"] for each in found], ".3f")
        cells.append([uniform, method, len(found), *finals, target, *ends, gain])
    if not cells:
        return ""
    return (
        f"## Bytes to one loss\n\n{report.table(PAIR_TITLES, cells)}\n\n"
        "The target is the higher of a pair's two last losses, seed by seed. MB: what a worker has sent until then, "
        "with what deciding sends. Where bytes decide, the ratio of speeds is theirs, at any rate; 1.2 was aimed at.\n"
    )


def main() -> None:
    report.run(SlowLinks, "slow_links", run_all, text, forks=lambda o: not o.throttle, goes_on=True)


if __name__ == "__main__":
    launch(main)
