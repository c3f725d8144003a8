"""Runs of language.train whose islands split their documents, beside runs of whole ones; and what is refused."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from core import CO2Config
from core.errors import UserError
from core.testing import run_distributed
from language.lengths.rings import Rings, measured
from language.recipes import LanguageRecipe, RingsConfig, gpt2_pydoc_small
from tests.problems import flat
from training.run import Run

END, STEPS = 0, 11
SPLIT = RingsConfig(costs=(1.0, 0.0, 0.0, 0.0))  # attention alone costs anything, and hops are free
SIZES = {"vocab_size": 64, "context": 80, "batch_size": 4, "epoch_steps": STEPS, "epochs": 1}
WHOLE = replace(gpt2_pydoc_small(), **SIZES, balance="round", crossing=40.0, recommended=False, log_every=2)
WHOLE = replace(WHOLE, device="cpu", optim=replace(WHOLE.optim, warmup_steps=2), co2=CO2Config(tau=3))
ISLANDS = replace(WHOLE, balance="rings", rings=SPLIT, per_node=2)
BY_DDP = {"method": "ddp", "accumulate": 2}
Trained = tuple[Tensor, list[float]]  # parameters at the end, and the training losses that were logged


def corpus():
    """300 documents of random tokens, some of them longer than the model's positions."""
    from language.data import Corpus

    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(3.3, 1.0, 300).astype(int) + 2, 200)
    tokens = rng.integers(1, 64, lengths.sum()).astype(np.uint16)
    tokens[np.cumsum(lengths) - 1] = END
    return Corpus(Path("none"), tokens, tokens[:161], 64, END, None, None, None, None, None)


def trained(rank: int, ranks: int, folder: str, jobs: dict[str, LanguageRecipe]) -> dict[str, Trained]:
    """Runs of a GPT-2 in float64; a job that ends in "stopped" does so after 5 steps."""
    from language import train
    from language.model import GPT2_SIZES
    from tests.e2e.test_language import rows, stop_after

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    GPT2_SIZES["gpt2_tiny"] |= {"n_layer": 2, "n_embd": 32}
    found, text = {}, corpus()
    for name, recipe in jobs.items():
        recipe = replace(recipe, out=recipe.out or Path(folder, name))
        with Run(recipe) as run:
            if name.endswith("stopped"):
                stop_after(run, 5)
            model = run.shard(train.initial(recipe, None).double())
            train.learn(run, recipe, model, train.TextTask(text, train.make_objective(recipe, text), text.val, {}))
        found[name] = flat(model.parameters()), [r["train_loss"] for r in rows(recipe.folder) if "train_loss" in r]
    return found


def assert_alike(found: list[dict[str, Trained]], expected: Trained) -> None:
    """On all ranks, for all runs: parameters, and losses, which the first rank has logged."""
    for of_rank in found:
        for params, losses in of_rank.values():
            torch.testing.assert_close(params, expected[0], rtol=0, atol=1e-10)
            assert losses == pytest.approx(expected[1], abs=1e-10)


def test_an_island_that_splits_its_documents_trains_as_one_worker(tmp_path: Path):
    whole = run_distributed(trained, 1, str(tmp_path), {"whole": replace(WHOLE, **BY_DDP)}, timeout=120)
    split = run_distributed(trained, 2, str(tmp_path), {"split": replace(ISLANDS, **BY_DDP)}, timeout=120)
    assert_alike(split, whole[0]["whole"])


@pytest.mark.slow
def test_islands_train_as_as_many_workers_also_when_stopped_and_resumed(tmp_path: Path):
    folder, halves = str(tmp_path), tmp_path / "halves"
    (expected, _) = run_distributed(trained, 2, folder, {"whole": WHOLE}, timeout=120)
    jobs = {
        "split": ISLANDS,
        "measured": replace(ISLANDS, rings=RingsConfig()),
        "little room": replace(ISLANDS, rings=RingsConfig(room=100)),
        "zero": replace(ISLANDS, zero=1),
        "recomputed": replace(ISLANDS, recompute=True),
        "stopped": replace(ISLANDS, out=halves),
        "resumed": replace(ISLANDS, out=halves, resume=True),
    }
    found = run_distributed(trained, 4, folder, jobs, timeout=240)
    for of_rank in found:
        of_rank.pop("stopped")
    assert_alike(found, expected["whole"])
