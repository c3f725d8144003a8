"""Images in tar files, named as WebDataset names them: KEY.jpg (.jpeg, .png) and beside it KEY.cls, its class's number.

A few large files in place of 1.28 million small ones. WebDataset streams them and shuffles what it holds; here each
image is read from its place in the file, so that every worker reads its own samples alone, in an order that follows
from the seed as it does for class folders, and a resumed run finds its place at once.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from PIL import Image

from core import UserError
from vision.index import index_path, listed_once

PICTURES = (".jpg", ".jpeg", ".png")


class Shards:
    """The images of all *.tar of a folder, in the order of the files and of their members.

    classes: the classes' numbers, as text, in order. samples: (shard, first byte, bytes, place in classes) of each.
    """

    def __init__(self, folder: Path):
        shards = sorted(folder.glob("*.tar"))
        lines = listed_once(index_path(folder, [shard.name for shard in shards]), lambda: members(shards))
        found = [(folder / name, *map(int, rest)) for name, *rest in (line.rsplit("\t", 3) for line in lines)]
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
                if suffix in PICTURES:
                    images[key] = member.offset_data, member.size
                elif suffix == ".cls" and (file := tar.extractfile(member)):
                    labels[key] = int(file.read())
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise UserError(f"{shard}: not a shard of images and classes ({error}); fetch it again") from None
    if unlabelled := next((key for key in images if key not in labels), None):
        raise UserError(f"{shard}: {unlabelled} has no {unlabelled}.cls beside it, which holds its class's number")
    if not images:
        raise UserError(f"{shard}: no image in it ({', '.join(PICTURES)}); remove it, or fetch it again")
    return [f"{shard.name}\t{at}\t{size}\t{labels[key]}" for key, (at, size) in images.items()]
