"""The search's texts: the Gutenberg books as bytes, for four language models, and as tokens for GPT-2 Small."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.search.task import Batch, Inner, Shards, Split, Task, matrices_inside, places

CONTEXT = 48
WINDOWS = 1024  # held out
GPT2_SMALL = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}  # 124 M parameters
GPT2_CONTEXT, GPT2_WINDOWS = 256, 128  # of gpt2_small


class Layer(nn.Module):
    """A pre-normalised transformer layer with causal attention. [batch, time, width] -> the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        size = width // self.heads
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, size).permute(2, 0, 3, 1, 4)
        later = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(size)).masked_fill(later, -math.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ByteGPT(nn.Module):
    """Bytes int64 [batch, time] -> logits [batch, time, 256], the output layer sharing the embedding's weight."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 4, context: int = CONTEXT):
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for weight in (self.embedding.weight, self.position.weight):  # logits of size one, the weight being shared
            nn.init.normal_(weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.norm(h) @ self.embedding.weight.T


def output_loss(output: Any, targets: Tensor) -> Tensor:
    """Nats per byte or token, int64 [batch, time]; those below 0 are not predicted. output: logits, [batch, time,
    vocabulary], which the models of language/model.py wrap."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def windows(text: Tensor, starts: Tensor, context: int = CONTEXT) -> Batch:
    """Inputs and what follows them, int64 [..., context]. text: bytes or tokens [n]; starts: int64 [...]."""
    found = text[starts[..., None] + torch.arange(context + 1)].long()
    return found[..., :-1], found[..., 1:]


@functools.cache
def documents() -> tuple[list[str], dict[Split, list[str]]]:
    """The books to train on and the held-out ones, four for tuning and four for the test."""
    from language.corpora import gutenberg_file
    from language.prepare import read_documents

    found = list(read_documents(gutenberg_file()))
    held = random.Random(0).sample(range(len(found)), 8)
    rest = [document for i, document in enumerate(found) if i not in held]
    return rest, {"tuning": [found[i] for i in held[:4]], "test": [found[i] for i in held[4:]]}


@functools.cache
def books() -> tuple[Tensor, dict[Split, Tensor]]:
    """`documents` as bytes, uint8 each."""

    def text(some: list[str]) -> Tensor:
        return torch.frombuffer(bytearray("\n".join(some).encode()), dtype=torch.uint8)

    training, held = documents()
    return text(training), {split: text(some) for split, some in held.items()}


@functools.cache
def tokens() -> tuple[Tensor, dict[Split, Tensor]]:
    """`documents` as ids of a byte-level BPE of GPT-2's size, trained on those to train on; int32 each."""
    from language.prepare import train_tokenizer

    training, held = documents()
    tokenizer = train_tokenizer(training, GPT2_SMALL["vocab_size"])

    def text(some: list[str]) -> Tensor:
        encodings = tokenizer.encode_batch_fast(some, add_special_tokens=False)
        return torch.tensor([i for encoding in encodings for i in encoding.ids], dtype=torch.int32)

    return text(training), {split: text(some) for split, some in held.items()}


def spread(text: Tensor, context: int = CONTEXT, count: int = WINDOWS) -> Batch:
    """So many windows at equal distances."""
    return windows(text, torch.linspace(0, len(text) - context - 1, count).long(), context)


def books_task(
    name: str,
    model: str,
    build: Callable[[], nn.Module],
    draw: Callable[[int, int, int, int, Shards], Batch],
    held_out: dict[Split, Batch],
    *,
    lr: float,
    what: str = "bytes",
    window: str = f"{CONTEXT} bytes",
    predicted: str = "byte",
) -> Task:
    """A task on the Gutenberg books. model, what, window, predicted: in words."""
    return Task(
        name,
        f"the Gutenberg books as {what} (four whole books for tuning, four for the test), {model}, AdamW (weight decay "
        f"0.01), cosine schedule, gradients of a worker clipped to norm 1, 8 windows of {window} per worker and step; "
        f"the loss is in nats per {predicted}",
        build,
        output_loss,
        draw,
        held_out,
        Inner("adamw", lr, clip=1.0),
        batch=8,
    )


def windows_draw(text: Tensor, context: int = CONTEXT) -> Callable[[int, int, int, int, Shards], Batch]:
    """`draw` of windows anywhere in a text."""

    def draw(seed: int, step: int, workers: int, batch: int, shards: Shards) -> Batch:
        return windows(text, places(len(text) - context, seed, step, workers, batch, shards), context)

    return draw


def causal_task(name: str, build: Callable[[], nn.Module], model: str, lr: float = 8e-3) -> Task:
    training, held = books()
    held_out: dict[Split, Batch] = {split: spread(text) for split, text in held.items()}
    return books_task(name, model, build, windows_draw(training), held_out, lr=lr)


def bytes_(name: str, width: int, parameters: str, layers: int = 2, lr: float = 8e-3) -> Task:
    about = f"a GPT of {layers} layers, {width} wide, {parameters} M parameters"
    return causal_task(name, lambda: ByteGPT(width, layers), about, lr)


MUON = "torch.optim.Muon for the layers' matrices, AdamW for the rest"


def with_muon(task: Task) -> Task:
    """The task with Muon for the matrices of its layers and AdamW for the rest, by one learning rate."""
    inner = replace(task.inner, name="muon", matrices=matrices_inside(task.build(), "layers."))
    about = task.about.replace("AdamW (weight decay 0.01)", f"{MUON} (weight decay 0.01)")
    return replace(task, name=f"{task.name}_muon", about=about, inner=inner)


def gpt2_model(sizes: dict[str, int]) -> nn.Module:
    """Without dropout."""
    from language.model import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    none |= {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, attn_implementation="eager"))  # vmap has no other


