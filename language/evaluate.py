"""Evaluates a language model, trained or tuned: `python -m language.evaluate RUN`."""

import sys
from pathlib import Path

from torch import nn

from language import pretrained
from language.data import open_corpus, open_wikitext2
from language.finetune import open_task as open_tuning
from language.finetune_recipes import FinetuneRecipe
from language.recipe import LanguageRecipe
from language.train import TextTask, make_model, make_objective
from training.evaluate import Evaluation, Results, evaluate_run
from training.script import launch
from training.weights import read_config


def open_task(recipe: LanguageRecipe):
    """Returns the model, and its evaluation on the whole held-out text."""
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    texts = {"val": corpus.val} | ({"wikitext2": open_wikitext2(corpus)} if recipe.wikitext2 else {})
    task = TextTask(corpus, make_objective(recipe, corpus), corpus.val, texts)

    def measure(run: Evaluation, model: nn.Module) -> Results:
        return task.evaluate(run, model, at_end=True)

    return make_model(recipe, corpus.pad), measure


def open_tuned(recipe: FinetuneRecipe):
    """Returns the model of a fine-tuning run, and its evaluation on all held-out prompts or text."""
    model = pretrained.open_model(recipe)
    assert recipe.model is not None
    tokenizer = pretrained.open_tokenizer(recipe.model, model)
    task = open_tuning(recipe, tokenizer, pretrained.positions(model, recipe.context))

    def measure(run: Evaluation, model: nn.Module) -> Results:
        return task.evaluate(run, model, at_end=True)

    return model, measure


def main() -> None:
    folder = next((Path(word).expanduser() for word in sys.argv[1:] if not word.startswith("-")), None)
    tuned = folder is not None and "lora" in read_config(folder)["recipe"]
    if tuned:
        evaluate_run(FinetuneRecipe, open_tuned, "language.evaluate")
    else:
        evaluate_run(LanguageRecipe, open_task, "language.evaluate")


if __name__ == "__main__":
    launch(main)
