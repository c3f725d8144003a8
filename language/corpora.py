"""The corpora that recipes name, each opened by `open_corpus(name, vocab_size)`.

`openwebtext`, `wikibooks` and `wikitext103` are the paper's; they are read from `CO2_DATA/<name>`, where the
user has put token files. `gutenberg` (books, from CO2_DATA) and `pydoc` (Python's own documentation, which
every Python brings) are the small stand-ins; they are tokenised once, into the cache.
"""

import hashlib
import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tokenizers import Tokenizer

from core.errors import UserError
from language.data import Corpus, bytes_per_token, check_tokens, load_corpus, open_tokens
from language.prepare import (
    SUFFIXES,
    Documents,
    encode_documents,
    split_documents,
    text_files,
    token_dtype,
    write_corpus,
)
from language.recipe import CorpusName
from training.data import cached, data_root, missing

STAND_IN = "gpt2_pydoc_small"
GUTENBERG_HELD_OUT = 4  # books; with seed 0 about 3 % of the text
# Whole topics of the documentation, about a seventh of its text.
PYDOC_HELD_OUT = ("calls", "formatstrings", "import", "objects", "raise", "typesmapping")
_FORMAT = "2"  # part of every cache key: raise it when the files' content changes for the same source


def open_corpus(name: CorpusName, vocab_size: int) -> Corpus:
    """Opens a corpus, tokenising a stand-in on first use; UserError where its data is missing. vocab_size: of a
    stand-in's tokenizer; the paper's corpora bring their own."""
    if name == "pydoc":
        return _open_pydoc(vocab_size)
    if name == "gutenberg":
        return _open_gutenberg(vocab_size)
    folder = data_root() / name
    if not (folder / "train.bin").is_file():
        command = f"python -m language.prepare TEXT... --out {folder} --vocab-size {vocab_size}"
        expected = f"train.bin and val.bin, made by `{command}` or, for GPT-2, by nanoGPT"
        raise missing(f"{name} token files", folder, expected, STAND_IN, holds=name)
    corpus = load_corpus(folder)
    if not (folder / "meta.json").is_file():
        for split in ("train", "val"):
            _check_once(getattr(corpus, split), corpus.vocab_size, folder / f"{split}.bin")
    return corpus


def _check_once(tokens: np.ndarray, vocab_size: int, file: Path) -> None:
    """Checks every token of a file that somebody else wrote, such as nanoGPT; not again until the file changes."""
    seen = file.stat()
    key = _key(f"{file.resolve()} {seen.st_size} {seen.st_mtime_ns} {vocab_size}".encode())
    cached(f"checked-{key}", lambda _: check_tokens(tokens, vocab_size, file))


def open_wikitext2(corpus: Corpus) -> np.ndarray:
    """WikiText-2's test text in the tokens of `corpus`: 1-D, uint16 or uint32; to evaluate on, not to train on.

    Its bytes are those of the file as distributed, with its " @-@ " and "<unk>".
    """
    tokenizer = corpus.tokenizer
    if tokenizer is None:
        raise UserError(f"{corpus.folder} has no tokenizer.json to encode WikiText-2 with: add it, or --no_wikitext2")
    file = wikitext2_file()
    key = _key(file.read_bytes(), tokenizer.to_str().encode())

    def build(target: Path) -> None:
        encode_documents(tokenizer, Documents((file,)), target / "test.bin")

    folder = cached(f"wikitext2-{key}", build)
    return open_tokens(folder / "test.bin", token_dtype(tokenizer), tokenizer.get_vocab_size())


def wikitext2_file() -> Path:
    """WikiText-2's test text; UserError where it is missing."""
    file = data_root() / "wt2.test.txt"
    if not file.is_file():
        raise missing("WikiText-2", file.parent, f"{file.name}, the plain test text (or --no_wikitext2)", STAND_IN)
    return file


def open_text(folder: Path, tokenizer: Tokenizer, end: int) -> Corpus:
    """Plain text, train.txt and val.txt (see text_files) in `folder`, in a model's own tokens, of which `end` ends a
    document."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # encode_documents changes it
    files = {split: text_files([_text(folder, split)]) for split in ("train", "val")}

    def build(target: Path) -> None:
        for split, found in files.items():
            encode_documents(tokenizer, Documents(found), target / f"{split}.bin", end)

    contents = [_content(file) for found in files.values() for file in found]
    made = cached(f"text-{_key(*contents, tokenizer.to_str().encode(), str(end).encode())}", build)
    size, dtype = tokenizer.get_vocab_size(), token_dtype(tokenizer)
    train, val = (open_tokens(made / f"{split}.bin", dtype, size) for split in files)
    by_bytes = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    sizes = bytes_per_token(tokenizer) if by_bytes else None
    return Corpus(folder, train, val, size, end, tokenizer=tokenizer, token_bytes=sizes)


def _content(path: Path) -> bytes:
    """Of a file, or of all files of a folder that `datasets` has written."""
    return path.read_bytes() if path.is_file() else b"".join(f.read_bytes() for f in sorted(path.rglob("*.*")))


def _text(folder: Path, split: str) -> Path:
    """The split's file or folder."""
    found = [path for suffix in (*SUFFIXES, "") if (path := folder / f"{split}{suffix}").exists()]
    if not found:
        raise UserError(
            f"{folder / split}.txt is missing: plain text, documents parted by lines with a form feed alone"
        )
    return found[0]


def gutenberg_file() -> Path:
    """The books; UserError where they are missing."""
    file = data_root() / "gutenberg_en.txt.xz"
    if not file.is_file():
        raise missing("Gutenberg books", file.parent, f"{file.name}, books separated by form feed lines", STAND_IN)
    return file


def _open_gutenberg(vocab_size: int) -> Corpus:
    file = gutenberg_file()

    def build(target: Path) -> None:
        train, held = split_documents((file,), GUTENBERG_HELD_OUT, seed=0)
        write_corpus(train, held, target, vocab_size, [file.name])

    key = _key(file.read_bytes())
    return load_corpus(cached(f"gutenberg-{vocab_size}-{key}", build))


def _open_pydoc(vocab_size: int) -> Corpus:
    def build(target: Path) -> None:
        train, held = pydoc_documents()
        write_corpus(train, held, target, vocab_size, ["pydoc_data.topics"])

    key = _key("\0".join(topics.values()).encode())
    return load_corpus(cached(f"pydoc-{vocab_size}-{key}", build))


def pydoc_documents() -> tuple[list[str], list[str]]:
    """Python's documentation topics: (training documents, held-out documents).

    Topics quote each other at length, so the held-out topics' paragraphs are cut out of the training topics.
    """
    held = [topics[name] for name in PYDOC_HELD_OUT]
    seen = {paragraph.strip() for text in held for paragraph in text.split("\n\n")}
    kept = (
        "\n\n".join(part for part in text.split("\n\n") if part.strip() not in seen)
        for name, text in sorted(topics.items())
        if name not in PYDOC_HELD_OUT
    )
    return [text for text in kept if text.strip()], held


def _key(*contents: bytes) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:12]
