"""Documents split over the ranks of an island: a model's step beside that of whole documents."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from core.testing import run_distributed
from language.data import IGNORE
from language.lengths.dealt import Document, attend_to_documents, pack_share
from tests.tiny_models import CONFIGS

VOCABULARY = 50
LENGTHS = [100, 37, 5, 1, 60, 3]
RINGS = {
    "all ranks": [(2, 0, 3, 1), (1, 3), (0,), (2,), (3, 2, 1), (0, 1, 2, 3)],
    "one rank with a filler alone": [(2, 0, 1), (1, 0), (0,), (2,), (2, 1), (0, 1)],
}


def documents() -> list[Document]:
    """Their last tokens predict nothing."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    return [(ids, torch.cat([ids[1:], ids.new_full((1,), IGNORE)])) for ids in texts]


def summed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


def build(kind: str) -> nn.Module:
    """gpt2, or a llama with fewer heads of keys and a scale of scores of its own; float64, without dropout."""
    from language.model import build_model

    torch.manual_seed(0)
    if kind == "gpt2":
        return build_model("gpt2_tiny", vocab_size=VOCABULARY, context=100, dropout=0.0).double()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).double().train()
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.7
    return model


def steps_in_rings(rank: int, ranks: int, kinds: tuple[str, ...]) -> list[Tensor]:
    """For each model and each of RINGS the loss and all gradients, [1 + parameters]."""
    results = []
    for kind in kinds:
        model = build(kind)
        attend_to_documents(model)
        for rings in RINGS.values():
            model.zero_grad()
            row = pack_share(documents(), rings)
            logits = model(row.ids, position_ids=row.positions, documents=row.boundaries).logits[0]
            loss = summed(logits, row.targets[0]) / sum(n - 1 for n in LENGTHS)
            loss.backward()
            result = torch.cat([loss.detach().reshape(1), *(p.grad.reshape(-1) for p in model.parameters())])
            dist.all_reduce(result)
            results.append(result)
    return results


@pytest.mark.slow  # four processes import transformers
def test_a_step_on_four_ranks_is_that_of_one_process():
    expected, total = [], sum(n - 1 for n in LENGTHS)
    for kind in (kinds := ("gpt2", "llama")):
        model = build(kind)
        loss = sum(summed(model(ids[None]).logits[0], targets) for ids, targets in documents()) / total
        loss.backward()
        whole = torch.cat([loss.detach().reshape(1), *(p.grad.reshape(-1) for p in model.parameters())])
        expected += [whole] * len(RINGS)
    for results in run_distributed(steps_in_rings, 4, kinds, timeout=120):
        for result, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(result, whole, rtol=1e-10, atol=1e-10)
