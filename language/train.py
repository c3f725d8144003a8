"""Trains a language model: torchrun --standalone --nproc-per-node 4 -m language.train RECIPE [overrides]."""

from __future__ import annotations

from language.recipe import LanguageRecipe, TextRecipe
from language.recipes import RECIPES
from training.checks import dry_run
from training.recipe import answer_help, parse
from training.start.script import launch

if __name__ == "__main__":
    answer_help(RECIPES, prog="language.train")  # before the imports below, which take seconds

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from core.baselines.table import Method
from core.errors import UserError
from language.data import (
    IGNORE,
    Batch,
    CausalObjective,
    Corpus,
    MaskedObjective,
    Objective,
    count_windows,
    held_out_batches,
    open_corpus,
    open_wikitext2,
    read_windows,
    train_batches,
)
from language.lengths.dealt import Dealt, Documents, Packed, Rows, text_documents
from language.metrics import (
    continuation_markdown,
    continue_text,
    fill_masks,
    filled_markdown,
    held_out_sums,
    summarize,
    token_loss,
)
from language.model import blocks_of, build_model, is_causal, make_optimizer
from language.zeroth import ZerothOrder, of_run
from training.data.samples import generator, steps_per_epoch
from training.elastic import repeated
from training.layout import Layout
from training.loop.kinds import open_run
from training.loop.run import Run
from training.optim import Scalars, backward_in_parts, make_schedule, recompute
from training.start.workers import upload
from training.weights.read import keep_names, load_weights

if TYPE_CHECKING:
    from language.prompts import PromptTask

PROMPT_TOKENS, NEW_TOKENS, TOP_K = 16, 48, 20  # of the text that a causal model writes for TensorBoard
SAMPLES = 4

Texts = dict[str, np.ndarray]  # name of a text -> its held-out tokens


def main() -> None:
    recipe = parse(RECIPES, prog="language.train")
    if recipe.dry_run:
        return dry_run(recipe, functools.partial(make_model, pad=1))
    if recipe.layout:
        from training.layouts.parallel import check_cut  # imported here, because DTensors take seconds

        with torch.device("meta"):
            check_cut(make_model(recipe, pad=1), Layout.parse(recipe.layout))
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    objective = make_objective(recipe, corpus)
    final_texts = {"val": corpus.val} | ({"wikitext2": open_wikitext2(corpus)} if recipe.wikitext2 else {})
    with open_run(recipe) as run:
        train(run, recipe, corpus, objective, final_texts)


