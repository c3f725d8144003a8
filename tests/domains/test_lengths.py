"""Whole documents dealt over rounds, and rows that hold several of them."""

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import training.prepared  # noqa: F401, transformers imports torchvision when it is installed

# isort: split
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from core import CO2, CO2Config, UserError
from core.testing import run_distributed
from language import model as models
from language.data import IGNORE
from language.lengths import dealt, rounds
from language.lengths.dealt import Dealt, steps_ahead, text_documents
from language.metrics import token_loss
from language.prompts import prompt_documents
from language.recipes import gpt2_pydoc_small
from tests.problems import run_cases
from tests.tiny_models import CONFIGS

END = 0
RECIPE = replace(gpt2_pydoc_small(), batch_size=8, balance="round", recommended=False)


def text(lengths: list[int]) -> np.ndarray:
    """Documents of so many tokens each, the last of them END; every other token stands once."""
    tokens = np.arange(1, 1 + sum(lengths), dtype=np.uint32)
    tokens[np.cumsum(lengths) - 1] = END
    return tokens


def log_normal(n: int, rng: np.random.Generator, median: float = 500, sigma: float = 1.1) -> np.ndarray:
    """Web text."""
    return rng.lognormal(np.log(median), sigma, n)


def github_like(n: int, rng: np.random.Generator) -> np.ndarray:
    """Source files, and 6 % joined repositories."""
    tail = 8000 * (1 + rng.pareto(1.2, n))
    return np.where(rng.random(n) < 0.06, tail, log_normal(n, rng, 700, 1.3))


def prolong_like(n: int, rng: np.random.Generator) -> np.ndarray:
    """Long documents among short ones, as in ProLong (arXiv 2410.02660)."""
    return np.where(rng.random(n) < 0.02, 65536, log_normal(n, rng))


def draw(law: Callable[..., np.ndarray], n: int, seed: int) -> np.ndarray:
    return np.maximum(law(n, np.random.default_rng(seed)), 1).astype(np.int64)


