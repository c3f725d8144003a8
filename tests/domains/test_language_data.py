"""Token files, windows, masking, held-out batches, and the named corpora with their cache."""

import contextlib
import json
import lzma
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from core.errors import UserError
from language.data import (
    IGNORE,
    PYDOC_HELD_OUT,
    CausalObjective,
    MaskedObjective,
    count_windows,
    held_out_batches,
    load_corpus,
    open_corpus,
    open_wikitext2,
    pydoc_documents,
    train_batches,
    window_keys,
)
from language.recipes import gpt2_pydoc_small

TOKENS = np.arange(1000, dtype=np.uint16)
MASKED = MaskedObjective(context=34, vocab_size=50, eot=0, mask=2)


def _keys(objective, start=0, total=40, rank=0, world_size=1, seed=0):
    recipe = replace(gpt2_pydoc_small(), batch_size=6, seed=seed)
    return list(window_keys(1000, objective, recipe, rank, world_size, start, total))


def _starts(*args, **kwargs):
    return torch.tensor([[at for *_, at in keys] for keys in _keys(*args, **kwargs)])


def test_windows_do_not_overlap_and_cover_the_text_in_each_epoch():
    per_epoch = count_windows(1000, CausalObjective(16)) // 6
    assert per_epoch == (1000 - 17) // 16 // 6 == 10
    keys = _keys(CausalObjective(16))
    assert [batch[0][:2] for batch in keys] == [(0, epoch) for epoch in range(4) for _ in range(10)]
    origins = set()
    for epoch in range(4):
        starts = sorted(at for batch in keys for _, of, at in batch if of == epoch)
        assert len(set(starts)) == len(starts) == 60 and all((at - starts[0]) % 16 == 0 for at in starts)
        assert starts[0] >= 0 and starts[-1] + 17 <= 1000
        origins.add(starts[0] % 16)
    assert len(origins) > 1, "the cut moves"


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_global_batches_are_the_same_for_every_number_of_workers(world_size):
    shares = [_starts(MASKED, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert all(share.shape == (40, 6 // world_size) for share in shares)
    assert torch.equal(torch.cat(shares, dim=1), _starts(MASKED))


def test_windows_depend_on_seed_epoch_and_rank_alone():
    same = dict(rank=1, world_size=2)
    assert torch.equal(_starts(MASKED, **same), _starts(MASKED, **same))
    assert torch.equal(_starts(MASKED, start=13, **same), _starts(MASKED, **same)[13:]), "resumed in an epoch's middle"
    for other in (dict(seed=1), dict(rank=0)):
        assert not torch.equal(_starts(MASKED, **same), _starts(MASKED, **(same | other)))
    epochs = _starts(MASKED, **same, total=10), _starts(MASKED, **same, start=10, total=20)
    assert not torch.equal(*epochs)


def test_causal_targets_are_the_next_tokens():
    recipe = replace(gpt2_pydoc_small(), batch_size=4)
    ((inputs, targets),) = train_batches(TOKENS, CausalObjective(8), recipe, rank=0, world_size=2, start=0, total=1)
    assert inputs.shape == targets.shape == (2, 8) and inputs.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)


@pytest.mark.parametrize("objective", [CausalObjective(8), MASKED])
def test_batches_do_not_depend_on_loader_processes_or_resuming(objective):
    recipe = replace(gpt2_pydoc_small(), batch_size=4)
    place = dict(rank=1, world_size=2, total=8)
    before = torch.get_rng_state()
    here = list(train_batches(TOKENS, objective, recipe, **place, start=0))
    there = list(train_batches(TOKENS, objective, replace(recipe, loader_workers=2), **place, start=3))
    assert torch.equal(before, torch.get_rng_state()), "the model's dropout draws from it"
    assert len(here) == 8 and not torch.equal(here[0][0], here[1][0])
    for (inputs, targets), (same, wanted) in zip(here[3:], there, strict=True):
        assert torch.equal(inputs, same) and torch.equal(targets, wanted)


@pytest.mark.parametrize(("objective", "samples"), [(CausalObjective(400), 1), (MaskedObjective(1200, 50, 0, 2), 0)])
def test_too_little_text_is_refused(objective, samples):
    with pytest.raises(UserError, match=rf"batch_size=6 \(global\) exceeds the {samples} training samples"):
        _starts(objective)


def test_masking_follows_the_15_80_10_10_rule_never_predicts_the_end_and_changes_with_the_epoch_alone():
    words = torch.from_numpy(np.random.default_rng(0).integers(3, 50, size=(4000, 32)))
    inputs, targets = MASKED.batch(words, [(0, row) for row in range(4000)])
    assert (inputs[:, [0, -1]] == MASKED.eot).all() and (targets[:, [0, -1]] == IGNORE).all()
    inputs, targets = inputs[:, 1:-1], targets[:, 1:-1]
    chosen = targets != IGNORE
    assert torch.equal(targets[chosen], words[chosen]) and torch.equal(inputs[~chosen], words[~chosen])
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.005)
    masked, kept = inputs[chosen] == MASKED.mask, inputs[chosen] == words[chosen]
    # A random word is the mask, or the word itself, once in 50.
    assert masked.float().mean().item() == pytest.approx(0.8 + 0.1 / 50, abs=0.01)
    assert kept.float().mean().item() == pytest.approx(0.1 + 0.1 / 50, abs=0.01)
    _, targets = MASKED.batch(torch.zeros(200, 32, dtype=torch.int64), [(row,) for row in range(200)])
    assert (targets == IGNORE).all()
    words = torch.full((5, 32), 7)

    def targets(epoch, rows):
        return MASKED.batch(words[rows], [(0, epoch, row) for row in rows])[1]

    assert torch.equal(torch.cat((targets(0, [0, 1]), targets(0, [2, 3, 4]))), targets(0, [0, 1, 2, 3, 4]))
    assert not torch.equal(targets(0, [0, 1, 2]), targets(1, [0, 1, 2]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("n_tokens", [17, 100, 129, 130])
def test_held_out_windows_predict_every_token_once(world_size, n_tokens):
    predicted = [
        target
        for rank in range(world_size)
        for inputs, target in held_out_batches(
            TOKENS[:n_tokens], CausalObjective(16), 3, rank=rank, world_size=world_size
        )
        if torch.equal(inputs + 1, target)
    ]
    tokens = torch.cat([target.flatten() for target in predicted]).sort().values
    assert tokens.tolist() == list(range(1, n_tokens))


def test_held_out_masks_do_not_depend_on_the_workers():
    words = np.random.default_rng(0).integers(3, 50, size=333).astype(np.uint16)

    def masked(world_size, batch_size):
        rows = []
        for rank in range(world_size):
            for inputs, targets in held_out_batches(words, MASKED, batch_size, rank=rank, world_size=world_size):
                rows += [str(row) for row in torch.stack((inputs, targets), 1).tolist()]
        return sorted(rows)

    assert masked(1, 4) == masked(3, 2)


def _nanogpt(folder: Path, tokens, dtype="uint16") -> Path:
    folder.mkdir(parents=True)
    for name in ("train", "val"):
        np.asarray(tokens, dtype).tofile(folder / f"{name}.bin")
    return folder


def test_nanogpt_files_are_read_without_meta(tmp_path):
    corpus = load_corpus(_nanogpt(tmp_path / "owt", [1, 50255, 50256]))
    assert (corpus.vocab_size, corpus.eot, corpus.mask, corpus.token_bytes) == (50257, 50256, None, None)
    assert corpus.train.tolist() == [1, 50255, 50256]


def test_token_files_that_cannot_be_right_are_named(tmp_path):
    with pytest.raises(UserError, match=r"train\.bin holds token 50257, outside"):
        load_corpus(_nanogpt(tmp_path / "large", [50257]))
    odd = _nanogpt(tmp_path / "odd", [1, 2])
    (odd / "train.bin").write_bytes(b"abc")
    with pytest.raises(UserError, match=r"train\.bin holds 3 bytes"):
        load_corpus(odd)
    (odd / "train.bin").unlink()
    with pytest.raises(UserError, match=r"no token file .*train\.bin"):
        load_corpus(odd)
    broken = _nanogpt(tmp_path / "broken", [1])
    for content in ("[]", "{", '"O"', "5"):
        (broken / "meta.json").write_text(content)
        with pytest.raises(UserError, match=r"meta\.json is damaged"):
            load_corpus(broken)
    whole = {"vocab_size": 5, "dtype": "uint16", "eot": 4, "pad": None, "mask": None}
    whole |= {"train": {"tokens": 1}, "val": {"tokens": 1}}
    for wrong in ({"dtype": "O"}, {"dtype": 3}, {"vocab_size": 5.5}, {"vocab_size": -1}, {"eot": 5}, {"mask": "x"}):
        (broken / "meta.json").write_text(json.dumps(whole | wrong))
        with pytest.raises(UserError, match=rf"meta\.json has {next(iter(wrong))}=.*: run `python -m"):
            load_corpus(broken)
    (broken / "meta.json").write_text(json.dumps(whole))
    for content in ("{}", "[]", "", "{", "[" * 100_000, "\0"):
        (broken / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=r"broken/tokenizer\.json cannot be read .*beside them, or remove it"):
            load_corpus(broken)
    (broken / "meta.json").write_text(json.dumps({"vocab_size": 5}))
    with pytest.raises(UserError, match=r"meta\.json is damaged"):
        load_corpus(broken)


META = [
    ("dtype", "O"), ("dtype", "float64"), ("dtype", None), ("dtype", ["uint16"]), ("vocab_size", 0),
    ("vocab_size", -5), ("vocab_size", 1e20), ("vocab_size", "300"), ("vocab_size", 10),
    ("eot", 300), ("eot", None), ("eot", -1), ("eot", 1.5), ("pad", 1000), ("mask", -2), ("bos", 10**9), ("bos", "x"),
    ("train", None), ("val", 7), ("train", {"tokens": 7}), ("val", {"tokens": "x"}), ("train", {"tokens": -1}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "wrong"), META)
def test_a_meta_that_its_tokens_contradict_is_refused(tmp_path, key, wrong):
    counts = {"train": {"tokens": 400, "documents": 1, "bytes": 400}}
    meta = dict(
        vocab_size=300, dtype="uint16", eot=0, pad=1, mask=2, bos=None, sources=[], val=counts["train"], **counts
    )
    folder = _nanogpt(tmp_path / "owt", np.arange(400) % 300)
    for changes in ({}, {key: wrong}):
        (folder / "meta.json").write_text(json.dumps(meta | changes))
        with pytest.raises(UserError) if changes else contextlib.nullcontext():
            load_corpus(folder)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_pydoc_needs_no_data_and_does_not_leak(cache, monkeypatch):
    monkeypatch.delenv("CO2_DATA", raising=False)
    corpus = open_corpus("pydoc", 512)
    assert corpus.vocab_size == 512 and len(corpus.train) > 4 * len(corpus.val) > 40_000
    train, held = pydoc_documents()
    assert held == [topics[name] for name in PYDOC_HELD_OUT]
    text = "\n\n".join(train)
    paragraphs = [p for document in held for p in document.split("\n\n") if len(p) > 100]
    assert len(paragraphs) > 100 and not [p for p in paragraphs if p in text]


def test_gutenberg_and_wikitext_come_from_the_data_folder(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    books = [f"This is the story of number {i}. " * 20 for i in range(9)]
    with lzma.open(tmp_path / "gutenberg_en.txt.xz", "wt") as file:
        file.write("\n\x0c\n".join(books))
    corpus = open_corpus("gutenberg", 300)
    assert json.loads((corpus.folder / "meta.json").read_text())["val"]["documents"] == 4
    assert open_corpus("gutenberg", 300).folder == corpus.folder, "made once"
    with pytest.raises(UserError, match=r"no WikiText-2 in .*wt2\.test\.txt.*--no_wikitext2.*gpt2_pydoc_small"):
        open_wikitext2(corpus)
    (tmp_path / "wt2.test.txt").write_text(" = Title = \n A <unk> text .\n")
    tokens = open_wikitext2(corpus)
    assert corpus.tokenizer.decode(tokens[:-1].tolist()) == " = Title = \n A <unk> text .\n"


def test_every_token_of_nanogpts_files_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "openwebtext").mkdir()
    tokens = np.zeros(3_000_000, np.uint16)
    for name in ("train", "val"):
        tokens.tofile(folder / f"{name}.bin")
    open_corpus("openwebtext", 50257)
    ends = 1_000_000  # tokens at each end of a file, which are checked whenever it is opened
    fail = lambda part, *_: len(part) <= ends or pytest.fail("checked again")  # noqa: E731
    monkeypatch.setattr("language.data.check_tokens", fail)
    open_corpus("openwebtext", 50257)
    monkeypatch.undo()
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    tokens[1_500_000] = 60_000  # neither in the first million nor in the last
    tokens.tofile(folder / "train.bin")
    with pytest.raises(UserError, match="train.bin holds token 60000, outside its vocabulary of 50257"):
        open_corpus("openwebtext", 50257)
