"""Images in tar files, named as WebDataset names them: KEY.jpg (.jpeg, .png) and beside it KEY.cls, its class's number.

A few large files in place of 1.28 million small ones. WebDataset streams them and shuffles what it holds; here each
image is read from its place in the file, so that every worker reads its own samples alone, in an order that follows
from the seed as it does for class folders, and a resumed run finds its place at once.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import tarfile
from pathlib import Path

from PIL import Image

from core import UserError
from training.images import read_rgb
from vision.index import listed_once

PICTURES = (".jpg", ".jpeg", ".png")
LONGEST_LABEL = 20  # bytes


def tars(folder: Path) -> list[Path]:
    """The shards in a folder; not hidden files, such as macOS' ._ files."""
    return [path for path in folder.glob("*.tar") if not path.name.startswith(".")]


class Shards:
    """The images of all *.tar of a folder, in the order of the files and of their members.

    classes: the classes' numbers, as text, in order. samples: (shard, first byte, bytes, place in classes) of each.
    """

    def __init__(self, folder: Path):
        shards = sorted(tars(folder))
        names = [shard.name for shard in shards]
        found = listed_once(folder, names, lambda: (members(shards), []), lambda e: _place(e, folder, names))
        numbers = sorted({label for *_, label in found})
        self.classes = tuple(map(str, numbers))
        place = {number: i for i, number in enumerate(numbers)}
        self.samples = [(path, at, size, place[label]) for path, at, size, label in found]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """(RGB image, class)."""
        path, at, size, label = self.samples[index]
        with open(path, "rb") as file:
            file.seek(at)
            return read_rgb(io.BytesIO(file.read(size)), self.name(index)), label

    def name(self, index: int) -> str:
        path, at, *_ = self.samples[index]
        return f"{path}, the image at byte {at}"


def _place(entry: str, folder: Path, names: list[str]) -> tuple[Path, int, int, int] | None:
    """(shard, first byte, bytes, class) of an entry that `members` made."""
    found = re.fullmatch(r"(.*)\t(\d+)\t(\d+)\t(-?\d+)", entry, re.DOTALL)
    if not found or found[1] not in names:
        return None
    return folder / found[1], int(found[2]), int(found[3]), int(found[4])


def members(shards: list[Path]) -> list[str]:
    """An entry for each image: shard, first byte, bytes, class, between tabs. UserError names what is broken."""
    return [entry for shard in shards for entry in _members(shard)]


def _members(shard: Path) -> list[str]:
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, tuple[str, int]] = {}
    last = "its start"
    try:
        with tarfile.open(shard, "r:") as tar:  # a compressed one has no places
            for member in tar:
                last = member.name
                key, suffix = os.path.splitext(posixpath.normpath(member.name))
                if (suffix := suffix.lower()) not in (*PICTURES, ".cls") or posixpath.basename(key).startswith("."):
                    continue
                if not member.isfile() or member.issparse() or (file := tar.extractfile(member)) is None:
                    raise ValueError(f"{member.name} is a link, a folder, a device or sparse, not a file")
                before = (labels if suffix == ".cls" else images).get(key)
                if before:
                    what = "two classes" if suffix == ".cls" else "two images"
                    raise ValueError(f"{before[0]} and {member.name} are {what} of one key")
                if suffix == ".cls":
                    labels[key] = member.name, _number(member.name, file.read(LONGEST_LABEL + 1))
                else:
                    images[key] = member.name, member.offset_data, member.size
            last = f"{last}, byte {tar.offset:,}"
            _check_end(shard, tar.offset)
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        after = "" if isinstance(error, ValueError) else f", after {last}"
        raise UserError(f"{shard}: not a shard of images and classes ({error}{after}); fetch it again") from None
    if unlabelled := next((key for key in images if key not in labels), None):
        raise UserError(f"{shard}: {unlabelled} has no {unlabelled}.cls beside it, which holds its class's number")
    if unseen := next((key for key in labels if key not in images), None):
        raise UserError(f"{shard}: {labels[unseen][0]} has no image beside it ({', '.join(PICTURES)}); add it")
    if not images:
        raise UserError(f"{shard}: no image in it ({', '.join(PICTURES)}); remove it, or fetch it again")
    return [f"{shard.name}\t{at}\t{size}\t{labels[key][1]}" for key, (_, at, size) in images.items()]


def _number(name: str, content: bytes) -> int:
    """The class that a .cls holds."""
    found = re.fullmatch(rb"(?:\xef\xbb\xbf)?\s*(-?\d+)\s*", content)
    if not found or len(content) > LONGEST_LABEL:
        raise ValueError(f"{name} holds {content!r}, not the number of a class")
    return int(found[1])


def _check_end(shard: Path, at: int) -> None:
    """tarfile takes a cut or a damaged header for the end, which is two blocks of zeros and nothing behind them."""
    with open(shard, "rb") as file:
        file.seek(at)
        rest = file.read(2 * tarfile.BLOCKSIZE)
        if len(rest) < 2 * tarfile.BLOCKSIZE or any(rest):
            raise tarfile.ReadError("cut, or damaged")
        while rest := file.read(1 << 20):
            if any(rest):
                raise tarfile.ReadError("more behind its end, as where shards are joined by cat")
