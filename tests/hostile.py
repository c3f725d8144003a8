"""Hostile command lines, data and checkpoints, for tests/e2e/test_fuzz.py, and which of them no run could be."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.hostile_commands import commands, tuning
from tests.hostile_files import Case, Files, a_file, checkpoints, data
from training.recipe import flat

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
    "slowmo.outer_lr": POSITIVE, "slowmo.outer_momentum": BELOW_ONE,
    "overlap_local.pull": (5e-324, 1), "overlap_local.anchor_momentum": BELOW_ONE,
    "optim.lr": POSITIVE, "optim.momentum": BELOW_ONE, "optim.eps": POSITIVE, "optim.weight_decay": DECAY,
    "optim.power": POSITIVE, "optim.warmup_steps": (0, 1e9), "optim.min_lr_share": SHARE,
    "optim.clip_grad_norm": POSITIVE, "batch_size": COUNT, "epochs": COUNT, "seed": (0, 1e9), "accumulate": COUNT,
    "per_node": (0, 1e9), "zero": (0, 3), "timeout": (5e-324, 1e9), "link_mbit": (5e-324, 1e9), "eval_every": POSITIVE,
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
            yield Case(f"out {folder[:20]}", module, [*run, f"--out={folder}"], bad, files.env, a_file)
        for folder in absurd:
            env = files.env | {"CO2_CACHE": folder, "CO2_DATA": folder}
            yield Case(f"cache and data {folder[:20]}", module, [*run, "--out=@/run"], False, env, a_file)
        full = Case("a full disk", module, [*run, "--out=@/run"], True, files.env, file_limit=100_000)
        yield full
        yield replace(full, name="a fuller disk", file_limit=1000)
    for name, options in files.on_data.items():
        for folder in absurd:
            env = files.env | {"CO2_DATA": folder}
            module, arguments = options
            yield Case(f"data {name} {folder[:20]}", module, [*arguments, "--out=@/run"], True, env, a_file)
