"""Measurements on a GPU: costs of boundaries and compression, and real loops during a slow collective.

Copies are timed in between, so that disturbances of the device affect both. "Bytes a parameter" converts the time of a
measurement to the bytes that a copy moves in it. A boundary that is one pass over memory moves `least` bytes.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench import boundary
from bench.gpu.command import Scope, check
from bench.gpu.slow import Slow, asleep, one_rank
from bench.report import flags
from core import CO2, CO2Config, CompressionConfig, LGrecoConfig, LocalSGD, make_method, outer
from core.buckets import Scalars, make_buckets
from core.outer import Merge, OuterStep, Rule, make_outer_step

# at a fixed step, so that runs compare
RECOMMENDED = CO2Config(outer_momentum=0.0, gap="none", merge="keep_local", delay="auto")
PASSES: dict[str, Callable[..., OuterStep]] = {"fast": make_outer_step, "plain": OuterStep}
PARAMETERS = 350_000_000
REPEATS = 7
COPY = 1 << 28  # elements: 1 GiB, which takes long enough to time
ASLEEP = 20_000_000  # cycles: about 10 ms, in which the host queues a thousand kernels
# bytes a float32 parameter: the norm reads d; the pass reads p, d, x, m and writes p, x, m, and d if it sends as well;
# keep sends before, which reads p and x and writes d and sent, and its pass reads sent
LEAST = {"restart": 36, "interpolate": 36, "keep_local": 52}


def beside_copies(scope: Scope, once: Callable[[], Any]) -> tuple[float, float]:
    """Median seconds of `once`, and median bytes a second that a copy moves in between (read and written).

    On a GPU, the host queues the work while the device sleeps, so that launches do not count.
    """
    n = scope(COPY, 1 << 16)
    source, target = (torch.randn(n, device=scope.device) for _ in range(2))
    took, copied = [], []
    for repeat in range(2 + scope(REPEATS, 2)):  # the first two warm up
        one = boundary.timed(lambda: target.copy_(source), scope.device, ASLEEP)
        other = boundary.timed(once, scope.device, ASLEEP)
        if repeat > 1:
            copied.append(one)
            took.append(other)
    return statistics.median(took), 8 * n / statistics.median(copied)


class CompiledOuterStep(outer.OuterStep):
    """core/outer.py's `update`, compiled by torch, to compare with the hand-written kernels."""

    def update(self, rule: outer.Rule) -> Tensor:
        return outer.combine_stats([compiled()(s, rule) for s in self.segments])


@functools.cache  # once for all buckets
def compiled() -> Any:
    return torch.compile(outer.update, dynamic=False)  # of unknown sizes some strided parameters do not compile


@torch.no_grad()
def state(params: list[torch.nn.Parameter]) -> tuple[Tensor, Tensor, Tensor]:
    """d and m of zeros, x the parameters: flat."""
    x = torch.cat([p.view(-1) for p in params])
    return torch.zeros_like(x), x, torch.zeros_like(x)


@check("costs")
def copy_bandwidth(scope: Scope) -> dict[str, float]:
    return {"GB/s, read and written": beside_copies(scope, lambda: None)[1] / 1e9}


CASES = [f"{merge}, {kind}" for merge in LEAST for kind in PASSES]
CASES += ["restart, compiled"] * torch.cuda.is_available()  # compiling takes a minute


@check("costs", CASES)
def a_boundarys_bytes_a_parameter(scope: Scope, case: str) -> dict[str, Any]:
    merge, _, kind = case.partition(", ")
    params = boundary.model(scope(PARAMETERS, 50_000), scope.device)
    d, x, m = state(params)
    sent = x.clone() if merge == "keep_local" else None
    one = CompiledOuterStep(params, d, x, m) if kind == "compiled" else PASSES[kind](params, d, x, m, sent)

    def once() -> None:
        if merge == "keep_local":
            one.take()
        c = outer.norm([d]) / len(d) ** 0.5
        one.run(
            Rule(0.5, 1.0, 1.0, 1.0, 1.0, delta_rms=c, merge=cast(Merge, merge), takes_difference=merge != "keep_local")
        )

    seconds, rate = beside_copies(scope, once)
    found = seconds * rate / len(d)
    figures = {"ms": 1e3 * seconds, "bytes": found, "least": LEAST[merge], "share of copy": LEAST[merge] / found}
    return figures | {"kernels": kernels(scope, once)} if scope.cuda else figures