def drawn(n: int = 400, longest: int = 64, seed: int = 0) -> list[int]:
    return np.minimum(draw(log_normal, n, seed) // 12 + 2, 3 * longest).tolist()


# -- which documents a round holds, and to whom they go -----------------------------------------------------------


def order_of(workers: int, seed: int = 0) -> rounds.Order:
    lengths, *_ = rounds.cut(np.array(drawn()), 64)
    return rounds.Order(lengths, 512, lengths == 64, seed=seed, workers=workers)


def test_each_document_comes_once_an_epoch_whatever_the_rounds_are():
    order = order_of(workers=4)
    whole = [order.of(step, 1) for step in range(3 * order.steps)]
    for taus in ([3] * order.steps, [1, 5, 2, 7] * order.steps):
        ends = np.cumsum(taus).tolist()
        parts = [order.of(end - tau, tau) for end, tau in zip(ends, taus, strict=True) if end <= 3 * order.steps]
        assert np.array_equal(np.concatenate(parts), np.concatenate(whole)[: sum(map(len, parts))])
    for epoch in range(3):
        seen = np.concatenate(whole[epoch * order.steps : (epoch + 1) * order.steps])
        assert len(np.unique(seen)) == len(seen)
        excluded = np.setdiff1d(np.arange(len(order.sizes)), seen)
        assert order.sizes[excluded].sum() < order.step_size + 4 * 64
    assert not np.array_equal(whole[0], whole[order.steps]), "epochs are shuffled anew"
    assert not np.array_equal(whole[0], order_of(4, seed=1).of(0, 1))


@pytest.mark.parametrize("workers", [2, 5])
def test_the_longest_documents_are_held_over_until_there_is_one_for_each_worker(workers: int):
    order = order_of(workers)
    for step in range(0, 2 * order.steps - 5, 5):
        assert order.full[order.of(step, 5)].sum() % workers == 0


def wait(loads: np.ndarray) -> float:
    return 1 - loads.mean() / loads.max()


@pytest.mark.parametrize(
    ("law", "longest", "workers"),
    [(log_normal, 8192, 4), pytest.param(prolong_like, 65536, 16, marks=pytest.mark.slow)],
)
def test_a_round_is_even_in_work_and_in_tokens(law: Callable[..., np.ndarray], longest: int, workers: int):
    """The marks: a mean wait of 1 % at tau 24 and 3 % at tau 6, tokens within 1 % at tau 24."""
    lengths, *_ = rounds.cut(draw(law, 200_000, 0), longest)
    step, full = workers * max(longest, 8192), lengths == longest
    held, as_they_come = (rounds.Order(lengths, step, of, seed=0, workers=workers) for of in (full, full & False))
    for tau, most in ((24, 0.01), (6, 0.03)):
        waits, naive, off = [], [], []
        for number in range(5):
            chosen, usual = (lengths[order.of(number * tau, tau)] for order in (held, as_they_come))
            costs = rounds.cost(chosen, 9216)
            owner = rounds.deal(np.stack([chosen, costs], axis=1), workers)
            assert len(np.unique(owner)) == workers
            waits.append(wait(np.bincount(owner, costs, workers)))
            naive.append(wait(np.bincount(rounds.by_tokens(usual, workers), rounds.cost(usual, 9216), workers)))
            tokens = np.bincount(owner, chosen, workers)
            off.append(np.abs(tokens / tokens.mean() - 1).max())
        assert np.mean(waits) <= most and np.mean(waits) < np.mean(naive) / 3
        assert tau == 6 or max(off) < 0.01


def test_exchanges_even_out_what_the_first_deal_leaves_and_a_workers_steps_are_filled_alike():
    lengths, *_ = rounds.cut(draw(github_like, 700, 1), 32768)
    shares = np.stack([lengths, rounds.cost(lengths, 9216)], axis=1)
    owner = rounds.deal(shares, 16)
    loads = np.stack([np.bincount(owner, column, 16) for column in shares.T])
    assert np.abs(loads / loads.mean(axis=1, keepdims=True) - 1).max() < 0.01
    lengths = np.array([64] * 6 + [7, 9, 30, 1, 1, 4])
    part = rounds.into_parts(lengths, 6)
    assert np.bincount(part, lengths, 6).max() <= 64 + 30 and np.bincount(part[:6]).tolist() == [1] * 6


# -- documents ----------------------------------------------------------------------------------------------------


def test_a_text_becomes_documents_and_every_token_but_the_first_is_predicted_once():
    lengths = [5, 1, 17, 2, 9, 1, 33]  # two hold nothing but their end
    for unfinished in (0, 3):
        tokens = np.concatenate([text(lengths), np.arange(900, 900 + unfinished, dtype=np.uint32)])
        found = text_documents(tokens, END, context=8)
        assert found.lengths.max() == 8 and found.lengths.min() >= 1
        targets = torch.cat([found.read(i)[1] for i in range(len(found.lengths))]).tolist()
        begins = np.cumsum([0, *lengths])
        assert targets == [t for i, t in enumerate(tokens.tolist()) if i not in begins]
        for i in range(len(found.lengths)):
            inputs, wanted = found.read(i)
            assert len(inputs) == len(wanted) == found.lengths[i] and END not in inputs.tolist()
    assert (
        "5 documents, of which 3 are longer than 4 tokens and are cut; 2 empty ones left out"
        in text_documents(text(lengths), END, 4).about
    )
    with pytest.raises(UserError, match="2 documents, all of them empty"):
        text_documents(np.zeros(2, dtype=np.uint16), END, 8)


def test_prompts_are_documents_whose_answers_alone_are_targets():
    found = prompt_documents([([5, 6, 7, 8], 3), ([5, 9], 1)])
    assert found.lengths.tolist() == [3, 1] and found.targets.tolist() == [1, 1] and found.sizes.tolist() == [1, 1]
    inputs, targets = found.read(0)
    assert inputs.tolist() == [5, 6, 7] and targets.tolist() == [IGNORE, IGNORE, 8]


# -- the steps of a run ---------------------------------------------------------------------------------------------


def steps_of(rank: int, workers: int, start: int, taus: list[int], rows: int = 1) -> list[dealt.Rows]:
    """Of rounds of so many steps each."""
    dealt = Dealt(text_documents(text(drawn()), END, 64), 100.0)
    recipe = replace(RECIPE, accumulate=rows)
    ahead = iter(taus)
    return list(dealt.steps(recipe, rank, workers, start, start + sum(taus), lambda: next(ahead)))


def tokens_of(steps: list[dealt.Rows]) -> list[int]:
    return [t for step in steps for row in step.parts for t in row.targets[0].tolist() if t != IGNORE]


def test_the_workers_share_each_round_and_know_its_targets():
    shares = [steps_of(rank, 3, 0, [6, 6], rows=2) for rank in range(3)]
    assert all(len(share) == 12 and all(len(step.parts) == 2 for step in share) for share in shares)
    for step, whole in zip(shares[1], steps_of(1, 3, 0, [6, 6]), strict=True):
        assert sorted(tokens_of([step])) == sorted(tokens_of([whole])), "micro-batches leave a step as it is"
    for begin in (0, 6):
        mine = [tokens_of(share[begin : begin + 6]) for share in shares]
        joined = [t for tokens in mine for t in tokens if t != END]
        assert len(set(joined)) == len(joined)
        assert sum(map(len, mine)) / 18 == shares[0][begin].predicted == shares[2][begin + 5].predicted
        assert max(map(len, mine)) < 1.02 * min(map(len, mine))


def same(a: list[dealt.Rows], b: list[dealt.Rows]) -> bool:
    """Bit by bit."""
    rows = [(x, y) for s, t in zip(a, b, strict=True) for x, y in zip(s.parts, t.parts, strict=True)]
    alike = all(torch.equal(p, q) for x, y in rows for p, q in zip(vars(x).values(), vars(y).values(), strict=True))
    return alike and [s.predicted for s in a] == [t.predicted for t in b]


def test_a_run_goes_on_from_any_round_also_where_tau_has_changed():
    taus = [4, 1, 6, 6, 3]
    whole = steps_of(1, 3, 0, taus)
    for done in range(len(taus)):
        assert same(steps_of(1, 3, sum(taus[:done]), taus[done:]), whole[sum(taus[:done]) :])
    other = [t for rank in range(2) for t in tokens_of(steps_of(rank, 2, 11, [6])) if t != END]
    assert len(set(other)) == len(other), "two workers go on"
    seen = [t for rank in range(3) for t in tokens_of(steps_of(rank, 3, 0, [4, 1, 6])) if t != END]
    assert len(set(seen) & set(other)) < 3 * 64, "at most as many full documents come again as there are workers"


def test_a_worker_without_documents_gets_fillers():
    dealt = Dealt(text_documents(text([65, 40, 3]), END, 64), 100.0)
    recipe = replace(RECIPE, batch_size=1)
    (step,) = dealt.steps(recipe, 2, 3, 0, 1, lambda: 1)
    (row,) = step.parts
    assert row.targets.tolist() == [[IGNORE]] and row.boundaries.tolist() == [0, 1]


def test_a_deal_is_for_a_round():
    params = [nn.Parameter(torch.zeros(2))]
    assert steps_ahead(nn.Linear(1, 1)) == 1  # pyright: ignore[reportArgumentType]
    co2 = CO2(params, CO2Config(tau=7))
    assert steps_ahead(co2) == 7
    co2.close()
    co2 = CO2(params, CO2Config(tau="auto", delay="auto", merge="keep_local", gap="none", outer_momentum=0.0))
    assert steps_ahead(co2) == co2.tau > 1
    co2.close()


# -- what is refused --------------------------------------------------------------------------------------------------


def test_fewer_documents_than_workers_or_than_a_step_are_refused(monkeypatch: pytest.MonkeyPatch):
    found = text_documents(text([9, 9, 9]), END, 8)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="3 documents over 4 workers: give as many, or --balance none"):
        Dealt.of(RECIPE, models.build_model("gpt2_tiny", vocab_size=97, context=64, dropout=0.0), found)
    with pytest.raises(UserError, match="3 documents do not fill a step: give more, or a smaller --batch_size"):
        rounds.Order(found.sizes, 100, found.lengths == 8, seed=0, workers=1)


