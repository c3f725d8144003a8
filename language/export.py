"""Exports a trained language model for transformers: `python -m language.export RUN OUT`.

A folder is for GPT-2 and RoBERTa. language.finetune writes its folder itself.
"""

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, RobertaForMaskedLM

from core.errors import UserError
from language.data import open_corpus
from language.model import MaskedRoberta, is_causal
from language.recipe import LanguageRecipe
from language.train import make_model
from training.start.script import launch
from training.weights.export import Exporter, export_run
from training.weights.read import Weights, misnamed


def build(recipe: LanguageRecipe, weights: Callable[[nn.Module], Weights]) -> nn.Module:
    """Returns the model. RoBERTa's pad token follows from its number of positions, without the corpus."""
    if is_causal(recipe.model):
        return make_model(recipe, pad=None)
    found = weights(make_model(recipe, pad=1))["roberta.embeddings.position_embeddings.weight"]
    return make_model(recipe, pad=len(found) - recipe.context - 1)


def example(recipe: LanguageRecipe, model: nn.Module) -> Any:
    return lambda ids: model(ids).logits, torch.zeros(2, recipe.context, dtype=torch.long)


def folder(recipe: LanguageRecipe, model: nn.Module, target: Path) -> None:
    """Writes a folder for from_pretrained, with the corpus's tokenizer if the corpus is there."""
    if not hasattr(model, "save_pretrained"):
        raise UserError(f"transformers has no {recipe.model}: give a name that ends in .safetensors, .pth or .pt2")
    if isinstance(model, MaskedRoberta):  # our own class is not in transformers
        plain = RobertaForMaskedLM(model.config)
        plain.load_state_dict(model.state_dict())
        model = plain
    wanted: dict[str, Any] = {"use_cache": True}  # training needs none
    try:
        corpus = open_corpus(recipe.corpus, recipe.vocab_size)
    except UserError as error:
        print(f"without a tokenizer: {error}", file=sys.stderr)
    else:
        end = corpus.eot
        wanted |= {"bos_token_id": end, "eos_token_id": end}
        if wrong := misnamed(getattr(model, "names", ()), corpus.names):
            print(f"without a tokenizer: {corpus.folder} has another one, {wrong}", file=sys.stderr)
        elif corpus.tokenizer is not None:
            ids = {"eos_token": end, "bos_token": end, "pad_token": corpus.pad, "mask_token": corpus.mask}
            named = {key: corpus.tokenizer.id_to_token(at) for key, at in ids.items() if at is not None}
            PreTrainedTokenizerFast(tokenizer_object=corpus.tokenizer, **named).save_pretrained(target)
    of_transformers: Any = model
    of_transformers.config.update(wanted)
    if of_transformers.can_generate():
        of_transformers.generation_config.update(**wanted)
    of_transformers.save_pretrained(target)


TASK = Exporter(LanguageRecipe, build, example, folder)

if __name__ == "__main__":
    launch(lambda: export_run(TASK, "language.export"))
