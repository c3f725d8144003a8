"""Recipes, what a run is made of, and one step's gradient."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.errors import UserError
from language.data import CausalObjective, Corpus, MaskedObjective, read_windows
from language.recipes import RECIPES, gpt2_pydoc_small, roberta_pydoc_small
from language.train import backward, make_model, make_objective
from training.optim import lr_factor
from training.run import Run


def test_the_papers_batches_are_as_stated():
    for name in ("gpt2_small_owt", "gpt2_medium_owt", "gpt2_large_owt"):
        assert (RECIPES[name].context, RECIPES[name].batch_size, RECIPES[name].corpus) == (1024, 480, "openwebtext")


def _corpus(vocab_size: int, mask: int | None) -> Corpus:
    tokens = np.random.default_rng(0).integers(3, vocab_size, 4000).astype(np.uint16)
    return Corpus(Path("words"), tokens, tokens, vocab_size, 0, 1, mask)


def test_the_model_decides_what_is_predicted():
    causal, masked = gpt2_pydoc_small(), roberta_pydoc_small()
    assert make_objective(causal, _corpus(1024, None)) == CausalObjective(causal.context)
    assert make_objective(masked, _corpus(1024, 2)) == MaskedObjective(masked.context, 1024, 0, 2)
    with pytest.raises(UserError, match="no mask token"):
        make_objective(masked, _corpus(1024, None))
    with pytest.raises(UserError, match="add --vocab_size 500"):
        make_objective(causal, _corpus(500, 2))


@pytest.mark.parametrize("hardware", [True, False])
def test_autocast_keeps_the_loss_close_and_stays_off_where_the_hardware_would_emulate_it(hardware: bool, monkeypatch):
    monkeypatch.setattr("training.run.has_bfloat16", lambda _: hardware)
    recipe = replace(gpt2_pydoc_small(), device="cpu", vocab_size=50, model="transnormer_tiny")
    corpus = _corpus(50, 2)
    objective = make_objective(recipe, corpus)
    batch = objective.batch(read_windows(corpus.train, [0, 100], objective.read), [(0,), (1,)])
    losses = []
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        job = replace(recipe, precision=precision)
        losses.append(backward(Run(job), job, make_model(job, pad=1), batch).item())
    assert (losses[0] != losses[1]) == hardware and losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("roberta") and "wiki" in name])
def test_robertas_learning_rate_falls_linearly_as_in_what_it_cites(name: str):
    optim, total = RECIPES[name].optim, 100_000
    half = (optim.warmup_steps + total) // 2
    assert lr_factor(half, total, optim) == pytest.approx(0.5) and lr_factor(total, total, optim) == 0.0
    assert lr_factor((half + total) // 2, total, optim) == pytest.approx(0.25)
