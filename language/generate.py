"""Text from a model, to look at while it trains."""

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from language.data import IGNORE


@torch.no_grad()
def continue_text(
    model: nn.Module, prompts: Tensor, new_tokens: int, *, context: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """Samples from a causal model: int64 [batch, time] -> [batch, time + new_tokens].

    The model reads at most the last `context` tokens; the CPU generator draws among the top_k most likely tokens.
    transformers' generate(), which TransNormer lacks, would draw from dropout's generator.
    """
    was_training = model.training
    model.eval()
    ids = prompts
    for _ in range(new_tokens):
        logits = model(ids[:, -context:]).logits[:, -1].float()
        values, candidates = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
        pick = torch.multinomial(values.softmax(-1).cpu(), 1, generator=generator).to(ids.device)
        ids = torch.cat((ids, candidates.gather(-1, pick)), dim=1)
    model.train(was_training)
    return ids


@torch.no_grad()
def fill_masks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The inputs, with a masked model's best guess at each predicted position: int64 [batch, time]."""
    was_training = model.training
    model.eval()
    guesses = model(inputs).logits.argmax(-1)
    model.train(was_training)
    return torch.where(targets != IGNORE, guesses, inputs)


def continuation_markdown(tokenizer: Tokenizer, ids: Tensor, prompt_length: int) -> str:
    """Prompts in bold, what the model wrote after them in plain type: Markdown for TensorBoard."""
    rows = []
    for row in ids.tolist():
        prompt, text = (
            tokenizer.decode(part, skip_special_tokens=False) for part in (row[:prompt_length], row[prompt_length:])
        )
        rows.append(f"**{_one_line(prompt)}**{_one_line(text)}")
    return "\n\n".join(rows)


def filled_markdown(tokenizer: Tokenizer, filled: Tensor, targets: Tensor) -> str:
    """Filled texts with each guess in bold, and the right token after it where the guess is wrong."""
    return "\n\n".join(
        "".join(_guess(tokenizer, guess, target) for guess, target in zip(row, wanted, strict=True))
        for row, wanted in zip(filled.tolist(), targets.tolist(), strict=True)
    )


def _guess(tokenizer: Tokenizer, guess: int, target: int) -> str:
    text = _one_line(tokenizer.decode([guess], skip_special_tokens=False))
    if target == IGNORE:
        return text
    truth = "" if guess == target else f" ({_one_line(tokenizer.decode([target], skip_special_tokens=False)).strip()})"
    return f" **{text.strip()}**{truth} "


def _one_line(text: str) -> str:
    return text.replace("\n", "↵").replace("*", "\\*")
