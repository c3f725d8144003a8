"""Turns text into token files: `python -m language.prepare SOURCE... --out DIR --vocab-size N`.

A byte-level BPE tokenizer (GPT-2's kind) is trained on the training documents with the `tokenizers` library, or read
from `--tokenizer tokenizer.json`, such as GPT-2's or RoBERTa's own. DIR receives these files:

    train.bin, val.bin   token ids, uint16 or uint32; every document is followed by the end-of-text token
    tokenizer.json       the tokenizer
    meta.json            vocabulary, special tokens, and the documents, tokens and bytes of both files

Sources are text files, JSON Lines (one object with the key "text" per line), or folders that Hugging Face's `datasets`
wrote with save_to_disk. Nothing is downloaded. Documents are held out whole, so that no book is in both files.
"""

import hashlib
import json
import lzma
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from core.checkpoint.stored import parse_json
from core.errors import UserError
from training.data.files import build_whole, unreadable
from training.start.errors import explained
from training.start.script import launch, parse_options

FORM_FEED = "\x0c"  # a line with only this and blanks ends a document
BYTE_ORDER_MARK = "\ufeff"
LINE_ENDS = "\n\x85\u2028\u2029"
JSON_LINES = (".jsonl", ".jsonl.xz")
SUFFIXES = (".txt", ".txt.xz", ".xz", *JSON_LINES)
LEFT_OUT = re.compile(r".*\.(txt|jsonl)\.(gz|bz2|zst|zip)", re.IGNORECASE)
END_OF_TEXT, PAD, MASK = SPECIAL_TOKENS = ("<|endoftext|>", "<pad>", "<mask>")
ROBERTAS_BEGIN, ROBERTAS_END = "<s>", "</s>"
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 256 + len(SPECIAL_TOKENS), 1 << 32
PIECE = 1 << 20  # characters that are encoded at once, to bound memory for documents of any length


@dataclass(frozen=True)
class Documents:
    """The documents of some text files. Each iteration reads them again, with at most one document in memory.

    Attributes:
        files: Files for read_documents.
        chosen: Indices of the documents to yield, in the order of the files. None means all.
    """

    files: tuple[Path, ...]
    chosen: frozenset[int] | None = None

    def __iter__(self) -> Iterator[str]:
        numbered = enumerate(document for file in self.files for document in read_documents(file))
        return (document for i, document in numbered if self.chosen is None or i in self.chosen)


def text_files(sources: Iterable[Path]) -> tuple[Path, ...]:
    """Returns the text files that the sources name.

    A folder stands for all text files below it, sorted by path. A folder of `datasets` stands for itself. UserError
    names a folder that cannot be read.
    """
    files: list[Path] = []
    for source in sources:
        if (source / "dataset_dict.json").is_file():
            raise UserError(f"{source} holds several splits: name one of them, such as {source / 'train'}")
        if (source / "dataset_info.json").is_file():
            files.append(source)
        elif source.is_dir():
            found = sorted(_below(source))
            if not found:
                raise UserError(f"no text file in folder {source}: expected names that end in {', '.join(SUFFIXES)}")
            files += found
        elif not source.is_file():
            raise UserError(f"no such file or folder: {source}")
        elif not is_text(source):
            raise UserError(f"{source} is no text file: expected a name that ends in {', '.join(SUFFIXES)}")
        else:
            files.append(source)
    return tuple(files)


def _below(folder: Path) -> Iterator[Path]:
    """Yields the text files below a folder and below linked folders, without hidden files and folders."""
    seen = {folder.resolve()}
    for at, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        found = {Path(at, name).resolve(): name for name in folders if not name.startswith(".")}
        folders[:] = [name for path, name in found.items() if path not in seen]  # a link may lead up
        seen.update(found)
        for file in (Path(at, name) for name in names if not name.startswith(".")):
            if is_text(file):
                yield file
            elif LEFT_OUT.fullmatch(file.name) or (file.name.lower().endswith(SUFFIXES) and not file.exists()):
                raise UserError(f"{file} cannot be read: decompress it (only .xz is read), mend the link, or remove it")


def is_text(file: Path) -> bool:
    """Returns whether it is a file with the name of a text file. Windows writes some names in capitals."""
    return file.name.lower().endswith(SUFFIXES) and file.is_file()


def read_documents(file: Path) -> Iterator[str]:
    """Yields the documents of a UTF-8 file, text or JSON Lines, or of a folder of `datasets`, without empty documents.

    Lines may end as on Unix, Windows or old Macs, and are returned with newlines. A byte order mark is removed.

    Raises:
        UserError: Names the file if it cannot be decompressed or decoded, or has no text.
    """
    empty = True
    try:
        for document in _saved_by_datasets(file) if file.is_dir() else _in_file(file):
            empty = False
            yield document
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text ({error.reason}): convert it, or leave it out") from error
    except (lzma.LZMAError, EOFError) as error:
        raise UserError(f"{file} cannot be decompressed ({error}): get it again, or leave it out") from error
    if empty:
        raise UserError(f"{file} holds no text: remove it from the sources")


