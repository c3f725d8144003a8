"""Real loops: the train scripts on the device, and a small GPT-2 on text beside a slow collective."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu.command import Scope, check
from bench.gpu.costs import RECOMMENDED, cycles_a_ms
from bench.gpu.slow import Slow, asleep, one_rank
from bench.trainings import flags
from core import CO2Config, make_method

ROOT = Path(__file__).parents[2]
WAYS = {
    "ddp": ["--method", "ddp"],
    "local": ["--method", "local"],
    "co2": ["--method", "co2", "--no_recommended"],
    "recommended": ["--method", "co2", "--recommended"],
}
SCRIPTS = {"vision.train": "digits_small", "language.train": "gpt2_pydoc_small"}
SAID = ("test_top1", "val_perplexity", "allreduce_seconds", "exposed_seconds")  # no speed: one worker


@check("loops", [f"{script}, {way}" for script in SCRIPTS for way in WAYS])
def train_script(scope: Scope, case: str) -> dict[str, float]:
    """Under torchrun, a process group of one worker, and with a trace."""
    script, way = case.split(", ")
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        settings = {"device": scope.device, "epochs": scope(4, 1), "checkpoint_every": 0, "out": f"{folder}/run"}
        command = [*torchrun, "-m", script, SCRIPTS[script], *WAYS[way], *flags(settings), "--trace"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"status {done.returncode}: {done.stderr[-500:]}"
        summary = json.loads(Path(folder, "run", "summary.json").read_text())
        traced = any(Path(folder, "run").glob("*trace*"))
    assert traced or way == "ddp", "no trace was written"
    return {name: float(summary[name]) for name in SAID if name in summary}


# -- a loop beside a slow collective ------------------------------------------------------------------------------

TAU, ROUNDS = 6, 8


@check("loops", [way for way in WAYS if way != "ddp"])
def gpt2_beside_a_sleeping_collective_ms_a_round(scope: Scope, case: str) -> dict[str, float]:
    """The tiny GPT-2 on Python's documentation, whose reductions first sleep for half a round, or not at all.

    A method that hides them takes about as long with the sleep as without.
    """
    from language.recipes import gpt2_pydoc_small
    from language.train import make_model, open_corpus

    recipe = gpt2_pydoc_small()
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    text = torch.from_numpy(corpus.train[: scope(200_000, 4000)].astype("int64"))
    config = replace(RECOMMENDED if case == "recommended" else CO2Config(), tau=TAU)

    def loop(sleep_ms: float) -> tuple[float, float, float]:
        """Milliseconds of a round, the median of the last ones; the first and the last loss."""
        torch.manual_seed(0)
        model = make_model(recipe, corpus.pad).to(scope.device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=scope.cuda)
        forward, method = make_method({"recommended": "co2"}.get(case, case), model, co2=config)
        if sleep_ms:
            cycles = round(sleep_ms * cycles_a_ms(scope))
            method.reducer = Slow(method.reducer, lambda: asleep(scope.device, cycles, sleep_ms / 1e3))
        losses, ended = [], []
        for step in range(TAU * scope(ROUNDS, 4)):
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
