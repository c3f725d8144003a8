"""An index of a folder of images or shards, so that not every worker lists 1.28 million files on a shared file system.

One worker lists the files, and the cache (training.data.files.cached) keeps the list for all other workers and later
runs. An index depends on the folder's path, its classes (or shards), and the modification times of these and of all
folders in them. A new or removed file makes a new index. Hidden files and folders, such as .ipynb_checkpoints, are left
out.
"""

import training.prepared  # noqa: F401

# isort: split

import hashlib
import io
import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from core import UserError
from training.data.files import cached, entries, unreadable
from training.data.images import read_rgb
from training.start.errors import explained

T = TypeVar("T")
END, PARTS = b"\0", b"\0\0"  # after each entry, and between the two lists; file names have no zero bytes


@dataclass
class Samples:
    """Labeled images.

    Attributes:
        classes: Names of the classes. In shards the names are numbers.
        samples: (path, place in `classes`) of each image, or in shards (path, first byte, number of bytes, place).
    """

    classes: tuple[str, ...]
    samples: Sequence[tuple[Any, ...]]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns (RGB image, class)."""
        path, *part, label = self.samples[index]
        with open(path, "rb") as file:
            if part:
                file.seek(part[0])
            return read_rgb(io.BytesIO(file.read(*part[1:])), self.name(index)), label

    def name(self, index: int) -> str:
        path, *part, _ = self.samples[index]
        return f"{path}, the image at byte {part[0]}" if part else path


def in_folders(folder: Path) -> Samples:
    """Returns the images in a folder of class folders, as torchvision's ImageFolder finds and numbers them."""
    classes = tuple(path.name for path in entries(folder) if path.is_dir())
    if not classes:
        raise UserError(f"{folder}: no class folder in it; every class is a folder with images")
    label = {name: i for i, name in enumerate(classes)}

    def place(name: str) -> tuple[str, int] | None:
        found = label.get(name.split(os.sep, 1)[0])
        return None if found is None else (os.path.join(folder, name), found)

    return Samples(classes, listed_once(folder, [*classes], lambda: pictures(folder, classes), place))


