"""The fine-tuning runs: what is tuned, on what, and how. Batch sizes are global: all workers together."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from core.errors import UserError
from language.recipe import TextRecipe
from training.optim import OptimConfig

Task = Literal["prompts", "text"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al., arXiv 2106.09685), by the package peft; the model's own parameters stay."""

    rank: int = 0
    """0: no adapters."""
    alpha: float = 16.0
    """An adapter's product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """The linear layers that get one, by the ends of their names; none: those that peft names for the model type."""


@dataclass(frozen=True)
class FinetuneRecipe(TextRecipe):
    """A causal language model in Hugging Face's format, and what it is tuned on. Dropout is off."""

    model: Path | None = None
    """The model's folder: config.json, *.safetensors and the tokenizer's files."""
    data: Path | None = None
    """The folder of the task's data: train.jsonl and val.jsonl, or train.txt and val.txt (also .txt.xz)."""
    task: Task = "prompts"
    """prompts: choose the right answer to each prompt, the loss is on the answer's tokens. text: predict each next
    token."""
    answers: tuple[str, ...] = ()
    """The answers that a prompt may have; none: those of the training file."""
    context: int | None = None
    """The most tokens of a sample that the model reads; None: the positions that it has."""
    trainable: tuple[str, ...] = ("*",)
    """Which parameters are tuned: patterns of their names, such as "*.bias" or "*layers.1?.*"."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    weights: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type that parameters are kept in; the 16-bit ones for method zo alone, which needs no gradients."""
    eval_samples: int | None = None
    """Held-out prompts, or windows of text, to evaluate on while training, None for all, as at the end. Results on a
    part are named val_part_*."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(context=4, eval_samples=1)
        if self.lora.rank < 0 or not self.lora.alpha > 0:
            raise UserError(
                f"lora rank={self.lora.rank}, alpha={self.lora.alpha}: give a rank of 0 or more, alpha above 0"
            )
        if self.lora.rank and self.trainable != ("*",):
            raise UserError(f"lora and trainable={' '.join(self.trainable)}: adapters alone are tuned; leave one out")
        if self.answers and len(set(self.answers)) < max(2, len(self.answers)):
            raise UserError(f"answers={' '.join(map(repr, self.answers))}: give two or more, each once")
        if self.weights != "float32" and self.method != "zo":
            raise UserError(f"weights={self.weights} with method {self.method!r}: it needs float32; leave it out")
        for name in ("zero", "elastic"):
            if value := getattr(self, name):
                raise UserError(f"{name}={value}: one worker, which has the whole model, writes it; leave it out")


MEZO = OptimConfig("sgd", lr=1e-6, momentum=0.0, schedule="constant")
ADAMW = OptimConfig("adamw", lr=1e-5, weight_decay=0.0, schedule="poly", warmup_steps=100, clip_grad_norm=1.0)


def prompts() -> FinetuneRecipe:
    """A classification by prompts, such as SST-2, with zeroth-order steps. Not run at this size. As in MeZO's runs of
    OPT: 20,000 steps of 16 prompts, the learning rate constant at 1e-6 (they also tried 1e-7)."""
    length = {"batch_size": 16, "epoch_steps": 1000, "epochs": 20}
    return FinetuneRecipe(method="zo", optim=MEZO, log_every=100, eval_samples=1000, **length)


def prompts_adamw() -> FinetuneRecipe:
    """The same task with gradients; learning rate and steps are ours. Not run at this size."""
    return replace(prompts(), method="ddp", optim=ADAMW, epoch_steps=100, epochs=10, log_every=10)


def text() -> FinetuneRecipe:
    """Plain text, windows of 512 tokens, with zeroth-order steps; all settings are ours. Not run at this size."""
    return replace(prompts(), task="text", context=512, eval_samples=256)


def text_adamw() -> FinetuneRecipe:
    """The same text with gradients; learning rate and steps are ours. Not run at this size."""
    return replace(prompts_adamw(), task="text", context=512, eval_samples=256)


RECIPES = {f.__name__: f() for f in (prompts, prompts_adamw, text, text_adamw)}
