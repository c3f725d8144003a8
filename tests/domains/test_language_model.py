"""Model sizes, linear attention, weight decay, metrics, generated text; what runs are made of, a step's gradient."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from core import UserError
from language import export
from language.data import IGNORE, CausalObjective, Corpus, MaskedObjective, held_out_batches, read_windows
from language.metrics import (
    continuation_markdown,
    continue_text,
    fill_masks,
    filled_markdown,
    held_out_sums,
    summarize,
    token_loss,
)
from language.model import build_model, decay_groups, is_causal
from language.recipes import gpt2_pydoc_small, roberta_pydoc_small
from language.train import backward, make_model, make_objective
from language.transnormer import LRPE, chunked_attention, decay_slopes
from training.loop.run import Run
from training.optim import OptimConfig

TINY = ["gpt2_tiny", "roberta_tiny", "transnormer_tiny"]
CPU = torch.device("cpu")


def _tiny(name: str, vocab_size: int = 97, context: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name, vocab_size=vocab_size, context=context, dropout=0.0, pad=1)


@pytest.mark.parametrize(
    ("name", "vocab_size", "context", "millions"),
    [
        ("gpt2_small", 50257, 1024, 124.4),
        ("gpt2_xl", 50257, 1024, 1557.6),
        ("roberta_base", 50265, 512, 124.7),
        ("roberta_large", 50265, 512, 355.4),
        ("transnormer_7b", 64000, 2048, 7051.7),
    ],
)
def test_parameter_counts_are_the_published_ones(name, vocab_size, context, millions):
    with torch.device("meta"):
        model = build_model(name, vocab_size=vocab_size, context=context, dropout=0.0, pad=1)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("name", TINY)
def test_logits_are_guesses_at_first_and_only_causal_models_ignore_what_comes_later(name):
    model = _tiny(name)
    for time in (1, 32):
        assert model(torch.randint(97, (2, time))).logits.shape == (2, time, 97)
    ids, targets = torch.randint(3, 97, (2, 8, 32))
    assert token_loss(model(ids).logits, targets).item() == pytest.approx(math.log(97), abs=0.35)
    model.eval()
    ids = torch.randint(3, 97, (1, 32))
    changed = ids.clone()
    changed[0, 20:] = (changed[0, 20:] + 1 - 3) % 94 + 3
    before, after = model(ids).logits[0, :20], model(changed).logits[0, :20]
    assert torch.allclose(before, after, atol=1e-5) == is_causal(name)


def _attention_by_definition(query, key, value, slope):
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    for t in range(query.shape[2]):
        for s in range(t + 1):
            weight = torch.exp(-slope * (t - s)) * (query[:, :, t] * key[:, :, s]).sum(-1)
            out[:, :, t] += weight[..., None] * value[:, :, s]
    return out


@pytest.mark.parametrize(("time", "chunk"), [(1, 4), (4, 4), (13, 4), (12, 64), (16, 1)])
def test_chunked_attention_equals_its_definition_and_so_do_its_gradients(time, chunk):
    torch.manual_seed(0)
    shapes = [(2, 3, time, 5), (2, 3, time, 5), (2, 3, time, 4)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    slope = torch.tensor([0.01, 0.5, 3.0], dtype=torch.float64)
    chunked, defined = chunked_attention(*inputs, slope, chunk), _attention_by_definition(*inputs, slope)
    torch.testing.assert_close(chunked, defined, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(chunked)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (chunked, defined))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_chunked_attention_stays_finite_over_long_sequences():
    long = torch.ones(1, 2, 5000, 4)
    out = chunked_attention(long, long, long, torch.tensor([0.9, 0.05]), 64)
    # Sum of a geometric series, times q.k = 4.
    expected = 4 / (1 - torch.exp(-torch.tensor([0.9, 0.05])))
    torch.testing.assert_close(out[0, :, -1, 0], expected, rtol=1e-4, atol=0)


def test_lrpe_products_depend_on_the_distance_alone_and_decay_is_fast_in_low_layers():
    lrpe = LRPE(heads=2, dim=6)
    query, key = torch.randn(2, 1, 2, 1, 6).expand(2, 1, 2, 9, 6)
    scores = lrpe(query) @ lrpe(key).transpose(-1, -2)
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=1e-4, atol=1e-4)
    angle = lrpe.theta[:, 0] * 3
    torch.testing.assert_close(scores[0, :, 5, 2], (query * key)[0, :, 0].mul(angle.cos()).sum(-1))
    first, last = decay_slopes(8, 0, 6), decay_slopes(8, 5, 6)
    torch.testing.assert_close(first, 2.0 ** -torch.arange(1.0, 9.0), rtol=1e-4, atol=0)
    assert last.max() < 1e-5 and last.min() > 0
    assert decay_slopes(8, 0, 1).max() == pytest.approx(0.5, rel=1e-4), "a single layer is a first layer"


@pytest.mark.parametrize("name", TINY)
def test_weight_decay_reaches_matrices_only(name):
    model = _tiny(name)
    decayed, others = decay_groups(model, OptimConfig("adamw", weight_decay=0.1))
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    grouped = [id(p) for group in (decayed, others) for p in group["params"]]
    assert sorted(grouped) == sorted(names), "each parameter once"
    for p in decayed["params"]:
        assert p.ndim == 2 and not any(word in names[id(p)] for word in ("bias", "emb", "norm", "wte", "wpe", "ln_"))
    undecayed = [names[id(p)] for p in others["params"] if p.ndim == 2]
    assert all("emb" in n or "wte" in n or "wpe" in n for n in undecayed), undecayed


def test_frozen_parameters_are_in_no_group():
    model = _tiny("gpt2_tiny")
    model.transformer.wte.requires_grad_(False)
    grouped = [p for group in decay_groups(model, OptimConfig("adamw", weight_decay=0.1)) for p in group["params"]]
    assert len(grouped) == len(list(model.parameters())) - 1


class Successor(nn.Module):
    """Knows that token n is followed by n + 1 modulo the vocabulary, with the given margin in its logits."""

    def __init__(self, vocab_size: int, margin: float):
        super().__init__()
        self.vocab_size, self.margin = vocab_size, margin

    def forward(self, ids):
        return CausalLMOutput(logits=self.margin * F.one_hot((ids + 1) % self.vocab_size, self.vocab_size).float())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_perplexity_and_bits_per_byte_by_hand(world_size):
    tokens = torch.arange(50).remainder(8).numpy()  # every target is the successor
    token_bytes = torch.arange(8)
    margin = math.log(7.0)  # the right token gets probability 7 / (7 + 7) = 1/2
    sums = 0
    for rank in range(world_size):
        batches = held_out_batches(tokens, CausalObjective(6), 4, rank=rank, world_size=world_size)
        sums += held_out_sums(Successor(8, margin), batches, CPU, token_bytes)
    metrics = summarize(sums.tolist(), causal=True)
    n_bytes = int(tokens[1:].sum())
    assert metrics["tokens"] == 49 and metrics["bytes"] == n_bytes
    assert metrics["perplexity"] == pytest.approx(2.0, rel=1e-6) and metrics["accuracy"] == 1.0
    assert metrics["bits_per_byte"] == pytest.approx(49 / n_bytes, rel=1e-6)


def test_perplexity_agrees_with_torchmetrics():
    from torchmetrics.text import Perplexity  # after language.model, which makes torchvision importable

    torch.manual_seed(0)
    logits, targets = torch.randn(3, 7, 11), torch.randint(11, (3, 7))
    targets[0, :4] = IGNORE

    class Fixed(nn.Module):
        def forward(self, ids):
            return CausalLMOutput(logits=logits)

    metrics = summarize(held_out_sums(Fixed(), [(targets, targets)], CPU, None).tolist(), causal=True)
    library = Perplexity(ignore_index=IGNORE)
    assert metrics["perplexity"] == pytest.approx(library(logits, targets).item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(token_loss(logits, targets).item(), rel=1e-5)
    assert metrics["tokens"] == 17 and "bits_per_byte" not in metrics


@pytest.mark.parametrize(("loss", "perplexity"), [(709.0, math.exp(709.0)), (800.0, math.inf), (math.inf, math.inf)])
def test_a_diverged_model_has_a_perplexity_too(loss: float, perplexity: float):
    assert summarize([2 * loss, 2.0, 0.0, 0.0], causal=True)["perplexity"] == perplexity
    assert math.isnan(summarize([math.nan, 2.0, 0.0, 0.0], causal=True)["perplexity"])


def _continue(top_k: int, seed: int, margin: float = 3.0):
    prompts = torch.tensor([[3, 4], [6, 7]])
    generator = torch.Generator().manual_seed(seed)
    return continue_text(Successor(9, margin), prompts, 5, context=4, top_k=top_k, generator=generator)


def test_greedy_text_follows_the_model_and_sampling_its_seed():
    assert _continue(1, 0).tolist() == [[3, 4, 5, 6, 7, 8, 0], [6, 7, 8, 0, 1, 2, 3]]
    assert torch.equal(_continue(9, 1), _continue(9, 1))
    assert not torch.equal(_continue(9, 1, margin=0.0), _continue(9, 2, margin=0.0))


@pytest.mark.parametrize("name", ["gpt2_tiny", "transnormer_tiny"])
def test_text_may_grow_beyond_the_context(name):
    model = _tiny(name, context=8)
    draws = torch.Generator().manual_seed(0)
    ids = continue_text(model, torch.tensor([[3, 4]]), 12, context=8, top_k=5, generator=draws)
    assert ids.shape == (1, 14)


def _word_tokenizer(words: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_samples_are_shown_as_markdown():
    tokenizer = _word_tokenizer(["?", "one", " two", "\n", " *"])
    assert continuation_markdown(tokenizer, torch.tensor([[1, 2, 3, 4]]), 2) == "**one two**↵ \\*"
    targets = torch.tensor([[IGNORE, 2, 2]])
    filled = fill_masks(Successor(5, 1.0), torch.tensor([[1, 1, 2]]), targets)
    assert filled.tolist() == [[1, 2, 3]]
    assert filled_markdown(tokenizer, filled, targets) == "one **two**  **↵** (two) "


# -- recipes, what a run is made of, and one step ---------------------------------------------------------------------


def _corpus(vocab_size: int, mask: int | None) -> Corpus:
    tokens = np.random.default_rng(0).integers(3, vocab_size, 4000).astype(np.uint16)
    return Corpus(Path("words"), tokens, tokens, vocab_size, 0, 1, mask)


def test_the_model_decides_what_is_predicted():
    causal, masked = gpt2_pydoc_small(), roberta_pydoc_small()
    assert make_objective(causal, _corpus(1024, None)) == CausalObjective(causal.context)
    assert make_objective(masked, _corpus(1024, 2)) == MaskedObjective(masked.context, 1024, 0, 2)
    with pytest.raises(UserError, match="no mask token"):
        make_objective(masked, _corpus(1024, None))
    with pytest.raises(UserError, match="add --vocab_size 500"):
        make_objective(causal, _corpus(500, 2))


def test_a_training_text_without_a_window_is_refused_unless_documents_are_whole():
    recipe, corpus = replace(gpt2_pydoc_small(), eval_tokens=None, context=2000), _corpus(1024, None)
    with pytest.raises(UserError, match="^words: its training text of 4,000 tokens .* context=2000: give a smaller"):
        make_objective(recipe, corpus)
    make_objective(replace(recipe, context=1999), corpus)
    make_objective(replace(recipe, balance="round"), corpus)


def test_an_exported_model_ends_its_text_and_has_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With weights of 0 the first token, which ends a document, is the likeliest."""
    from transformers import GPT2LMHeadModel

    recipe = replace(gpt2_pydoc_small(), vocab_size=50)
    monkeypatch.setattr(export, "open_corpus", lambda *_: _corpus(50, None))
    model = make_model(recipe, pad=None)
    for p in model.parameters():
        p.detach().zero_()
    export.folder(recipe, model, tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert model.config.use_cache and model.generation_config.use_cache
    assert model.generate(torch.tensor([[5]]), max_new_tokens=8).tolist() == [[5, 0]]  # pyright: ignore


@pytest.mark.parametrize("hardware", [True, False])
def test_autocast_keeps_the_loss_close_and_stays_off_where_the_hardware_would_emulate_it(hardware: bool, monkeypatch):
    monkeypatch.setattr("training.loop.progress.has_bfloat16", lambda _: hardware)
    recipe = replace(gpt2_pydoc_small(), device="cpu", vocab_size=50, model="transnormer_tiny")
    corpus = _corpus(50, 2)
    objective = make_objective(recipe, corpus)
    batch = objective.batch(read_windows(corpus.train, [0, 100], objective.read), [(0,), (1,)])
    losses = []
    for precision in ("float32", "bfloat16"):
        torch.manual_seed(0)
        job = replace(recipe, precision=precision)
        losses.append(backward(Run(job), job, make_model(job, pad=1), batch).item())
    assert (losses[0] != losses[1]) == hardware and losses[1] == pytest.approx(losses[0], rel=0.02)
