"""Seconds of training to a held-out loss, for this project's methods and other packages', on the emulated cluster.

    python -m bench.time_to_loss [--tasks vision language cifar10 perceptron] [--rates 40 200] [--seeds 0 1 2]
        [--methods ddp local:tau=12,compression=int4 co2_auto torchft_streaming ...] [--step_ms 30]

All methods share the loop, the model and its initial values, the data and their order, the inner optimizer and the
evaluation. Every --eval_every steps each worker writes its parameters to a file while its clock stands still. After
the run, the average of the workers' models is evaluated. Every run keeps its whole trajectory. The command writes
time_to_loss.json.
"""

import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench import report, standin
from bench.cluster import Cluster, require_namespaces, run_ranks, sent_bytes
from bench.peers.adapters import PEERS, Task, Trainer
from bench.report import Metrics, Summary, require, require_no_crowd
from core.baselines.table import make_method
from core.errors import UserError
from core.local_update import LocalUpdateMethod
from core.nodes import node_mesh
from core.tau import CALIBRATION_TAU, SyncSchedule
from core.testing.link import ThrottledLink
from training.data.samples import steps_per_epoch
from training.optim import clip_gradients, lr_factor
from training.recipe import parse
from training.start.script import launch

NAME = "time_to_loss"
TIMEOUT = 300.0  # seconds until a missing worker is an error
CPU = torch.device("cpu")

# -- methods ----------------------------------------------------------------------------------------------------

OURS = {  # name -> options of a train script; the period is the recipe's tau where they set none
    **{name: ("--method", name, "--no_recommended") for name in ("ddp", "local", "overlap_local", "slowmo", "diloco")},
    "co2": ("--method", "co2", "--no_recommended"),
    "co2_recommended": ("--method", "co2", "--recommended"),
    "co2_auto": ("--method", "co2", "--recommended", "--co2.tau", "auto", "--co2.tau_max", "24"),
}
BLOCKING = ("local", "slowmo", "diloco")
METHODS = (*OURS, *PEERS)


Fits = Callable[[float], bool]
OWN: dict[str, tuple[tuple[str, ...], Fits, str]] = {  # key -> methods, what fits, what to give
    "share": (BLOCKING, lambda x: 0 < x < 1, "a number between 0 and 1"),
    "cap": (("ddp",), lambda x: 0 < x < math.inf, "MiB, above 0"),
    "accumulate": (("ddp",), lambda x: x >= 1 and x % 1 == 0, "a whole number of micro-batches"),
    "nodes": ((*OURS,), lambda x: x >= 1 and x % 1 == 0, "a whole number of ranks"),
}
"""Options that no train script has: a blocking method's share=0.1 (see `ShareOfWaiting`), the MiB of ddp's buckets, the
micro-batches of an update of ddp, and the ranks of a node, which is then one worker."""


def options_of(method: str) -> list[str]:
    """NAME or NAME:key=value,..., as options of a train script."""
    name, given = report.split_method(method)
    if name not in METHODS:
        raise UserError(f"methods: {name!r} does not exist; choose among {', '.join(METHODS)}")
    compression = "ddp_compression" if name == "ddp" else "co2.compression"
    keys = {"compression": f"{compression}.format", "tau": "co2.tau", "lr": "optim.lr"}
    if name.startswith("co2"):
        keys |= {key: f"co2.{key}" for key in ("delay", "fragments", "outer_momentum", "outer_lr")}
    own = {key for key, (methods, *_) in OWN.items() if name in methods}
    options = list(OURS.get(name, OURS["local"]))
    for key, value in given.items():
        if key in own:
            number_of(method, key)
        elif key in keys:
            options += [f"--{keys[key]}", value]
        else:
            raise UserError(f"methods: {method!r} has '{key}={value}'; give one of {', '.join((*keys, *sorted(own)))}")
    return options


