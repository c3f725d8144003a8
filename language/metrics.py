"""Metrics on held-out text: perplexity, bits per byte, accuracy, and samples of text that the model writes.

Perplexity depends on the tokenizer, while bits per byte compare between vocabularies. Ranks add up sums, not averages,
so the result is exact for every world size.
"""

import math
import sys
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from language.data import IGNORE


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Returns the cross-entropy in nats over the targets that are not IGNORE, in float32 or a finer dtype.

    Args:
        logits: [batch, time, vocab_size] or [n, vocab_size].
        targets: int64 [batch, time] or [n].
        reduction: See torch's cross_entropy.
    """
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction=reduction)


@torch.no_grad()
def held_out_sums(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device, token_bytes: Tensor | None
) -> Tensor:
    """Returns sums, float64 [nats, predicted tokens, their bytes, right first guesses], of a model in eval mode."""
    sizes = None if token_bytes is None else token_bytes.to(device)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        output = model(inputs)
        if output is None:  # under a layout another rank has the output
            continue
        logits = output.logits
        predicted = targets[targets != IGNORE]
        n_bytes = predicted.new_zeros(()) if sizes is None else sizes[predicted].sum()
        right = (logits.argmax(-1) == targets).sum()  # IGNORE is no token, so it never counts
        nats = token_loss(logits, targets, reduction="sum")
        sums += torch.stack([nats.double(), torch.tensor(predicted.numel(), device=device).double(), n_bytes, right])
    return sums


def summarize(sums: Sequence[float], causal: bool) -> dict[str, float]:
    """Returns metrics from `held_out_sums`, added over all workers.

    They are loss (nats per predicted token), perplexity (inf after divergence), accuracy and tokens. A causal model
    with a known tokenizer also has bits_per_byte and bytes.
    """
    nats, tokens, n_bytes, right = sums
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < math.log(sys.float_info.max) or math.isnan(loss) else math.inf
    metrics = dict(loss=loss, perplexity=perplexity, accuracy=right / tokens, tokens=tokens)
    if causal and n_bytes:
        metrics |= dict(bits_per_byte=nats / math.log(2) / n_bytes, bytes=n_bytes)
    return metrics


# -- text from a model, to look at while it trains --------------------------------------------------------------------


@torch.no_grad()
def continue_text(
    model: nn.Module, prompts: Tensor, new_tokens: int, *, context: int, top_k: int, generator: torch.Generator
) -> Tensor:
    """Samples from a causal model in eval mode, from int64 [batch, time] to [batch, time + new_tokens].

    The model reads at most `context` of the last tokens. A CPU generator draws from the `top_k` most likely tokens.
    transformers' generate(), which TransNormer does not have, would draw from dropout's generator.
    """
    ids = prompts
    for _ in range(new_tokens):
        logits = model(ids[:, -context:]).logits[:, -1].float()
        values, candidates = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
        pick = torch.multinomial(values.softmax(-1).cpu(), 1, generator=generator).to(ids.device)
        ids = torch.cat((ids, candidates.gather(-1, pick)), dim=1)
    return ids


@torch.no_grad()
def fill_masks(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the inputs with a masked model's best guess at each predicted position, int64 [batch, time]."""
    return torch.where(targets != IGNORE, model(inputs).logits.argmax(-1), inputs)


def continuation_markdown(tokenizer: Tokenizer, ids: Tensor, prompt_length: int) -> str:
    """Returns Markdown for TensorBoard: prompts in bold, and the model's continuations in plain type."""
    n = prompt_length
    return "\n\n".join(f"**{_decoded(tokenizer, row[:n])}**{_decoded(tokenizer, row[n:])}" for row in ids.tolist())


def filled_markdown(tokenizer: Tokenizer, filled: Tensor, targets: Tensor) -> str:
    """Returns filled texts with each guess in bold, and the right token after each wrong guess."""

    def shown(guess: int, target: int) -> str:
        text, truth = (_decoded(tokenizer, [token]) for token in (guess, max(target, 0)))
        if target == IGNORE:
            return text
        return f" **{text.strip()}**{'' if guess == target else f' ({truth.strip()})'} "

    rows = zip(filled.tolist(), targets.tolist(), strict=True)
    return "\n\n".join("".join(map(shown, row, wanted)) for row, wanted in rows)


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False).replace("\n", "↵").replace("*", "\\*")