# -- rows that hold several documents: those are as in a row each -----------------------------------------------------


def build(kind: str) -> nn.Module:
    """A tiny model without dropout, in float64. llama has fewer heads of keys, and a scale of scores of its own."""
    torch.manual_seed(0)
    if kind == "own gpt2":
        return models.build_model("gpt2_tiny", vocab_size=97, context=64, dropout=0.0).double()
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]).eval().double()
    for layer in model.model.layers if kind == "llama" else ():
        layer.self_attn.scaling *= 1.7
    return model


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


@pytest.mark.parametrize("kind", ["own gpt2", "llama"])
def test_packed_documents_are_those_of_a_row_each(kind: str):
    expected, reference = one_a_row(kind)
    model = build(kind)
    dealt.attend_to_documents(model)
    row = dealt.pack(documents())
    loss = packed_loss(model, row)
    torch.testing.assert_close(gradients(model, [loss]), reference, rtol=0, atol=1e-10)
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    mixed = model(row.ids, position_ids=row.positions, documents=torch.tensor([0, row.ids.shape[1]]))
    assert (loss64(mixed.logits, row.targets) - loss).abs() > 1e-4, "boundaries matter"


RINGS = [  # the ranks that hold each document: all four ranks share, then all but the last, which has a filler
    [(0,), (1, 3), (2, 0, 3, 1), (0, 1, 2, 3), (3, 2, 1), (2,), (1, 3), (0,)],
    [(0,), (1, 0), (2, 0, 1), (0, 1), (2, 1), (2,), (1, 0), (0,)],
]