def number_of(method: str, key: str) -> float | None:
    """The number of one of OWN in a method, or None."""
    if (value := report.split_method(method)[1].get(key)) is None:
        return None
    _, fits, remedy = OWN[key]
    with contextlib.suppress(ValueError):
        if fits(number := float(value)):
            return number
    raise UserError(f"methods: {method!r} has '{key}={value}'; give {remedy}")


def ranks_of(method: str) -> int:
    """The ranks of a node, which are one worker, as in co2:nodes=2; 1 without it."""
    return int(number_of(method, "nodes") or 1)


class ShareOfWaiting(SyncSchedule):
    """Automatic tau for a blocking method: the least with which it waits for at most `share` of the time.

    The slowest worker's times of the third round decide, once. Rounds before have two local steps, as with tau auto.

    Args:
        share: The share, between 0 and 1.
        method: The method whose rounds are timed.
    """

    def __init__(self, share: float, method: LocalUpdateMethod):
        self.share, self.method = share, method
        super().__init__(CALIBRATION_TAU)

    def begin(self, number: int) -> None:
        if number == 3:
            stats = self.method.stats
            times = torch.tensor([float(stats.step_seconds), float(stats.exposed_seconds)])
            dist.all_reduce(times, dist.ReduceOp.MAX)
            step, wait = times.tolist()
            self._given = max(1, math.ceil(wait * (1 - self.share) / (self.share * step)))
        super().begin(number)


# -- tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learned:
    """A recipe of a train script, changed in the same way for every method.

    Attributes:
        package: vision or language, the package whose train.py trains it.
        target: The held-out cross-entropy to reach; for text per token.
        late: A lower one, which training reaches near its end.
        settings: Options that change the recipe.
        held_out: The evaluation uses every n-th image, n being this number.
        mean_of: The loss of a run is averaged over so many evaluations, because one is noisy.
        perceptron: Whether the model is the perceptron of bench/standin.py instead of the recipe's.
    """

    package: str
    recipe: str
    target: float
    late: float
    settings: tuple[str, ...] = ()
    held_out: int = 1
    mean_of: int = 1
    perceptron: bool = False

    def parse(self, *options: str) -> Any:
        """The recipe with these options, too."""
        recipes = importlib.import_module(f"{self.package}.recipes").RECIPES
        return parse(recipes, [self.recipe, *self.settings, "--device", "cpu", *options])

    @property
    def script(self) -> Any:
        return importlib.import_module(f"{self.package}.train")

    @functools.cache  # noqa: B019 (there are four)
    def data(self) -> tuple[Any, Any]:
        """The training set and the held-out set; of text, what language.train learns, and the objective."""
        recipe = self.parse()
        if self.package == "vision":
            from vision import data

            train_set, test = data.load(recipe.dataset)
            some = slice(None, None, self.held_out)
            return train_set, replace(test, images=test.images[some], labels=test.labels[some])
        corpus = self.script.open_corpus(recipe.corpus, recipe.vocab_size)
        objective = self.script.make_objective(recipe, corpus)
        return self.script.TextTask(corpus, objective, corpus.val[: recipe.eval_tokens], {}), objective

    def model(self, recipe: Any) -> nn.Module:
        if self.perceptron:
            return standin.build_model(256)
        learned = self.data()[0]
        return self.script.make_model(recipe, len(learned.classes) if self.package == "vision" else learned.corpus.pad)

    def batches(self, recipe: Any, rank: int, workers: int) -> tuple[int, Iterator[Any]]:
        """The steps of the whole run, over which the learning rate falls, and this worker's batches."""
        learned = self.data()[0]
        if self.package == "vision":
            steps = steps_per_epoch(len(learned), recipe.batch_size) * recipe.epochs
            return steps, learned.train_batches(recipe, rank, workers, 0, steps)
        steps = recipe.epoch_steps * recipe.epochs
        return steps, (([batch]) for batch in learned.batches(recipe, rank, workers, 0, steps))

    @torch.no_grad()
    def loss(self, recipe: Any, model: nn.Module) -> float:
        """The held-out cross-entropy."""
        model.eval()
        learned, held_out = self.data()
        if self.package == "vision":
            batches = held_out.test_batches(recipe, 0, 1)
            return sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in batches) / len(held_out)
        batches = self.script.held_out_batches(learned.some, held_out, 8, rank=0, world_size=1)
        nats, tokens, *_ = self.script.held_out_sums(model, batches, CPU, None).tolist()
        return nats / tokens


