"""Method zo in the language models' train script: what is refused, and what a dry run counts; runs: test_language."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from core import UserError
from language.model import blocks_of
from language.recipes import RECIPES
from language.train import make_model
from language.zeroth.method import of_run
from tests.e2e.test_language import ZO, tiny
from tests.scripts import Mistakes
from training import checks
from training.run import Run


def test_a_model_without_a_list_of_blocks_cannot_be_streamed(tmp_path: Path):
    model = nn.Linear(2, 2)
    with (
        pytest.raises(UserError, match="offload: the model has no list of blocks that could be uploaded one by one"),
        Run(tiny(**ZO, offload=True, out=tmp_path / "run")) as run,
    ):
        of_run(run, run.shard(model), torch.optim.SGD(model.parameters()), blocks_of(model))


def test_half_as_many_parts_of_a_batch_as_workers_in_pairs_and_neither_gradients_nor_an_optimiser():
    assert [tiny(**ZO).data_workers(n) for n in (1, 2, 3, 4)] == [1, 1, 3, 2]
    assert tiny(method="ddp").data_workers(4) == 4
    recipe = RECIPES["gpt2_zo_small"]
    with torch.device("meta"):
        model = make_model(recipe, pad=1)
    needs = checks.estimate(recipe, model, world_size=4)
    assert needs.gradients == needs.optimizer == 0 and needs.method == needs.parameters
    streamed = checks.estimate(replace(recipe, offload=True), model, 4)
    h = model.transformer.h
    block = checks.size_of(h[0].parameters())
    copy = max(0, 1024 * 128 * 4 - 2 * block)  # of the embedding, beyond two blocks' room
    assert streamed.parameters == needs.parameters - (len(h) - 3) * block + copy and streamed.method == 0


def test_mistakes_are_told_in_one_line(mistake: Mistakes, tmp_path: Path):
    run = ("language.train", "gpt2_zo_small", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert "pairs=True with 1 worker: a pair is two" in mistake(*run, "--zeroth.pairs", "True")
    assert f"{tmp_path} holds no checkpoint of a run" in mistake(*run, "--init_from", str(tmp_path))
    told = mistake("language.train", "gpt2_pydoc_small", "--zeroth.eps", "0.1")
    assert "zeroth.eps=0.1 is method zo's own" in told and "--method zo" in told