def packed_on_ranks(rank: int, ranks: int, kind: str, rings: list[tuple[int, ...]]) -> float:
    """The largest error of the summed gradients. Without rings documents are whole, and the last rank has none."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    expected, reference = one_a_row(kind)
    model = build(kind)
    dealt.attend_to_documents(model)
    whole = dealt.pack(documents()[rank :: ranks - 1] if rank < ranks - 1 else [])
    loss = packed_loss(model, dealt.pack_share(documents(), rings) if rings else whole)
    found = gradients(model, [loss])
    total = loss.detach()
    for t in (*found, total):
        torch.distributed.all_reduce(t)
    return max(
        abs(total.item() - expected), *((a - b).abs().max().item() for a, b in zip(found, reference, strict=True))
    )


def test_packed_rows_of_several_ranks_sum_to_the_reference():
    assert max(run_distributed(packed_on_ranks, 3, "gpt2", [])) < 1e-10


@pytest.mark.slow  # four processes import transformers
def test_documents_that_ranks_split_sum_to_the_reference():
    cases = [(kind, rings) for kind in ("own gpt2", "llama") for rings in RINGS]
    for case, errors in zip(cases, run_cases(packed_on_ranks, 4, cases, timeout=120), strict=True):
        assert max(errors) < 1e-10, case


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
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": 97, "num_key_value_heads": 2, "sliding_window": 3}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Deaf, "Deaf mixes the documents of a row"),
        (lambda: nn.Linear(1, 1), "Linear has no attention that could be told of documents"),
        (windowed, "attention to documents knows no window, the model's is 3"),
    ],
)
def test_models_that_would_mix_documents_are_refused(make: Callable[[], nn.Module], message: str):
    with pytest.raises(UserError, match=message):
        dealt.attend_to_documents(make())