FLAT = ("--epochs", "11", "--optim.schedule", "constant", "--optim.warmup_steps", "0", "--optim.weight_decay", "0")
TEXT = ("--epoch_steps", "24", "--batch_size", "8", "--eval_tokens", "8192")
TEXT += ("--optim.lr", "2e-3", "--optim.warmup_steps", "20")
# timm's small ResNet, whose stem and stages halve the sides five times: two cores can train four workers
CIFAR10 = ("--model", "test_resnet", "--no_augment", "--batch_size", "64", "--optim.warmup_steps", "20")
CIFAR10 += ("--optim.lr", "0.05")  # of 0.02, 0.05 and 0.1 the best for CO2, seed 100; for DDP and Local-SGD 0.02
TASKS = {
    "vision": Learned("vision", "digits_small", 0.25, 0.06),
    # the learning rate is the best of 0.002, 0.004 and 0.008 for DDP, Local-SGD and CO2, seed 100
    "language": Learned("language", "gpt2_pydoc_small", 5.8, 5.7, TEXT),
    "cifar10": Learned("vision", "cifar10_small", 1.7, 1.6, CIFAR10, held_out=10, mean_of=5),
    "perceptron": Learned("vision", "digits_small", 0.2, 0.15, FLAT, perceptron=True),
}

# -- options ----------------------------------------------------------------------------------------------------

Planned = tuple[int, float, str, str]  # seed, rate, task, method of a run


@dataclass(frozen=True)
class TimeToLoss:
    """What to train, over which links, and to which loss."""

    tasks: tuple[str, ...] = ("vision", "language")
    """vision, language, perceptron, and cifar10, which needs CO2_DATA."""
    rates: tuple[float, ...] = (40.0, 200.0)
    """Link rates, Mbit/s."""
    seeds: tuple[int, ...] = (0, 1, 2)
    methods: tuple[str, ...] = tuple(OURS)
    """Methods of this project or of other packages.
    `local:tau=12,compression=int4` changes settings."""
    workers: int = 4
    """Ranks. Without nodes=..., each is a worker."""
    per_node: int = 1
    """Ranks on each emulated node, which reach each other without the link."""
    step_ms: float = 0.0
    """Stretch the forward and backward pass to this time, so that workers do not compete for cores. 0 does not."""
    eval_every: int = 4
    """Steps between evaluations."""
    target: float | None = None
    """The held-out loss to reach, in place of each task's own."""
    against: str = "co2_auto"
    """The method that all others are compared with, seed by seed. Without its runs there is no comparison."""
    limit_seconds: float = 60.0
    """Seconds of training after which a run is stopped."""
    throttle: bool = False
    """Throttle collectives in software instead of making network namespaces. Not for other packages."""
    out: Path | None = None
    """The folder to write into; runs/time_to_loss-DATE by default."""

    def check(self) -> None:
        require(self, once="tasks rates seeds methods", tasks=TASKS, ones="eval_every per_node", zeros="step_ms")
        require(self, positive="rates workers limit_seconds" + (" target" if self.target is not None else ""))
        require_no_crowd(self)
        if self.workers % self.per_node or self.workers == self.per_node:  # one node has no link
            raise UserError(f"workers={self.workers}, per_node={self.per_node}: give two or more whole nodes")
        for method in self.methods:
            options = options_of(method)
            if self.workers % ranks_of(method):
                raise UserError(f"methods: {method!r} has nodes that do not divide {self.workers} workers: give others")
            if ":" in method:  # what it changes, the recipe checks
                TASKS[self.tasks[0]].parse(*options)

    def plan(self) -> list[Planned]:
        """All runs in a reproducible order, shuffled within seed and rate.

        So disturbances of the machine affect all methods alike.
        """
        runs = []
        for seed, rate in itertools.product(self.seeds, self.rates):
            group = [(seed, rate, task, method) for task in self.tasks for method in self.methods]
            random.Random(f"{seed} {rate}").shuffle(group)
            runs += group
        return runs


