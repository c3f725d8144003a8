"""Evaluates a language model: `python -m language.evaluate RUN`."""

from language.data import open_corpus, open_wikitext2
from language.recipe import LanguageRecipe
from language.train import TextTask, make_model, make_objective
from training.start.script import launch
from training.weights.evaluate import evaluate_run


def open_task(recipe: LanguageRecipe):
    """Returns the model, and its evaluation on the whole held-out text."""
    corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    texts = {"val": corpus.val} | ({"wikitext2": open_wikitext2(corpus)} if recipe.wikitext2 else {})
    model, task = make_model(recipe, corpus.pad), TextTask(corpus, make_objective(recipe, corpus), corpus.val, texts)
    model.names = corpus.names  # pyright: ignore[reportAttributeAccessIssue]
    return model, lambda run: task.evaluate(run, model, at_end=True)


if __name__ == "__main__":
    launch(lambda: evaluate_run(LanguageRecipe, open_task, "language.evaluate"))
