"""Data that is easily read wrong without a word: pixels, shards, texts, lists and names."""

import contextlib
import io
import lzma
import os
import struct
import tarfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import training.prepared  # noqa: F401, timm imports torchvision

# isort: split
import numpy as np
import pytest
import torch
from mmcv.transforms import LoadImageFromFile
from mmseg.datasets.transforms import LoadAnnotations
from PIL import Image

from core import UserError
from language.prepare import read_documents, text_files
from language.prompts import read_lines
from pointcloud.sources import ShapeNet55
from segmentation import train as script
from segmentation.data import LoadImage, LoadMask, Scenes, build_dataset
from segmentation.recipes import RECIPES
from tests.damages import write_tar
from training.data.images import read_mask
from vision.data import Augmented, ImageNet
from vision.train import PICTURES, spread

RAMP = np.linspace(0, 65535, 1024).astype(np.uint16).reshape(32, 32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CO2_CACHE", str(tmp_path / "cache"))


def save(image: Image.Image, path: Path, **how: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **how)
    return path


def pixels(folder: Path, index: int = 0) -> np.ndarray:
    return np.asarray(ImageNet(folder).samples.read(index)[0])


# -- images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_16_bit_greys_keep_their_upper_bits(tmp_path: Path, name: str):
    path = save(Image.fromarray(RAMP), tmp_path / "train" / "x" / name)
    wanted = np.repeat((RAMP >> 8).astype(np.uint8)[..., None], 3, -1)
    assert np.array_equal(pixels(tmp_path / "train"), wanted)
    assert np.array_equal(LoadImage().transform({"img_path": str(path)})["img"], wanted)


@pytest.mark.parametrize(
    ("values", "kind"),
    [(np.linspace(0, 1, 16, dtype=np.float32), "floats"), (np.arange(16, dtype=np.int32) << 20, "32-bit integers")],
)
def test_pixels_without_a_range_are_refused(tmp_path: Path, values: np.ndarray, kind: str):
    path = save(Image.fromarray(values.reshape(4, 4)), tmp_path / "train" / "x" / "a.tif")
    words = f"^{path}: pixels are {kind}, .* 16 bits a channel$"
    with pytest.raises(UserError, match=words):
        Augmented(ImageNet(tmp_path / "train").samples, None)[0, 0, 0]
    with pytest.raises(UserError, match=words):
        LoadImage().transform({"img_path": str(path)})


@pytest.mark.parametrize("kind", ["grey", "palette", "16 bits", "32 bits", "4-bit grey", "2-bit grey"])
def test_masks_hold_their_labels(tmp_path: Path, kind: str):
    labels = np.array([[0, 1], [2, 3]], np.uint8)
    image = {
        "palette": lambda: Image.fromarray(labels, "P"),
        "16 bits": lambda: Image.fromarray(labels.astype(np.uint16)),
        "32 bits": lambda: Image.fromarray(labels.astype(np.int32)),
    }.get(kind, lambda: Image.fromarray(labels))()
    if kind == "palette":
        image.putpalette([9, 9, 9, 200, 0, 0, 0, 200, 0, 0, 0, 200])
    path = tmp_path / ("m.tif" if kind == "32 bits" else "m.png")
    if kind.endswith("-bit grey"):
        path.write_bytes(small_greys(labels, int(kind[0])))
    else:
        image.save(path)
    assert read_mask(path).tolist() == labels.tolist()


def small_greys(labels: np.ndarray, bits: int) -> bytes:
    """A PNG of greys of so few bits, which Pillow does not write."""
    rows = b"".join(b"\0" + bytes([(int(a) << (8 - bits)) | (int(b) << (8 - 2 * bits))]) for a, b in labels)
    header = struct.pack(">IIBBBBB", 2, 2, bits, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    framed = (struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@pytest.mark.parametrize(("name", "dtype"), [("m.tif", np.float32), ("m.jpg", np.uint8)])
def test_masks_whose_labels_are_not_sure_are_refused(tmp_path: Path, name: str, dtype: type):
    path = save(Image.fromarray(np.ones((8, 8), dtype)), tmp_path / name)
    with pytest.raises(UserError, match=f"^{path}: a mask of .*PNG$"):
        read_mask(path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_mmcvs_default_reader_turns_them_and_masks_are_not(tmp_path: Path, orientation: int):
    picture = Image.fromarray(np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(picture, tmp_path / "a.png", exif=exif)
    ours, theirs = (t.transform({"img_path": str(path)}) for t in (LoadImage(), LoadImageFromFile()))
    assert np.array_equal(ours["img"], theirs["img"]) and ours["ori_shape"] == theirs["ori_shape"]
    labels = np.arange(np.prod(ours["ori_shape"]), dtype=np.uint8).reshape(ours["ori_shape"])
    mask = save(Image.fromarray(labels), tmp_path / "m.png", exif=exif)
    given = {"seg_map_path": str(mask), "reduce_zero_label": False, "ori_shape": ours["ori_shape"]}
    found = [t.transform(given | {"seg_fields": []}) for t in (LoadMask(9), LoadAnnotations())]
    assert all(np.array_equal(one["gt_seg_map"], labels) for one in found)


# -- shards -------------------------------------------------------------------------------------------------------


def picture(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value,) * 3).save(buffer, "jpeg")
    return buffer.getvalue()


def shard(folder: Path, members: list[tuple[str, bytes]]) -> Path:
    write_tar(folder / "0.tar", members)
    return folder / "0.tar"


A, ONE = ("a.jpg", picture(10)), ("a.cls", b"0")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([A, ONE, ("a.jpg", picture(200)), ("a.cls", b"1")], "a.jpg and a.jpg are two images of one key"),
        ([A, ONE, ("a.png", picture())], "a.jpg and a.png are two images"),
        ([A, ONE, ("a.JPEG", picture())], "a.jpg and a.JPEG are two images"),
        ([A, ONE, ("./a.jpg", picture())], "a.jpg and ./a.jpg are two images"),
        ([A, ONE, ("b.jpg", picture()), ("b.cls", b"1"), ("a.cls", b"1")], "a.cls and a.cls are two classes"),
        ([A, ONE, ("b.cls", b"1")], "b.cls has no image next to it"),
        ([A], "a has no a.cls next to it"),
        ([("a.txt", b"")], "no image in it"),
        ([A, ("a.cls", b"1_0")], "a.cls holds b'1_0', not the number"),
        ([A, ("a.cls", b"1" * 30)], "a.cls holds b'1*', not the number"),
        ([A, ("a.cls", "3".encode("utf-16"))], "a.cls holds .*, not the number"),
    ],
)
def test_shards_that_lack_or_contradict_are_refused(tmp_path: Path, members: list[tuple[str, bytes]], words: str):
    path = shard(tmp_path / "train", members)
    with pytest.raises(UserError, match=f"^{path}: .*{words}") as error:
        ImageNet(tmp_path / "train")
    assert "\n" not in str(error.value)


def test_a_shard_cut_anywhere_before_its_end_is_refused(tmp_path: Path):
    members = [(f"{i}.{end}", what) for i in range(4) for end, what in (("jpg", picture(i)), ("cls", b"0"))]
    path = shard(tmp_path / "train", members)
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        end = tar.getmembers()[-1].offset_data + 512
    places = [*range(512, end + 1024, 512), 700, end - 1, end + 1, end + 1023]
    for at in places:
        path.write_bytes(whole[:at])
        with pytest.raises(UserError, match=f"^{path}: ") as error:
            ImageNet(tmp_path / "train")
        assert at < 1024 or ".jpg" in str(error.value) or ".cls" in str(error.value), "it names a member"
    path.write_bytes(whole[: end + 1024])
    assert len(ImageNet(tmp_path / "train")) == 4, "the padding behind the end is not needed"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("1.tar.gz", "decompress it to .tar"),
        ("2.TGZ", "decompress it"),
        ("more/3.tar", "next to shards: keep one kind"),
    ],
)
def test_what_would_be_left_out_beside_shards_is_refused(tmp_path: Path, name: str, said: str):
    first = shard(tmp_path / "train", [A, ONE])
    first.rename(first.with_suffix(".TAR"))
    (tmp_path / "train/notes").mkdir()
    assert len(ImageNet(tmp_path / "train")) == 1
    (tmp_path / "train" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "train" / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"^{tmp_path}/train/[a-zA-Z0-9.]+: .*{said}"):
        ImageNet(tmp_path / "train")