# -- one rank ---------------------------------------------------------------------------------------------------


def work(o: TimeToLoss, run: Planned, task: Learned, interface: str | None, folder: Path, log: Path) -> None:
    """Trains as one rank. At every evaluation, writes the model and a line of metrics to `folder`."""
    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # also of libraries
        os.dup2(output, stream)
    seed, rate, _, method = run
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, workers = dist.get_rank(), dist.get_world_size()
    recipe = task.parse(*options_of(method), "--seed", str(seed))
    torch.manual_seed(seed * 1_000_003)  # the same initial values on all workers
    model = task.model(recipe).train()
    torch.manual_seed(seed * 1_000_003 + rank)
    optimizer = task.script.make_optimizer(model, recipe.optim)
    every = int(number_of(method, "accumulate") or 1)  # micro-batches of an update, at equal samples
    of_run = SimpleNamespace(device=CPU, autocast=contextlib.nullcontext, scaled=lambda loss: loss / every)
    pacer = standin.Pacer(o.step_ms / 1e3)
    if o.step_ms:
        standin.pace(model, pacer)
    trainer = start(method, model, optimizer, recipe, rate if o.throttle else None)
    total, batches = task.batches(recipe, rank, workers)

    def set_rate(number: int) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] = recipe.optim.lr * lr_factor(number, total, recipe.optim)

    def keep(number: int, seconds: float) -> None:
        with open(folder / f"{number}.{rank}", "wb") as file:
            for tensor in state_of(model):
                tensor.detach().numpy().tofile(file)
        line = {"step": number, "seconds": seconds} | trainer.stats()
        line |= {"bytes_sent": sent_bytes(interface) - before} if interface else {}
        lines.write(json.dumps(line) + "\n")

    (folder / str(rank)).mkdir()
    with open(folder / str(rank) / "metrics.jsonl", "w", buffering=1) as lines:
        set_rate(0)
        dist.barrier()
        before = sent_bytes(interface) if interface else 0
        keep(0, 0.0)
        began, stopped = time.perf_counter(), 0.0
        for number, batch in enumerate(batches, start=1):
            pacer.restart()
            updates = number % every == 0 or number == total
            with contextlib.nullcontext() if updates else trainer.model.no_sync():  # pyright: ignore
                task.script.backward(of_run, recipe, trainer.model, *batch)
            if updates:
                clip_gradients(model, recipe.optim)
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
            set_rate(number)
            if updates:
                trainer.after_step(last=number == total)
            if number == total:
                trainer.finish()
            if number % o.eval_every == 0 or number == total:
                now = time.perf_counter()
                keep(number, now - began - stopped)
                stopped += time.perf_counter() - now
    dist.barrier()
    trainer.close()
    dist.barrier()


