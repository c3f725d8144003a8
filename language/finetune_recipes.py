"""The fine-tuning runs. Batch sizes are global, over all workers."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from core.errors import UserError
from language.recipe import TextRecipe
from training.optim import OptimConfig

Task = Literal["prompts", "text"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al., arXiv 2106.09685) from the package peft. The model's own parameters stay fixed."""

    rank: int = 0
    """Rank of the adapters. 0 means no adapters."""
    alpha: float = 16.0
    """Scale of the adapters. The product of an adapter is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by the ends of their names. The default is peft's choice for the model."""


@dataclass(frozen=True)
class FinetuneRecipe(TextRecipe):
    """Settings of a causal language model in Hugging Face's format, and its data. Dropout is off."""

    model: Path | None = None
    """The model's folder, with config.json, *.safetensors and the tokenizer's files."""
    data: Path | None = None
    """Folder of the task's data, with train.jsonl and val.jsonl, or train.txt and val.txt (also .txt.xz)."""
    task: Task = "prompts"
    """The task. prompts chooses the right answer to each prompt, with a loss on the answer's tokens. text predicts each
    next token."""
    answers: tuple[str, ...] = ()
    """Answers that a prompt may have. The default is all answers in the training file."""
    context: int | None = None
    """Most tokens of a sample that the model reads. None means all positions of the model."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    weights: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the parameters. The 16-bit types are only for method zo, which needs no gradients."""
    eval_samples: int | None = None
    """Held-out prompts, or windows of text, in evaluations during training. None means all, as at the end. Results on a
    part are named val_part_*."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(context=4, eval_samples=1)
        if self.lora.rank < 0 or not self.lora.alpha > 0:
            raise UserError(
                f"lora rank={self.lora.rank}, alpha={self.lora.alpha}: give a rank of 0 or more, alpha above 0"
            )
        if self.answers and len(set(self.answers)) < max(2, len(self.answers)):
            raise UserError(f"answers={' '.join(map(repr, self.answers))}: give two or more, each once")
        if self.weights != "float32" and self.method != "zo":
            raise UserError(f"weights={self.weights} with method {self.method!r}: it needs float32; leave it out")
        self.leave_out("does not go with --model, which names the initial weights", init_from=None)
        self.leave_out("does not go with tuning, where one worker writes the whole model", zero=0, elastic=False)


MEZO = OptimConfig("sgd", lr=1e-6, momentum=0.0, schedule="constant")
ADAMW = OptimConfig("adamw", lr=1e-5, weight_decay=0.0, schedule="poly", warmup_steps=100, clip_grad_norm=1.0)


def prompts() -> FinetuneRecipe:
    """Zeroth-order steps on a classification by prompts, such as SST-2. We did not run it at this size.

    As in MeZO's runs of OPT, it has 20,000 steps of 16 prompts, and a constant learning rate of 1e-6 (they also tried
    1e-7).
    """
    length = {"batch_size": 16, "epoch_steps": 1000, "epochs": 20}
    return FinetuneRecipe(method="zo", optim=MEZO, log_every=100, eval_samples=1000, **length)


def prompts_adamw() -> FinetuneRecipe:
    """The same task with gradients. Learning rate and steps are ours. We did not run it at this size."""
    return replace(prompts(), method="ddp", optim=ADAMW, epoch_steps=100, epochs=10, log_every=10)


def text() -> FinetuneRecipe:
    """Zeroth-order steps on plain text in windows of 512 tokens, with our settings. We did not run it at this size."""
    return replace(prompts(), task="text", context=512, eval_samples=256)


def text_adamw() -> FinetuneRecipe:
    """The same text with gradients. Learning rate and steps are ours. We did not run it at this size."""
    return replace(prompts_adamw(), task="text", context=512, eval_samples=256)


RECIPES = {f.__name__: f() for f in (prompts, prompts_adamw, text, text_adamw)}
