"""Token files, windows, masking, held-out batches, corpora with their cache; and `language.prepare`."""

import contextlib
import json
import lzma
import sys
import types
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, processors

from core import UserError
from language.data import (
    IGNORE,
    PYDOC_HELD_OUT,
    CausalObjective,
    MaskedObjective,
    bytes_per_token,
    count_windows,
    held_out_batches,
    load_corpus,
    open_corpus,
    open_text,
    open_wikitext2,
    pydoc_documents,
    train_batches,
    window_keys,
)
from language.prepare import Documents, prepare, read_documents, split_documents, text_files, train_tokenizer
from language.recipes import gpt2_pydoc_small
from tests.damages import forbid, room
from tests.scripts import run_script

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


@pytest.mark.parametrize("world_size", [2, 3])
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


def test_batches_do_not_depend_on_loader_processes_or_resuming():
    recipe = replace(gpt2_pydoc_small(), batch_size=4)
    place = dict(rank=1, world_size=2, total=8)
    before = torch.get_rng_state()
    here = list(train_batches(TOKENS, MASKED, recipe, **place, start=0))
    there = list(train_batches(TOKENS, MASKED, replace(recipe, loader_workers=2), **place, start=3))
    assert torch.equal(before, torch.get_rng_state()), "the model's dropout draws from it"
    assert len(here) == 8 and not torch.equal(here[0][0], here[1][0])
    for (inputs, targets), (same, wanted) in zip(here[3:], there, strict=True):
        assert torch.equal(inputs, same) and torch.equal(targets, wanted)


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


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("n_tokens", [17, 129, 130])
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


