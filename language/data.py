"""Token files on disk, and the batches that causal and masked language models read from them.

A corpus is a folder with `train.bin` and `val.bin`. They hold raw token ids, uint16 or uint32, of one document after
the other, each ended by the end-of-text token. `language.prepare` writes such folders with `meta.json` and
`tokenizer.json`. nanoGPT's OpenWebText files (uint16, GPT-2 tokens, no meta.json) can be read too.

The tokens that a worker sees are a pure function of (seed, epoch, rank, world size). The masks of a window are a pure
function of its key, (seed, epoch, first token). So neither the number of workers nor a resumed run changes the training
data. transformers' DataCollatorForLanguageModeling draws masks from one generator for all batches, in their order.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from core.checkpoint.stored import parse_json
from core.errors import UserError
from language.prepare import (
    END_OF_TEXT,
    SUFFIXES,
    Documents,
    encode_documents,
    fingerprint,
    split_documents,
    text_files,
    token_dtype,
    vocabulary_size,
    write_corpus,
)
from language.recipe import GPT2_VOCABULARY, CorpusName, TextRecipe
from training.data.files import cached, data_root, missing
from training.data.samples import Key, eval_share, generator, load_batches, train_keys
from training.start.errors import explained

IGNORE = -100  # torch's cross_entropy skips targets with this value
# first int32 of the 256 before the tokens in llm.c's and modded-nanogpt's files: of GPT-2's tokens, and Llama 3's
HEADERS = {20240520: "uint16", 20240801: "uint32"}
# files of nanoGPT, SentencePiece, BERT, fairseq, Megatron and LitData that may describe other tokens than GPT-2's
OF_OTHERS = ("meta.p*k*l*", "*.model", "vocab.txt", "dict.txt", "*.idx", "index.json")
PREDICTED = 0.15  # share of the tokens that a masked language model predicts

Batch = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class Corpus:
    """The token files of one corpus, and the information to read them.

    Attributes:
        folder: The corpus's folder.
        train: Read-only memory map, 1-D, uint16 or uint32.
        val: As train, for the held-out text.
        vocab_size: Number of tokens in the vocabulary.
        eot: The id that ends each document.
        pad: The pad token's id for masked language models, or None if the vocabulary has none (GPT-2's).
        mask: The mask token's id, or None as for pad.
        bos: The id that begins a masked model's window, or None if the end-of-text token does (all but RoBERTa's own).
        tokenizer: None if the folder has no tokenizer.json.
        token_bytes: int64 [vocab_size], the UTF-8 bytes of each token. None unless the tokenizer is byte-level.
    """

    folder: Path
    train: np.ndarray
    val: np.ndarray
    vocab_size: int
    eot: int
    pad: int | None = None
    mask: int | None = None
    bos: int | None = None
    tokenizer: Tokenizer | None = None
    token_bytes: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """The tokens in the order of their ids, with "" for gaps. Empty without a tokenizer."""
        size = self.vocab_size if self.tokenizer else 0
        return [self.tokenizer.id_to_token(i) or "" for i in range(size)]  # pyright: ignore


def load_corpus(folder: Path) -> Corpus:
    """Opens the token files in `folder`. A UserError names the file that is missing, empty or inconsistent."""
    meta, tokenizer_file = _read_meta(folder), folder / "tokenizer.json"
    vocab_size = meta["vocab_size"]
    remedy = "put the tokenizer that made them next to them, or remove it"
    with explained(f"{tokenizer_file} cannot be read", remedy):
        tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
    if tokenizer is not None and (ids := vocabulary_size(tokenizer)) != vocab_size:
        raise UserError(f"{tokenizer_file} has {ids} tokens but the token files use {vocab_size}: {remedy}")
    if tokenizer is not None and meta["vocabulary"] not in (None, fingerprint(tokenizer)):
        raise UserError(f"{tokenizer_file} has other tokens than {folder / 'meta.json'} says: restore it, or remove it")
    files = (open_tokens(folder / f"{f}.bin", meta["dtype"], vocab_size, meta[f]) for f in ("train", "val"))
    ids = {key: meta[key] for key in ("eot", "pad", "mask", "bos")}
    sizes = bytes_per_token(tokenizer) if tokenizer is not None and is_byte_level(tokenizer) else None
    return Corpus(folder, *files, vocab_size, **ids, tokenizer=tokenizer, token_bytes=sizes)


def _read_meta(folder: Path) -> dict:
    """Returns load_corpus's part of meta.json and the tokens of each file, or nanoGPT's values without meta.json."""
    file = folder / "meta.json"
    if not file.is_file():
        _check_gpt2(folder)
        unknown = dict.fromkeys(("pad", "mask", "bos", "train", "val", "vocabulary"))
        return dict(vocab_size=GPT2_VOCABULARY, dtype="uint16", eot=GPT2_VOCABULARY - 1, **unknown)
    with explained(f"{file} is damaged", "run `python -m language.prepare` again"):
        meta = parse_json(file.read_text())
        known = {key: meta[key] for key in ("vocab_size", "dtype", "eot", "pad", "mask")}
        known |= {key: meta.get(key) for key in ("bos", "vocabulary")}  # older files lack them
        known |= {name: meta[name]["tokens"] for name in ("train", "val")}
    size = known["vocab_size"] if type(known["vocab_size"]) is int else 0
    wrong = [key for key in ("pad", "mask", "bos") if known[key] is not None and not _is_token(known[key], size)]
    wrong += ["eot"] * (not _is_token(known["eot"], size)) + ["dtype"] * (known["dtype"] not in ("uint16", "uint32"))
    wrong += [f for f in ("train", "val") if not _is_token(known[f], 1 << 62)]  # the number of the file's tokens
    if wrong or size < 1:
        key = wrong[-1] if size > 0 else "vocab_size"
        raise UserError(f"{file} has {key}={known[key]!r}: run `python -m language.prepare` again")
    return known


def _check_gpt2(folder: Path) -> None:
    """Refuses a folder without meta.json where another tool's file says that the tokens are not GPT-2's."""
    end = GPT2_VOCABULARY - 1
    found = [path for pattern in OF_OTHERS for path in sorted(folder.glob(pattern))]
    for name in ("tokenizer.json", "vocab.json"):
        try:
            content = parse_json((folder / name).read_text())
            vocabulary = content if name == "vocab.json" else content["model"]["vocab"] | _added(content)
            found += [] if vocabulary.get(END_OF_TEXT) == end else [folder / name]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # none, or load_corpus names the damage
    if found:
        raise UserError(
            f"{found[0]} may say that the tokens next to it are not GPT-2's: make them from text with `python -m "
            "language.prepare`, or remove the file if they are"
        )


def _added(content: dict[str, Any]) -> dict[str, int]:
    return {token["content"]: token["id"] for token in content["added_tokens"]}


def _is_token(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def open_tokens(file: Path, dtype: str, vocab_size: int, expected: int | None = None) -> np.ndarray:
    """Maps a token file into memory, read only, as a 1-D array of `dtype`.

    It checks the first and last million tokens against the vocabulary. Otherwise a file of another tokenizer or dtype
    would only show up as an index error, or on a GPU as a device assertion. `expected` is the number of tokens that
    were written, if it is known.

    Raises:
        UserError: If the file is missing, cut, or has tokens outside the vocabulary.
    """
    if not file.is_file():
        raise UserError(f"no token file {file}: expected train.bin and val.bin, made by `python -m language.prepare`")
    size = file.stat().st_size
    if size == 0 or size % np.dtype(dtype).itemsize:
        raise UserError(f"{file} holds {size} bytes, not a whole number of {dtype} tokens: write it again")
    tokens = np.memmap(file, dtype=dtype, mode="r")
    with file.open("rb") as opened:
        first = opened.read(6)
    if wide := HEADERS.get(int.from_bytes(first[:4], "little")):
        raise UserError(
            f"{file} begins with llm.c's header of 1,024 bytes, before tokens in {wide}: keep only what follows, "
            f"tail -c +1025 {file.name} > NEW"
        )
    if first == b"\x93NUMPY":
        raise UserError(f"{file} begins with NumPy's header: keep only the tokens, numpy.load(FILE).tofile(NEW)")
    if expected is not None and len(tokens) != expected:
        raise UserError(
            f"{file} holds {len(tokens):,} tokens, but meta.json says {expected:,}: copy it again, it was cut"
        )
    for part in (tokens[:1_000_000], tokens[-1_000_000:]):
        check_tokens(part, vocab_size, file)
    return tokens


def check_tokens(tokens: np.ndarray, vocab_size: int, file: Path) -> None:
    """Raises UserError, with the file's name, if a token is outside the vocabulary."""
    largest = max(int(tokens[at : at + (1 << 24)].max()) for at in range(0, len(tokens), 1 << 24))
    if largest >= vocab_size:
        raise UserError(
            f"{file} holds token {largest}, outside its vocabulary of {vocab_size}: wrong tokenizer or dtype"
        )


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Returns whether each byte is a character of the vocabulary. A model's own tokenizer may have another decoder."""
    return '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])


