"""Fine-tuning as its users start it, of tiny models made here."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.errors import UserError
from core.testing import run_distributed
from language import zo_replay
from language.finetune import tune
from language.finetune_recipes import RECIPES, FinetuneRecipe
from language.zeroth import ScalarLog, ZerothConfig
from tests.runs import logged, summary
from tests.scripts import Mistakes, run_script
from tests.tiny_models import make_model, make_prompts, make_text

STEPS = 24


def tiny(folder: Path, **changes) -> FinetuneRecipe:
    """prompts_adamw cut down to a few seconds."""
    files = {"model": folder / "model", "data": folder / "data"}
    sizes = {"batch_size": 8, "epoch_steps": STEPS // 3, "epochs": 3, "eval_samples": 8}
    recipe = replace(RECIPES["prompts_adamw"], device="cpu", name="tiny", **files, **sizes)
    recipe = replace(recipe, log_every=4, checkpoint_every=3)
    recipe = replace(recipe, optim=replace(recipe.optim, lr=1e-2, warmup_steps=0, schedule="constant"))
    return replace(recipe, co2=replace(recipe.co2, tau=4), **changes)


def tune_in_process(rank: int, world_size: int, folder: str, jobs: dict[str, dict]) -> None:
    """Tunes for several recipes in one process group."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "CO2_CACHE": f"{folder}/cache"}
    for name, changes in jobs.items():
        tune(tiny(Path(folder), out=Path(folder, changes.get("name", name)), **changes))


ZO = {"method": "zo", "optim": replace(RECIPES["prompts"].optim, lr=1e-3)}
JOBS = {"ddp": {"method": "ddp", "ema": 0.5}, "co2": {"method": "co2"}, "zo": ZO}
MORE = {
    "dealt": {"method": "co2", "balance": "round", "seed": 1},
    "text": {"method": "ddp", "task": "text", "context": 16},
    "zo first half": ZO | {"name": "zo halves", "epochs": 1, "offload": True},
    "zo second half": ZO | {"name": "zo halves", "resume": True, "extend": True, "offload": True},
    "zo 16 bits": ZO | {"weights": "bfloat16", "zeroth": ZerothConfig(eps=0.01)},
    "zo text": ZO | {"task": "text", "context": 16, "epochs": 1},
}


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """Runs of two workers."""
    make_model(folder / "model")
    make_text(make_prompts(folder / "data"))
    run_distributed(tune_in_process, 2, str(folder), JOBS, timeout=240)
    return folder


@pytest.fixture(scope="module")
def more(folder: Path) -> Path:
    """The same folder, with the others, too."""
    run_distributed(tune_in_process, 2, str(folder), MORE, timeout=240)
    return folder


@pytest.fixture
def run(request: pytest.FixtureRequest, folder: Path) -> Path:
    """The folder of a run of that name."""
    return (folder if request.param in JOBS else request.getfixturevalue("more")) / request.param


def of_runs(*names: str) -> pytest.MarkDecorator:
    """A run that is not among JOBS is slow."""
    slow = [name if name in JOBS else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("run", slow, indirect=True)


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(t, others[name]) for name, t in some.items())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@of_runs("ddp", "co2", "dealt")
def test_two_workers_learn_the_answers(run: Path):
    """Dealt by length, too."""
    found, end = logged(run), summary(run)
    assert found[-1] < found[0] - 1 and end["val_loss"] < 2, "guessing among all tokens: 6.1"
    assert end["steps"] == STEPS and end["val_samples"] == 20
    assert logged(run, "val_part_samples") == [8, 8]
    assert logged(run, "val_samples") == [20], "all of them, at the end"


def test_the_tuned_folder_is_the_model_that_was_evaluated(folder: Path, tmp_path: Path):
    """With averaged weights. One worker goes on at a learning rate that changes nothing, and evaluates it."""
    still = tiny(folder, model=folder / "ddp" / "model", out=tmp_path / "run", epochs=1)
    tune(replace(still, optim=replace(still.optim, lr=1e-30)))
    assert summary(tmp_path / "run")["val_loss"] == pytest.approx(summary(folder / "ddp")["val_loss"], rel=1e-5)
    assert summary(tmp_path / "run")["val_accuracy"] == summary(folder / "ddp")["val_accuracy"]


