"""Language's train script as its users start it, on Python's documentation and on small files; method zo's refusals."""

import lzma
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from core import UserError
from core.testing import run_distributed
from language import train as script
from language.data import open_corpus
from language.model import GPT2_SIZES, ROBERTA_SIZES, TRANSNORMER_SIZES, blocks_of
from language.recipe import LanguageRecipe
from language.recipes import RECIPES, gpt2_pydoc_small
from language.train import make_model
from language.zeroth import ZerothConfig
from language.zeroth.method import of_run
from tests.runs import logged, summary
from tests.scripts import Mistakes, fork_script
from training import checks
from training.loop.progress import Actions
from training.loop.run import Run


def tiny(**changes) -> LanguageRecipe:
    """gpt2_pydoc_small cut down to a few seconds."""
    sizes = {"context": 16, "batch_size": 8, "epoch_steps": 12}
    recipe = replace(gpt2_pydoc_small(), device="cpu", **sizes, log_every=6, eval_every=4, checkpoint_every=4)
    recipe = replace(recipe, optim=replace(recipe.optim, lr=1e-2, warmup_steps=6), co2=replace(recipe.co2, tau=3))
    return replace(recipe, **changes)


def train_in_process(rank: int, world_size: int, folder: str, jobs: dict[str, dict]) -> dict[str, list[float]]:
    """Runs the train loop for several recipes in one process group; their logged training losses."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    script.NEW_TOKENS = 4  # samples of text take as long as the training
    GPT2_SIZES["gpt2_tiny"] |= {"n_layer": 2, "n_embd": 64}
    ROBERTA_SIZES["roberta_tiny"] |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    TRANSNORMER_SIZES["transnormer_tiny"] |= {"layers": 2, "width": 64, "glu_width": 128}
    for name, changes in jobs.items():
        stop_at = changes.pop("stop_at", None)
        changes |= {"init_from": Path(folder, changes["init_from"])} if "init_from" in changes else {}
        recipe = tiny(out=Path(folder, changes.get("name", name)), **changes)
        corpus = open_corpus(recipe.corpus, recipe.vocab_size)
        with Run(recipe) as job:
            if stop_at is not None:
                stop_after(job, stop_at)
            script.train(job, recipe, corpus, script.make_objective(recipe, corpus), {"val": corpus.val[:600]})
    names = {changes.get("name", name) for name, changes in jobs.items()}
    return {name: logged(Path(folder, name)) for name in names}


def stop_after(job: Run, step: int) -> None:
    """Asks this worker to stop after so many steps."""
    after_step = job.after_step

    def stopping(closed: bool, **scalars: Tensor) -> Actions:
        if job.step == step:
            signal.raise_signal(signal.SIGUSR1)
        return after_step(closed, **scalars)

    job.after_step = stopping  # pyright: ignore[reportAttributeAccessIssue]


LONG = {"method": "co2", "epochs": 3}
OPTIM = replace(RECIPES["gpt2_zo_small"].optim, lr=1e-3)
ZO = {"method": "zo", "recommended": False, "optim": OPTIM, "zeroth": ZerothConfig(eps=2e-3)}
FROM_DDP = ZO | {"init_from": "ddp", "epoch_steps": 6, "batch_size": 15, "epochs": 2}  # a pair takes the batch whole
STREAMED = FROM_DDP | {"name": "zo halves", "offload": True}
DEALT = LONG | {"balance": "round", "context": 64}  # rounds of whole documents
JOBS = {"ddp": LONG | {"method": "ddp"}, "co2": LONG, "zo": FROM_DDP}
MORE = {model: {"model": model, "epochs": 3} for model in ("roberta_tiny", "transnormer_tiny")} | {
    "stopped": LONG | {"stop_at": 13, "name": "halves"},
    "resumed": LONG | {"resume": True, "name": "halves"},
    "dealt": DEALT,
    "dealt, stopped": DEALT | {"stop_at": 7, "name": "dealt halves"},
    "dealt, resumed": DEALT | {"resume": True, "name": "dealt halves"},
    "zo first half": STREAMED | {"epochs": 1},
    "zo second half": STREAMED | {"resume": True, "extend": True},
}


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[str, list[float]]:
    """The training losses of all jobs, trained by one pair of workers."""
    return run_distributed(train_in_process, 2, str(folder), JOBS, timeout=240)[0]


@pytest.fixture(scope="module")
def more(folder: Path, losses: dict[str, list[float]]) -> dict[str, list[float]]:
    """With the others."""
    return losses | run_distributed(train_in_process, 2, str(folder), MORE, timeout=240)[0]


def check_learning(folder: Path, losses: dict[str, list[float]], methods: tuple[str, ...]) -> None:
    for method in methods:
        assert losses[method][-1] < losses[method][0] - 0.5, method
        end = summary(folder / method)
        assert end["val_perplexity"] < 600 and end["val_tokens"] == 599, f"{method}; guessing evenly makes 1,024"
        assert 0 < end["val_bits_per_byte"] < 8 and end["bytes_sent"] > 0, method


def test_two_methods_learn_on_two_workers(folder: Path, losses: dict[str, list[float]]):
    check_learning(folder, losses, ("ddp", "co2"))


@pytest.mark.slow
@pytest.mark.usefixtures("more")
@pytest.mark.parametrize("model", ["roberta_tiny", "transnormer_tiny"])
def test_the_other_models_learn_on_two_workers(folder: Path, model: str):
    end = summary(folder / model)
    assert end["val_loss"] < math.log(1024) - 0.5, "better than guessing"
    assert ("val_bits_per_byte" in end) == (model == "transnormer_tiny")


@pytest.mark.slow
def test_a_stop_does_not_change_the_losses(more: dict[str, list[float]]):
    assert more["halves"] == more["co2"] and len(more["co2"]) == 6


@pytest.mark.slow
def test_rounds_of_whole_documents_are_learned_and_a_stop_between_them_changes_nothing(folder, more):
    check_learning(folder, more, ("dealt",))
    assert more["dealt halves"] == more["dealt"] and len(more["dealt"]) == 6


def test_a_run_without_gradients_starts_from_anothers_weights(folder, losses):
    base, whole = (summary(folder / name) for name in ("ddp", "zo"))
    assert 0 < abs(whole["val_loss"] - base["val_loss"]) < 0.1, "it goes on from there"
    assert abs(losses["zo"][0] - losses["ddp"][-1]) < 0.5, "a random model's would be log(1024)"
    assert whole["bytes_sent"] == 12 * 8 * 5, "12 steps, to one worker: a loss a side, the tokens, and two wishes"
    assert logged(folder / "zo", "round/exposed_seconds") and list((folder / "zo").glob("**/events.out.tfevents.*"))


@pytest.mark.slow
@pytest.mark.usefixtures("more")
def test_a_run_without_gradients_resumes_as_if_it_had_not_been_stopped(folder):
    whole, halves = (summary(folder / name) for name in ("zo", "zo halves"))
    assert halves["steps"] == whole["steps"] == 12 and halves["val_loss"] == whole["val_loss"]


@pytest.mark.slow
def test_one_process_trains_on_books_and_is_evaluated_on_wikitext2(tmp_path: Path):
    books = [f"Chapter {i}. It was the year {1800 + i}, and all was well in town number {i}.\n" * 30 for i in range(8)]
    with lzma.open(tmp_path / "gutenberg_en.txt.xz", "wt") as file:
        file.write("\n\x0c\n".join(books))
    (tmp_path / "wt2.test.txt").write_text(" = Town = \n It was the year 1807 <unk> , and all was well .\n" * 9)
    sizes = ["--vocab_size", "300", "--context", "16", "--batch_size", "8", "--epoch_steps", "4", "--epochs", "2"]
    folder = tmp_path / "run"
    arguments = ["gpt2_gutenberg_small", *sizes, "--eval_every", "1", "--eval_tokens", "100", "--co2.tau", "2"]
    env = {"CO2_DATA": str(tmp_path), "CO2_CACHE": str(tmp_path / "cache")}
    process = fork_script(tmp_path / "said", "language.train", *arguments, "--out", str(folder), **env)
    process.join(240)
    assert process.exitcode == 0, (tmp_path / "said").read_text()
    end = summary(folder)
    assert {"val_perplexity", "val_bits_per_byte", "wikitext2_perplexity", "wikitext2_bits_per_byte"} <= set(end)
    assert logged(folder, "val_part_tokens")[0] == 99 < end["val_tokens"] and "val_part_tokens" not in end
    assert logged(folder, "val_tokens") == [end["val_tokens"]], "a name has one text: a part in mid-run, all at the end"
    events = EventAccumulator(str(folder)).Reload()
    assert len(events.Tensors("sample/text_summary")) == 2
    assert events.Tensors("sample/text_summary")[0].tensor_proto.string_val[0].startswith(b"**")


# -- method zo: what is refused, and what a dry run counts ------------------------------------------------------------


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
    needs, streamed = (checks.estimate(replace(recipe, offload=offload), model, 4) for offload in (False, True))
    assert needs["gradients"] == needs["optimizer"] == 0 and needs["method"] == needs["parameters"]
    block = checks.size_of(model.transformer.h[0].parameters())
    rest = needs["parameters"] - len(model.transformer.h) * block
    assert streamed["parameters"] == 2 * rest + 3 * block and streamed["method"] == 0


def test_mistakes_are_told_in_one_line(mistake: Mistakes, tmp_path: Path):
    run = ("language.train", "gpt2_zo_small", "--device", "cpu", "--out", str(tmp_path / "run"))
    assert f"{tmp_path}: holds no checkpoint of a run" in mistake(*run, "--init_from", str(tmp_path))
    told = mistake("language.train", "gpt2_pydoc_small", "--zeroth.eps", "0.1")
    assert "zeroth.eps=0.1 is method zo's own" in told and "--method zo" in told