def bytes_per_token(tokenizer: Tokenizer) -> Tensor:
    """Returns the UTF-8 bytes per token of a byte-level BPE, int64 [vocab_size], with 0 for special tokens.

    A byte-level vocabulary writes each byte as one printable character, so a token's length is its number of bytes.
    """
    added = tokenizer.get_added_tokens_decoder()  # of these, those that are not special are written as they are
    counts = torch.zeros(vocabulary_size(tokenizer), dtype=torch.int64)
    for token, index in tokenizer.get_vocab().items():
        size = len(token) if index not in added else len(token.encode())
        counts[index] = 0 if index in added and added[index].special else size
    return counts


@dataclass(frozen=True)
class CausalObjective:
    """Predicts each next token."""

    context: int
    """Tokens that the model reads, and predicts, per window."""

    @property
    def read(self) -> int:
        """Tokens to read from the file per window. A window's last target is the next window's first input."""
        return self.context + 1

    @property
    def stride(self) -> int:
        """Distance between neighboring windows in the file."""
        return self.context

    def batch(self, windows: Tensor, keys: list[tuple[int, ...]]) -> Batch:
        """Returns inputs and targets, both [batch, n], for windows int64 [batch, n + 1]. `keys` are not used."""
        return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True)
class MaskedObjective:
    """Recovers hidden tokens, by BERT's rule with RoBERTa's dynamic masking (Liu et al., arXiv 1907.11692).

    The model predicts 15 % of the tokens. It replaces 80 % of these by the mask token and 10 % by a random token, and
    keeps 10 %. Each window is put between RoBERTa's <s> and </s>, or two end-of-text tokens in their place. Windows run
    across documents ("FULL-SENTENCES"). The fields vocab_size, eot, mask and bos are the corpus's.
    """

    context: int
    """Tokens that the model reads per window, including the two end-of-text tokens."""
    vocab_size: int
    eot: int
    mask: int
    bos: int | None = None

    @property
    def read(self) -> int:
        """Tokens to read from the file per window."""
        return self.context - 2

    stride = read
    """Distance between neighboring windows in the file."""

    def batch(self, windows: Tensor, keys: list[tuple[int, ...]]) -> Batch:
        """Returns inputs and targets, both [batch, n + 2], for windows int64 [batch, n].

        Row i is masked by a generator that depends on `keys[i]`. Targets are IGNORE where nothing is predicted.
        """
        ends = windows.new_full((len(windows), 1), self.eot)
        begins = ends if self.bos is None else torch.full_like(ends, self.bos)
        words = torch.cat((begins, windows, ends), dim=1)
        rngs, n = [generator(*key) for key in keys], words.shape[1]
        draw = torch.stack([torch.rand(n, generator=rng) for rng in rngs])
        other = torch.stack([torch.randint(self.vocab_size, (n,), generator=rng) for rng in rngs])
        chosen = (draw < PREDICTED) & (words != self.eot) & (words != begins[:, :1])
        inputs = torch.where(chosen & (draw < 0.8 * PREDICTED), self.mask, words)
        inputs = torch.where(chosen & (draw >= 0.9 * PREDICTED), other, inputs)
        return inputs, torch.where(chosen, words, IGNORE)


