"""A causal language model with Trainer, in the manner of transformers' run_clm.py. "CO2" marks CO2's lines.

pip install ".[transformers]"
torchrun --nproc-per-node 2 examples/run_clm.py --output_dir out_clm
"""

import math
import os
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import torch
from co2_training import CO2Config  # CO2
from co2_training.integrations.transformers import CO2Callback  # CO2
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    EvalPrediction,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class ModelArguments:
    n_layer: int = field(default=2, metadata={"help": "Layers of the GPT-2 that is trained from scratch."})
    n_embd: int = field(default=64, metadata={"help": "Its width."})


@dataclass
class DataArguments:
    block_size: int = field(default=64, metadata={"help": "Bytes of a sample."})
    tau: int = field(default=5, metadata={"help": "Local steps per round."})  # CO2


@dataclass
class Arguments(TrainingArguments):
    """Other defaults than Trainer's, so that it runs in seconds."""

    output_dir: str = "out_clm"
    per_device_train_batch_size: int = 16
    learning_rate: float = 3e-3
    max_steps: int = 60
    logging_steps: int = 20
    save_steps: int = 20
    report_to: str = "none"  # pyright: ignore[reportIncompatibleVariableOverride]
    disable_tqdm: bool = True
    use_cpu: bool = not torch.cuda.is_available()


class Blocks(Dataset):
    """Python's own documentation in blocks of bytes."""

    def __init__(self, block_size: int, part: slice):
        text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
        self.rows = text[: len(text) // block_size * block_size].view(-1, block_size)[part]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


def preprocess_logits_for_metrics(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def compute_metrics(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions[:, :-1] == found.label_ids[:, 1:]).mean())}


def main() -> None:
    model_args, data_args, args = HfArgumentParser(
        (ModelArguments, DataArguments, Arguments)
    ).parse_args_into_dataclasses()
    set_seed(args.seed)
    sizes = {"vocab_size": 256, "n_positions": data_args.block_size, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=model_args.n_layer, n_embd=model_args.n_embd, **sizes)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=args,
        train_dataset=Blocks(data_args.block_size, slice(200, None)),
        eval_dataset=Blocks(data_args.block_size, slice(200)),
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    co2_config = CO2Config.recommended(steps=args.max_steps, tau=data_args.tau)  # CO2
    trainer.add_callback(CO2Callback(trainer, co2_config))  # CO2: in place of DDP; it saves and resumes, too
    checkpoint = args.resume_from_checkpoint
    if checkpoint is None and os.path.isdir(args.output_dir):
        checkpoint = get_last_checkpoint(args.output_dir)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"resumed at step {checkpoint.rpartition('-')[2] if checkpoint else 0}")
        print(f"accuracy {metrics['eval_accuracy']:.4f}, perplexity {math.exp(metrics['eval_loss']):.2f}")


if __name__ == "__main__":
    main()