def pictures(root: Path, classes: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the images of the classes, and the folders inside the classes, in torchvision's order.

    Paths are relative to `root`.

    Raises:
        UserError: Names a class without an image, or a folder that cannot be read.
    """
    files, folders = list[str](), list[str]()
    for name in sorted(classes):
        before = len(files)
        walked = []
        for folder, below, found in os.walk(root / name, onerror=unreadable, followlinks=True):
            below[:] = [inner for inner in below if not inner.startswith(".")]
            walked.append((folder, found))
        for folder, found in sorted(walked):
            relative = os.path.relpath(folder, root)
            folders += [relative] if relative != name else []
            shown = (file for file in sorted(found) if not file.startswith("."))
            files += [os.path.join(relative, file) for file in shown if file.lower().endswith(IMG_EXTENSIONS)]
        if len(files) == before:
            raise UserError(
                f"{root / name}: a class's folder without an image ({', '.join(IMG_EXTENSIONS)}): remove it, or put "
                "the class's images there"
            )
    return files, folders


def listed_once(
    folder: Path, names: list[str], listing: Callable[[], tuple[list[str], list[str]]], read: Callable[[str], T | None]
) -> list[T]:
    """Returns the result of `read` for each entry of the folder's index, and makes the index if it is not there yet.

    Args:
        folder: The folder to list.
        names: The classes or shards in the folder.
        listing: Returns the entries, and the folders inside the classes whose changes make the index outdated.
        read: Returns None for an entry that is not valid.

    Raises:
        UserError: If there is no entry, or `read` returns None.
    """
    key = _hash(str(folder.resolve()), *_states(folder, names))
    while True:
        index = cached(f"index-{key}", lambda target: _write(target / "files", folder, *listing())) / "files"
        with explained(f"{index}: the list of images is damaged", f"remove {index.parent}, it is made again"):
            content = index.read_bytes()
            listed, folders = ([os.fsdecode(n) for n in part.split(END) if n] for part in content.split(PARTS))
            found = [read(entry) for entry in listed]
            if not found or None in found or len(folders) % 2:
                raise ValueError("an entry names no image")
        now = _states(folder, folders[::2])
        if now == folders[1::2]:
            return found  # pyright: ignore[reportReturnType]
        key = _hash(key, *now)  # key of the index with these changes


def _states(folder: Path, names: list[str]) -> list[str]:
    """Returns each name with its modification time and, for files, its size."""
    found = []
    for name in names:
        try:
            state = (folder / name).stat()
            found.append(f"{name} {state.st_mtime_ns} {state.st_size}")
        except OSError:
            found.append(f"{name} is gone")
    return found


def _write(target: Path, folder: Path, listed: list[str], folders: list[str]) -> None:
    pairs = [text for pair in zip(folders, _states(folder, folders), strict=True) for text in pair]
    target.write_bytes(PARTS.join(END.join(map(os.fsencode, part)) for part in (listed, pairs)))


def _hash(*parts: str) -> str:
    return hashlib.sha256(END.join(map(os.fsencode, parts))).hexdigest()[:16]


# -- shards -----------------------------------------------------------------------------------------------------------


PICTURES = (".jpg", ".jpeg", ".png")
PACKED = re.compile(r".*\.(tar\.(gz|bz2|xz|zst)|tgz|tbz2?|txz)")
LONGEST_LABEL = 20  # bytes


def tars(folder: Path) -> list[Path]:
    """Returns the shards in a folder, without hidden files such as macOS' ._ files.

    Raises:
        UserError: Names what would be left out: a compressed shard, or a folder of images or shards next to shards.
    """
    found = entries(folder)
    shards = [path for path in found if path.suffix.lower() == ".tar" and path.is_file()]
    packed = [path for path in found if PACKED.fullmatch(path.name.lower())]
    if packed:
        raise UserError(f"{packed[0]}: a compressed shard: decompress it to .tar, or remove it")
    for other in filter(Path.is_dir, found if shards else ()):
        if any(path.suffix.lower() in (".tar", *PICTURES) for path in entries(other)):
            raise UserError(f"{other}: a folder of images or shards next to shards: keep one kind, all in {folder}")
    return shards


def in_shards(folder: Path) -> Samples:
    """Returns the images of all *.tar files in a folder, in the order of the files and of their members."""
    shards = tars(folder)
    names = [shard.name for shard in shards]
    known = set(names)  # of hundreds of shards, and an index has a million entries
    listing = lambda: ([entry for shard in shards for entry in _members(shard)], [])  # noqa: E731
    found = listed_once(folder, names, listing, lambda entry: _place(entry, folder, known))
    place = {number: i for i, number in enumerate(sorted({label for *_, label in found}))}
    return Samples(tuple(map(str, place)), [(path, at, size, place[label]) for path, at, size, label in found])


def _place(entry: str, folder: Path, names: set[str]) -> tuple[Path, int, int, int] | None:
    """Returns (shard, first byte, number of bytes, class) of an entry that `_members` made."""
    found = re.fullmatch(r"(.*)\t(\d+)\t(\d+)\t(-?\d+)", entry, re.DOTALL)
    if not found or found[1] not in names:
        return None
    return folder / found[1], int(found[2]), int(found[3]), int(found[4])


def _members(shard: Path) -> list[str]:
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, tuple[str, int]] = {}
    last = "its start"
    try:
        with tarfile.open(shard, "r:") as tar:  # a compressed archive has no places
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
        raise UserError(f"{shard}: {unlabelled} has no {unlabelled}.cls next to it, which holds its class's number")
    if unseen := next((key for key in labels if key not in images), None):
        raise UserError(f"{shard}: {labels[unseen][0]} has no image next to it ({', '.join(PICTURES)}); add it")
    if not images:
        raise UserError(f"{shard}: no image in it ({', '.join(PICTURES)}); remove it, or fetch it again")
    return [f"{shard.name}\t{at}\t{size}\t{labels[key][1]}" for key, (_, at, size) in images.items()]


def _number(name: str, content: bytes) -> int:
    """Returns the class that a .cls file holds."""
    found = re.fullmatch(rb"(?:\xef\xbb\xbf)?\s*(-?\d+)\s*", content)
    if not found or len(content) > LONGEST_LABEL:
        raise ValueError(f"{name} holds {content!r}, not the number of a class")
    return int(found[1])


def _check_end(shard: Path, at: int) -> None:
    """Raises an error if the archive is cut or damaged, which tarfile would take for its end.

    An archive ends with two blocks of zeros, and nothing follows them.
    """
    with open(shard, "rb") as file:
        file.seek(at)
        rest = file.read(2 * tarfile.BLOCKSIZE)
        if len(rest) < 2 * tarfile.BLOCKSIZE or any(rest):
            raise tarfile.ReadError("cut, or damaged")
        while rest := file.read(1 << 20):
            if any(rest):
                raise tarfile.ReadError("more after its end, as when shards are joined by cat")