def kernels(scope: Scope, once: Callable[[], Any]) -> int:
    """The number of kernels that a call queues on the device."""
    scope.sync()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        once()
        scope.sync()
    return sum(event.count for event in seen.key_averages() if event.device_type != torch.autograd.DeviceType.CPU)


@check("costs", ("bfloat16", "int8", "int4", "lgreco int4"))
def a_reductions_bytes_a_parameter(scope: Scope, case: str) -> dict[str, Any]:
    """Encoding, error feedback, decoding and averaging of one worker, both steps. L-GreCo includes its choices."""
    uniform = LGrecoConfig(rule="uniform", every=2, first=1)
    compression = (
        CompressionConfig("lgreco", like="int4", lgreco=uniform) if " " in case else CompressionConfig(cast(Any, case))
    )
    params = boundary.model(scope(PARAMETERS, 50_000), scope.device)
    scalars = Scalars({"steps": 1, "weight": 1})
    buckets = make_buckets(params, [], scalars.numel)
    scalars.attach(buckets[0].scalars)
    reducer, number = compression.reducer(buckets, scalars, 0, 1), 0
    queued: list[float] = []

    def once() -> None:
        nonlocal number
        scalars.set("steps", 1.0)
        scalars.set("weight", 1.0)
        began = time.perf_counter()
        for works, _ in reducer.stages(None, number):
            for work in works:
                work.wait()
        queued.append(time.perf_counter() - began)
        number += 1

    for bucket in buckets:
        bucket.payload.normal_(std=1e-3)
    seconds, rate = beside_copies(scope, once)
    figures = {
        "ms": 1e3 * seconds,
        "bytes": seconds * rate / buckets[0].numel,
        "host ms": 1e3 * statistics.median(queued),
    }
    return figures | {"kernels": kernels(scope, once)} if scope.cuda else figures


# -- a round during a slow collective -----------------------------------------------------------------------------

TAU = 8
WAYS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "local": lambda params: LocalSGD(params, TAU),
    "paper": lambda params: CO2(params, CO2Config.paper(tau=TAU)),
    "paper, int4": lambda params: CO2(params, CO2Config(tau=TAU, compression=CompressionConfig("int4"))),
    "recommended": lambda params: CO2(params, replace(RECOMMENDED, tau=TAU)),
    "recommended, int4": lambda params: CO2(
        params, replace(RECOMMENDED, tau=TAU, compression=CompressionConfig("int4"))
    ),
}


@check("costs", WAYS)
def a_round_beside_a_sleeping_collective_ms(scope: Scope, case: str) -> dict[str, float]:
    """A round during a slow collective: a kernel in the all-reduces' stream that sleeps for half a round's steps.

    host: the calling thread's time in the step() that closes a round. others: its time in every other step().
    """
    params = boundary.model(scope(PARAMETERS, 50_000), scope.device)
    optimizer = torch.optim.AdamW(params, 1e-4, fused=scope.cuda)
    for p in params:
        p.grad = torch.randn_like(p)
    compute = products(scope)
    step_ms = 1e3 * paced(scope, compute, optimizer)
    with one_rank(scope.device):
        method = WAYS[case](params)
        cycles = round(TAU / 2 * step_ms * cycles_a_ms(scope))
        method._reducer = Slow(method._reducer, lambda: asleep(scope.device, cycles, TAU / 2 * step_ms / 1e3))
        stats, closing, others = [], [], []
        for _ in range(TAU * scope(8, 4)):
            compute()
            optimizer.step()
            began = time.perf_counter()
            closed = method.step()
            (closing if closed else others).append(time.perf_counter() - began)
            stats += [method.stats] if closed else []
        scope.sync()
        seen = [s.as_dict() for s in stats[2:-1]]
        method.finish()
        method.close()
    median = {key: 1e3 * statistics.median(s[f"{key}_seconds"] for s in seen) for key in TIMES}
    host = {"host": 1e3 * statistics.median(closing[2:]), "others": 1e3 * statistics.median(others)}
    return {"step alone": step_ms} | median | host


TIMES = ("step", "allreduce", "exposed", "boundary", "merge")


def products(scope: Scope) -> Callable[[], None]:
    """A step's computation: matrix products of some milliseconds."""
    n, count = scope(8192, 128), scope(12, 2)
    dtype = torch.bfloat16 if scope.cuda else torch.float32
    a, b = (torch.randn(n, n, device=scope.device, dtype=dtype) / n**0.5 for _ in range(2))

    def once() -> None:
        for _ in range(count):
            torch.mm(a, b)

    return once