def gpt2() -> Task:
    sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_layer": 2, "n_head": 4, "n_embd": 48}
    model = "transformers' GPT-2 of 2 layers, 48 wide, 0.07 M parameters"
    return causal_task("gpt2", lambda: gpt2_model(sizes), model)


def gpt2_small() -> Task:
    training, held = tokens()
    held_out: dict[Split, Batch] = {split: spread(text, GPT2_CONTEXT, GPT2_WINDOWS) for split, text in held.items()}
    return books_task(
        "gpt2_small",
        "transformers' GPT-2 Small, 124 M parameters, without dropout",
        lambda: gpt2_model(GPT2_SMALL),
        windows_draw(training, GPT2_CONTEXT),
        held_out,
        lr=3e-4,
        what="50,257 tokens of a byte-level BPE",
        window=f"{GPT2_CONTEXT} tokens",
        predicted="token",
    )


def transnormer() -> Task:
    def build() -> nn.Module:
        from language.transnormer import TransNormer, TransNormerConfig

        return TransNormer(TransNormerConfig(256, layers=2, width=48, heads=4, glu_width=96, chunk=CONTEXT))

    about = "language's TransNormer of 2 layers, 48 wide, 0.08 M parameters"
    return causal_task("transnormer", build, about)


PAD, MASK, END, FIRST_BYTE = 0, 1, 2, 3


def roberta() -> Task:
    from language.data import MaskedObjective

    objective = MaskedObjective(CONTEXT + 2, FIRST_BYTE + 256, END, MASK)
    training, held = books()

    def build() -> nn.Module:
        from language.model import MaskedRoberta, RobertaConfig

        return MaskedRoberta(
            RobertaConfig(
                **{"vocab_size": FIRST_BYTE + 256, "max_position_embeddings": CONTEXT + 3, "type_vocab_size": 1},
                **{"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 48, "intermediate_size": 192},
                **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
                **{"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None, "attn_implementation": "eager"},
            )
        )

    def masked(found: Tensor, *key: int) -> Batch:
        """Windows int64 [..., CONTEXT] -> inputs and targets, [..., CONTEXT + 2]."""
        rows = found.flatten(0, -2)
        parts = objective.batch(rows + FIRST_BYTE, [(*key, i) for i in range(len(rows))])
        return tuple(part.view(*found.shape[:-1], -1) for part in parts)

    def draw(seed: int, step: int, workers: int, batch: int, shards: Shards) -> Batch:
        at = places(len(training) - CONTEXT, seed, step, workers, batch, shards)
        return masked(windows(training, at)[0], seed, step)

    held_out: dict[Split, Batch] = {split: masked(spread(text)[0], i) for i, (split, text) in enumerate(held.items())}
    model = "transformers' RoBERTa of 2 layers, 48 wide, 0.07 M parameters"
    asked = f"of which 15 % are predicted as in RoBERTa, {model}"
    return books_task("roberta", asked, build, draw, held_out, lr=4e-3, predicted="predicted byte")
