"""The loss that documents end with, by how they are dealt over the workers:

    python -m bench.lengths_loss [--out FOLDER]

A tiny GPT-2 is trained by CO2 on paragraphs of Gutenberg's books, in processes of this machine. --balance tokens and
round have the same rows of documents without attention between them, and differ in who gets which; --balance none has
windows of the same text. All are evaluated on windows of held-out paragraphs.
"""

from __future__ import annotations

import itertools
import json
import lzma
import os
import re
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.report import Asked, mean_sd, require, require_company
from core import CO2Config
from core.testing import run_distributed
from language.corpora import gutenberg_file
from language.data import CausalObjective, load_corpus
from language.lengths.laws import PARAGRAPH
from language.prepare import write_corpus
from language.recipe import LanguageRecipe
from language.recipes import gpt2_pydoc_small
from language.train import train
from training.run import Run
from training.script import launch

WAYS = ("tokens", "round", "none")
CHARACTERS = 4_000_000  # of the books' beginning
HELD_OUT = 100  # one paragraph in so many


@dataclass(frozen=True)
class Bench(Asked):
    """Losses of each way to deal, for each seed."""

    ways: tuple[str, ...] = WAYS
    seeds: tuple[int, ...] = (0, 1, 2)
    workers: int = 4
    tau: int = 6
    steps: int = 120
    context: int = 256
    batch_size: int = 4
    """Contexts a step, over all workers."""
    vocab_size: int = 2048
    lr: float = 4e-3

    def check(self) -> None:
        require_company(self)
        require(self, once="ways seeds", ones="tau steps context batch_size vocab_size", ways=WAYS)


def main() -> None:
    report.run(Bench, "lengths_loss", measure, text, packages=("torch", "transformers"))


def measure(bench: Bench, session: report.Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        session.result["text"] = write_paragraphs(Path(folder, "text"), bench.vocab_size)
        session.result["rows"] = run_distributed(one_worker, bench.workers, bench, folder, timeout=24 * 3600)[0]


def write_paragraphs(folder: Path, vocab_size: int) -> dict[str, Any]:
    """A corpus whose documents are paragraphs; what its meta.json holds."""
    with lzma.open(gutenberg_file(), "rt") as file:
        found = [part.strip() for part in re.split(PARAGRAPH, file.read(CHARACTERS))]
    found = [part for part in found if part]
    held = found[::HELD_OUT]
    folder.mkdir()
    return write_corpus([p for i, p in enumerate(found) if i % HELD_OUT], held, folder, vocab_size, ["paragraphs"])


def recipe_of(bench: Bench, way: str, seed: int, out: Path) -> LanguageRecipe:
    small = gpt2_pydoc_small()
    return replace(
        small,
        name="paragraphs",
        recommended=False,
        balance=way,
        seed=seed,
        context=bench.context,
        batch_size=bench.batch_size,
        vocab_size=bench.vocab_size,
        epoch_steps=bench.steps,
        epochs=1,
        optim=replace(small.optim, lr=bench.lr),
        co2=CO2Config(tau=bench.tau, outer_momentum=0.0),  # in the paper's order: no mean's arrival changes the result
        device="cpu",
        checkpoint_every=0,
        out=out,
    )


def one_worker(rank: int, workers: int, bench: Bench, folder: str) -> list[dict[str, Any]]:
    """A row for each run: all of them one after the other, so that processes start once."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    corpus, rows = load_corpus(Path(folder, "text")), []
    for seed, way in itertools.product(bench.seeds, bench.ways):
        recipe = recipe_of(bench, way, seed, Path(folder, f"{way}-{seed}"))
        with Run(recipe) as run:
            train(run, recipe, corpus, CausalObjective(recipe.context), {"val": corpus.val})
        if rank == 0:
            summary = json.loads((recipe.folder / "summary.json").read_text())
            rows.append({"way": way, "seed": seed} | {key: summary[key] for key in ("val_loss", "val_tokens", "steps")})
            print(json.dumps(rows[-1]), flush=True)
    return rows


NOTE = f"""\
# The loss where documents are dealt whole

{{table}}

{{verdict}}

- Model: a GPT-2 of 4 layers and width 128, {{positions}} positions. Method: CO2 in the paper's order, {{size}}.
- Data: {{paragraphs}} from the beginning of Gutenberg's books. One in {HELD_OUT} is held out. Held-out windows run
  across paragraphs, as those of `none` do in training, and no rows of the others.
- Seeds: {{seeds}}. No time was measured. {{source}}.
"""


def text(result: dict[str, Any]) -> str:
    o, rows = result["options"], result["rows"]
    losses = {way: [row["val_loss"] for row in rows if row["way"] == way] for way in o["ways"]}
    table = report.table(
        ("--balance", "held-out loss, nats a token", *(f"seed {seed}" for seed in o["seeds"])),
        ([way, mean_sd(found, ".4f"), *(f"{loss:.4f}" for loss in found)] for way, found in losses.items()),
    )
    meta = result["text"]["train"]
    size = f"{o['workers']} workers, tau {o['tau']}, {o['steps']} steps of {o['batch_size'] * o['context']:,} tokens"
    return NOTE.format(
        table=table,
        verdict=verdict(losses),
        size=size,
        paragraphs=f"{meta['documents']:,} paragraphs of {meta['tokens']:,} tokens",
        positions=o["context"],
        seeds=len(o["seeds"]),
        source=report.source(result),
    )


def verdict(losses: dict[str, list[float]]) -> str:
    """Whether round ends where tokens does, by the seeds' pairs."""
    if not {"tokens", "round"} <= losses.keys():
        return "tokens and round were not both run."
    pairs = [b - a for a, b in zip(losses["tokens"], losses["round"], strict=True)]
    deviation, *spreads = (
        statistics.stdev(found) if len(found) > 1 else 0.0 for found in (pairs, losses["tokens"], losses["round"])
    )
    mean, spread = statistics.fmean(pairs), max(spreads)
    found = "equal within that" if abs(mean) <= spread else "lower" if mean < 0 else "higher"
    return (
        f"Round minus tokens: {mean:+.4f} ± {deviation:.4f} over the pairs of a seed. A way's seeds spread by up to "
        f"{spread:.4f}: round ends {found}."
    )


if __name__ == "__main__":
    launch(main)
