"""Causal language models in Hugging Face's format: opens a folder, adds adapters, writes the tuned model.

Nothing is downloaded, no pickle is read, and no code from a folder is run.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from core.checkpoint.stored import parse_json
from core.errors import UserError
from language.finetune_recipes import FinetuneRecipe, LoraConfig
from language.model import blocks_of
from language.prepare import vocabulary_size
from training.data.files import build_whole, share
from training.data.samples import mix, seeded
from training.optim import recompute
from training.start.errors import explained
from training.start.workers import rank

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
# buffers in files of older versions: causal masks, rotary frequencies, positions
BUFFERS = re.compile(r"(.*\.)?(attn|attention)\.(masked_)?bias|(.*\.)?rotary_emb\.inv_freq|(.*\.)?position_ids")
LEAST_SHARE = 0.9  # of a model's embeddings that its own tokenizer uses; the rest is padding
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def open_config(folder: Path | None) -> Any:
    """Returns the model's configuration from config.json. Raises UserError if transformers does not support it."""
    if folder is None:
        raise UserError("no model is named: add --model FOLDER, with config.json, *.safetensors and the tokenizer")
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"{file} is missing: give --model the folder of a causal language model; none is fetched")
    with explained(f"{file} is damaged", "copy it again"):
        kind = str(parse_json(file.read_text()).get("model_type"))
    with explained(f"{file} cannot be opened", "copy it again"):
        config = AutoConfig.from_pretrained(folder, **LOCAL) if kind in transformers.CONFIG_MAPPING else None
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{file}: transformers {transformers.__version__} has no causal language model of model_type {kind!r}; "
            "give one that it has, such as opt, gpt2 or llama"
        )
    return config


def open_model(recipe: FinetuneRecipe) -> nn.Module:
    """Returns the model with its weights on the host, in evaluation mode, with the recipe's adapters."""
    config, folder = open_config(recipe.model), recipe.model
    assert folder is not None
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} has no *.safetensors: convert its weights with transformers' save_pretrained")
    transformers.utils.logging.set_verbosity_error()  # errors are one line, without tables and bars
    transformers.utils.logging.disable_progress_bar()
    with explained(f"{folder} cannot be opened", "copy it again"):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, recipe.weights),
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
            **LOCAL,
        )
    said = {"missing_keys": "are missing", "mismatched_keys": "have another shape than config.json says"}
    for key, what in (said | {"unexpected_keys": "have no place in the model of config.json"}).items():
        names = sorted(str(name if isinstance(name, str) else name[0]) for name in found[key])
        if wrong := [name for name in names if key != "unexpected_keys" or not BUFFERS.fullmatch(name)]:
            some = f"{len(wrong)} tensors {what}, such as {', '.join(wrong[:3])}"
            raise UserError(f"{folder}: {some}: copy its files again, of one model")
    model.eval()
    check_causal(model, folder)
    return tunable(model, recipe)


def build_model(recipe: FinetuneRecipe) -> nn.Module:
    """Returns the same model without its weights, on torch's default device, for a dry run."""
    dtype = getattr(torch, recipe.weights)
    model = AutoModelForCausalLM.from_config(open_config(recipe.model), dtype=dtype, trust_remote_code=False)
    return tunable(model.eval(), recipe)


def tunable(model: nn.Module, recipe: FinetuneRecipe) -> nn.Module:
    """Adds the recipe's adapters, and freezes all else then. Turns off the cache of generation."""
    of_transformers: Any = model
    of_transformers.opened_use_cache = getattr(of_transformers.config, "use_cache", True)  # write_model restores it
    of_transformers.config.use_cache = False
    if recipe.recompute:
        recompute(blocks_of(model))
    if recipe.lora.rank:
        return add_lora(model, recipe.lora, recipe.seed)
    return model


def add_lora(model: nn.Module, config: LoraConfig, seed: int) -> nn.Module:
    """Returns the model with adapters, the same for each seed, as its only tunable parameters."""
    try:
        import peft
    except ImportError:
        raise UserError(f"lora.rank={config.rank} needs peft: pip install peft, or leave lora out") from None
    targets = list(config.targets) or None
    adapters = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    with explained(f"lora.targets={' '.join(config.targets)}", "name linear layers of the model"), seeded(mix(seed)):
        return peft.get_peft_model(model, adapters).eval()


def check_causal(model: nn.Module, folder: Path) -> None:
    """Raises UserError if a later token changes an earlier prediction, as in BERT: that model would see the answers."""
    with torch.no_grad():
        first, other = (model(torch.tensor([[1, 2, last]])).logits[0, :2].float() for last in (3, 4))
    if not torch.isfinite(first).all():
        raise UserError(f"{folder}: its weights give non-finite numbers: copy it again, or try --weights float32")
    if (first - other).abs().max() > 1e-3 * first.abs().max():
        raise UserError(f"{folder} is no causal language model, it sees later tokens: give a decoder, such as opt")


def open_tokenizer(folder: Path, model: nn.Module) -> Any:
    """Returns the folder's tokenizer. Raises UserError if there is none, or it has more tokens than the model."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{folder} has no tokenizer: add its files ({', '.join(TOKENIZER_FILES)}; one is enough)")
    with explained(f"{folder} cannot be opened", "copy it again"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    size: int = model.get_input_embeddings().num_embeddings  # pyright: ignore
    if (ids := vocabulary_size(tokenizer)) > size:
        raise UserError(f"{folder}: its tokenizer has {ids} tokens, its model {size}: they are not one pair")
    configs = (getattr(model, name, None) for name in ("config", "generation_config"))
    known: list[Any] = [getattr(config, "eos_token_id", None) for config in configs]
    ends = {end for one in known for end in (one if isinstance(one, list) else [one]) if end is not None and end < size}
    if ends and tokenizer.eos_token_id not in {*ends, None}:
        what = f"its tokenizer ends a text with token {tokenizer.eos_token_id}, its model with {sorted(ends)}"
        if ids < LEAST_SHARE * size:
            raise UserError(f"{folder}: {what}, and they have {ids} and {size} tokens: they are not one pair")
        if rank() == 0:
            print(f"warning: {folder}: {what}: make sure that they are one pair", file=sys.stderr)
    return tokenizer


def positions(model: nn.Module, context: int | None) -> int:
    """Returns the most tokens of a sample: `context`, or the model's positions. Raises UserError if it has fewer."""
    has = getattr(model.config, "max_position_embeddings", None)
    if context is not None and has is not None and context > has:
        raise UserError(f"context={context}: the model has {has} positions; give so many or fewer")
    return context or has or 2048


def write_model(model: nn.Module, tokenizer: Any, target: Path) -> None:
    """Writes a folder in the opened folder's format, or peft's for adapters. It appears only when it is complete."""
    of_transformers: Any = model
    if hasattr(of_transformers, "opened_use_cache"):
        of_transformers.config.use_cache = of_transformers.opened_use_cache
    old = target.with_name(f".{target.name}.old")

    def build(fresh: Path) -> None:
        of_transformers.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        share(fresh)
        shutil.rmtree(old, ignore_errors=True)
        if target.exists():
            target.rename(old)

    with explained(f"{target}: cannot be written", "make room, and give --resume"):
        target.parent.mkdir(parents=True, exist_ok=True)
        build_whole(target, build)
    shutil.rmtree(old, ignore_errors=True)