def test_macos_files_are_left_out(tmp_path: Path):
    path = shard(tmp_path / "train", [("._a.jpg", b"x"), A, ("._a.cls", b"\0\5"), ("a.cls", b"\xef\xbb\xbf3\r\n")])
    (path.parent / "._0.tar").write_bytes(b"x")
    found = ImageNet(tmp_path / "train")
    assert (len(found), found.classes) == (1, ("3",))


# -- folders and names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["a\u2028b.png", "a\u0085b.png", "a\rb.png", "a\nb.png", "a\tb.png", " a .png", os.fsdecode(b"a\xff.png"), "ü.PNG"],
)
def test_any_file_name_is_found(tmp_path: Path, name: str):
    for kind in ("x", os.fsdecode(b"y\xfe\r")):
        save(Image.new("RGB", (4, 4)), tmp_path / "train" / kind / "p.png").rename(tmp_path / "train" / kind / name)
    for _ in range(2):  # and from the index
        found = ImageNet(tmp_path / "train")
        assert [Path(path).name for path, _ in found.samples.samples] == [name, name]
        assert pixels(tmp_path / "train").shape == (4, 4, 3)


def test_files_that_come_in_subfolders_are_seen(tmp_path: Path):
    def count(*names: str) -> int:
        for name in names:
            save(Image.new("RGB", (4, 4)), tmp_path / "train" / name)
        return len(ImageNet(tmp_path / "train"))

    assert count("x/a.png", "x/sub/b.png", "x/sub/deep/c.png", "y/d.png") == 4 and count("x/sub/e.png") == 5
    assert count("x/sub/deep/f.png") == 6 and count("x/sub/new/g.png") == 7
    (tmp_path / "train/x/sub/new/g.png").unlink()
    assert count() == 6
    (tmp_path / "train/x/sub/new").rmdir()
    assert count() == 6 and count("z/h.png") == 7