def start(
    method: str, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Any, link_mbit: float | None
) -> Trainer:
    """Wraps the model in the method."""
    name = method.partition(":")[0]
    if name in PEERS:
        return PEERS[name].start(Task(model, optimizer, recipe.co2.tau, TIMEOUT))
    wrapped, made = make_method(
        recipe.method,
        model,
        co2=recipe.co2,
        lr=lambda: optimizer.param_groups[0]["lr"],
        timeout=TIMEOUT,
        link=ThrottledLink(link_mbit) if link_mbit else None,
        mesh=node_mesh("cpu", ranks_of(method)) if ranks_of(method) > 1 else None,
        **({"bucket_cap_mb": cap} if (cap := number_of(method, "cap")) else {}),
        **recipe.own_settings,
    )
    if (share := number_of(method, "share")) is not None:
        made.sync_schedule = ShareOfWaiting(share, made)  # pyright: ignore
    sums = {"exposed_seconds": 0.0, "allreduce_seconds": 0.0, "bytes_sent": 0.0}
    stats = lambda: {"rounds": made.rounds, "tau": made.tau, **sums}  # noqa: E731

    def after_step(*, last: bool) -> None:
        if made.step(last=last):
            for key in sums:
                sums[key] += float(getattr(made.stats, key))

    return Trainer(wrapped, optimizer, after_step, made.finish, made.close, stats)


def state_of(model: nn.Module) -> list[Tensor]:
    """The tensors that evaluations average over the workers: parameters and BatchNorm's statistics."""
    return [*model.parameters(), *(b for b in model.buffers() if b.dtype == torch.float32)]


# -- evaluation -------------------------------------------------------------------------------------------------


def evaluate(task: Learned, folder: Path, workers: int, steps: list[int]) -> list[float]:
    """The held-out losses of the averaged models at this process's share of the steps."""
    torch.set_num_threads(1)
    recipe, losses = task.parse(), []
    model = task.model(recipe)
    for step in steps[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]:
        models = [np.fromfile(folder / f"{step}.{rank}", dtype=np.float32) for rank in range(workers)]
        mean = torch.from_numpy(np.mean(models, axis=0))
        state = state_of(model)
        for tensor, values in zip(state, mean.split([t.numel() for t in state]), strict=True):
            tensor.data.copy_(values.view_as(tensor))
        losses.append(task.loss(recipe, model))
    return losses