BESIDE = {
    "meta.pkl": b"any pickle: it is not read",
    "vocab.json": json.dumps({"a": 0, "<|endoftext|>": 31999}).encode(),
    "tokenizer.json": json.dumps({"model": {"vocab": {"a": 50256}}, "added_tokens": []}).encode(),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_file_of_another_tool_that_says_what_tokens_are_is_believed(tmp_path: Path, name: str):
    folder = _nanogpt(tmp_path / "owt", [1, 2, 3])
    (folder / name).write_bytes(BESIDE[name])
    with pytest.raises(UserError, match=rf"owt/{name} may say .* not GPT-2's: make them from text .*"):
        load_corpus(folder)
    (folder / name).unlink()
    (folder / "vocab.json").write_text(json.dumps({"!": 0, "<|endoftext|>": 50256}))
    assert load_corpus(folder).vocab_size == 50257


def test_a_header_before_the_tokens_is_named(tmp_path: Path):
    header, tokens = np.zeros(256, np.int32), np.arange(5, dtype=np.uint16)
    folder = _nanogpt(tmp_path / "owt", tokens)
    for magic, dtype in ((20240520, "uint16"), (20240801, "uint32")):
        header[0] = magic
        (folder / "train.bin").write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
        with pytest.raises(UserError, match=f"train.bin begins with llm.c's header .* tokens in {dtype}: .*tail -c"):
            load_corpus(folder)
    np.save(tmp_path / "tokens.npy", tokens)
    (tmp_path / "tokens.npy").replace(folder / "train.bin")
    with pytest.raises(UserError, match="train.bin begins with NumPy's header: keep only the tokens"):
        load_corpus(folder)


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
    for content in ("[]", "{", json.dumps({"vocab_size": 5})):
        (broken / "meta.json").write_text(content)
        with pytest.raises(UserError, match=r"meta\.json is damaged"):
            load_corpus(broken)
    whole = {"vocab_size": 5, "dtype": "uint16", "eot": 4, "pad": None, "mask": None}
    whole |= {"train": {"tokens": 1}, "val": {"tokens": 1}}
    (broken / "meta.json").write_text(json.dumps(whole))
    for content in ("{}", "", "[" * 100_000):
        (broken / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=r"broken/tokenizer\.json cannot be read .*next to them, or remove it"):
            load_corpus(broken)


META = {
    "dtype": ("O", ["uint16"]), "vocab_size": (1e20, 10), "eot": (None, 1.5), "pad": (1000,), "mask": (-2,),
    "bos": ("x",), "train": (None, {"tokens": 7}), "val": ({"tokens": -1},),
}  # fmt: skip


@pytest.mark.parametrize("key", META)
def test_a_meta_that_its_tokens_contradict_is_refused(tmp_path, key):
    counts = {"train": {"tokens": 400, "documents": 1, "bytes": 400}}
    meta = dict(
        vocab_size=300, dtype="uint16", eot=0, pad=1, mask=2, bos=None, sources=[], val=counts["train"], **counts
    )
    folder = _nanogpt(tmp_path / "owt", np.arange(400) % 300)
    for changes in ({}, *({key: wrong} for wrong in META[key])):
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


@pytest.mark.usefixtures("cache")
def test_every_token_of_nanogpts_files_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    tokens = np.ones(3_000_000, np.uint16)
    folder = _nanogpt(tmp_path / "openwebtext", tokens)
    open_corpus("openwebtext", 50257)
    ends = 1_000_000  # tokens at each end of a file, which are checked whenever it is opened
    fail = lambda part, *_: len(part) <= ends or pytest.fail("checked again")  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("language.data.check_tokens", fail)
        open_corpus("openwebtext", 50257)
    tokens[1_500_000] = 60_000  # neither in the first million nor in the last
    tokens.tofile(folder / "train.bin")
    with pytest.raises(UserError, match="train.bin holds token 60000, outside its vocabulary of 50257"):
        open_corpus("openwebtext", 50257)
    np.array([50256, 31848, 7, 11], np.uint32).tofile(folder / "train.bin")
    with pytest.raises(UserError, match="train.bin: every second uint16 is 0, .*: write it as uint16"):
        open_corpus("openwebtext", 50257)


def test_a_text_that_moves_to_the_other_split_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    tokenizer = train_tokenizer(BOOKS, 300)
    for i, name in enumerate(("train/a", "train/b", "val/c")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(BOOKS[i])
    before = len(open_text(tmp_path, tokenizer, 0).val)
    (tmp_path / "train/b.txt").rename(tmp_path / "val/b.txt")
    assert len(open_text(tmp_path, tokenizer, 0).val) == 2 * before


# -- language.prepare: documents, tokenizers, token files, and what is said of bad input ------------------------------


BOOKS = [f"Book {i}.\nIt says that {i} and {i + 1} are 日本 — numbers.\n" * 4 for i in range(6)]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with six books in two files, one of them compressed."""
    folder = tmp_path / "library"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("\n\x0c\n".join(BOOKS[:2]))
    with lzma.open(folder / "deep" / "b.txt.xz", "wt", encoding="utf-8") as file:
        file.write("\n\x0c\n".join(BOOKS[2:]))
    (folder / "notes.md").write_text("not a text file of the corpus")
    return folder


def test_a_folder_stands_for_its_text_files_and_form_feeds_split_them(library):
    files = text_files([library])
    assert [file.name for file in files] == ["a.txt", "b.txt.xz"] and list(Documents(files)) == BOOKS
    assert list(Documents(files, frozenset({0, 5}))) == [BOOKS[0], BOOKS[5]]


def test_a_folder_that_cannot_be_read_is_named_unless_it_is_hidden(library: Path, monkeypatch: pytest.MonkeyPatch):
    (library / ".trash").mkdir()
    for name in (".trash/c.txt", "._a.txt"):
        (library / name).write_text("removed")
    forbid(library / ".trash", monkeypatch)
    assert [file.name for file in text_files([library])] == ["a.txt", "b.txt.xz"]
    forbid(library / "deep", monkeypatch)
    with pytest.raises(UserError, match=f"^{library}/deep cannot be read .Permission denied.: change its permissions"):
        text_files([library])


def test_json_lines_are_a_document_each(tmp_path):
    lines = "".join(f"{json.dumps({'text': book, 'url': 'x'})}\n" for book in BOOKS)
    (tmp_path / "a.jsonl").write_text(lines + '\n{"text": " "}\n')
    with lzma.open(tmp_path / "b.jsonl.xz", "wt") as file:
        file.write(lines)
    assert list(Documents(text_files([tmp_path]))) == BOOKS * 2
    for broken in ('{"texts": "a"}', "{", '{"text": 3}', "7"):
        (tmp_path / "c.jsonl").write_text(f'{{"text": "a"}}\n{broken}\n')
        with pytest.raises(UserError, match=r'c.jsonl, line 2: expected a JSON object with a "text"'):
            list(read_documents(tmp_path / "c.jsonl"))


def test_what_datasets_has_saved_is_read_by_it(tmp_path, monkeypatch):
    """The library is played by a stand-in."""
    saved = tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (saved / "train" / "dataset_info.json").write_text("{}")
    with pytest.raises(UserError, match=r"saved holds several splits: name one of them, such as .*/saved/train"):
        text_files([saved])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets, to read it"):
        prepare((saved / "train",), out=tmp_path / "out")

    class Dataset:
        def select_columns(self, name: str) -> list[dict[str, str]]:
            return [{name: columns[name][i]} for i in range(len(BOOKS) + 1)]

    columns = {"text": [*BOOKS, " "]}
    found = {str(saved / "train"): Dataset()}
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_from_disk=found.__getitem__))
    meta = prepare((saved / "train",), out=tmp_path / "out", vocab_size=300, hold_out=2)
    assert (meta["train"]["documents"], meta["val"]["documents"], meta["sources"]) == (4, 2, ["train"])
    columns["text"][3] = None
    with pytest.raises(UserError, match='saved/train, row 3 from 0: its "text" is NoneType, not a string: remove'):
        list(read_documents(saved / "train"))


def test_token_files_decode_to_the_documents_and_count_their_bytes(library, tmp_path):
    meta = prepare((library,), out=tmp_path / "out", vocab_size=300, hold_out=2, seed=3)
    corpus = load_corpus(tmp_path / "out")
    assert meta == json.loads((tmp_path / "out" / "meta.json").read_text())
    found = {}
    for name, tokens in (("train", corpus.train), ("val", corpus.val)):
        *documents, after = np.split(tokens, np.flatnonzero(tokens == corpus.eot) + 1)
        assert len(after) == 0, "the last document ends with end-of-text too"
        found[name] = [corpus.tokenizer.decode(document[:-1].tolist()) for document in documents]
        assert meta[name]["documents"] == len(found[name]) and meta[name]["tokens"] == len(tokens)
        assert meta[name]["bytes"] == sum(len(text.encode()) for text in found[name])
        assert meta[name]["bytes"] == int(corpus.token_bytes[tokens.astype(np.int64)].sum())
    assert len(found["val"]) == 2 and sorted(found["train"] + found["val"]) == sorted(BOOKS)


def test_the_seed_chooses_the_held_out_books_and_a_split_of_the_data_sets_own_is_kept(library, tmp_path):
    files = text_files([library])
    held = [list(split_documents(files, 2, seed)[1]) for seed in (0, 0, 1, 2, 3)]
    assert held[0] == held[1] and any(other != held[0] for other in held[2:])
    meta = prepare((library / "a.txt",), out=tmp_path / "out", vocab_size=280, val=(library / "deep",))
    assert (meta["train"]["documents"], meta["val"]["documents"]) == (2, 4)


def test_special_tokens_in_a_text_stay_text(tmp_path):
    text = "before <|endoftext|> and <mask> after"
    (tmp_path / "x.txt").write_text(f"{text}\n\x0c\n{text}")
    prepare((tmp_path / "x.txt",), out=tmp_path / "out", vocab_size=260)
    corpus = load_corpus(tmp_path / "out")
    assert (corpus.train == corpus.eot).sum() == 1 and corpus.tokenizer.decode(corpus.train[:-1].tolist()) == text


def test_long_documents_are_encoded_in_pieces_without_loss(tmp_path, monkeypatch):
    monkeypatch.setattr("language.prepare.PIECE", 50)
    document = "A line of words.\n" * 9 + "x" * 140 + "\nend"
    (tmp_path / "x.txt").write_text(document)
    (tmp_path / "y.txt").write_text("held out")
    prepare((tmp_path / "x.txt",), out=tmp_path / "out", vocab_size=270, val=(tmp_path / "y.txt",))
    corpus = load_corpus(tmp_path / "out")
    assert corpus.tokenizer.decode(corpus.train[:-1].tolist()) == document


def test_ids_may_have_gaps(library: Path, tmp_path: Path):
    (tokenizer := train_tokenizer(BOOKS, 300)).save(str(tmp_path / "whole.json"))
    content = json.loads((tmp_path / "whole.json").read_text())
    content["model"]["vocab"][tokenizer.encode(BOOKS[0]).tokens[0]] = 70_000
    (tmp_path / "gaps.json").write_text(json.dumps(content))
    whole, gaps = (prepare((library,), out=tmp_path / n, tokenizer=tmp_path / f"{n}.json") for n in ("whole", "gaps"))
    assert (gaps["vocab_size"], gaps["dtype"], gaps["train"]) == (70_001, "uint32", whole["train"])
    corpus = load_corpus(tmp_path / "gaps")
    assert corpus.train.max() == 70_000 and corpus.token_bytes is not None
    assert corpus.token_bytes[corpus.train.astype(np.int64)].sum() == gaps["train"]["bytes"]


def test_bytes_per_token_are_of_utf8_also_of_an_added_token_that_is_not_special():
    tokenizer = train_tokenizer(BOOKS, 320)
    counts = bytes_per_token(tokenizer)
    assert counts[:3].tolist() == [0, 0, 0] and sorted(counts[3:259].tolist()) == [1] * 256
    assert counts[tokenizer.encode("日本 — 7").ids].sum() == len("日本 — 7".encode())
    tokenizer.add_tokens(["    "])
    ids, counts = tokenizer.encode("a    b").ids, bytes_per_token(tokenizer)
    assert ids[1] == tokenizer.token_to_id("    ") and counts[ids].tolist() == [1, 4, 1]


def test_a_truncation_or_padding_that_a_tokenizer_stores_is_not_used(library: Path, tmp_path: Path):
    tokenizer = train_tokenizer(BOOKS, 300)
    tokenizer.save(str(tmp_path / "whole.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "cut.json"))
    whole, cut = (prepare((library,), out=tmp_path / n, tokenizer=tmp_path / f"{n}.json") for n in ("whole", "cut"))
    assert whole["train"] == cut["train"] and whole["train"]["tokens"] > 100


def test_a_text_is_read_once_and_none_is_left_out(tmp_path: Path):
    folder, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "a.txt").write_text("one")
    (elsewhere / "b.txt").write_text("two")
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(folder)
    assert [file.name for file in text_files([folder])] == ["a.txt", "b.txt"]
    for sources, val in (([folder, folder / "a.txt"], ()), ([folder], (elsewhere,))):
        with pytest.raises(UserError, match="[ab].txt is named twice, or also below --val: leave one out"):
            prepare(tuple(sources), out=tmp_path / "out", val=val)
    for name in ("c.txt.gz", "d.jsonl"):
        (folder / name).write_text("") if "gz" in name else (folder / name).symlink_to("nowhere")
        with pytest.raises(UserError, match=f"{folder}/{name} cannot be read"):
            text_files([folder])
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", b" \n\n"), ("a.txt.xz", b"no xz"), ("a.xz", lzma.compress(b"text " * 999)[:40]), ("a.csv", b"a,b")],
)
def test_bad_input_is_one_line_that_names_the_file(tmp_path, name, content):
    (file := tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        prepare((file,), out=tmp_path / "out", vocab_size=300)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_bad_values_name_themselves(library, tmp_path):
    for n in (6, 0):
        with pytest.raises(UserError, match=f"hold out {n} of 6 documents"):
            prepare((library,), out=tmp_path / "out", vocab_size=300, hold_out=n)
    with pytest.raises(UserError, match="vocab-size 200"):
        prepare((library,), out=tmp_path / "out", vocab_size=200)
    with pytest.raises(UserError, match="exists already"):
        prepare((library,), out=library, vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == ["library"], "no half-made folder is left behind"


def test_the_command_prints_counts_and_fails_without_a_traceback(library, tmp_path, mistake):
    command = ["language.prepare", str(library), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    run_script(*command, "--hold-out", "2")
    assert "train: 4 documents" in mistake.capfd.readouterr().out
    said = mistake(*command)
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize("size", [300, 4000])
def test_a_full_disk_names_the_folder_and_leaves_none(library: Path, tmp_path: Path, size: int):
    """With 300 bytes the token files do not fit, and with 4000 the tokenizer does not."""
    with room(size), pytest.raises(OSError, match="File too large") as caught:
        prepare((library,), out=tmp_path / "out", vocab_size=300)
    assert caught.value.filename == str(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["library"]


def test_a_full_disk_leaves_nothing_in_the_cache(cache: Path, tmp_path: Path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("".join(BOOKS))
    tokenizer = train_tokenizer(BOOKS, 300)
    with room(300), pytest.raises(UserError, match=r"the cache \S+ cannot be written .File too large.: set CO2_CACHE"):
        open_text(tmp_path, tokenizer, 0)
    corpus = open_text(tmp_path, tokenizer, 0)
    assert tokenizer.decode(corpus.val[:-1]) == "".join(BOOKS)


def robertas(folder: Path) -> Path:
    """A tokenizer.json in RoBERTa's layout: its special tokens first, and <s> and </s> around all that is encoded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("language.prepare.SPECIAL_TOKENS", ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
        tokenizer = train_tokenizer(BOOKS, 300)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(folder / "robertas.json"))
    return folder / "robertas.json"


def test_a_tokenizer_of_ones_own_is_used_as_it_is(library: Path, tmp_path: Path):
    file = robertas(tmp_path)
    meta = prepare((library,), out=tmp_path / "corpus", tokenizer=file)
    assert (meta["vocab_size"], meta["bos"], meta["pad"], meta["eot"], meta["mask"]) == (300, 0, 1, 2, 4)
    corpus, theirs = load_corpus(tmp_path / "corpus"), Tokenizer.from_file(str(file))
    documents = [[int(i) for i in part] for part in np.split(corpus.val, np.flatnonzero(corpus.val == 2) + 1)[:-1]]
    (held,) = documents
    assert theirs.decode(held[:-1]) in BOOKS and 0 not in held, "no <s> within the text: windows get theirs"
    windows = torch.from_numpy(corpus.train[:40].astype(np.int64))[None]
    inputs, targets = MaskedObjective(42, 300, corpus.eot, corpus.mask, corpus.bos).batch(windows, [(0,)])
    assert (inputs[0, 0], inputs[0, -1]) == (0, 2) and (targets[0, 0], targets[0, -1]) == (-100, -100)


def test_a_tokenizer_of_the_same_size_and_other_tokens_is_noticed(library: Path, tmp_path: Path):
    prepare((library,), out=tmp_path / "corpus", vocab_size=270)
    file = tmp_path / "corpus" / "tokenizer.json"
    names = load_corpus(tmp_path / "corpus").names
    assert len(names) == 270 and names[:3] == ["<|endoftext|>", "<pad>", "<mask>"]
    train_tokenizer(["zebra zoo zoom " * 50] * 9 + [chr(i) * 3 for i in range(40, 120)], 270).save(str(file))
    with pytest.raises(UserError, match="tokenizer.json has other tokens than .*meta.json says: restore it, or remove"):
        load_corpus(tmp_path / "corpus")


def test_a_tokenizer_that_cannot_serve_is_one_line(library: Path, tmp_path: Path):
    bad = {"{}": "cannot be read", "lossy": "changes text", "endless": "neither <.endoftext.> nor </s>"}
    for name, said in bad.items():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.add_special_tokens(["</s>"] if name == "lossy" else ["<end>"])
        file = tmp_path / "bad.json"
        file.write_text(name) if name == "{}" else tokenizer.save(str(file))
        with pytest.raises(UserError, match=f"^--tokenizer {file} .*{said}[^\n]*$"):
            prepare((library,), out=tmp_path / "corpus", tokenizer=file)
