"""samples/s of real processes at unlike speeds, beside what the simulator predicts of them.

python -m bench.uneven.real [--workers 4] [--rate 200] [--tau 12] [--scenarios half stalls] [--out FOLDER]

A worker is a node, a network namespace of its own; with --throttle all share the loopback device and collectives are
held back in software. Computing is bench.scaling's stand-in; a slow worker's steps are paced more slowly, and a stalled
one sleeps. The constants of the link are those that bench.simulator fits to results/scaling.json: none is of this run.
Writes uneven_real.json and uneven_real.md.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import report
from bench.cluster import run_ranks
from bench.report import Asked, require, require_company
from bench.scaling import TIMEOUT, run_round
from bench.simulator import calibrate
from bench.simulator.events import SSP, Rule, simulate
from bench.standin import BYTES, LAYERS, LEARNING_RATE, Pacer, StandIn, Trainer, digits
from bench.trainings import network, of_link
from bench.uneven.train import SCENARIOS, STALENESS
from core import CO2Config
from core.groups import ring_bytes
from core.methods import make_method
from core.rounds import Rounds
from core.stats import RoundStats
from core.testing.link import ThrottledLink
from training.script import launch


@dataclass
class Update:
    """An all-reduce on its way. own: what this worker has put in, [n]; total: of all workers, once it has landed."""

    own: Tensor
    total: Tensor
    work: dist.Work | None
    sent_at: float
    there_at: float

    def landed(self) -> bool:
        return (self.work is None or self.work.is_completed()) and time.perf_counter() >= self.there_at

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        time.sleep(max(0.0, self.there_at - time.perf_counter()))
        return self.total


@Rounds.register  # for bench/standin.py: what it waits for is given back
class StaleSync:
    """Every tau local steps, a clock, a worker sends what they have moved, over the number of workers, and goes on from
    all updates that have arrived and its own. It begins clock c once the updates of all clocks before c - staleness
    are there (Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS
    2013).

    There is no server: the updates of one clock are summed by an all-reduce, which lands once the slowest worker has
    sent. So a worker hears nothing of a fast peer's clock before that, which SSP allows and a server improves on; when
    it must wait is the same. params: float32, equal on all workers from here on. link: holds collectives back.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        tau: int,
        staleness: int,
        link: ThrottledLink | None = None,
        timeout: float = 120.0,
    ):
        self.params, self.tau, self.staleness, self.link = list(params), tau, staleness, link
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.group = dist.new_group(timeout=timedelta(seconds=timeout)) if self.world_size > 1 else None
        self.server = nn.utils.parameters_to_vector(self.params).detach().clone()
        if self.world_size > 1:
            dist.broadcast(self.server, src=0)
        self.on_the_way: deque[Update] = deque()
        self.steps, self.stats = 0, RoundStats()
        self._go_on()

    @torch.no_grad()
    def step(self) -> bool:
        """Call after every optimiser step; True when a clock has ended."""
        self.steps += 1
        if self.steps % self.tau:
            return False
        own = (nn.utils.parameters_to_vector(self.params) - self.begun) / self.world_size
        self._send(own)
        arrived = time.perf_counter()
        while self.on_the_way and (len(self.on_the_way) > self.staleness or self.on_the_way[0].landed()):
            self._land()
        self.stats.exposed_seconds = time.perf_counter() - arrived
        self._go_on()
        return True

    def finish(self) -> None:
        """Waits for all that is on its way; all workers, after as many clocks each, then hold the same."""
        while self.on_the_way:
            self._land()
        self._go_on()

    def close(self) -> None:
        """Leaves the process group. Only after finish()."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    def _send(self, own: Tensor) -> None:
        total, now = own.clone(), time.perf_counter()
        work = dist.all_reduce(total, group=self.group, async_op=True) if self.group is not None else None
        self.stats.bytes_sent = ring_bytes(total.nbytes, self.world_size)
        there_at = self.link.reserve(self.stats.bytes_sent) if self.link is not None else now
        self.on_the_way.append(Update(own, total, work, now, there_at))

    def _land(self) -> None:
        update = self.on_the_way.popleft()
        self.server += update.wait()
        self.stats.allreduce_seconds = time.perf_counter() - update.sent_at

    @torch.no_grad()
    def _go_on(self) -> None:
        """From what has arrived and this worker's own updates."""
        self.begun = self.server + sum((update.own for update in self.on_the_way), torch.zeros_like(self.server))
        nn.utils.vector_to_parameters(self.begun.clone(), self.params)


