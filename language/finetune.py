"""Tunes a causal language model in Hugging Face's format on answers to prompts, or on plain text:

    torchrun --standalone --nproc-per-node 4 -m language.finetune RECIPE --model FOLDER --data FOLDER [overrides]

It writes the tuned model to OUT/model, with the tokenizer. Method zo also writes OUT/replay, for language.zo_replay.
"""

from language.finetune_recipes import RECIPES, FinetuneRecipe
from training.checks import dry_run
from training.recipe import answer_help, parse
from training.start.script import launch

if __name__ == "__main__":
    answer_help(RECIPES, prog="language.finetune")  # before the imports below, which take seconds

from typing import Any

from core.errors import UserError
from language import pretrained, zo_replay
from language.data import CausalObjective, open_text
from language.prompts import PromptTask
from language.train import TextTask, check_windows, learn
from language.zeroth import ZerothOrder
from training.loop.kinds import open_run


def main() -> None:
    recipe = parse(RECIPES, prog="language.finetune")
    if recipe.dry_run:
        return dry_run(recipe, pretrained.build_model)
    tune(recipe)


def tune(recipe: FinetuneRecipe) -> None:
    """Runs this worker's part of a whole run."""
    model = pretrained.open_model(recipe)
    assert recipe.model is not None
    tokenizer = pretrained.open_tokenizer(recipe.model, model)
    task = open_task(recipe, tokenizer, pretrained.positions(model, recipe.context))
    with open_run(recipe) as run:
        model = run.shard(model)
        before = zo_replay.tuned_digest(model) if recipe.method == "zo" and run.rank == 0 else ""
        method = learn(run, recipe, model, task)
        if method is None:
            return
        with run.averaged_weights():  # as evaluated
            if run.folder.writes:
                pretrained.write_model(model, tokenizer, recipe.folder / "model")
        if run.folder.writes and isinstance(method, ZerothOrder):
            zo_replay.write(recipe.folder / "replay", recipe, method, before)


def open_task(recipe: FinetuneRecipe, tokenizer: Any, context: int) -> PromptTask | TextTask:
    """Returns the recipe's data in the model's tokens. The model reads at most `context` tokens."""
    if recipe.data is None or not recipe.data.is_dir():
        wanted = "train.jsonl and val.jsonl" if recipe.task == "prompts" else "train.txt and val.txt"
        raise UserError(f"data={recipe.data} is no folder: add --data FOLDER, with {wanted}")
    if recipe.task == "prompts":
        return PromptTask.open(recipe, recipe.data, tokenizer, context)
    if tokenizer.eos_token_id is None or not tokenizer.is_fast:
        raise UserError(f"{recipe.model}: task text needs a tokenizer.json and an eos_token, to end documents with")
    corpus = open_text(recipe.data, tokenizer.backend_tokenizer, tokenizer.eos_token_id)
    objective = CausalObjective(context)
    check_windows(recipe, corpus, objective)
    some = corpus.val[: recipe.eval_samples and recipe.eval_samples * objective.stride + 1]
    return TextTask(corpus, objective, some, {"val": corpus.val})


if __name__ == "__main__":
    launch(main)
