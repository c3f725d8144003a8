"""Hostile command lines, data and checkpoints, for tests/e2e/test_fuzz.py, and which of them no run could be."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import lzma
import math
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from training.recipe import flat

INF = math.inf
TRAIN = {  # module -> its smallest recipe
    "vision.train": "digits_small",
    "segmentation.train": "digits_small",
    "pointcloud.train": "surfaces_small",
    "language.train": "gpt2_pydoc_small",
}
# A number outside these ends cannot be: [least, most]. Which numbers belong is written here once more, apart from the
# recipes, so that a check that is lost is missed. What has no entry has no number that is impossible.
SHARE, BELOW_ONE, LARGE, COUNT = (0, 1), (0, 1 - 1e-9), 1e4, (1, 1e9)
POSITIVE, DECAY = (5e-324, LARGE), (0, LARGE)
RANGES: dict[str, tuple[float, float]] = {
    "co2.tau": COUNT, "co2.tau_max": COUNT, "co2.outer_lr": POSITIVE, "co2.outer_momentum": BELOW_ONE,
    "co2.clip": (5e-324, 1e9), "co2.mix": (5e-324, 1), "co2.delay": (0, 1e9),
    "delayed.taylor": DECAY, "slowmo.outer_lr": POSITIVE, "slowmo.outer_momentum": BELOW_ONE,
    "overlap_local.pull": (5e-324, 1), "overlap_local.anchor_momentum": BELOW_ONE,
    "optim.lr": POSITIVE, "optim.momentum": BELOW_ONE, "optim.eps": POSITIVE, "optim.weight_decay": DECAY,
    "optim.power": POSITIVE, "optim.warmup_steps": (0, 1e9), "optim.min_lr_share": SHARE,
    "optim.clip_grad_norm": POSITIVE, "batch_size": COUNT, "epochs": COUNT, "seed": (0, 1e9), "accumulate": COUNT,
    "per_node": (0, 1e9), "zero": (0, 3), "timeout": (5e-324, 1e9), "link_mbit": (5e-324, 1e9), "eval_every": COUNT,
    "checkpoint_every": (0, 1e9), "log_every": COUNT, "gpu_gb": (5e-324, 1e9),
    "label_smoothing": BELOW_ONE, "mixup": (0, 100), "cutmix": (0, 100), "color_jitter": SHARE,
    "random_erasing": SHARE, "repeats": COUNT, "drop_path": BELOW_ONE, "loader_workers": (0, 1000),
    "vocab_size": (1, 1e6), "context": (4, 1e6), "dropout": BELOW_ONE, "epoch_steps": COUNT, "eval_tokens": COUNT,
    "autoencoder.latent": (1, 1e6), "autoencoder.folding_width": (1, 1e6), "mae.groups": (2, 1e6),
    "mae.group_size": (1, 1e6), "mae.mask_ratio": (1e-9, 1 - 1e-9), "mae.dim": (1, 1e6), "mae.depth": (1, 1e4),
    "mae.heads": (1, 1e6), "mae.decoder_depth": (1, 1e4), "mae.drop_path": BELOW_ONE, "points": (1, 1e6),
    "emd_points": (1, 1e9), "crossing": (5e-324, 1e9),
}  # fmt: skip
NUMBERS = ("-1", "0", "nan", "inf", "-inf", "1e308", "-1e308", "1e20", "100000000000000000000", "1e-320", "-0.5", "1.5")
NO_NUMBERS = (
    "",
    " ",
    "ü",
    "1,5",
    "0x10",
    "True",
    "None None",
    "1 2 3",
    "--",
    "💥",
    "1e",
    "' OR 1=1",
    "$(reboot)",
    "\t",
)
NAMES = ("", "ü", "Co2", "../../etc", "None", "-1", "co2 ddp", "x" * 5000, "💥", "auto\n")


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


def cases(files: Files, rng: random.Random, number: int) -> list[Case]:
    """So many, of every kind."""
    kinds = {
        values(files): 0.36,
        names(files): 0.1,
        contradictions(files): 0.06,
        folders(files): 0.06,
        data(files, rng): 0.18,
        checkpoints(files, rng): 0.08,
        tuning(files, rng): 0.06,
        commands(files): 0.1,
    }
    chosen: list[Case] = []
    left: list[Case] = []
    for cases_of, share in kinds.items():
        listed = list(cases_of)
        rng.shuffle(listed)
        chosen += listed[: round(share * number)]
        left += listed[round(share * number) :]
    rng.shuffle(left)
    return (chosen + left)[:number]


# -- options ------------------------------------------------------------------------------------------------------


def _fields(module: str) -> dict[str, Any]:
    recipes = importlib.import_module(module.replace(".train", ".recipes")).RECIPES
    return flat(dataclasses.asdict(recipes[TRAIN[module]]))


def values(files: Files) -> Iterator[Case]:
    """Each number of each recipe, with values that are none or cannot be."""
    seen: set[str] = set()
    for module, recipe in TRAIN.items():
        options = sorted((RANGES.keys() & _fields(module).keys()) - seen)
        seen.update(options)
        for option in options:
            for text in NUMBERS + NO_NUMBERS:
                least, most = RANGES[option]
                known = text in NUMBERS
                impossible = not known or not least <= float(text) <= most
                arguments = [recipe, f"--{option}={text}", "--dry_run", "--device=cpu"]
                if option.split(".")[0] in ("slowmo", "overlap_local", "delayed"):
                    arguments += ["--method", option.split(".")[0]]
                if option.startswith("mae."):
                    arguments += ["--model", "mae"]
                yield Case(f"value {option}={text!r}", module, arguments, impossible, files.env)


def names(files: Files) -> Iterator[Case]:
    """Recipes, options and choices that do not exist."""
    for module, recipe in TRAIN.items():
        for name in NAMES:
            yield Case(f"recipe {name[:20]!r}", module, [name, "--dry_run"], True, files.env)
            yield Case(f"option {name[:20]!r}", module, [recipe, f"--{name}=1", "--dry_run"], True, files.env)
            for option in ("method", "co2.gap", "co2.merge", "optim.name", "precision", "device", "model"):
                arguments = [recipe, f"--{option}={name}", "--dry_run"]
                if option in _fields(module) or option == "device":
                    yield Case(f"choice {option}={name[:20]!r}", module, arguments, name != "", files.env)


def contradictions(files: Files) -> Iterator[Case]:
    """Options that are possible each by itself."""
    for module in TRAIN:
        for options in (
            "--method ddp --co2.wire.format int8",
            "--method slowmo --co2.tau auto",
            "--method local --shard",
            "--method ddp --recommended",
            "--method co2 --slowmo.outer_lr 2",
            "--no_recommended --co2.gap none --co2.outer_momentum 0.5",
            "--co2.delay 7 --co2.tau 6",
            "--co2.delay 0",
            "--co2.merge keep --co2.gap inner --co2.delay auto",
            "--zero 3",
            "--per_node 3",
            "--optim.name sgd --optim.nesterov --optim.momentum 0",
            "--batch_size 1000000",
            "--device cuda --link_mbit 5",
        ):
            impossible = options not in ("--co2.delay 0",)
            run = [*files.quick(module), *options.split(), "--out=@/run"]
            yield Case(f"contradiction {options}", module, run, impossible, files.env)


def folders(files: Files) -> Iterator[Case]:
    """Run folders, data folders and caches that are missing, absurd, or cannot be written."""
    absurd = ("/proc/nope", "/dev/null", "/dev/full/x", "@/file", "@/file/x", "@/" + "x" * 300, "/sys/run", "@/ü💥", "")
    for module in TRAIN:
        run = files.quick(module)
        for folder in absurd:
            bad = folder != "@/ü💥"
            yield Case(f"out {folder[:20]}", module, [*run, f"--out={folder}"], bad, files.env, _a_file)
        for folder in absurd:
            env = files.env | {"CO2_CACHE": folder, "CO2_DATA": folder}
            yield Case(f"cache and data {folder[:20]}", module, [*run, "--out=@/run"], False, env, _a_file)
        full = Case("a full disk", module, [*run, "--out=@/run"], True, files.env, file_limit=100_000)
        yield full
        yield replace(full, name="a fuller disk", file_limit=1000)
    for name, options in files.on_data.items():
        for folder in absurd:
            env = files.env | {"CO2_DATA": folder}
            module, arguments = options
            yield Case(f"data {name} {folder[:20]}", module, [*arguments, "--out=@/run"], True, env, _a_file)


def _a_file(folder: Path) -> None:
    (folder / "file").write_text("not a folder")


# -- data and checkpoints -----------------------------------------------------------------------------------------


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
        with tarfile.open(data / "cifar10_jpeg.tar.xz", "w:xz") as tar:
            for split, name in images * 2:
                content = _jpeg(rng, 32)
                member = tarfile.TarInfo(f"{split}/{name}/{len(tar.getmembers())}.jpg")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
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


# -- fine-tuning --------------------------------------------------------------------------------------------------


def tuning(files: Files, rng: random.Random) -> Iterator[Case]:
    """A tiny model and its prompts, with options that cannot be, and with a file damaged."""
    whole = files.folder / "tuning"
    files_of = ["--model=@/model", "--data=@/data", "--out=@/run"]
    quick = [*files_of, "--epochs=1", "--epoch_steps=2", "--batch_size=4", "--device=cpu"]

    def case(label: str, options: str, impossible: bool, damage: Callable[[Path], Any] | None = None) -> Case:
        which = rng.random()

        def prepare(folder: Path) -> None:
            shutil.copytree(whole, folder, dirs_exist_ok=True)
            _a_file(folder)
            if damage is not None:
                found = sorted(path for path in folder.glob("[dm]*/*") if path.is_file())
                damage(found[int(which * len(found))])

        recipe, *more = options.split()
        return Case(f"tuning {label}", "language.finetune", [recipe, *quick, *more], impossible, files.env, prepare)

    for recipe in ("prompts", "prompts_adamw"):
        yield case(f"{recipe} whole", recipe, False)
        for label, damage in DAMAGES.items():
            for _ in range(2):
                yield case(f"{recipe} {label}", recipe, False, damage)
    for options in TUNING.strip().splitlines():
        yield case(options, options, True)


TUNING = """
text
prompts --model=@/nowhere
prompts --model=@/file
prompts --model=@/data
prompts --data=@/nowhere
prompts --data=@/file
prompts --data=/dev/null
prompts --out=/proc/nope
prompts --context 3
prompts --context 1000000
prompts --epoch_steps 0
prompts --eval_samples 0
prompts --trainable nope
prompts --answers x
prompts --answers x x
prompts --answers x y
prompts --lora.rank -1
prompts --lora.rank 2 --trainable *.bias
prompts --lora.alpha nan
prompts --zeroth.eps 0
prompts --zeroth.eps nan
prompts --zeroth.directions 0
prompts --zeroth.directions 1e20
prompts --zeroth.directions 100000000
prompts --zeroth.delay 2
prompts --zeroth.weight_decay -1
prompts --zeroth.seed -1
prompts --zeroth.pairs --device=cpu
prompts --zero 1
prompts --elastic
prompts --optim.lr inf
prompts_adamw --weights float16
prompts_adamw --zeroth.directions 2
prompts_adamw --method nope
prompts_adamw --optim.lr nan
prompts_adamw --batch_size 0
"""


# -- the other commands -------------------------------------------------------------------------------------------


def commands(files: Files) -> Iterator[Case]:
    """reproduce.py, language.prepare, training.launch and the measurements."""
    for options in REPRODUCE.strip().splitlines():
        fine = options in ("imagenet --dry-run --rows=", "imagenet --seeds , --dry-run")
        yield Case(f"reproduce {options}", "reproduce", options.split(), not fine, files.env, _a_file)
    for options in PREPARE.strip().splitlines():
        yield Case(f"prepare {options}", "language.prepare", options.split(), True, files.env, _texts)
    for module, option, wrong in COMMANDS:
        for text in wrong:
            arguments = [f"--{option}={text}", *COMMANDS_QUICKLY.get(module, [])]
            yield Case(f"{module} {option}={text}", module, arguments, True, files.env, _a_file)


REPRODUCE = """
nope
imagenet --rows nope --dry-run
imagenet --methods nope --dry-run
imagenet --seeds -1 --dry-run
imagenet --seeds x --dry-run
imagenet --seeds 1e3 --dry-run
imagenet --seeds 99999999999999999999 --dry-run
imagenet --cluster h100
imagenet --array -1 --dry-run
imagenet --array x
imagenet --local --workers 0 --dry-run
imagenet --local --workers -4 --dry-run
imagenet --local --workers nan
imagenet --collect @/nowhere
imagenet --collect @/file
imagenet --dry-run -- --method ddp
imagenet --dry-run -- word
imagenet --dry-run -- --co2.tau=ü
imagenet --dry-run -- --co2.tau=0
imagenet --dry-run -- --co2.tau=-1
imagenet --seeds ² --dry-run
imagenet --dry-run --rows=
list extra
--frobnicate
imagenet --seeds , --dry-run
"""
PREPARE = """
@/nowhere.txt --out @/o
@/file --out @/o
@/text.txt
@/text.txt --out @/o --vocab-size 5
@/text.txt --out @/o --vocab-size -1
@/text.txt --out @/o --vocab-size 1e20
@/text.txt --out @/o --hold-out 0
@/text.txt --out @/o --hold-out -3
@/text.txt --out @/o --hold-out 99
@/text.txt --out @/file
@/text.txt --out @/file/x --vocab-size 300
@/text.txt --out /proc/nope --vocab-size 300
@/text.txt --out @/o --vocab-size 100000000000000000000
@/bad.txt --out @/o
@/bad.txt.xz --out @/o
@/empty.txt --out @/o
@/text.txt --out @/o --tokenizer @/file
@/text.txt --out @/o --tokenizer @/nowhere
@/text.txt --out @/o --tokenizer @
@/text.txt --out @/o --val @/nowhere.txt
@/text.txt --out @/o --seed x
@ --out @/o --vocab-size 300
@/cut.txt.xz --out @/o
@/text.txt --out /dev/null/x --vocab-size 300
"""
SHARED = ("-1", "nan", "ü", "", "0")
COMMANDS = [
    ("bench.scaling", "workers", (*SHARED, "99999999", "2.5", "inf")),
    ("bench.scaling", "rates", (*SHARED, "inf", "-inf")),
    (
        "bench.scaling",
        "methods",
        ("nope", "co2", "co2:0", "co2:-1", "co2:ü", "ddp:3", "local:auto", "co2:99999999999999999999"),
    ),
    ("bench.scaling", "repeats", (*SHARED, "1e9")),
    ("bench.scaling", "seconds", (*SHARED, "inf")),
    ("bench.scaling", "step_ms", (*SHARED, "inf")),
    ("bench.scaling", "batch", (*SHARED, "inf")),
    ("bench.time_to_loss", "tasks", ("nope", "ü", "")),
    ("bench.time_to_loss", "rates", (*SHARED, "inf")),
    ("bench.time_to_loss", "workers", (*SHARED, "inf")),
    ("bench.time_to_loss", "limit_seconds", (*SHARED, "inf")),
    ("bench.time_to_loss", "vision_loss", (*SHARED, "inf")),
    ("bench.search", "workers", (*SHARED, "inf")),
    ("bench.search", "steps", (*SHARED, "inf")),
    ("bench.search", "tau", (*SHARED, "inf")),
    ("bench.search", "batch", (*SHARED, "inf")),
    ("bench.search", "methods", ("nope", "")),
    ("bench.search", "configurations", (*SHARED, "inf")),
    ("bench.search", "lr_factors", ("-1", "nan", "inf", "0", "ü")),
    ("bench.search", "budget_minutes", ("-1", "nan", "ü", "")),
    ("bench.simulator", "nodes", (*SHARED, "inf")),
    ("bench.simulator", "inter_gbps", (*SHARED, "inf")),
    ("bench.simulator", "params", (*SHARED, "inf")),
    ("bench.simulator", "step_ms", (*SHARED, "inf")),
    ("bench.simulator", "tau", (*SHARED, "inf")),
    ("bench.simulator", "quantile", ("-1", "nan", "2", "ü")),
    ("bench.simulator", "rounds", (*SHARED, "inf")),
    ("bench.simulator", "efficiency", ("-1", "nan", "0", "2", "ü")),
    ("bench.simulator", "latency_ms", ("-1", "nan", "inf", "ü")),
    ("bench.simulator", "preset", ("nope",)),
    ("bench.simulator", "calibrate", ("@/nowhere", "@/file")),
    ("bench.peers", "steps", (*SHARED, "inf")),
    ("bench.peers", "rate", (*SHARED, "inf")),
    ("bench.peers", "workers", (*SHARED, "inf")),
    ("bench.peers", "methods", ("nope", "")),
    ("bench.memory", "parameters", (*SHARED, "inf")),
    ("bench.boundary", "sizes", (*SHARED, "inf", "1e300")),
    ("bench.boundary", "repeats", SHARED),
    ("bench.boundary", "threads", ("-1", "nan", "ü")),
]
COMMANDS_QUICKLY = {
    "bench.scaling": ["--throttle"],
    "bench.time_to_loss": ["--throttle"],
    "bench.peers": ["--throttle"],
}


def _texts(folder: Path) -> None:
    _a_file(folder)
    (folder / "text.txt").write_text("\n\x0c\n".join(f"document {i}, of words" for i in range(5)))
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00 no text")
    (folder / "bad.txt.xz").write_bytes(b"no xz")
    (folder / "cut.txt.xz").write_bytes(lzma.compress(b"text " * 1000)[:-20])
    (folder / "empty.txt").write_text("\n \n")