def test_hidden_folders_are_no_classes_and_empty_ones_are_named(tmp_path: Path):
    names = ("x/a.png", ".ipynb_checkpoints/a-checkpoint.png", "x/.ipynb_checkpoints/a-checkpoint.png", "x/._a.png")
    for name in names:
        save(Image.new("RGB", (4, 4)), tmp_path / "train" / name)
    found = ImageNet(tmp_path / "train")
    assert (found.classes, len(found)) == (("x",), 1)
    for kind in ("empty", "__MACOSX"):
        (tmp_path / "train" / kind).mkdir()
        with pytest.raises(UserError, match=rf"train/{kind}: a class's folder without an image .*: remove it") as error:
            ImageNet(tmp_path / "train")
        assert "CO2_CACHE" not in str(error.value)
        (tmp_path / "train" / kind).rmdir()


# -- texts ------------------------------------------------------------------------------------------------------------

BOM = "\ufeff"


@pytest.mark.parametrize(
    "text",
    [
        "One\na\n\x0c\nTwo\n",
        "One\r\na\r\n\x0c\r\nTwo\r\n",
        "One\ra\r\x0c\rTwo\r",
        BOM + "One\r\na\r\n\x0c\r\n" + BOM + "Two\r\n",
        "One\na\n" + BOM + "\x0c\nTwo\n",
        "One\na\n\xa0\x0c \nTwo\n",
        "\x0c\nOne\na\n\x0c\nTwo\n\x0c",
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "A.TXT", "a.txt.xz"])
def test_documents_part_alike_however_lines_end(tmp_path: Path, text: str, name: str):
    content = text.encode()
    (tmp_path / name).write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
    (file,) = text_files([tmp_path])
    assert [document.rstrip("\n") for document in read_documents(file)] == ["One\na", "Two"]


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_unicodes_other_line_ends_part_documents_and_stay_in_text(tmp_path: Path, end: str):
    (tmp_path / "a.txt").write_text(f"One{end}a{end}\x0c{end}Two{end}b\x0cc")
    assert list(read_documents(tmp_path / "a.txt")) == [f"One{end}a", f"Two{end}b\x0cc"]


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str):
    (tmp_path / "a.txt").write_bytes("Büch\n\x0c\nTwo\n".encode(encoding))
    with pytest.raises(UserError, match=r"^\S*a.txt (is not UTF-8 text|holds zero bytes).*convert it"):
        list(read_documents(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_bytes("Book\n\x0c\nTwo\n".encode("utf-16-le"))
    with pytest.raises(UserError, match="b.txt holds zero bytes"):
        list(read_documents(tmp_path / "b.txt"))


def test_json_lines_and_prompts_from_windows(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "One\xe2\x80\xa8a"}\r\n{"text": "Two"}\r\n')
    assert list(read_documents(tmp_path / "a.jsonl")) == ["One\u2028a", "Two"]
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": " b"}\r\n\r\n')
    assert [(line.prompt, line.answer) for line in read_lines(tmp_path / "p.jsonl")] == [("a", " b")]


# -- lists ------------------------------------------------------------------------------------------------------------


def listing(root: Path, content: bytes) -> ShapeNet55:
    path = root / "ShapeNet55-34" / "ShapeNet-55" / "train.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return ShapeNet55(root, "train")


@pytest.mark.parametrize(
    "content",
    ["a-1.npy\nb-ü 2.npy\n", BOM + "a-1.npy\r\nb-ü 2.npy\r\n\r\n", " a-1.npy\rb-ü 2.npy ", "a-1.npy\n\nb-ü 2.npy"],
)
def test_lists_name_a_file_a_line(tmp_path: Path, content: str):
    assert [file.name for file in listing(tmp_path, content.encode()).files] == ["a-1.npy", "b-ü 2.npy"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("ü.npy".encode("latin-1"), "is not UTF-8 text"),
        ("a.npy".encode("utf-16"), "is not UTF-8 text"),
        ("a.npy".encode("utf-16-le"), "holds zero bytes"),
        (b"a.npy\nb.npy\r\na.npy \n", "names a.npy twice"),
    ],
)
def test_lists_that_cannot_be_meant_are_refused(tmp_path: Path, content: bytes, words: str):
    with pytest.raises(UserError, match=rf"train.txt {words}"):
        listing(tmp_path, content)


# -- evaluations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("images", "classes"), [(100, 10), (1797, 10), (8, 8), (3, 3), (0, 1)])
def test_pictures_are_of_many_classes_of_a_set_that_is_sorted(images: int, classes: int):
    labels = np.arange(images) * classes // max(images, 1)
    assert len({labels[i] for i in spread(images)}) == min(PICTURES, classes, images)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_mIoU_is_evaluated_in_float32(precision: str):
    """At any precision of training, and in no autocast."""

    class Model(torch.nn.Module):
        def data_preprocessor(self, batch: Any, training: bool) -> Any:
            return {"inputs": torch.stack(batch["inputs"]).float(), "data_samples": batch["data_samples"]}

        def forward(self, inputs: torch.Tensor, data_samples: Any, mode: str) -> Any:
            assert not torch.is_autocast_enabled("cpu") and (inputs @ inputs.mT).dtype == torch.float32
            for sample in data_samples:
                sample.pred_sem_seg = sample.gt_sem_seg
            return data_samples

    run = MagicMock(rank=1, world_size=2, step=1, device=torch.device("cpu"))
    run.recipe = SimpleNamespace(dataset="digits", loader_workers=0, precision=precision, name=RECIPES)
    run.paused = contextlib.nullcontext
    run.autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    run.sum_tensor = lambda tensor: tensor
    found = script.evaluate.__wrapped__(run, Model(), "val", Scenes(build_dataset("digits", "val").get_subset(4)))
    assert found["val_mIoU"] == 100