def paced(scope: Scope, compute: Callable[[], None], optimizer: torch.optim.Optimizer) -> float:
    """Seconds of a step without any method."""

    def once() -> None:
        compute()
        optimizer.step()

    return statistics.median([boundary.timed(once, scope.device) for _ in range(6)][2:])


def cycles_a_ms(scope: Scope) -> float:
    """Cycles of the sleeping kernel in a millisecond."""
    if not scope.cuda:
        return 1.0
    torch.cuda._sleep(1_000_000)
    return 10_000_000 / (1e3 * boundary.timed(lambda: torch.cuda._sleep(10_000_000), scope.device))


# -- real loops -------------------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]
METHODS = {
    "ddp": ["--method", "ddp"],
    "local": ["--method", "local"],
    "co2": ["--method", "co2", "--no_recommended"],
    "recommended": ["--method", "co2", "--recommended"],
}
SCRIPTS = {"vision.train": "digits_small", "language.train": "gpt2_pydoc_small"}
SAID = ("test_top1", "val_perplexity", "allreduce_seconds", "exposed_seconds")  # no speed: one worker


@check("loops", [f"{script}, {way}" for script in SCRIPTS for way in METHODS])
def train_script(scope: Scope, case: str) -> dict[str, float]:
    """Under torchrun, a process group of one worker, and with a trace."""
    script, way = case.split(", ")
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        settings = {"device": scope.device, "epochs": scope(4, 1), "checkpoint_every": 0, "out": f"{folder}/run"}
        command = [*torchrun, "-m", script, SCRIPTS[script], *METHODS[way], *flags(settings), "--trace"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-500:]}"
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        traced = any(Path(folder, "run").glob("*trace*"))
    assert traced or way == "ddp", "no trace was written"
    return {name: float(summary[name]) for name in SAID if name in summary}


# -- a loop beside a slow collective ------------------------------------------------------------------------------

LOOP_TAU, ROUNDS = 6, 8


@check("loops", [way for way in METHODS if way != "ddp"])
def gpt2_beside_a_sleeping_collective_ms_a_round(scope: Scope, case: str) -> dict[str, float]:
    """The tiny GPT-2 on Python's documentation. Its all-reduces first sleep for half a round, or not at all.

    A method that hides them takes about as long with the sleep as without.
    """
    from language.recipes import gpt2_pydoc_small
    from language.train import make_model, open_corpus

    recipe = gpt2_pydoc_small()
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    text = torch.from_numpy(corpus.train[: scope(200_000, 4000)].astype("int64"))
    config = replace(RECOMMENDED if case == "recommended" else CO2Config(), tau=LOOP_TAU)

    def loop(sleep_ms: float) -> tuple[float, float, float]:
        """Milliseconds of a round, the median of the last ones; the first and the last loss."""
        torch.manual_seed(0)
        model = make_model(recipe, corpus.pad).to(scope.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=scope.cuda)
        forward, method = make_method({"recommended": "co2"}.get(case, case), model, co2=config)
        if sleep_ms:
            cycles = round(sleep_ms * cycles_a_ms(scope))
            method._reducer = Slow(method._reducer, lambda: asleep(scope.device, cycles, sleep_ms / 1e3))
        losses, ended = [], []
        for step in range(LOOP_TAU * scope(ROUNDS, 4)):
            losses.append(train_step(forward, optimizer, windows(text, step, scope(64, 4)).to(scope.device)))
            if method.step():
                ended.append(time.perf_counter())
        scope.sync()
        method.finish()
        method.close()
        return 1e3 * (ended[-1] - ended[1]) / (len(ended) - 2), float(losses[0]), float(losses[-1])

    with one_rank(scope.device):
        alone, first, last = loop(0.0)
        asleep_for = alone / 2
        beside, *_ = loop(asleep_for)
    assert last < first, f"the loss went from {first:.3f} to {last:.3f}"
    figures = {"first loss": first, "last loss": last, "without": alone, "the sleep": asleep_for, "with it": beside}
    hidden = 1 - (beside - alone) / asleep_for
    assert not scope.cuda or case == "local" or hidden > 0.5, figures
    return figures | {"share hidden": hidden}


def windows(text: Tensor, step: int, count: int, context: int = 64) -> Tensor:
    """int64 [count, context + 1]."""
    random = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - context, (count, 1), generator=random)
    return text[starts + torch.arange(context + 1)]


def train_step(forward: Any, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    logits = forward(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