Objective = CausalObjective | MaskedObjective


def count_windows(n_tokens: int, objective: Objective) -> int:
    """Returns the number of neighboring windows in a training text of `n_tokens`, which are the samples of an epoch."""
    return max(0, n_tokens - objective.read) // objective.stride  # one fewer than fit, so that the origin can move


def window_keys(
    n_tokens: int, objective: Objective, recipe: TextRecipe, rank: int, world_size: int, start: int, total: int
) -> Iterator[list[Key]]:
    """Yields this worker's batches from step `start` to `total`, as keys (seed, epoch, first token).

    The text is cut into neighboring windows, from an origin that moves with the epoch. The windows are shuffled, so a
    token is seen at most once an epoch.
    """
    samples = count_windows(n_tokens, objective)
    for (seed, epoch, *_), keys in train_keys(recipe, samples, rank, world_size, start, total):
        origin = torch.randint(objective.stride, (), generator=generator(seed, epoch, 0)).item()
        yield [(seed, epoch, origin + objective.stride * i) for *_, i in keys]


def train_batches(
    tokens: np.ndarray, objective: Objective, recipe: TextRecipe, rank: int, world_size: int, start: int, total: int
) -> Iterator[Batch]:
    """Yields this worker's (inputs, targets) of each step, int64 [batch_size / world_size, context], by window_keys."""
    keys = window_keys(len(tokens), objective, recipe, rank, world_size, start, total)
    return load_batches(Windows(tokens, objective), keys, recipe.loader_workers, collate=tuple)


