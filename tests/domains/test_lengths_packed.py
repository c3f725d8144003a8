"""Rows that hold several documents: those are as in a row each."""

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from core.errors import UserError
from core.testing import run_distributed
from language import model as models
from language.data import IGNORE
from language.lengths import dealt
from language.metrics import token_loss
from tests.tiny_models import CONFIGS


def build(kind: str) -> nn.Module:
    """A tiny model without dropout, in float64 but for TransNormer, which attends in float32."""
    torch.manual_seed(0)
    if kind == "transnormer":
        sizes = models.TransNormerConfig(vocab_size=97, layers=2, width=32, heads=2, glu_width=48, chunk=4)
        made: nn.Module = models.TransNormer(sizes)
    elif kind == "own gpt2":
        made = models.build_model("gpt2_tiny", vocab_size=97, context=64, dropout=0.0)
    else:
        made = models_of(kind)
    return made if kind == "transnormer" else made.double()


def models_of(kind: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()


LENGTHS = [1, 2, 40, 3, 17, 1, 29, 8]


def documents() -> list[dealt.Document]:
    """The last token of each predicts nothing, as in a text whose documents know no next one."""
    found = []
    generator = torch.Generator().manual_seed(3)
    for length in LENGTHS:
        ids = torch.randint(97, (length,), generator=generator)
        found.append((ids, torch.cat([ids[1:], torch.tensor([IGNORE])])))
    return found


def gradients(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    torch.stack(losses).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def one_a_row(kind: str) -> tuple[float, list[Tensor]]:
    """The reference: the model as it is, a call for each document."""
    model = build(kind)
    losses = [loss64(model(ids[None]).logits, targets[None]) for ids, targets in documents()]
    return torch.stack(losses).sum().item(), gradients(model, losses)


def loss64(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[0], targets[0], ignore_index=IGNORE, reduction="sum")


def packed_loss(model: nn.Module, row: dealt.Packed) -> Tensor:
    return loss64(model(row.ids, position_ids=row.positions, documents=row.boundaries).logits, row.targets)


@pytest.mark.parametrize("kind", ["own gpt2", "llama", "opt", "transnormer"])
def test_packed_documents_are_those_of_a_row_each(kind: str):
    expected, reference = one_a_row(kind)
    model = build(kind)
    dealt.attend_to_documents(model)
    row = dealt.pack(documents())
    loss = packed_loss(model, row)
    tolerance = 1e-10 if kind != "transnormer" else 1e-5
    torch.testing.assert_close(gradients(model, [loss]), reference, rtol=0, atol=tolerance)
    assert loss.item() == pytest.approx(expected, abs=10 * tolerance)
    mixed = model(row.ids, position_ids=row.positions, documents=torch.tensor([0, row.ids.shape[1]]))
    assert (loss64(mixed.logits, row.targets) - loss).abs() > 1e-4, "boundaries matter"


def packed_on_ranks(rank: int, ranks: int, kind: str) -> float:
    """The largest error of the summed gradients; the last rank has no documents."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    expected, reference = one_a_row(kind)
    model = build(kind)
    dealt.attend_to_documents(model)
    row = dealt.pack(documents()[rank :: ranks - 1] if rank < ranks - 1 else [])
    loss = packed_loss(model, row)
    found = gradients(model, [loss])
    total = loss.detach()
    for t in (*found, total):
        torch.distributed.all_reduce(t)
    return max(
        abs(total.item() - expected), *((a - b).abs().max().item() for a, b in zip(found, reference, strict=True))
    )


@pytest.mark.parametrize(
    ("ranks", "kind"), [(3, "gpt2"), *(pytest.param(n, "llama", marks=pytest.mark.slow) for n in (2, 4))]
)
def test_packed_rows_of_several_ranks_sum_to_the_reference(ranks: int, kind: str):
    assert max(run_distributed(packed_on_ranks, ranks, kind)) < 1e-10


def test_a_padded_batch_is_what_it_was():
    model, other = build("llama"), build("llama")
    dealt.attend_to_documents(model)
    ids = torch.randint(97, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[0, 6:] = 0
    for options in ({}, {"attention_mask": mask}):
        assert torch.equal(model(ids, **options).logits[:, :6], other(ids, **options).logits[:, :6])
    with pytest.raises(UserError, match="attention_mask goes with padded rows"):
        model(ids, attention_mask=mask, documents=torch.tensor([0, 9]))


def test_a_row_without_targets_has_a_gradient_of_zero():
    model = build("gpt2")
    dealt.attend_to_documents(model)
    row = dealt.pack([])
    loss = token_loss(model(row.ids, position_ids=row.positions, documents=row.boundaries).logits, row.targets, "sum")
    assert loss == 0 and all(not g.any() for g in gradients(model, [loss]))
    with pytest.raises(UserError, match="document 1 of a row is empty: leave it out"):
        dealt.pack([(torch.ones(2), torch.ones(2)), (torch.ones(0), torch.ones(0))])


# -- what is refused --------------------------------------------------------------------------------------------------


class Deaf(nn.Module):
    """Takes what it is told of documents, and does not heed it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = build("gpt2"), SimpleNamespace(_attn_implementation="sdpa", layer_types=None)

    def set_attn_implementation(self, name: str) -> None:
        self.config._attn_implementation = name

    def forward(self, ids: Tensor, **rest: Tensor) -> object:
        return self.inner(ids)


def windowed() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MistralForCausalLM(MistralConfig(vocab_size=97, num_key_value_heads=2, sliding_window=3, **sizes))


def with_layers() -> nn.Module:
    model = build("gpt2")
    model.config.layer_types = ["full_attention", "linear_attention"]  # pyright: ignore
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Deaf, "Deaf mixes the documents of a row"),
        (lambda: nn.Linear(1, 1), "Linear has no attention that could be told of documents"),
        (windowed, "attention to documents knows no window, the model's is 3"),
        (with_layers, "GPT2LMHeadModel has layers of linear_attention"),
    ],
)
def test_models_that_would_mix_documents_are_refused(make: Callable[[], nn.Module], message: str):
    with pytest.raises(UserError, match=message):
        dealt.attend_to_documents(make())


def test_dropout_on_attention_is_refused():
    model = models.build_model("gpt2_tiny", vocab_size=97, context=64, dropout=0.1)
    dealt.attend_to_documents(model)
    with pytest.raises(UserError, match="attention to documents has no dropout, the model's is 0.1: set it to 0"):
        packed_loss(model, dealt.pack(documents()))
