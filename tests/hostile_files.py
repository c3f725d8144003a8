"""Small data sets and their damages, and checkpoints with theirs: cases of tests/hostile.py."""

from __future__ import annotations

import io
import json
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Case:
    """A command line. An @ in an argument or in the environment stands for the folder in which it runs.

    impossible: no run could be what it asks for. prepare: makes the folder's content. file_limit: see tests.zygote.
    """

    name: str
    module: str
    arguments: Sequence[str]
    impossible: bool = False
    env: dict[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    file_limit: int = 0

    def at(self, folder: Path) -> Case:
        if self.prepare is not None:
            self.prepare(folder)
        arguments = [text.replace("@", str(folder)) for text in self.arguments]
        return replace(self, arguments=arguments, env={k: v.replace("@", str(folder)) for k, v in self.env.items()})


def a_file(folder: Path) -> None:
    (folder / "file").write_text("not a folder")


class Files:
    """Small data sets in the layouts that the loaders read. Attributes: folder; env, of every case; on_data: name ->
    (module, arguments) of a run of seconds on each; runs, the names of those whose checkpoints are damaged."""

    runs = ("cifar10", "openwebtext")

    def __init__(self, folder: Path):
        self.folder, self.data = folder, folder / "data"
        self.env = {"CO2_DATA": str(self.data), "CO2_CACHE": str(folder / "cache")}
        short = ["--epochs=1", "--device=cpu", "--batch_size=2", "--loader_workers=0"]
        tokens = ["gpt2_pydoc_small", "--vocab_size=300", "--context=16", "--epoch_steps=2", *short[:-1]]
        self.on_data = {
            "openwebtext": ("language.train", [*tokens, "--corpus=openwebtext"]),
            "cifar10": ("vision.train", ["cifar10_small", *short]),
            "imagenet": ("vision.train", ["digits_small", "--dataset=imagenet", *short]),
            "modelnet10": ("pointcloud.train", ["surfaces_small", "--dataset=modelnet10", *short]),
            "shapenet": ("pointcloud.train", ["surfaces_small", "--dataset=shapenet", *short]),
            "camvid": ("segmentation.train", ["digits_small", "--dataset=camvid", *short]),
        }

    def quick(self, module: str) -> list[str]:
        """The arguments of a train script's quickest run."""
        return next(arguments for name, arguments in self.on_data.values() if name == module)

    def make(self) -> None:
        rng, data = np.random.default_rng(0), self.data
        owt = data / "openwebtext"
        owt.mkdir(parents=True)
        counts = {}
        for split, n in (("train", 4000), ("val", 400)):
            rng.integers(0, 300, n).astype(np.uint16).tofile(owt / f"{split}.bin")
            counts[split] = {"tokens": n, "documents": 1, "bytes": n}
        meta = dict(vocab_size=300, dtype="uint16", eot=0, pad=1, mask=2, bos=None, sources=[], **counts)
        (owt / "meta.json").write_text(json.dumps(meta))
        images = [("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")]
        members = {f"{split}/{name}/{i}.jpg": _jpeg(rng, 32) for i, (split, name) in enumerate(images * 2)}
        write_tar(data / "cifar10_jpeg.tar.xz", members, "w:xz")
        for i, (split, name) in enumerate(images * 2):
            folder = data / "imagenet" / {"test": "val"}.get(split, split) / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.JPEG").write_bytes(_jpeg(rng, 64))
        clouds = {f"x_{s}": rng.standard_normal((4, 1024, 3)).astype(np.float16) for s in ("train", "test")}
        labels = {f"y_{s}": np.arange(4) % 2 for s in ("train", "test")}
        np.savez(data / "modelnet10_1024_fp16.npz", cls=np.array(["a", "b"]), **clouds, **labels)
        for split in ("train", "test"):
            folder = data / "ShapeNetCore.v2.PC15k" / "02691156" / split
            folder.mkdir(parents=True)
            for i in range(4):
                np.save(folder / f"{i}.npy", rng.standard_normal((600, 3)).astype(np.float32))
        camvid = {f"x_{s}": rng.integers(0, 256, (4, 180, 240, 3), np.uint8) for s in ("train", "val", "test")}
        camvid |= {f"y_{s}": rng.integers(0, 12, (4, 180, 240), np.uint8) for s in ("train", "val", "test")}
        np.savez(data / "camvid_240x180.npz", **camvid)
        from tests.tiny_models import make_model, make_prompts  # here, for transformers takes seconds

        make_model(self.folder / "tuning" / "model")
        make_prompts(self.folder / "tuning" / "data", 8, 4)

    def copy(self, name: str, folder: Path) -> list[Path]:
        """Copies a data set into folder/data; its files there."""
        start = {"shapenet": "ShapeNet"}.get(name, name)
        for path in self.data.iterdir():
            if path.name.startswith(start):
                target = folder / "data" / path.name
                target.parent.mkdir(exist_ok=True)
                shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
        return sorted(path for path in (folder / "data").rglob("*") if path.is_file())


def write_tar(path: Path, members: dict[str, Any], mode: Any = "w") -> None:
    """members: name -> content, or the member itself, such as a link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
            else:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _jpeg(rng: np.random.Generator, size: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(buffer, "jpeg")
    return buffer.getvalue()


def data(files: Files, rng: random.Random) -> Iterator[Case]:
    """Runs on data sets of which a file is damaged."""

    def case(name: str, label: str, damage: Callable[[list[Path]], None], impossible: bool) -> Case:
        module, arguments = files.on_data[name]
        env = {"CO2_DATA": "@/data", "CO2_CACHE": "@/cache"}

        def prepare(folder: Path) -> None:
            damage(files.copy(name, folder))

        return Case(f"data {name}: {label}", module, [*arguments, "--out=@/run"], impossible, env, prepare)

    for name in files.on_data:
        yield case(name, "whole", lambda found: None, False)
        for label, damage in DAMAGES.items():
            for _ in range(3):
                which = rng.random()
                hurt = lambda found, damage=damage, which=which: damage(found[int(which * len(found))])  # noqa: E731
                yield case(name, f"{label} {which:.2f}", hurt, False)
    for key, wrong in META:
        change = lambda found, key=key, wrong=wrong: _change_meta(found, key, wrong)  # noqa: E731
        yield case("openwebtext", f"meta.json {key}={wrong!r}", change, True)
    for name, key, label, array in ARRAYS:
        change = lambda found, key=key, array=array: _change_array(found[0], key, array)  # noqa: E731
        yield case(name, f"{key} {label}", change, True)


def _garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(2000))


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "odd": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "garbage": _garbage,
    "flip": _flip,
    "missing": lambda path: path.unlink(),
    "folder": _folder,
    "text": lambda path: path.write_text("ü not data\n"),
    "deep": lambda path: path.write_text("[" * 100_000 + "\n"),
    "half a surrogate": lambda path: path.write_text('{"text": "\\ud800", "prompt": "\\ud800", "answer": "a"}\n'),
    "another object": lambda path: path.write_text("{}\n"),
    "broken link": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
}
META = [
    ("dtype", "O"), ("dtype", "float64"), ("dtype", None), ("dtype", ["uint16"]), ("vocab_size", 0),
    ("vocab_size", -5), ("vocab_size", 1e20), ("vocab_size", 10**20), ("vocab_size", "300"), ("vocab_size", 10),
    ("eot", 300), ("eot", None), ("eot", -1), ("eot", 1.5), ("pad", 1000), ("mask", -2), ("bos", 10**9), ("bos", "x"),
    ("train", None), ("val", 7), ("train", {"tokens": 7}), ("val", {"tokens": "x"}), ("train", {"tokens": -1}),
]  # fmt: skip
ARRAYS: list[tuple[str, str, str, Callable[[np.ndarray], Any]]] = [
    ("modelnet10", "x_train", "nan", lambda a: np.full_like(a, np.nan)),
    ("modelnet10", "x_train", "of no clouds", lambda a: a[:0]),
    ("modelnet10", "x_test", "of no clouds", lambda a: a[:0]),
    ("modelnet10", "x_train", "flat", lambda a: a.ravel()),
    ("modelnet10", "x_train", "of four coordinates", lambda a: np.concatenate([a, a[..., :1]], 2)),
    ("modelnet10", "x_train", "whole numbers", lambda a: a.astype(np.int64)),
    ("modelnet10", "x_train", "objects", lambda a: np.array([None, {}], dtype=object)),
    ("modelnet10", "x_train", "complex", lambda a: a.astype(np.complex64)),
    ("modelnet10", "x_test", "a point", lambda a: np.zeros_like(a)),
    ("modelnet10", "x_train", "a number", lambda a: np.float32(3)),
    ("modelnet10", "x_train", "text", lambda a: np.array(["a", "b", "c", "d"])),
    ("camvid", "x_train", "float", lambda a: a.astype(np.float32)),
    ("camvid", "x_train", "grey", lambda a: a[..., 0]),
    ("camvid", "x_train", "of no images", lambda a: a[:0]),
    ("camvid", "x_train", "fewer than masks", lambda a: a[:2]),
    ("camvid", "y_train", "out of range", lambda a: a + 100),
    ("camvid", "y_train", "negative", lambda a: a.astype(np.int64) - 5),
    ("camvid", "y_train", "of another size", lambda a: a[:, :90]),
    ("camvid", "y_val", "objects", lambda a: np.array([None] * 4, dtype=object)),
    ("camvid", "y_train", "float", lambda a: a + 0.5),
    ("camvid", "x_val", "a number", lambda a: np.uint8(3)),
    ("camvid", "y_val", "of no masks", lambda a: a[:0]),
]


def _change_meta(found: list[Path], key: str, value: Any) -> None:
    (file,) = (path for path in found if path.name == "meta.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def _change_array(file: Path, key: str, change: Callable[[np.ndarray], Any]) -> None:
    with np.load(file) as old:
        arrays = dict(old)
    np.savez(file, **arrays | {key: change(arrays[key])})


def checkpoints(files: Files, rng: random.Random) -> Iterator[Case]:
    """Finished runs, resumed for another epoch after a file of theirs was damaged."""
    for name in files.runs:
        module, arguments = files.on_data[name]
        arguments = [*arguments, "--epochs=2", "--out=@/run", "--resume", "--extend"]
        whole = files.folder / name
        found = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
        found = [path for path in found if "events" not in path.name]
        for label, damage in DAMAGES.items():
            for at in found:

                def prepare(folder: Path, whole: Path = whole, at: Path = at, damage: Any = damage) -> None:
                    shutil.copytree(whole, folder / "run")
                    damage(folder / "run" / at)

                yield Case(f"checkpoint {name} {at.name} {label}", module, arguments, False, files.env, prepare)
        for stray in ("stepfoo", "step000000999", "step-1", "step000000022.tmp-x", "stepü"):

            def prepare(folder: Path, whole: Path = whole, stray: str = stray) -> None:
                shutil.copytree(whole, folder / "run")
                (folder / "run" / "checkpoints" / stray).mkdir(exist_ok=True)

            yield Case(f"checkpoint {name} stray {stray}", module, arguments, False, files.env, prepare)
