"""`language.prepare`: reading documents, the tokenizer, token files, and what is said of bad input."""

import json
import lzma
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, processors

from core.errors import UserError
from language.data import MaskedObjective, bytes_per_token, load_corpus
from language.prepare import (
    Documents,
    prepare,
    read_documents,
    split_documents,
    text_files,
    token_dtype,
    train_tokenizer,
)
from tests.scripts import run_script

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


def test_json_lines_are_a_document_each(tmp_path):
    lines = "".join(f"{json.dumps({'text': book, 'url': 'x'})}\n" for book in BOOKS)
    (tmp_path / "a.jsonl").write_text(lines + '\n{"text": " "}\n')
    with lzma.open(tmp_path / "b.jsonl.xz", "wt") as file:
        file.write(lines)
    assert list(Documents(text_files([tmp_path]))) == BOOKS * 2
    for broken in ('{"texts": "a"}', "{", '["text"]', '{"text": 3}', "7"):
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
    columns.clear()
    with pytest.raises(UserError, match='reads no column "text" from it'):
        list(read_documents(saved / "train"))


@pytest.mark.parametrize(
    "text", ["one", "one\n", "one\n\x0c\ntwo", "one\n\n\x0c\n\ntwo\n", "a\x0cb\n\x0c\nc\r\n\x0c\r\nd", "\n\x0c\n one"]
)
def test_documents_are_those_of_splitting_the_whole_text(tmp_path, text):
    file = tmp_path / "x.txt"
    file.write_bytes(text.encode())
    parts = text.replace("\r\n", "\n").split("\n\x0c\n")
    assert list(read_documents(file)) == [part for part in parts if part.strip()]


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


def test_more_than_65536_tokens_are_stored_as_uint32():
    def sized(n: int) -> Tokenizer:
        return Tokenizer(models.WordLevel({str(i): i for i in range(n)}, unk_token="0"))

    assert token_dtype(sized(65536)) == "uint16" and token_dtype(sized(65537)) == "uint32"


def test_bytes_per_token_counts_utf8_bytes(library, tmp_path):
    prepare((library,), out=tmp_path / "out", vocab_size=320)
    tokenizer = load_corpus(tmp_path / "out").tokenizer
    counts = bytes_per_token(tokenizer)
    assert counts[:3].tolist() == [0, 0, 0] and sorted(counts[3:259].tolist()) == [1] * 256
    assert counts[tokenizer.encode("日本 — 7").ids].sum() == len("日本 — 7".encode())


def _bad_input(tmp_path: Path, kind: str) -> Path:
    file = tmp_path / ("bad.txt.xz" if "xz" in kind else "bad.txt")
    if kind == "empty folder":
        file = tmp_path / "none"
        file.mkdir()
    elif kind == "cut off xz":
        file.write_bytes(lzma.compress(b"some text " * 1000)[:40])
    elif kind == "other suffix":
        file = tmp_path / "table.csv"
        file.write_text("a,b")
    elif kind != "missing":
        content = {"empty": b"", "blank": b" \n\n", "not utf-8": b"caf\xe9 au lait", "no xz": b"plain text"}
        file.write_bytes(content[kind])
    return file


@pytest.mark.parametrize(
    "kind", ["empty", "blank", "not utf-8", "no xz", "cut off xz", "missing", "empty folder", "other suffix"]
)
def test_bad_input_is_one_line_that_names_the_file(tmp_path, kind):
    file = _bad_input(tmp_path, kind)
    with pytest.raises(UserError) as caught:
        prepare((file,), out=tmp_path / "out", vocab_size=300)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_bad_values_name_themselves(library, tmp_path):
    for n in (6, 0, -3):
        with pytest.raises(UserError, match=f"hold out {n} of 6 documents"):
            prepare((library,), out=tmp_path / "out", vocab_size=300, hold_out=n)
    for few in (200, -1):
        with pytest.raises(UserError, match=f"vocab-size {few}"):
            prepare((library,), out=tmp_path / "out", vocab_size=few)
    with pytest.raises(UserError, match="exists already"):
        prepare((library,), out=library, vocab_size=300)
    assert [path.name for path in tmp_path.iterdir()] == ["library"], "no half-made folder is left behind"


def test_the_command_prints_counts_and_fails_without_a_traceback(library, tmp_path, mistake):
    command = ["language.prepare", str(library), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    run_script(*command, "--hold-out", "2")
    assert "train: 4 documents" in mistake.capfd.readouterr().out
    said = mistake(*command)
    assert said.startswith("error: ") and said.count("\n") == 1


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


def test_a_tokenizer_that_cannot_serve_is_one_line(library: Path, tmp_path: Path):
    bad = {"{}": "cannot be read", "lossy": "changes text", "endless": "neither <.endoftext.> nor </s>"}
    for name, said in bad.items():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.add_special_tokens(["</s>"] if name == "lossy" else ["<end>"])
        file = tmp_path / "bad.json"
        file.write_text(name) if name == "{}" else tokenizer.save(str(file))
        with pytest.raises(UserError, match=f"^--tokenizer {file} .*{said}[^\n]*$"):
            prepare((library,), out=tmp_path / "corpus", tokenizer=file)


def test_a_token_file_that_was_cut_is_noticed(library: Path, tmp_path: Path):
    meta = prepare((library,), out=tmp_path / "corpus", vocab_size=300)
    file = tmp_path / "corpus" / "train.bin"
    file.write_bytes(file.read_bytes()[:-4])
    tokens = meta["train"]["tokens"]
    with pytest.raises(
        UserError, match=f"train.bin holds {tokens - 2} tokens, but meta.json says {tokens}: copy it again"
    ):
        load_corpus(tmp_path / "corpus")
