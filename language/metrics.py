"""Metrics of held-out tokens: perplexity, bits per byte, and accuracy.

Perplexity depends on the tokenizer; bits per byte of text compare between vocabularies. Ranks add sums, not means, so
the result is exact for every world size.
"""

import math
import sys
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from language.data import IGNORE


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats over the targets that are not IGNORE, in float32 or what is finer. logits: [batch, time,
    vocab_size] or [n, vocab_size]; targets: int64 [batch, time] or [n]."""
    logits = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction=reduction)


@torch.no_grad()
def held_out_sums(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    token_bytes: Tensor | None,
) -> Tensor:
    """Sums over (inputs, targets): float64 [nats, predicted tokens, their bytes, right first guesses], in eval mode."""
    was_training = model.training
    model.eval()
    sizes = None if token_bytes is None else token_bytes.to(device)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for inputs, targets in batches:
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        output = model(inputs)
        if output is None:  # another rank has it, under a layout
            continue
        logits = output.logits
        predicted = targets[targets != IGNORE]
        n_bytes = predicted.new_zeros(()) if sizes is None else sizes[predicted].sum()
        right = (logits.argmax(-1) == targets).sum()  # IGNORE is no token, so it never counts
        nats = token_loss(logits, targets, reduction="sum")
        sums += torch.stack([nats.double(), torch.tensor(predicted.numel(), device=device).double(), n_bytes, right])
    model.train(was_training)
    return sums


def summarize(sums: Sequence[float], causal: bool) -> dict[str, float]:
    """Metrics from `held_out_sums` added over all workers.

    Keys: loss (nats per predicted token), perplexity (inf after divergence), accuracy, tokens; bits_per_byte and bytes
    for a causal model with a known tokenizer.
    """
    nats, tokens, n_bytes, right = sums
    loss = nats / tokens
    perplexity = math.exp(loss) if loss < math.log(sys.float_info.max) or math.isnan(loss) else math.inf
    metrics = dict(loss=loss, perplexity=perplexity, accuracy=right / tokens, tokens=tokens)
    if causal and n_bytes:
        metrics |= dict(bits_per_byte=nats / math.log(2) / n_bytes, bytes=n_bytes)
    return metrics