FITTED = Path("results/scaling.json")  # of bench.scaling: what the link's constants are fitted to
METHODS: dict[str, tuple[str, Rule]] = {
    "ddp": ("ddp", Rule()),
    "local": ("local", Rule()),
    **{f"ssp{s}": (SSP, Rule(staleness=s)) for s in STALENESS},
    "co2_even": ("co2", Rule()),
    "co2_by_speed": ("co2", Rule(by_speed=True)),
}


def warm(name: str) -> int:
    """Rounds until the fastest worker is as far ahead as it may be, or by_speed knows the speeds."""
    rule = METHODS[name][1]
    return max(2 + 2 * rule.staleness, 6 * rule.by_speed)


@dataclass(frozen=True)
class Real(Asked):
    """What to measure."""

    workers: int = 4
    rate: float = 200.0
    """Of the links, Mbit/s."""
    tau: int = 12
    """Of all but ddp."""
    scenarios: tuple[str, ...] = tuple(SCENARIOS)
    """Among even, half and stalls."""
    methods: tuple[str, ...] = tuple(METHODS)
    repeats: int = 3
    rounds: int = 20
    """Measured, behind those of warm-up; of ddp as many steps as they have."""
    step_ms: float = 40.0
    batch: int = 8
    """Samples per step and worker."""
    seed: int = 0
    throttle: bool = False
    """Hold collectives back in software instead of making network namespaces."""

    def check(self) -> None:
        require(self, once="scenarios methods", scenarios=SCENARIOS, methods=METHODS)
        require(self, positive="rate tau repeats rounds step_ms batch")
        require_company(self)


# -- one worker -------------------------------------------------------------------------------------------------


class Stalling(Trainer):
    """A trainer some of whose steps stall. chance: of a step; seconds: what it then takes more."""

    chance = seconds = 0.0
    random = random.Random()

    def step(self) -> Any:
        if self.random.random() < self.chance:
            time.sleep(self.seconds)
            self.pacer.stalled(self.seconds)
        return super().step()


def work(o: Real, scenario: str, data: tuple[Tensor, Tensor]) -> list[dict[str, Any]]:
    """This worker's rows: of each repeat and method its steps and seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rows = [measure(o, scenario, data, name, repeat) for repeat in range(o.repeats) for name in o.methods]
    dist.barrier()
    dist.destroy_process_group()
    return rows


def measure(o: Real, scenario: str, data: tuple[Tensor, Tensor], name: str, repeat: int) -> dict[str, Any]:
    rank, s, seed = dist.get_rank(), SCENARIOS[scenario], 1000 * o.seed + repeat
    pacer = Pacer(o.step_ms / 1e3 * dict(enumerate(s.slow)).get(rank, 1.0), LAYERS)
    torch.manual_seed(seed)
    model, method = make(o, name, StandIn(pacer))
    trainer = Stalling(model, method, pacer, data, o.batch, seed=seed * 1_000_003 + rank)
    trainer.chance, trainer.seconds = s.stall_chance, s.stall * o.step_ms / 1e3
    trainer.random = random.Random(f"{seed} {rank}")
    each = o.tau if name == "ddp" else 1
    dist.barrier()
    trainer.restart()
    for _ in range(warm(name) * each):
        run_round(trainer)
    start = time.perf_counter()
    rounds = [run_round(trainer) for _ in range(o.rounds * each)]
    seconds = time.perf_counter() - start
    method.finish()
    method.close()
    steps = sum(len(r.compute) for r in rounds)
    return {
        **{"scenario": scenario, "method": name, "repeat": repeat, "rank": rank, "steps": steps, "seconds": seconds},
        "samples_per_second": o.batch * steps / seconds,
        "exposed_share": sum(r.wait for r in rounds) / seconds,
        "step_seconds": statistics.median(each for r in rounds for each in r.compute),
    }


def make(o: Real, name: str, model: StandIn) -> tuple[Any, Any]:
    """The method of that name around a model; every worker starts from rank 0's parameters."""
    method, rule = METHODS[name]
    link = ThrottledLink(o.rate) if o.throttle else None
    if method == SSP:
        return model, StaleSync(model.parameters(), o.tau, rule.staleness, link, TIMEOUT)
    config = CO2Config(tau=o.tau, steps="by_speed" if rule.by_speed else "even")
    return make_method(method, model, co2=config, lr=lambda: LEARNING_RATE, timeout=TIMEOUT, link=link)