def _in_file(file: Path) -> Iterator[str]:
    name = file.name.lower()
    opener = lzma.open if name.endswith(".xz") else open
    with opener(file, "rt", encoding="utf-8-sig") as stream:
        for document in _from_json(file, stream) if (json_lines := name.endswith(JSON_LINES)) else _split(stream):
            if "\0" in document and not json_lines:
                raise UserError(f"{file} holds zero bytes, as UTF-16 and binary files do: convert it to UTF-8 text")
            yield document


def _from_json(file: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        what = f'{file}, line {number}: expected a JSON object with a "text"'
        with explained(what, "correct the line, or remove it"):
            text = parse_json(line)["text"] if line.strip() else ""
            blank = not text.strip()
        if not blank:
            yield text


def _saved_by_datasets(folder: Path) -> Iterator[str]:
    try:
        import datasets  # imported here, because it is an optional package
    except ImportError:
        raise UserError(f"{folder} was written by the library datasets: pip install datasets, to read it") from None
    with explained(f'{folder}: `datasets` reads no column "text" from it', "write it anew"):
        rows = datasets.load_from_disk(str(folder)).select_columns("text")
    for number, row in enumerate(rows):
        if not isinstance(text := row["text"], str):
            kind = type(text).__name__
            raise UserError(f'{folder}, row {number} from 0: its "text" is {kind}, not a string: remove such rows')
        if text.strip():
            yield text


def _split(lines: Iterable[str]) -> Iterator[str]:
    """Joins lines to documents, and leaves out documents without text. The line end before a form feed is removed.

    A file that was joined from several files may have a byte order mark at the start of any document.
    """
    held: list[str] = []
    for line in lines:
        for part in _parts(line) if FORM_FEED in line else (line,):
            if FORM_FEED in part and not part.replace(BYTE_ORDER_MARK, "").strip():
                document, held = "".join(held), []
                if document.strip():
                    yield document[:-1] if document[-1] in LINE_ENDS else document
            else:
                held.append(part if held else part.lstrip(BYTE_ORDER_MARK))
    if (last := "".join(held)).strip():
        yield last


def _parts(line: str) -> list[str]:
    """Returns the line cut after Unicode's other line ends, at which Python's files do not split lines."""
    return re.findall(f"[^{LINE_ENDS}]*[{LINE_ENDS}]|[^{LINE_ENDS}]+", line)


def split_documents(files: tuple[Path, ...], hold_out: int, seed: int) -> tuple[Documents, Documents]:
    """Chooses `hold_out` whole documents at random by `seed`. Returns (training documents, held-out documents)."""
    count = sum(1 for _ in Documents(files))
    if not 0 < hold_out < count:
        raise UserError(
            f"cannot hold out {hold_out} of {count} documents: give more documents (a line with only a form "
            "feed ends one), another --hold-out, or files of their own with --val"
        )
    held = frozenset(random.Random(seed).sample(range(count), hold_out))
    return Documents(files, frozenset(range(count)) - held), Documents(files, held)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE with GPT-2's word splitting. Ids 0, 1 and 2 are end-of-text, pad and mask.

    All 256 bytes are in the vocabulary, so any text can be encoded and decoded without loss. A small corpus may give
    fewer than `vocab_size` tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"vocab-size {vocab_size} is too small: 256 bytes and 3 special tokens need {SMALLEST_VOCABULARY}"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise UserError(
            f"vocab-size {vocab_size} is too large: a token file holds {LARGEST_VOCABULARY} kinds of tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(documents), trainer)
    return tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """Reads a tokenizer.json. It must restore text exactly, as byte-level BPE does, and have an end-of-text token."""
    with explained(f"--tokenizer {file} cannot be read", "give a tokenizer.json"):
        tokenizer = Tokenizer.from_file(str(file))
    if end_of_text(tokenizer) is None:
        raise UserError(
            f"--tokenizer {file} has neither {END_OF_TEXT} nor {ROBERTAS_END} to end documents with: give another one"
        )
    whole(tokenizer)
    texts = (" A b\n\tc  d's 日本 — é.", "A")  # the second shows a blank that is put before a text
    ids = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    if tuple(tokenizer.decode(tokens, skip_special_tokens=False) for tokens in ids) != texts:
        raise UserError(f"--tokenizer {file} changes text: give a byte-level BPE, such as GPT-2's or RoBERTa's")
    return tokenizer


def whole(tokenizer: Tokenizer) -> None:
    """Makes the tokenizer encode whole texts: transformers stores a truncation or padding of its last call."""
    tokenizer.no_truncation()
    tokenizer.no_padding()


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Returns the id that ends a document: GPT-2's token or, in RoBERTa's vocabulary, </s>."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return tokenizer.token_to_id(ROBERTAS_END) if end is None else end


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[str], file: Path, end: int | None = None
) -> dict[str, int]:
    """Writes the documents' token ids, with `end` after each (None: end_of_text's), as raw numbers of `token_dtype`.

    Returns:
        The numbers of documents, of tokens with the ends, and of UTF-8 bytes of text.
    """
    tokenizer.encode_special_tokens = True  # "<mask>" in a text is plain text
    whole(tokenizer)
    end, dtype = end_of_text(tokenizer) if end is None else end, token_dtype(tokenizer)
    n_documents = n_tokens = n_bytes = 0
    with open(file, "wb") as out:
        for document in documents:
            for encoding in tokenizer.encode_batch_fast(list(_pieces(document)), add_special_tokens=False):
                out.write(np.asarray(encoding.ids, dtype).tobytes())  # tofile misses errors of a full disk
                n_tokens += len(encoding.ids)
            out.write(np.asarray([end], dtype).tobytes())
            n_documents, n_tokens, n_bytes = n_documents + 1, n_tokens + 1, n_bytes + len(document.encode())
    return {"documents": n_documents, "tokens": n_tokens, "bytes": n_bytes}


def token_dtype(tokenizer: Tokenizer) -> str:
    """Returns the smallest type that holds every token id, "uint16" or "uint32"."""
    return "uint16" if vocabulary_size(tokenizer) <= 1 << 16 else "uint32"


def vocabulary_size(tokenizer: Any) -> int:
    """Returns the number of ids up to the largest of a vocabulary. This exceeds its tokens if the ids have gaps."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def fingerprint(tokenizer: Tokenizer) -> str:
    """Returns a short hash of the tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def _pieces(document: str) -> Iterator[str]:
    """Cuts a long document after line ends, where GPT-2's word splitting never joins words."""
    start = 0
    while start < len(document):
        end = document.rfind("\n", start, start + PIECE) + 1 if start + PIECE < len(document) else len(document)
        end = end if end > start else start + PIECE
        yield document[start:end]
        start = end


def write_corpus(
    train: Iterable[str],
    val: Iterable[str],
    folder: Path,
    tokenizer: Tokenizer | int,
    sources: list[str],
    end: int | None = None,
) -> dict:
    """Writes a corpus into an empty folder, and returns the content of its meta.json.

    Training documents are iterated over more than once, so they cannot be a generator. A number in place of a tokenizer
    is the vocabulary size of a new one. The id `end` ends a document (None: end_of_text's).
    """
    if isinstance(tokenizer, int):
        tokenizer = train_tokenizer(train, tokenizer)
    eot = end_of_text(tokenizer) if end is None else end
    meta = dict(
        sources=sources,
        vocab_size=vocabulary_size(tokenizer),
        vocabulary=fingerprint(tokenizer),
        dtype=token_dtype(tokenizer),
        eot=eot,
        bos=tokenizer.token_to_id(ROBERTAS_BEGIN),
        pad=tokenizer.token_to_id(PAD),
        mask=tokenizer.token_to_id(MASK),
        train=encode_documents(tokenizer, train, folder / "train.bin", eot),
        val=encode_documents(tokenizer, val, folder / "val.bin", eot),
    )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return meta


def prepare(
    sources: Annotated[tuple[Path, ...], tyro.conf.Positional],
    /,
    out: Path,
    vocab_size: int = 50257,
    tokenizer: Path | None = None,
    hold_out: int = 1,
    val: tuple[Path, ...] = (),
    seed: int = 0,
) -> dict:
    """Makes token files from text. Returns the content of meta.json.

    Args:
        sources: Text files (.txt, .txt.xz, .xz, in UTF-8, where a line with only a form feed and blanks ends a
            document), JSON Lines (.jsonl, .jsonl.xz, with the key "text"), folders of such files, or folders of
            datasets' save_to_disk.
        out: Folder to create. It appears only when it is complete.
        vocab_size: Tokens of the byte-level BPE vocabulary, including three special tokens.
        tokenizer: A tokenizer.json to use with its vocabulary, instead of training one on the text. Perplexities can
            only be compared between models with the same tokenizer.
        hold_out: Number of whole documents that go to val.bin instead of train.bin. Not used with `val`.
        val: Sources for val.bin, if a data set has its own split.
        seed: Seed that chooses the held-out documents.
    """
    files, held_files = text_files(sources), text_files(val)
    own = read_tokenizer(tokenizer) if tokenizer is not None else None
    if out.exists():
        raise UserError(f"{out} exists already: remove it, or give another --out")
    once = Counter(file.resolve() for file in (*files, *held_files))
    if twice := next((file for file, times in once.items() if times > 1), None):
        raise UserError(f"{twice} is named twice, or also below --val: leave one out")
    train, held = (Documents(files), Documents(held_files)) if val else split_documents(files, hold_out, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    names = [file.name for file in files]
    return build_whole(out, lambda folder: write_corpus(train, held, folder, own or vocab_size, names))[1]


def main() -> None:
    meta = parse_options(prepare, description=__doc__)
    for name in ("train", "val"):
        print(f"{name}: " + ", ".join(f"{value:,} {key}" for key, value in meta[name].items()))
    print(f"vocabulary: {meta['vocab_size']:,} tokens, stored as {meta['dtype']}")


if __name__ == "__main__":
    launch(main)
