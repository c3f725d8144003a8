"""scikit-learn's digits and CIFAR-10, in memory; CIFAR-10's archive and its cache, whole and damaged."""

import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core import UserError
from tests.damages import DAMAGES, write_tar
from training.data import data_root
from vision import data


def test_digits_are_split_without_overlap():
    train, test = data.digits()
    assert (len(train), len(test)) == (1437, 360)
    assert train.images.shape[1:] == (1, 8, 8) and train.images.dtype == torch.uint8 and train.images.max() == 255
    assert set(test.labels.tolist()) == set(range(10))
    pixels = train.normalise(train.images)
    assert abs(pixels.mean()) < 1e-3 and abs(pixels.std() - 1) < 1e-3


def jpeg(colour: int, size: int = 32) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (colour, 0, 255 - colour)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive in CIFAR-10's layout, and a cache folder of its own."""
    monkeypatch.setenv("CO2_DATA", str(tmp_path))
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "cifar10_jpeg.tar.xz"
    write(path, {"train/b/0.jpg": jpeg(200), "train/a/0.jpg": jpeg(20), "test/b/0.jpg": jpeg(90)})
    return path


def write(path: Path, files: dict[str, bytes]) -> None:
    write_tar(path, {f"cifar10/{name}": content for name, content in files.items()}, "w:xz")


def test_cifar_is_decoded_once_with_labels_from_folders(archive: Path):
    train, test = data.cifar10()
    assert train.classes == ("a", "b") and train.labels.tolist() == [0, 1] and test.labels.tolist() == [1]
    assert abs(int(train.images[0, 0, 5, 5]) - 20) < 6 and abs(int(train.images[1, 0, 5, 5]) - 200) < 6
    (cache,) = archive.parent.glob("cache/*/*.npz")
    written = cache.stat().st_mtime_ns
    data.cifar10()
    assert cache.stat().st_mtime_ns == written


ONE_OF_EACH = {"train/a/0.jpg": jpeg(20), "test/a/0.jpg": jpeg(90)}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no image train/CLASS/FILE"),
        ({"notes.txt": b"", "train/x.jpg": jpeg(1), "valid/a/0.jpg": jpeg(1)}, "holds no image train/CLASS/FILE"),
        ({"train/a/0.jpg": jpeg(1)}, "holds no image test/CLASS/FILE"),
        ({**ONE_OF_EACH, "test/b/0.jpg": jpeg(1)}, "test has the class b, which train has not"),
        ({**ONE_OF_EACH, "train/a/1.jpg": jpeg(1, 33)}, "train/a/1.jpg has 33 x 33 pixels, not 32 x 32"),
        ({**ONE_OF_EACH, "train/a/1.jpg": jpeg(1)[:200]}, "train/a/1.jpg is not a readable image"),
        ({**ONE_OF_EACH, "train/a/1.jpg": bytes(3_000_000)}, "train/a/1.jpg is not a readable image"),
    ],
)
def test_an_archive_of_something_else_is_named(archive: Path, files: dict[str, bytes], words: str):
    write(archive, files)
    with pytest.raises(UserError, match=rf"^{archive}: .*{words}.*; fetch it again$"):
        data.cifar10()
    assert not list(archive.parent.glob("cache/[!.]*")), "nothing is left of what failed"


@pytest.mark.parametrize("damage", ["flip", "garbage", "empty", "text", "cut short", "no tar"])
def test_a_damaged_archive_is_named(archive: Path, damage: str):
    if damage == "no tar":
        archive.write_bytes(lzma.compress(b"no archive" * 1000))
    elif damage == "cut short":
        archive.write_bytes(archive.read_bytes()[:200])
    else:
        DAMAGES[damage](archive)
    with pytest.raises(UserError, match=f"^{archive}: cannot be read as a tar archive .*; fetch it again$"):
        data.cifar10()


CHANGES = ("npy", "objects", "floats", "grey", "labels", "none", "train_y", "classes")


@pytest.mark.parametrize("change", [*sorted(DAMAGES.keys() - {"missing", "broken link"}), *CHANGES])
def test_a_damaged_cache_is_named(archive: Path, change: str):
    data.cifar10()
    (cache,) = archive.parent.glob("cache/*/*.npz")
    with np.load(cache) as file:
        arrays = dict(file)
    x, y = arrays["train_x"], arrays["train_y"]
    others: dict[str, dict[str, Any]] = {
        "objects": {"train_x": np.array([None, {}], dtype=object)},
        "floats": {"train_x": x.astype(np.float32)},
        "grey": {"test_x": arrays["test_x"][:, :1]},
        "labels": {"train_y": y + 5},
        "none": {"train_x": x[:0], "train_y": y[:0]},
    }
    if change in DAMAGES:
        DAMAGES[change](cache)
    elif change == "npy":
        with open(cache, "wb") as to:
            np.save(to, x)
    elif change in arrays:
        np.savez(cache, **{name: array for name, array in arrays.items() if name != change})
    else:
        np.savez(cache, **arrays | others[change])
    said = rf"^{cache}: the cache of CIFAR-10 is damaged .*: remove {cache.parent}, it is made again$"
    with pytest.raises(UserError, match=said):
        data.cifar10()


@pytest.mark.slow  # where the cache has it not yet
@pytest.mark.skipif(not (data_root() / "cifar10_jpeg.tar.xz").is_file(), reason=f"no CIFAR-10 in {data_root()}")
def test_real_cifar_has_its_published_shape():
    train, test = data.cifar10()
    assert (len(train), len(test), len(train.classes)) == (50_000, 10_000, 10)
    assert train.images.shape[1:] == (3, 32, 32) and np.array_equal(train.labels.bincount(), [5000] * 10)
