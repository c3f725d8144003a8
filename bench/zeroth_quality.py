"""Fine-tuning a tiny GPT-2 with and without gradients, for bench/zeroth.py: learning rates chosen, losses over time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.cluster import Cluster, run_ranks
from bench.scaling import shape
from language.corpora import open_corpus, open_wikitext2
from language.recipes import LanguageRecipe, gpt2_pydoc_small, gpt2_zo_small
from language.train import make_objective, train
from training.run import Run

if TYPE_CHECKING:
    from bench.zeroth import ZerothBench

FAST = 10_000.0  # Mbit/s: no slow link
TUNED_AS = {"MeZO, one process": "zo"}  # the same steps


def fine_tune(recipe: LanguageRecipe, log: Path, wikitext: bool) -> None:
    """One rank: the train script's own loop."""
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    if wikitext:
        tokens = open_wikitext2(corpus)
        cut = len(tokens) * 4 // 5
        corpus = replace(corpus, train=tokens[:cut], val=tokens[cut:])
    with Run(recipe) as run:
        train(run, recipe, corpus, make_objective(recipe, corpus), {"val": corpus.val[: recipe.eval_tokens]})


def recipes(o: ZerothBench, base: Path) -> dict[str, tuple[int, LanguageRecipe]]:
    """Name -> workers, recipe."""
    common: dict[str, Any] = {"device": "cpu", "checkpoint_every": 0, "init_from": base, "timeout": 300.0}
    common |= {"epoch_steps": o.epoch_steps, "eval_every": 1, "eval_tokens": 1 << 14, "log_every": 5}
    zo = replace(gpt2_zo_small(), **common, epochs=o.epochs)
    fewer = max(1, o.epochs // 5)
    adam = replace(gpt2_pydoc_small(), **common, epochs=fewer, method="ddp", recommended=False)
    adam = replace(adam, optim=replace(adam.optim, warmup_steps=5))
    late = replace(zo, zeroth=replace(zo.zeroth, delay=1))
    co2 = replace(adam, method="co2", recommended=True, co2=replace(adam.co2.recommended(4), tau=5))
    return {
        "MeZO, one process": (1, zo),
        "zo": (4, zo),
        "zo, delay 1": (4, late),
        "ddp, AdamW": (4, adam),
        "co2": (4, co2),
    }


def base_run(folder: Path, o: ZerothBench) -> Path:
    """The run on Python's documentation whose model goes on; made where it is not there yet."""
    base = folder / "runs" / "base"
    if not base.exists():
        base.mkdir(parents=True)
        r = replace(gpt2_pydoc_small(), out=base, device="cpu", method="ddp", recommended=False, epochs=o.base_epochs)
        with Cluster(2, FAST) as cluster:
            run_ranks(fine_tune, cluster, 1, 2, r, base / "log.txt", False, timeout=1200)
    return base


def measured(
    cluster: Cluster, folder: Path, name: str, workers: int, recipe: LanguageRecipe, seed: int, lr: float
) -> dict[str, Any]:
    """A run, which is written to the folder: its losses over time and at the end, or why it failed."""
    folder.mkdir(parents=True)
    recipe = replace(recipe, out=folder, seed=seed, zeroth=replace(recipe.zeroth, seed=seed))
    recipe = replace(recipe, optim=replace(recipe.optim, lr=lr))
    row = {"method": name, "seed": seed, "lr": lr}
    try:
        run_ranks(fine_tune, cluster, 1, workers, recipe, folder / "log.txt", True, timeout=900)
    except (RuntimeError, TimeoutError) as error:
        return row | {"failed": str(error).strip().splitlines()[-1]}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return row | {
        "losses": [(line["seconds"], line["val_loss"]) for line in lines if "val_loss" in line],
        "final": summary["val_loss"],
        "steps": summary["steps"],
        "steps_per_second": summary["steps_per_second"],
        "bytes_a_step": summary["bytes_sent"] / summary["steps"],
    }


def slug(*parts: object) -> str:
    return "-".join(str(part).replace(", ", "-").replace(" ", "-") for part in parts)


def measure_tuning(o: ZerothBench, result: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Every learning rate of the grids, on a seed and a link of its own, which no figure of `quality` has."""
    base = base_run(folder, o)
    with Cluster(4, FAST) as cluster:
        for name, (workers, recipe) in recipes(o, base).items():
            for lr in (o.lrs if recipe.method == "zo" else o.adam_lrs) if name not in TUNED_AS else ():
                out = folder / "runs" / slug("tuning", name, f"lr{lr:g}")
                yield measured(cluster, out, name, workers, recipe, o.tuning_seed, lr)


def best_lr(tuning: list[dict[str, Any]], name: str) -> float | None:
    """Of the run that ended with the least loss; None where none ended."""
    own = [row for row in tuning if row["method"] == TUNED_AS.get(name, name)]
    ended = [(row["final"], row["lr"]) for row in own if math.isfinite(row.get("final", math.nan))]
    return min(ended)[1] if ended else None


def measure_quality(o: ZerothBench, result: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    base = base_run(folder, o)
    with Cluster(4, FAST) as cluster:
        for seed in o.seeds:
            for rate in o.rates:
                shape(cluster, rate, result["verified_mbit"])
                for name, (workers, recipe) in recipes(o, base).items():
                    if workers == 1 and rate != o.rates[0]:
                        continue  # it has no link
                    usual = o.lr if recipe.method == "zo" else o.adam_lr
                    lr = best_lr(result["tuning"], name) if "tuning" in result else usual
                    row = {"rate_mbit": rate if workers > 1 else None}
                    if lr is None:
                        yield row | {"method": name, "seed": seed, "failed": "no learning rate of the grid trains it"}
                        continue
                    out = folder / "runs" / slug(name, f"{rate:g}mbit", f"seed{seed}")
                    yield row | measured(cluster, out, name, workers, recipe, seed, lr)
