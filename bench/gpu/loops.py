"""Real loops: the train scripts on the device, a small GPT-2 on text beside a slow collective, with a trace; and GPT-2
Small, 124 M parameters, with the methods of bench.loss, all workers in one process on the device."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.gpu.checks import NotRun, Scope, check, one_line, one_rank, sync
from bench.gpu.costs import cycles_a_ms
from bench.gpu.equal import RECOMMENDED, ROOT, end
from bench.gpu.hidden import Slow, asleep
from bench.trainings import flags
from core import CO2Config, make_method

WAYS = {
    "ddp": ["--method", "ddp"],
    "local": ["--method", "local"],
    "co2": ["--method", "co2", "--no_recommended"],
    "recommended": ["--method", "co2", "--recommended"],
}
SCRIPTS = {"vision.train": "digits_small", "language.train": "gpt2_pydoc_small"}
SAID = ("test_top1", "val_perplexity", "perplexity", "allreduce_seconds", "exposed_seconds")  # no speed: one worker


@check("loops", cases=[f"{script}, {way}" for script in SCRIPTS for way in WAYS], limit=240.0)
def train_script(scope: Scope, case: str) -> dict[str, float]:
    """Under torchrun, a process group of one worker, and with a trace."""
    script, way = case.split(", ")
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        settings = {"device": scope.device, "epochs": scope(4, 1), "checkpoint_every": 0, "out": f"{folder}/run"}
        command = [*torchrun, "-m", script, SCRIPTS[script], *WAYS[way], *flags(settings), "--trace"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"status {done.returncode}: {one_line(done.stderr, 500)}"
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        traced = any(Path(folder, "run").glob("*trace*"))
    assert traced or way == "ddp", "no trace was written"
    return {name: float(summary[name]) for name in SAID if name in summary}


# -- a loop beside a slow collective ------------------------------------------------------------------------------

TAU, ROUNDS, TRACED = 6, 8, 2
UNDER, ELSE = "computing under the sleep", "computing else"


@check("loops", cases=WAYS, limit=240.0)
def gpt2_beside_a_sleeping_collective(scope: Scope, case: str) -> dict[str, Any]:
    """The tiny GPT-2 on Python's documentation. The shares of the sleeping kernel's time, and of the rest, in which
    other streams computed: close ones say that it is hidden, 0 under it that it blocks. From the trace of two rounds,
    which OUT/gpu_trace_METHOD.json.gz keeps. ddp has none to hide."""
    from language.recipes import gpt2_pydoc_small
    from language.train import make_model, make_objective, open_corpus

    recipe = gpt2_pydoc_small()
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    objective = make_objective(recipe, corpus)
    torch.manual_seed(0)
    model = make_model(recipe, corpus.pad).to(scope.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=scope.cuda)
    text = torch.from_numpy(corpus.train[: scope(200_000, 4000)].astype("int64"))
    assert objective is not None
    config = replace(RECOMMENDED, tau=TAU, delay="auto") if case == "recommended" else CO2Config(tau=TAU)
    with one_rank(scope):
        name = {"recommended": "co2"}.get(case, case)
        forward, method = make_method(name, model, co2=CO2Config(tau=TAU) if name != "co2" else config)
        if case != "ddp":
            cycles = round(scope(20, 1) * cycles_a_ms(scope))
            method.reducer = Slow(method.reducer, lambda: asleep(scope, cycles, 1e-3))
        losses, trace = [], None
        for step in range(TAU * scope(ROUNDS, 4)):
            if step == TAU * (scope(ROUNDS, 4) - TRACED):
                trace = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + scope.cuda])
                trace.start()
            losses.append(train_step(forward, optimizer, windows(text, step, scope(64, 4)).to(scope.device)))
            method.step()
        sync(scope)
        assert trace is not None
        trace.stop()
        shares = overlap(kept(scope, trace, case)) if scope.cuda and case != "ddp" else {}
        end(method)
    first, last = float(losses[0]), float(losses[-1])
    assert last < first, f"the loss went from {first:.3f} to {last:.3f}"
    hides = not shares or case == "local" or shares[UNDER] > shares[ELSE] / 2
    assert hides, f"{shares[UNDER]:.1%} of the sleep computed under, {shares[ELSE]:.1%} of the rest"
    return {"first loss": first, "last loss": last} | shares


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


def kept(scope: Scope, trace: profile, case: str) -> list[dict[str, Any]]:
    """The trace's events, once it lies beside the report, packed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        text = path.read_bytes()
    (scope.out / f"gpu_trace_{case}.json.gz").write_bytes(gzip.compress(text))
    return json.loads(text)["traceEvents"]