class Windows(Dataset[Any]):
    """Batches of windows by their keys."""

    def __init__(self, tokens: np.ndarray, objective: Objective):
        self.tokens, self.objective = tokens, objective

    def __getitems__(self, keys: list[tuple[int, ...]]) -> Batch:
        """Returns the inputs and targets, see the objective's batch()."""
        windows = read_windows(self.tokens, [at for *_, at in keys], self.objective.read)
        return self.objective.batch(windows, keys)


def held_out_batches(
    tokens: np.ndarray, objective: Objective, batch_size: int, *, rank: int, world_size: int
) -> Iterator[Batch]:
    """Yields this worker's share of the non-overlapping windows that cover `tokens`, in order.

    Together the workers predict every token but the text's first (causal), or read every token (masked), exactly once,
    for any number of workers. A short last window comes in its own batch, so that nothing is padded. `batch_size` is
    per worker.
    """
    overlap = objective.read - objective.stride
    n_windows = -(-(len(tokens) - overlap) // objective.stride)
    mine = [objective.stride * k for k in eval_share(n_windows, rank=rank, world_size=world_size)]
    whole = [start for start in mine if start + objective.read <= len(tokens)]
    groups = [whole[i : i + batch_size] for i in range(0, len(whole), batch_size)]
    groups += [[start] for start in mine[len(whole) :]]
    for starts in groups:
        yield objective.batch(read_windows(tokens, starts, objective.read), [(start,) for start in starts])


def read_windows(tokens: np.ndarray, starts: list[int], length: int) -> Tensor:
    """Stacks tokens[start : start + length] to int64 [len(starts), length], shorter at the end of the text."""
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


# -- corpora by name --------------------------------------------------------------------------------------------------


STAND_IN = "gpt2_pydoc_small"
GUTENBERG_HELD_OUT = 4  # books; with seed 0 they are about 3 % of the text
# Whole topics of the documentation, about a seventh of its text.
PYDOC_HELD_OUT = ("calls", "formatstrings", "import", "objects", "raise", "typesmapping")
_FORMAT = "3"  # part of every cache key; raise it if the files' content changes for the same source


def open_corpus(name: CorpusName, vocab_size: int) -> Corpus:
    """Opens a corpus, and tokenizes a stand-in on its first use.

    Args:
        name: Name of the corpus.
        vocab_size: Size of a stand-in's vocabulary. The paper's corpora have their own tokenizers.

    Raises:
        UserError: If its data is missing.
    """
    if name in ("pydoc", "gutenberg"):
        books = None if name == "pydoc" else gutenberg_file()

        def build(target: Path) -> None:
            train, held = split_documents((books,), GUTENBERG_HELD_OUT, seed=0) if books else pydoc_documents()
            write_corpus(train, held, target, vocab_size, [books.name if books else "pydoc_data.topics"])

        key = _key(books.read_bytes() if books else "\0".join(topics.values()).encode())
        return load_corpus(cached(f"{name}-{vocab_size}-{key}", build))
    folder = data_root() / name
    if not (folder / "train.bin").is_file():
        command = f"python -m language.prepare TEXT... --out {folder} --vocab-size {vocab_size}"
        expected = f"train.bin and val.bin, made by `{command}` or, for GPT-2, by nanoGPT"
        raise missing(f"{name} token files", folder, expected, STAND_IN, holds=name)
    corpus = load_corpus(folder)
    if not (folder / "meta.json").is_file():
        for split in ("train", "val"):  # checks every token of a file that is not ours, once until the file changes
            tokens, size, file = getattr(corpus, split), corpus.vocab_size, folder / f"{split}.bin"
            if len(tokens) > 1 and not tokens[1:1_000_001:2].any():
                raise UserError(f"{file}: every second uint16 is 0, as in 32- or 64-bit numbers: write it as uint16")
            key = _key(f"{file.resolve()} {(seen := file.stat()).st_size} {seen.st_mtime_ns} {size}".encode())
            cached(f"checked-{key}", lambda _, t=tokens, n=size, f=file: check_tokens(t, n, f))
    return corpus


def open_wikitext2(corpus: Corpus) -> np.ndarray:
    """Returns WikiText-2's test text in the tokens of `corpus`, 1-D, uint16 or uint32, for evaluations.

    Its bytes are the bytes of the distributed file, with its `" @-@ "` and `"<unk>"`.
    """
    tokenizer = corpus.tokenizer
    if tokenizer is None:
        raise UserError(f"{corpus.folder} has no tokenizer.json to encode WikiText-2 with: add it, or --no_wikitext2")
    file = _file("WikiText-2", "wt2.test.txt", "the plain test text (or --no_wikitext2)")
    key = _key(file.read_bytes(), tokenizer.to_str().encode())

    def build(target: Path) -> None:
        encode_documents(tokenizer, Documents((file,)), target / "test.bin")

    folder = cached(f"wikitext2-{key}", build)
    return open_tokens(folder / "test.bin", token_dtype(tokenizer), vocabulary_size(tokenizer))


def gutenberg_file() -> Path:
    """Returns the file of the books. Raises UserError if it is missing."""
    return _file("Gutenberg books", "gutenberg_en.txt.xz", "books separated by form feed lines")


def _file(what: str, name: str, holds: str) -> Path:
    file = data_root() / name
    if not file.is_file():
        raise missing(what, file.parent, f"{name}, {holds}", STAND_IN)
    return file


def open_text(folder: Path, tokenizer: Tokenizer, end: int) -> Corpus:
    """Opens plain text, train.txt and val.txt (see text_files) in `folder`, in a model's own tokens.

    The id `end` ends a document.
    """
    tokenizer = Tokenizer.from_str(tokenizer.to_str())  # encode_documents changes it
    files = {split: text_files([_text(folder, split)]) for split in ("train", "val")}
    named = [(f"{split}/{file.name}".encode(), _content(file)) for split, found in files.items() for file in found]
    key = _key(*(part for pair in named for part in pair), tokenizer.to_str().encode(), str(end).encode())
    texts = [Documents(found) for found in files.values()]
    made = cached(f"text-{key}", lambda target: write_corpus(*texts, target, tokenizer, [], end))
    return replace(load_corpus(made), folder=folder)


def _content(path: Path) -> bytes:
    """Returns the content of a file, or of all files in a folder that `datasets` has written."""
    return path.read_bytes() if path.is_file() else b"".join(f.read_bytes() for f in sorted(path.rglob("*.*")))


def _text(folder: Path, split: str) -> Path:
    """Returns the split's file or folder."""
    found = [path for suffix in (*SUFFIXES, "") if (path := folder / f"{split}{suffix}").exists()]
    if not found:
        raise UserError(
            f"{folder / split}.txt is missing: plain text, documents separated by lines with only a form feed"
        )
    return found[0]


def pydoc_documents() -> tuple[list[str], list[str]]:
    """Returns Python's documentation topics, as (training documents, held-out documents).

    Topics quote each other at length, so paragraphs of the held-out topics are removed from the training topics.
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
