"""Tunes a causal language model in Hugging Face's format on answers to prompts, or on plain text:

    torchrun --standalone --nproc-per-node 4 -m language.finetune RECIPE --model FOLDER --data FOLDER [overrides]

The tuned model is written to OUT/model, tokenizer included; method zo writes OUT/replay, too, for language.zo_replay.
"""

from __future__ import annotations

from language.finetune_recipes import RECIPES, FinetuneRecipe
from training.checks import dry_run
from training.recipe import answer_help, parse
from training.script import launch

if __name__ == "__main__":
    answer_help(RECIPES, prog="language.finetune")  # before the imports below, which take seconds

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from core.errors import UserError
from core.methods import Zeroth
from language import pretrained, zo_replay
from language import train as language_train
from language.corpora import open_text
from language.data import Batch, CausalObjective, Corpus, count_windows, train_batches
from language.model import make_optimizer
from language.prompts import PromptTask
from language.train import backward, measure
from training.optim import clip_gradients, make_schedule
from training.run import Run
from training.sampling import steps_per_epoch

if TYPE_CHECKING:
    from training.memory import Step


def main() -> None:
    recipe = parse(RECIPES, prog="language.finetune")
    if recipe.dry_run:
        return dry_run(recipe, lambda: pretrained.build_model(recipe), fake_step)
    tune(recipe)


def tune(recipe: FinetuneRecipe) -> None:
    """A whole run of this worker."""
    model = pretrained.open_model(recipe)
    assert recipe.model is not None
    tokenizer = pretrained.open_tokenizer(recipe.model, model)
    task = open_task(recipe, tokenizer, pretrained.positions(model, recipe.context))
    with Run(recipe) as run:
        train(run, recipe, model, task)


@dataclass(frozen=True)
class TextTask:
    """What is learned of plain text: to predict each next token."""

    tokenizer: Any
    corpus: Corpus
    objective: CausalObjective

    @property
    def samples(self) -> int:
        return count_windows(len(self.corpus.train), self.objective)

    def batches(self, recipe: FinetuneRecipe, rank: int, world_size: int, start: int, total: int) -> Iterator[Batch]:
        """This worker's windows of the steps from `start` to `total`."""
        return train_batches(self.corpus.train, self.objective, recipe, rank, world_size, start, total)

    def evaluate(self, run: Run, recipe: FinetuneRecipe, model: nn.Module, most: int | None) -> dict[str, float]:
        """Of the first `most` held-out windows; see language.train."""
        val = self.corpus.val[: most and most * self.objective.stride + 1]
        return language_train.evaluate(run, recipe, model, self.corpus, self.objective, {"val": val})


def open_task(recipe: FinetuneRecipe, tokenizer: Any, context: int) -> PromptTask | TextTask:
    """The recipe's data in the model's tokens. context: the most tokens that the model reads."""
    if recipe.data is None or not recipe.data.is_dir():
        wanted = "train.jsonl and val.jsonl" if recipe.task == "prompts" else "train.txt and val.txt"
        raise UserError(f"data={recipe.data} is no folder: add --data FOLDER, with {wanted}")
    if recipe.task == "prompts":
        return PromptTask.open(recipe, recipe.data, tokenizer, context)
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise UserError(f"{recipe.model}: task text needs a tokenizer.json and an eos_token, to end documents with")
    corpus = open_text(recipe.data, tokenizer.backend_tokenizer, tokenizer.eos_token_id)
    return TextTask(tokenizer, corpus, CausalObjective(context))


def train(run: Run, recipe: FinetuneRecipe, model: nn.Module, task: PromptTask | TextTask) -> None:
    """The loop: optimiser steps, method.step(), and at round boundaries evaluations and checkpoints; in eval mode, so
    without dropout, throughout."""
    model = run.shard(model)
    writes = run.rank == 0 or recipe.elastic  # at the end
    before = zo_replay.tuned_digest(model) if recipe.method == "zo" and writes else ""
    optimizer = run.shard_optimizer(make_optimizer(model, recipe.optim))
    epoch = recipe.epoch_steps or steps_per_epoch(task.samples, recipe.batch_size)
    total = epoch * recipe.epochs
    schedule = make_schedule(optimizer, total, recipe.optim)
    wrapped, method = run.make_method(model, optimizer, total, pretrained.blocks_of(model))
    run.begin(model, optimizer, schedule, method, epoch=epoch, total=total, samples=task.samples)

    wrapped.eval()
    for batch in run.batches(task.batches):
        if isinstance(method, Zeroth):  # two forward passes stand for the gradient and its step
            loss = measure(run, recipe, method, batch)
        else:
            loss = backward(run, recipe, wrapped, batch)
            clip_gradients(model, recipe.optim)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        due = run.after_step(method.step(last=run.at_last_step), train_loss=loss)
        if due.evaluation:
            task.evaluate(run, recipe, model, recipe.eval_samples)
        if due.checkpoint:
            run.save()
        if due.stop:
            return run.stop()

    method.finish()
    run.end(task.evaluate(run, recipe, model, None))
    if run.folder.writes:
        pretrained.write_model(model, task.tokenizer, recipe.folder / "model")
        if isinstance(method, Zeroth):
            zo_replay.write(recipe.folder / "replay", recipe, method.order, before, run.device)


def fake_step(step: Step, recipe: FinetuneRecipe, model: nn.Module, samples: int) -> None:
    """A step on zeros, for training.memory: samples as long as the model's positions, where the recipe says no less."""
    context = pretrained.positions(model, recipe.context)
    language_train.fake_step(step, replace(recipe, context=context), model, samples)


if __name__ == "__main__":
    launch(main)
