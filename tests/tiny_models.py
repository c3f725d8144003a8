"""Folders as Hugging Face's, with tiny random models and a tokenizer made here; and prompts that can be learned."""

import json
import random
from pathlib import Path

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import torch
from transformers import GPT2Config, LlamaConfig, OPTConfig, PreTrainedTokenizerFast
from transformers.models import auto

from language.prepare import train_tokenizer

POSITIONS = 48
# which answer follows from which
WORDS = {" great": ("lovely", "funny", "warm"), " terrible": ("dull", "clumsy", "cold")}
TEXT = "a film of two hours. It was seen by all.\n"
SIZES = dict(vocab_size=448, bos_token_id=0, eos_token_id=0, pad_token_id=1)
CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=POSITIONS, **SIZES),
    "opt": OPTConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        max_position_embeddings=POSITIONS,
        **SIZES,
    ),
    "llama": LlamaConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_size=32,
        intermediate_size=64,
        max_position_embeddings=POSITIONS,
        **SIZES,
    ),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, 400 tokens at most; each answer is one of them."""
    words = " ".join(word for of in WORDS.values() for word in of)
    texts = [TEXT + words + f" It was{answer}." for answer in WORDS] * 20
    tokenizer = train_tokenizer(texts, 400)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<pad>")


def make_model(folder: Path, kind: str = "gpt2", seed: int = 0, scale: float = 1.0) -> Path:
    """kind: of CONFIGS. scale: of all weights."""
    torch.manual_seed(seed)
    model = auto.AutoModelForCausalLM.from_config(CONFIGS[kind])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_prompts(folder: Path, train: int = 64, val: int = 20) -> Path:
    """train.jsonl and val.jsonl, in which one word of the prompt decides the answer."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("val", val)):
        lines = []
        for _ in range(count):
            answer = rng.choice(sorted(WORDS))
            filler = "a film " * rng.randrange(3)
            lines.append(json.dumps({"prompt": f"{filler}{rng.choice(WORDS[answer])}. It was", "answer": answer}))
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_text(folder: Path) -> Path:
    """train.txt and val.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in (("train", 60), ("val", 12)):
        (folder / f"{split}.txt").write_text(TEXT * lines)
    return folder
