"""Images in tar files, named as WebDataset names them: KEY.jpg (.jpeg, .png) and beside it KEY.cls, its class's number.

A few large files in place of 1.28 million small ones. WebDataset streams them and shuffles what it holds; here each
image is read from its place in the file, so that every worker reads its own samples alone, in an order that follows
from the seed as it does for class folders, and a resumed run finds its place at once.
"""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

from PIL import Image

from core import UserError
from vision.index import listed_once

PICTURES = (".jpg", ".jpeg", ".png")


class Shards:
    """The images of all *.tar of a folder, in the order of the files and of their members.

    classes: the classes' numbers, as text, in order. samples: (shard, first byte, bytes, place in classes) of each.
    """

    def __init__(self, folder: Path):
        shards = sorted(folder.glob("*.tar"))
        names = [shard.name for shard in shards]
        found = listed_once(folder, names, lambda: members(shards), lambda line: _place(line, folder, names))
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
            return Image.open(io.BytesIO(file.read(size))).convert("RGB"), label

    def name(self, index: int) -> str:
        path, at, *_ = self.samples[index]
        return f"{path}, the image at byte {at}"


def _place(line: str, folder: Path, names: list[str]) -> tuple[Path, int, int, int] | None:
    """(shard, first byte, bytes, class) of a line that `members` made."""
    found = re.fullmatch(r"(.*)\t(\d+)\t(\d+)\t(-?\d+)", line)
    if not found or found[1] not in names:
        return None
    return folder / found[1], int(found[2]), int(found[3]), int(found[4])


def members(shards: list[Path]) -> list[str]:
    """A line for each image: shard, first byte, bytes, class, between tabs. UserError names what is broken."""
    return [line for shard in shards for line in _members(shard)]


def _members(shard: Path) -> list[str]:
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(shard, "r:") as tar:  # a compressed one has no places
            for member in tar:
                key, suffix = member.name.removesuffix(end := Path(member.name).suffix), end.lower()
                if suffix not in (*PICTURES, ".cls"):
                    continue
                if not member.isfile() or (file := tar.extractfile(member)) is None:
                    raise ValueError(f"{member.name} is a link, a folder or a device, not a file")
                if suffix in PICTURES:
                    images[key] = member.offset_data, member.size
                else:
                    labels[key] = int(file.read(20))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise UserError(f"{shard}: not a shard of images and classes ({error}); fetch it again") from None
    if unlabelled := next((key for key in images if key not in labels), None):
        raise UserError(f"{shard}: {unlabelled} has no {unlabelled}.cls beside it, which holds its class's number")
    if not images:
        raise UserError(f"{shard}: no image in it ({', '.join(PICTURES)}); remove it, or fetch it again")
    return [f"{shard.name}\t{at}\t{size}\t{labels[key]}" for key, (at, size) in images.items()]