def overlap(events: Iterable[dict[str, Any]], slow: str = "spin") -> dict[str, float]:
    """The shares of the time of kernels named `slow` (torch.cuda._sleep's), and of the rest, in which a kernel ran in
    another stream. A sleep after which nothing comes is left out: there was nothing to run beside it."""
    ran = [e for e in events if e.get("cat") == "kernel"]
    streams = {e["args"]["stream"] for e in ran if slow in e["name"].lower()}
    busy = joined([(e["ts"], e["ts"] + e["dur"]) for e in ran if e["args"]["stream"] not in streams])
    begin, end = (busy[0][0], busy[-1][1]) if busy else (0.0, 0.0)
    slept = [(e["ts"], e["ts"] + e["dur"]) for e in ran if slow in e["name"].lower()]
    slept = [(max(start, begin), stop) for start, stop in slept if begin < stop < end]
    if not slept:
        raise NotRun("the trace has no sleeping kernel with work behind it")
    under = sum(max(0.0, min(stop, b) - max(start, a)) for start, stop in slept for a, b in busy)
    asleep_for = sum(stop - start for start, stop in slept)
    beside = (sum(b - a for a, b in busy) - under) / (end - begin - asleep_for)
    return {UNDER: under / asleep_for, ELSE: beside}


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times without overlaps, in order."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


METHODS = {
    "ddp": "ddp",
    "local": "local",
    "local over int4": "local:wire=int4",
    "paper": "co2:beta=0.5",
    "recommended": "co2:merge=keep,gap=none,beta=0,delay=1,wire=int4",
}
SEARCH = 1000, 24, 4  # steps, tau, workers


@check("search", cases=METHODS, limit=590.0)
def loss_of_gpt2_small(scope: Scope, case: str) -> dict[str, Any]:
    """Four workers, tau 24, one learning rate for all, one seed; the loss is that of four held-out books."""
    small = ("digits", 3, 1, 2) if scope.tiny else ("gpt2_small", *SEARCH)
    if not scope.cuda and not scope.tiny:
        raise NotRun("1,000 steps of 124 M parameters need a CUDA device")
    task, steps, tau, workers = small
    rows = scope.out / "gpu_search.jsonl"
    settings = {"tasks": task, "steps": steps, "tau": tau, "workers": workers, "seeds": 0, "lr_factors": 1}
    settings |= {"methods": METHODS[case], "configurations": 2, "rows": rows, "device": scope.device}
    if (row := search_row(rows, METHODS[case], steps, scope.device)) is None:
        command = [sys.executable, "-m", "bench.loss", *flags(settings)]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if "no Gutenberg books in" in done.stderr:
            raise NotRun(one_line(done.stderr))
        assert done.returncode == 0, f"status {done.returncode}: {one_line(done.stderr, 500)}"
        row = search_row(rows, METHODS[case], steps, scope.device)
    assert row is not None, f"{rows} has no row of the search that ended"
    assert row["loss"] is not None, "diverged"
    figures = {"held-out loss": row["loss"], "before the end's drain": row["loss_of_mean"], "seconds": row["seconds"]}
    return figures | {"commit": row["commit"]}


def search_row(rows: Path, asked: str, steps: int, device: str) -> dict[str, Any] | None:
    """The search's run of a method with seed 0, where there is one, of whatever commit, which the row names.
    bench.loss itself would take a minute to make its tokens, and may have added runs with other seeds."""
    found = [json.loads(text) for text in rows.read_text().splitlines()] if rows.exists() else []
    choices = [row for row in found if row["kind"] == "choice" and (row["asked"], row["steps"]) == (asked, steps)]
    keys = ("task", "steps", "method", "options", "workers")
    runs = [row for row in found if row["kind"] == "run" and row["device"] == device and row["seed"] == 0 and choices]
    runs = [row for row in runs if all(row[k] == choices[-1][k] for k in keys)]
    return runs[-1] if runs else None
