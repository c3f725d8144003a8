"""A small GPT-2 on Python's own documentation, byte by byte, with Hugging Face's Trainer. "CO2" marks CO2's lines.

pip install ".[transformers]"
torchrun --nproc-per-node 2 examples/hf_trainer.py [folder]

It goes on from the last checkpoint in the folder.
"""

import os
import sys
from pydoc_data.topics import topics

import torch
from co2_training import CO2Config  # CO2
from co2_training.integrations.transformers import CO2Callback  # CO2
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

LENGTH = 64  # bytes of an example


def examples() -> list[dict[str, torch.Tensor]]:
    text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean())}


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "out_hf_trainer",
        per_device_train_batch_size=16,
        max_steps=60,
        learning_rate=3e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_steps=20,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    data = examples()
    trainer = Trainer(model, args, train_dataset=data[200:], eval_dataset=data[:200], compute_metrics=accuracy)
    config = CO2Config.recommended(steps=args.max_steps, tau=5)  # CO2
    trainer.add_callback(CO2Callback(trainer, config))  # CO2: in place of DDP; it saves and resumes, too
    last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=last)
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"resumed at step {last.rpartition('-')[2] if last else 0}")
        print(f"accuracy {found['eval_accuracy']:.3f} of the next byte, loss {found['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
