"""Command lines of fine-tuning, reproduce.py, language.prepare and the measurements: cases of tests/hostile.py."""

from __future__ import annotations

import lzma
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hostile_files import DAMAGES, Case, Files, a_file

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
            a_file(folder)
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
prompts --zeroth.weight_decay -1
prompts --zeroth.seed -1
prompts --zeroth.pairs --device=cpu
prompts --zero 1
prompts --elastic
prompts --optim.lr inf
prompts_adamw --weights float16
prompts_adamw --zeroth.eps 0.1
prompts_adamw --method nope
prompts_adamw --optim.lr nan
prompts_adamw --batch_size 0
"""


# -- the other commands -------------------------------------------------------------------------------------------


def commands(files: Files) -> Iterator[Case]:
    """reproduce.py, language.prepare, training.launch and the measurements."""
    for options in REPRODUCE.strip().splitlines():
        fine = options in ("imagenet --dry-run --rows=", "imagenet --seeds , --dry-run")
        yield Case(f"reproduce {options}", "reproduce", options.split(), not fine, files.env, a_file)
    for options in PREPARE.strip().splitlines():
        yield Case(f"prepare {options}", "language.prepare", options.split(), True, files.env, _texts)
    for module, option, wrong in COMMANDS:
        for text in wrong:
            arguments = [f"--{option}={text}", *COMMANDS_QUICKLY.get(module, [])]
            yield Case(f"{module} {option}={text}", module, arguments, True, files.env, a_file)


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
    ("bench.scaling", "methods", ("nope", "co2", "co2:0", "co2:-1", "co2:ü", "ddp:3", "local:auto", "co2:" + 20 * "9")),
    ("bench.scaling", "repeats", (*SHARED, "1e9")),
    ("bench.scaling", "seconds", (*SHARED, "inf")),
    ("bench.scaling", "step_ms", (*SHARED, "inf")),
    ("bench.scaling", "batch", (*SHARED, "inf")),
    ("bench.time_to_loss", "tasks", ("nope", "ü", "")),
    ("bench.time_to_loss", "rates", (*SHARED, "inf")),
    ("bench.time_to_loss", "workers", (*SHARED, "inf")),
    ("bench.time_to_loss", "limit_seconds", (*SHARED, "inf")),
    ("bench.time_to_loss", "target", (*SHARED, "inf")),
    ("bench.time_to_loss", "methods", ("nope", "", "local:", "local:tau", "co2:ü=1")),
    ("bench.loss", "workers", (*SHARED, "inf")),
    ("bench.loss", "steps", (*SHARED, "inf")),
    ("bench.loss", "tau", (*SHARED, "inf")),
    ("bench.loss", "batch", (*SHARED, "inf")),
    ("bench.loss", "methods", ("nope", "")),
    ("bench.loss", "configurations", (*SHARED, "inf")),
    ("bench.loss", "lr_factors", ("-1", "nan", "inf", "0", "ü")),
    ("bench.boundary", "sizes", (*SHARED, "inf", "1e300")),
    ("bench.boundary", "repeats", SHARED),
    ("bench.boundary", "threads", ("-1", "nan", "ü")),
]
COMMANDS_QUICKLY = {"bench.scaling": ["--throttle"], "bench.time_to_loss": ["--throttle"]}


def _texts(folder: Path) -> None:
    a_file(folder)
    (folder / "text.txt").write_text("\n\x0c\n".join(f"document {i}, of words" for i in range(5)))
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00 no text")
    (folder / "bad.txt.xz").write_bytes(b"no xz")
    (folder / "cut.txt.xz").write_bytes(lzma.compress(b"text " * 1000)[:-20])
    (folder / "empty.txt").write_text("\n \n")
