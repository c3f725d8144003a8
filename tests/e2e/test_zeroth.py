"""Method zo in the language models' train script: from another run's weights, stopped and resumed, and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from core import UserError
from core.testing import run_distributed
from core.zeroth import ZerothConfig
from language.recipes import RECIPES
from language.train import fake_step, make_model
from tests.e2e.test_language import rows, tiny, train_in_process
from tests.scripts import Mistakes
from training import memory
from training.run import Run
from vision.recipes import digits_small

OPTIM = replace(RECIPES["gpt2_zo_small"].optim, lr=1e-3)
ZO = {"method": "zo", "recommended": False, "optim": OPTIM, "zeroth": ZerothConfig(weight_decay=0.01)}


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_run_starts_from_anothers_weights_and_resumes_as_if_it_had_not_been_stopped(tmp_path):
    more = ZO | {"init_from": tmp_path / "base", "epoch_steps": 6, "batch_size": 15}  # a pair takes it whole
    streamed = {"offload": True, "per_node": 2}  # the half of each block is uploaded
    jobs = {
        "base": {"method": "ddp", "epochs": 1},
        "whole": more | {"epochs": 2},
        "first half": more | {"epochs": 1, "name": "halves"} | streamed,
        "second half": more | {"epochs": 2, "name": "halves", "resume": True, "extend": True} | streamed,
    }
    losses = run_distributed(train_in_process, 2, str(tmp_path), jobs, timeout=600)[0]
    base, whole, halves = (summary(tmp_path / name) for name in ("base", "whole", "halves"))
    assert whole["val_loss"] != base["val_loss"]
    assert abs(whole["val_loss"] - base["val_loss"]) < 0.1, "it goes on from there"
    first = losses["whole"][0]
    assert abs(first - losses["base"][-1]) < 0.5, "a random model's would be log(1024)"
    assert whole["bytes_sent"] == 12 * 8 * 5, "12 steps, to one worker: a loss a side, the tokens, and two wishes"
    assert any("round/exposed_seconds" in row for row in rows(tmp_path / "whole"))
    assert list((tmp_path / "whole").glob("**/events.out.tfevents.*"))
    assert halves["steps"] == whole["steps"] == 12 and halves["val_loss"] == whole["val_loss"]


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (
            tiny(),
            {"method": "zo"},
            "optim.name='adamw' with method 'zo', which has no gradients: give --optim.name sgd",
        ),
        (tiny(), {"method": "zo", "optim": replace(OPTIM, weight_decay=0.1)}, "and --zeroth.weight_decay for that"),
        (tiny(), ZO | {"recompute": True}, "recompute=True with method 'zo'"),
        (tiny(), ZO | {"compile": True}, "compile=True with method 'zo'"),
        (tiny(), ZO | {"per_node": 2}, "per_node=2 with method 'zo', which makes no use of it"),
        (tiny(), {"method": "ddp", "offload": True}, "offload=True is CO2's own"),
        (tiny(), ZO | {"elastic": True, "offload": True}, "elastic does not go with offload=True"),
        (tiny(), ZO | {"elastic": True, "zeroth": ZerothConfig(delay=1)}, "elastic does not go with zeroth.delay=1"),
        (digits_small(), {"method": "zo"}, "method='zo' is of language models"),
    ],
)
def test_what_it_would_leave_unused_is_refused(recipe, changes: dict, message: str):
    with pytest.raises(UserError, match=message):
        replace(recipe, **changes)


def test_a_model_without_a_list_of_blocks_cannot_be_streamed(tmp_path: Path):
    model = nn.Linear(2, 2)
    with (
        pytest.raises(UserError, match="offload: the model has no list of blocks that could be uploaded one by one"),
        Run(tiny(**ZO, offload=True, out=tmp_path / "run")) as run,
    ):
        run.make_method(run.shard(model), torch.optim.SGD(model.parameters()))


def test_half_as_many_parts_of_a_batch_as_workers_in_pairs():
    assert [tiny(**ZO).data_workers(n) for n in (1, 2, 3, 4)] == [1, 1, 3, 2]
    assert tiny(method="ddp").data_workers(4) == 4


def test_mistakes_are_told_in_one_line(mistake: Mistakes, tmp_path: Path):
    run = ("language.train", "gpt2_zo_small", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert "pairs=True with 1 worker: a pair is two" in mistake(*run, "--zeroth.pairs", "True")
    assert f"{tmp_path} holds no checkpoint of a run" in mistake(*run, "--init_from", str(tmp_path))
    told = mistake("language.train", "gpt2_pydoc_small", "--zeroth.eps", "0.1")
    assert "zeroth.eps=0.1 is method zo's own" in told and "--method zo" in told


def test_a_dry_run_counts_neither_gradients_nor_an_optimiser():
    recipe = RECIPES["gpt2_zo_small"]
    needs = memory.estimate(recipe, lambda: make_model(recipe, pad=1), fake_step, world_size=4)
    assert needs.gradients == needs.optimizer == 0 and needs.method == needs.parameters
    streamed = memory.estimate(replace(recipe, offload=True), lambda: make_model(recipe, pad=1), fake_step, 4)
    with torch.device("meta"):
        h = make_model(recipe, pad=1).transformer.h
    block = memory.size_of(h[0].parameters())
    copy = max(0, 1024 * 128 * 4 - 2 * block)  # of the embedding, beyond two blocks' room
    assert streamed.parameters == needs.parameters - (len(h) - 3) * block + copy and streamed.method == 0
    with_gradients = replace(recipe, method="ddp")
    assert (
        needs.activations
        < memory.estimate(with_gradients, lambda: make_model(recipe, pad=1), fake_step, world_size=2).activations
    )