@pytest.mark.slow
def test_text_is_learned(more: Path):
    found = summary(more / "text")
    assert found["val_perplexity"] < 50 and found["val_bits_per_byte"] < logged(more / "text")[0]


# -- without gradients --------------------------------------------------------------------------------------------


@of_runs("zo", "zo 16 bits")
def test_the_held_out_loss_falls_without_gradients(run: Path):
    found = logged(run, "val_part_loss") + logged(run, "val_loss")
    assert len(found) == 3 and found[-1] < found[0] - 0.2


@pytest.mark.slow
def test_one_worker_tunes_as_a_pair_does_and_a_resumed_run_as_an_uninterrupted_one(more: Path, tmp_path: Path):
    folder = more
    tune(tiny(folder, out=tmp_path, **ZO))
    one, two = weights(tmp_path / "model"), weights(folder / "zo" / "model")
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    assert not any(torch.equal(two[name], start) for name, start in weights(folder / "model").items())
    assert logged(folder / "zo halves") == logged(folder / "zo")
    assert equal(weights(folder / "zo halves" / "model"), weights(folder / "zo" / "model"))


@of_runs("zo", "zo halves", "zo 16 bits", "zo text")
def test_the_first_model_and_the_scalars_give_the_tuned_one(run: Path, tmp_path: Path):
    steps, first = STEPS // 3 if run.name == "zo text" else STEPS, run.parent / "model"
    assert len(ScalarLog.load(run / "replay" / "scalars")) == steps
    zo_replay.replay(run / "replay", first, tmp_path / "out")
    found = weights(tmp_path / "out")
    assert equal(found, weights(run / "model")) and not equal(found, weights(first))
    assert {t.dtype for t in found.values()} == {torch.bfloat16 if run.name == "zo 16 bits" else torch.float32}


def test_a_replay_that_would_give_another_model_is_refused(folder: Path, tmp_path: Path):
    run = shutil.copytree(folder / "zo" / "replay", tmp_path / "replay")
    with pytest.raises(UserError, match="is not the model that .* was tuned from"):
        zo_replay.replay(run, folder / "ddp" / "model", tmp_path / "out")
    scalars = bytearray((run / "scalars").read_bytes())
    scalars[-2] ^= 1  # in the last number's exponent
    (run / "scalars").write_bytes(scalars)
    with pytest.raises(UserError, match="do not lead to the model"):
        zo_replay.replay(run, folder / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- the command line ---------------------------------------------------------------------------------------------


def test_a_dry_run_prints_what_a_gpu_needs(folder: Path, capsys: pytest.CaptureFixture):
    options = ["--model", str(folder / "model"), "--data", str(folder / "data"), "--dry_run", "--weights", "bfloat16"]
    run_script("language.finetune", "prompts", *options)
    said = capsys.readouterr().out
    assert "0.04 M parameters, 1 workers of 16 samples" in said and "GiB a GPU and activations: parameters" in said


def test_a_users_mistake_is_one_line(folder: Path, tmp_path: Path, mistake: Mistakes):
    model = ["--model", str(folder / "model")]
    for arguments, message in (
        (["prompts_adamw"], "error: no model is named: add --model FOLDER"),
        (["prompts_adamw", *model], "error: data=None is no folder: add --data FOLDER, with train.jsonl and val.jsonl"),
        (["prompts_adamw", *model, "--data", str(tmp_path)], f"error: {tmp_path}/train.jsonl is missing"),
        (["text_adamw", *model, "--data", str(tmp_path), "--context", "16"], f"error: {tmp_path}/train.txt is missing"),
        (["text_adamw", *model], "error: context=512: the model has 48 positions; give so many or fewer"),
    ):
        said = mistake("language.finetune", *arguments)
        assert said.startswith(message) and said.count("\n") == 1