# -- the prediction ---------------------------------------------------------------------------------------------


def predict(o: Real, constants: calibrate.Constants, scenario: str, name: str) -> float:
    """samples/s of all workers; repeats are averaged by a longer run."""
    method, rule = METHODS[name]
    s, step = SCENARIOS[scenario], o.step_ms / 1e3
    known = "co2" if method == SSP else method
    row = {"method": known, "workers": o.workers, "rate_mbit": o.rate, "compute": "stand-in"}
    base = calibrate.work_of(row, replace(constants, step=step), BYTES)
    there = replace(base, slow=s.slow[: o.workers], stall_chance=s.stall_chance, stall=s.stall * step)
    rounds = 10 * o.rounds * (o.tau if name == "ddp" else 1)
    outcome = simulate(method, there, o.tau, rounds + warm(name), seed=o.seed, warmup=warm(name), rule=rule)
    return o.workers * o.batch * outcome.steps / outcome.seconds


def markdown(result: dict[str, Any]) -> str:
    """A line for each scenario and method."""
    o, lines = result["options"], []
    for cell in result["cells"]:
        values = cell["samples_per_second"]
        middle = statistics.median(values)
        spread = report.Spread.of(values).show(",.0f")
        error = f"{cell['predicted'] / middle - 1:+.1%}"
        lines.append([cell["scenario"], cell["method"], spread, f"{cell['predicted']:,.0f}", error])
    errors = [abs(c["predicted"] / statistics.median(c["samples_per_second"]) - 1) for c in result["cells"]]
    notes = [
        f"samples/s of {o['workers']} workers over {o['rate']:g} Mbit/s ({result['link']}), median of {o['repeats']} "
        f"repeats (least to greatest); tau {o['tau']}, paced steps of {o['step_ms']:g} ms, {BYTES / 1e6:.1f} MB.",
        *(f"{name}: {SCENARIOS[name].about}." for name in o["scenarios"]),
        "predicted: by bench/simulator, its link fitted to results/scaling.json; nothing of this run is known to it. "
        f"Median error {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
        "ssp1, ssp3, ssp8: stale synchronous parallel of that staleness, its clocks as long as the others' rounds, its "
        "updates by all-reduces. co2: the paper's settings.",
        f"{report.source(result)}.",
    ]
    titles = ["scenario", "method", "measured, samples/s", "predicted", "error"]
    return f"{report.table(titles, lines)}\n\n{report.bullets(notes)}\n"


# -- the command ------------------------------------------------------------------------------------------------


def run(o: Real, result: dict[str, Any]) -> None:
    """Measures every scenario; predicts each of its rows."""
    data = calibrate.read(FITTED)
    on_time = [row for row in data["rows"] if not row.get("late")]
    constants = calibrate.fit(calibrate.split(on_time)[0], data["model"]["bytes"])
    result |= of_link(o.throttle) | {"rows": [], "cells": []}
    samples, step = digits(), o.step_ms / 1e3
    with network(o.throttle, o.workers, o.rate) as cluster:
        if cluster is not None:
            cluster.shape(o.rate, result["verified_mbit"])
        for scenario in o.scenarios:
            slowest = max([1.0, *SCENARIOS[scenario].slow, *[3.0] * bool(SCENARIOS[scenario].stall_chance)])
            steps = o.repeats * sum(o.rounds + warm(name) for name in o.methods) * o.tau
            limit = 120 + 4 * steps * (slowest * step + BYTES * 16e-6 / o.rate)
            ranks = run_ranks(work, cluster, 1, o.workers, o, scenario, samples, timeout=limit)
            result["rows"] += [row for rows in ranks for row in rows]
            for name in o.methods:
                mine = [row for row in result["rows"] if (row["scenario"], row["method"]) == (scenario, name)]
                speeds = [sum(r["samples_per_second"] for r in mine if r["repeat"] == i) for i in range(o.repeats)]
                cell = {"scenario": scenario, "method": name, "samples_per_second": speeds}
                result["cells"].append(cell | {"predicted": predict(o, constants, scenario, name)})
                print(f"{scenario}, {name}: {statistics.median(speeds):,.0f} samples/s", flush=True)


def main() -> None:
    measure = lambda o, session: run(o, session.result)  # noqa: E731
    report.run(Real, "uneven_real", measure, markdown, forks=lambda o: not o.throttle, module="bench.uneven.real")


if __name__ == "__main__":
    launch(main)