def trajectory(o: TimeToLoss, task: Learned, folder: Path) -> list[dict[str, Any]]:
    """One line per evaluation within the limit: rank 0's line, the slowest worker's seconds, and the loss."""
    ranks = [{line["step"]: line for line in Metrics(folder / str(rank)).read()} for rank in range(o.workers)]
    lines = []
    for step, line in ranks[0].items():
        if all(step in rank for rank in ranks):
            line["seconds"] = max(rank[step]["seconds"] for rank in ranks)
            lines += [line] if line["seconds"] <= o.limit_seconds else []
    processes = len(os.sched_getaffinity(0))
    job = task, folder, o.workers, [line["step"] for line in lines]
    found = run_ranks(evaluate, None, 1, processes, *job, timeout=3600.0)
    for number, line in enumerate(lines):
        line["loss"] = found[number % processes][number // processes]
    return lines


# -- one run ----------------------------------------------------------------------------------------------------


def train(o: TimeToLoss, cluster: Cluster | None, task: Learned, run: Planned, log: Path) -> dict[str, Any]:
    """Trains one run, and returns its trajectory, how it `ended`, and the `reason` if it failed or did not run."""
    peer = PEERS.get(run[3].partition(":")[0])
    if peer is not None and (why := "other packages need network namespaces" if cluster is None else peer.missing()):
        return {"ended": "not run", "reason": why, "trajectory": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        metrics = Metrics(folder / "0")
        over = lambda: bool(lines := metrics.read()) and lines[-1]["seconds"] > o.limit_seconds  # noqa: E731
        job = o, run, task, cluster.interface if cluster else None, folder, log
        patience = 2 * o.limit_seconds + 120  # wall-clock, with the start
        ended, reason = "not reached", ""
        try:
            finished = run_ranks(work, cluster, o.per_node, o.workers // o.per_node, *job, timeout=patience, until=over)
            ended = "not reached" if finished else "out of time"
        except TimeoutError:
            ended = "out of time"
        except RuntimeError as error:  # one of the ranks has failed
            lines = str(error).strip().splitlines()
            ended, reason = "failed", f"{lines[0]} {lines[-1]}"
        read = all((folder / str(rank)).exists() for rank in range(o.workers))
        return {"ended": ended, "reason": reason, "trajectory": trajectory(o, task, folder) if read else []}


def outcome(o: TimeToLoss, run: dict[str, Any], late: bool = False) -> dict[str, Any]:
    """When a run reached the target, or the task's late target: status, seconds, steps, loss, exposed_share, tau, and
    `limits`.

    The status is "reached", or how the run ended. All other entries describe the first evaluation at or below the
    target, or the last evaluation if there is none. The loss is averaged over the task's last `mean_of` evaluations.
    """
    lines, task = run["trajectory"], TASKS[run["task"]]
    last = zip(*(lines[first:] for first in range(task.mean_of)), strict=False)
    lines = [some[-1] | {"loss": statistics.fmean(line["loss"] for line in some)} for some in last]
    target = task.late if late else o.target or task.target
    reached = next((line for line in lines if line["loss"] <= target), None)
    lines = lines or run["trajectory"]  # too short for a mean
    at = reached or (lines[-1] if lines else {"step": 0, "seconds": 0.0, "loss": None})
    over = run["ended"] == "out of time" and not reached
    return {
        "status": "reached" if reached else run["ended"],
        "seconds": o.limit_seconds if over else at["seconds"],
        "steps": at["step"],
        "loss": at["loss"],
        "exposed_share": at["exposed_seconds"] / at["seconds"] if at["seconds"] and "exposed_seconds" in at else None,
        "tau": at.get("tau"),
    } | limits(at, run.get("rate_mbit"))


def compare(o: TimeToLoss, runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The seconds of every method over the seconds of `against`, seed by seed, for both targets."""
    for task, rate, target in itertools.product(o.tasks, o.rates, ("target", "late")):
        there = [run for run in runs if (run["task"], run["rate_mbit"]) == (task, rate)]
        for method in {run["method"] for run in there} - {o.against}:
            if found := ratio_of(there, method, o.against, late=target == "late"):
                cell = {"task": task, "rate_mbit": rate, "target": target, "method": method, "against": o.against}
                yield cell | found


def ratio_of(runs: list[dict[str, Any]], method: str, against: str, *, late: bool = False) -> dict[str, Any] | None:
    """The seconds of a method over the seconds of another on one task and link. None for fewer than three seeds.

    A run that missed the target counts with the seconds at which it ended.

    Returns:
        ratio, low, high, p: As from `report.paired_ratio`.
        missed, against_missed: How many runs of each method missed the target. If only the method's did, the ratio is
            a lower bound, and if only the other's did, an upper bound.
    """
    took, missed = {method: {}, against: {}}, {method: 0, against: 0}
    for run in runs:
        at = run["late"] if late else run
        if run["method"] in took and at["status"] in ("reached", "out of time", "not reached"):
            took[run["method"]][run["seed"]] = at["seconds"]
            missed[run["method"]] += at["status"] != "reached"
    ratio = report.paired_ratio(took[against], took[method])
    if ratio is None:
        return None
    return ratio._asdict() | {"missed": missed[method], "against_missed": missed[against]}


def limits(at: dict[str, Any], rate_mbit: float | None) -> dict[str, float]:
    """How much hiding can be worth at most, from the run's own times; {} for another package's method.

    Returns:
        step_seconds: c, a local step without its waiting.
        allreduce_seconds: As measured, on average.
        link_seconds: a, what the link needs for an all-reduce's bytes.
        limit: (c + a / tau) / max(c, a / tau), blocking over hidden with this tau.
    """
    if not (rounds := at.get("rounds")) or "exposed_seconds" not in at or not rate_mbit:
        return {}
    step = (at["seconds"] - at["exposed_seconds"]) / at["step"]
    link = at["bytes_sent"] * 8e-6 / rate_mbit / rounds
    wait = link * rounds / at["step"]
    found = {"step_seconds": step, "link_seconds": link, "limit": (step + wait) / max(step, wait)}
    return found | ({"allreduce_seconds": at["allreduce_seconds"] / rounds} if "allreduce_seconds" in at else {})


# -- all of them ------------------------------------------------------------------------------------------------


def run_all(o: TimeToLoss, folder: Path, result: dict[str, Any]) -> None:
    """Trains everything, and saves the result after each run. A method that failed at a task and rate is not tried
    again there."""
    about = {name: vars(TASKS[name]) | {"target": o.target or TASKS[name].target} for name in o.tasks}
    options = {method: " ".join(options_of(method)) for method in o.methods if method.partition(":")[0] in OURS}
    result |= {"link": "throttled in software" if o.throttle else "namespaces + tbf", "verified_mbit": {}}
    result |= {"tasks": about, "method_options": options, "runs": []}
    for name in o.tasks:  # once, and not in every rank
        TASKS[name].data()
    runs, broken = result["runs"], dict[Any, dict[str, Any]]()
    (logs := folder / "logs").mkdir(parents=True, exist_ok=True)
    nodes = o.workers // o.per_node
    with contextlib.nullcontext() if o.throttle else Cluster(nodes, o.rates[0]) as cluster:
        for planned in o.plan():
            seed, rate, name, method = planned
            if cluster:
                cluster.set_rate(rate)
                if f"{rate:g}" not in result["verified_mbit"]:
                    result["verified_mbit"][f"{rate:g}"] = cluster.verify()
            log = logs / f"{name}-{rate:g}mbit-{method}-seed{seed}.txt"
            found = broken.get(planned[1:]) or train(o, cluster, TASKS[name], planned, log)
            if found["reason"]:
                broken[planned[1:]] = found
            row = {"task": name, "rate_mbit": rate, "method": method, "seed": seed, **found}
            runs.append(row | outcome(o, row) | {"late": outcome(o, row, late=True)})
            report.save(folder, NAME, result)
            print("runs", *TABLES["runs"].lines(runs[-1:])[0], sep=" | ", flush=True)
    result["ratios"] = sorted(compare(o, runs), key=lambda row: [*map(str, row.values())])
    report.save(folder, NAME, result)


FIGURES = {"seconds": ".2f", "steps": ".0f", "loss": ".3f", "exposed_share": ".0%", "tau": ".3g", "late.seconds": ".2f"}
FIGURES |= {"step_seconds": ".3g", "allreduce_seconds": ".3g", "link_seconds": ".3g", "limit": ".2f"}
TABLES = {
    "runs": Summary("task rate_mbit method status reason", FIGURES),
    "ratios": Summary(
        "task rate_mbit target method against missed against_missed",
        {"ratio": ".2f", "low": ".2f", "high": ".2f", "p": ".2g"},
    ),
}


def main() -> None:
    o = report.read_options(TimeToLoss, f"bench.{NAME}")
    folder = o.out or Path("runs") / time.strftime(f"{NAME}-%Y%m%d-%H%M%S")
    file = folder / f"{NAME}.json"
    if file.exists():
        raise UserError(f"{folder} holds a measurement: choose another --out")
    if not o.throttle:
        require_namespaces()
    import torch._dynamo  # noqa: F401, the first optimizer of each forked rank would import it

    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder.mkdir(parents=True, exist_ok=True)
    result = report.header(f"bench.{NAME}", o, ["torch", *(peer.package for peer in PEERS.values())])
    with report.stoppable(f"what was measured is in {file}"):
        run_all(o, folder, result)
    for part, summary in TABLES.items():
        if result[part]:
            print(f"\n{part}\n\n{summary.table(result[part])}")
    print(f"\nwritten to {file}")


if __name__ == "__main__":
    launch(main)