def make_model(recipe: LanguageRecipe, pad: int | None) -> nn.Module:
    """Returns the recipe's model, with its vocabulary padded to a multiple of 64, which is faster on GPUs."""
    padded = -(-recipe.vocab_size // 64) * 64
    sizes = {"vocab_size": padded, "context": recipe.context, "dropout": recipe.dropout}
    model = build_model(recipe.model, **sizes, pad=pad)
    if recipe.recompute:
        recompute(blocks_of(model))
    return model


def make_objective(recipe: LanguageRecipe, corpus: Corpus) -> Objective:
    """Returns the model's objective on this corpus. Refuses a corpus that does not fit the recipe."""
    if corpus.vocab_size != recipe.vocab_size:
        raise UserError(
            f"vocab_size={recipe.vocab_size}, but {corpus.folder} uses {corpus.vocab_size} tokens: "
            f"add --vocab_size {corpus.vocab_size}"
        )
    if is_causal(recipe.model):
        objective = CausalObjective(recipe.context)
    elif corpus.mask is None:
        raise UserError(
            f"{corpus.folder} has no mask token, for {recipe.model}: make it with `python -m language.prepare`"
        )
    else:
        objective = MaskedObjective(recipe.context, corpus.vocab_size, corpus.eot, corpus.mask, corpus.bos)
    check_windows(recipe, corpus, objective)
    return objective


def check_windows(recipe: TextRecipe, corpus: Corpus, objective: Objective) -> None:
    """Refuses a training text without a window. Training on whole documents needs none."""
    if recipe.balance == "none" and not count_windows(n := len(corpus.train), objective):
        raise UserError(
            f"{corpus.folder}: its training text of {n:,} tokens is shorter than two windows of "
            f"context={objective.context}: give a smaller --context, or more text"
        )


def train(run: Run, recipe: LanguageRecipe, corpus: Corpus, objective: Objective, final_texts: Texts) -> None:
    """Trains from random weights, or the weights of `init_from`. `final_texts` are evaluated at the end."""
    model = make_model(recipe, corpus.pad)
    model.names = corpus.names  # pyright: ignore[reportAttributeAccessIssue]
    keep_names(run, corpus.names)
    if recipe.init_from is not None:
        load_weights(model, recipe.init_from, rows=recipe.vocab_size)
    learn(run, recipe, run.shard(model), TextTask(corpus, objective, corpus.val[: recipe.eval_tokens], final_texts))


@dataclass(frozen=True)
class TextTask:
    """A corpus and an objective.

    Attributes:
        corpus: The corpus.
        objective: The objective.
        some: Held-out tokens for evaluations during training.
        texts: Texts for the last evaluation.
    """

    corpus: Corpus
    objective: Objective
    some: np.ndarray
    texts: Texts

    @property
    def samples(self) -> int:
        return count_windows(len(self.corpus.train), self.objective)

    def batches(self, recipe: TextRecipe, rank: int, world_size: int, start: int, total: int) -> Iterator[Batch]:
        """Yields this worker's windows from step `start` to `total`."""
        return train_batches(self.corpus.train, self.objective, recipe, rank, world_size, start, total)

    @property
    def documents(self) -> Documents:
        """The documents of the training text, for training without windows."""
        return text_documents(self.corpus.train, self.corpus.eot, self.objective.context)

    @repeated
    def evaluate(self, run: Run, model: nn.Module, *, at_end: bool) -> dict[str, float]:
        """Returns perplexity and bits per byte of each text, and shows sample text in TensorBoard.

        Each worker evaluates its share.
        """
        some = {"val" if len(self.some) == len(self.corpus.val) else "val_part": self.some}
        results: dict[str, float] = {}
        with run.paused(), run.autocast():
            for name, tokens in (self.texts if at_end else some).items():
                place = {"rank": run.data_rank, "world_size": run.data_workers}
                batches = held_out_batches(tokens, self.objective, run.eval_batch, **place)
                sums = run.sum(*held_out_sums(model, batches, run.device, self.corpus.token_bytes))
                metrics = summarize(sums, causal=isinstance(self.objective, CausalObjective))
                results |= {f"{name}_{key}": value for key, value in metrics.items()}
            if run.draws and self.corpus.tokenizer is not None and not run.recipe.layout:  # no rank has the whole model
                run.folder.writer.add_text("sample", sample(run, model, self.corpus, self.objective), run.step)
        run.log_evaluation(results)
        return results


def learn(run: Run, recipe: TextRecipe, model: nn.Module, task: TextTask | PromptTask) -> Method | ZerothOrder | None:
    """Runs the loop: optimizer steps, method.step(), and at round boundaries evaluations and checkpoints.

    The model, from run.shard, stays in its mode, because fine-tuning has no dropout.

    Returns:
        The method, or None after a signal.
    """
    optimizer = run.shard_optimizer(make_optimizer(model, recipe.optim))
    dealt = Dealt.of(recipe, model, task.documents, run) if recipe.balance != "none" else None
    epoch = recipe.epoch_steps or steps_per_epoch((dealt or task).samples, recipe.batch_size)
    total = epoch * recipe.epochs
    schedule = make_schedule(optimizer, total, recipe.optim)
    make = task.batches
    if recipe.method == "zo":
        wrapped, method = model, of_run(run, model, optimizer, blocks_of(model))
        place = method.place.data_rank, method.place.data_workers  # both workers of a pair get the same data
        make = lambda recipe, rank, workers, start, total: task.batches(recipe, *place, start, total)  # noqa: E731
    else:
        wrapped, method = run.make_method(model, optimizer)
    run.begin(model, optimizer, schedule, method, epoch=epoch, total=total, samples=task.samples)

    wrapped.train(model.training)
    for batch in run.batches(dealt.following(method) if dealt else make):
        if isinstance(method, ZerothOrder):  # two forward passes replace the gradient, its step, and a round
            method.lr = optimizer.param_groups[0]["lr"]
            loss = measure(run, recipe, method, batch)
        else:
            loss = backward(run, recipe, wrapped, batch)
            run.update(model, optimizer)
        schedule.step()
        closed = isinstance(method, ZerothOrder) or method.step(last=run.at_last_step)
        due = run.after_step(closed, train_loss=loss)
        if due.evaluation:
            task.evaluate(run, model, at_end=False)
        if due.checkpoint:
            run.save()
        if due.stop:
            return run.stop()

    method.finish()
    run.end(task.evaluate(run, model, at_end=True))
    return method


# inputs, targets, and the positions that are predicted (None: all), or documents
Part = tuple[Tensor, Tensor, Tensor | None] | Packed


def backward(run: Run, recipe: TextRecipe, wrapped: nn.Module, batch: Batch | Rows) -> Tensor:
    """Adds the gradient of this worker's average loss over the batch, in micro-batches. Returns the loss."""
    if recipe.layout:  # a layout cuts the batch into micro-batches itself
        parallel: Any = wrapped
        inputs, targets = (part.to(run.device, non_blocking=True) for part in batch)
        predicted = (targets != IGNORE).sum().clamp(min=1)
        with run.autocast():
            return parallel.backward(inputs, targets, lambda x, y: token_loss(x, y, reduction="sum") / predicted)
    parts, predicted = micro_batches(run, recipe, batch)

    def part_of(part: Part) -> Scalars:
        return {"train_loss": part_loss(run, wrapped, part) / predicted}

    loss = backward_in_parts(wrapped, parts, part_of, run.scaled)["train_loss"]
    return batch.mean_loss(loss) if isinstance(batch, Rows) else loss


def measure(run: Run, recipe: TextRecipe, method: ZerothOrder, batch: Batch) -> Tensor:
    """Takes a step of method zo. Returns this worker's average loss over the batch."""
    parts, predicted = micro_batches(run, recipe, batch)

    def mean_loss(model: nn.Module) -> Tensor:
        return torch.stack([part_loss(run, model, part) for part in parts]).sum() / predicted

    method.step(mean_loss, count=int(predicted))
    return torch.tensor(method.own_loss, dtype=torch.float64)


def micro_batches(run: Run, recipe: TextRecipe, batch: Batch | Rows) -> tuple[list[Part], Tensor | float]:
    """Returns the batch in parts on the device, and the number of predicted tokens in all of it, 0-d."""
    if isinstance(batch, Rows):
        return [row.to(run.device) for row in batch.parts], batch.predicted
    inputs, targets = (part.to(run.device, non_blocking=True) for part in batch)
    predicted = (targets != IGNORE).sum().clamp(min=1)  # over the whole batch, so that micro-batches change nothing
    on_host = batch[1].chunk(recipe.accumulate)
    places = [(t.flatten() != IGNORE).nonzero()[:, 0] for t in on_host]  # the predicted positions, int64 [n]
    chosen = [None if is_causal(recipe.model) else upload(at, run.device) for at in places]
    parts = zip(inputs.chunk(recipe.accumulate), targets.chunk(recipe.accumulate), chosen, strict=True)
    return list(parts), predicted


def part_loss(run: Run, model: nn.Module, part: Part) -> Tensor:
    """Returns the sum of the losses of a micro-batch's predicted tokens, 0-d."""
    if isinstance(part, Packed):
        with run.autocast():
            logits = model(part.ids, position_ids=part.positions, documents=part.boundaries).logits
        return token_loss(logits, part.targets, reduction="sum")
    inputs, wanted, places = part
    with run.autocast():
        logits = (model(inputs) if places is None else model(inputs, places)).logits
    if places is not None:
        wanted = wanted.flatten()[places]
    return token_loss(logits, wanted, reduction="sum")


def sample(run: Run, model: nn.Module, corpus: Corpus, objective: Objective) -> str:
    """Returns Markdown with the model's text after, or in the gaps of, some held-out text."""
    assert corpus.tokenizer is not None
    starts = np.linspace(0, max(0, len(corpus.val) - objective.read), SAMPLES).astype(int).tolist()
    windows = read_windows(corpus.val, starts, objective.read)
    if isinstance(objective, CausalObjective):
        prompts = windows[:, :PROMPT_TOKENS].to(run.device)
        rng = generator(run.recipe.seed)
        ids = continue_text(model, prompts, NEW_TOKENS, context=objective.context, top_k=TOP_K, generator=rng)
        return continuation_markdown(corpus.tokenizer, ids, prompts.shape[1])
    inputs, targets = (part.to(run.device) for part in objective.batch(windows, [(at,) for at in starts]))
    return filled_markdown(corpus.tokenizer, fill_masks(model, inputs, targets), targets)


if __name__ == "__main__":
    launch(main)
