"""A seeded fuzz of options, environment variables and files: python -m bench.chaos.inputs [--cases N] [--seed S]

Each case is one command of the project with one hostile value: of an option, of an environment variable, or in a file
that the command reads. A traceback, a crash, or a status other than 0, 1 or 2 is a fault. The script prints each fault
with its case, and writes the numbers to inputs.json. Its status is 1 if there is a fault.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.chaos.crew import work
from bench.cluster import hold_port
from bench.report import header, read_options, require, save
from training.script import launch

STARTING = threading.Lock()
TINY = ("--device", "cpu", "--timeout", "3", "--epochs", "1", "--out", "{}/run")
TRAIN = ("vision.train", "digits_small", *TINY)
COMMANDS: dict[tuple[str, ...], tuple[str, ...]] = {  # a command -> the files that it reads; {}: the case's folder
    TRAIN: (),
    (*TRAIN, "--dry_run"): (),
    (*TRAIN, "--resume"): ("run/*", "run/checkpoints/*/*"),
    ("vision.train", "digits_small", *TINY[:-1], "{}/new", "--init_from", "{}/run"): ("run/checkpoints/*/*",),
    ("vision.evaluate", "{}/run", "--device", "cpu"): ("run/*", "run/checkpoints/*/*"),
    ("vision.export", "{}/run", "{}/weights.safetensors"): ("run/*", "run/checkpoints/*/*"),
    ("language.train", "gpt2_pydoc_small", *TINY, "--dry_run"): (),
    ("segmentation.train", "digits_small", *TINY, "--dry_run"): (),
    ("pointcloud.train", "surfaces_small", *TINY, "--dry_run"): (),
    ("language.finetune", "text", *TINY, "--dry_run"): (),
    ("language.prepare", "{}/text.txt", "{}/text.jsonl", "--out", "{}/corpus", "--vocab_size", "270"): ("text.*",),
    ("language.zo_replay", "{}/run", "--model", "{}/run", "--out", "{}/tuned"): ("run/*",),
    ("pointcloud.pack", "shapenet"): (),
    ("training.plan", "--model", "gpt-125m", "--batch", "64", "--cluster", "{}/cluster.json"): ("cluster.json",),
    ("training.plan", "--model", "gpt-125m", "--batch", "64", "--preset", "dgx-a100-tcp", "--sbatch"): (),
    ("training.plan", "--model", "{}/model", "--batch", "64", "--preset", "laptops"): ("model/config.json",),
    ("training.plan", "methods", "--parameters", "1e8", "--step", "0.1", "--gbit", "10"): (),
    ("core.doctor", "--params", "1e5", "--timeout", "3", "--out", "{}/new.json"): (),
    ("training.launch", "--nproc-per-node", "1", "-m", *TRAIN, "--dry_run"): (),
    ("training.launch", "--nproc-per-node", "1", "-m", *TRAIN, "--dry_run", "--elastic"): (),
    ("training.launch", "--nproc-per-node", "1", "-m", *TRAIN, "--elastic"): (),
    ("training.launch", "--nnodes", "3", "--store", "etcd://127.0.0.1:9/run", "-m", *TRAIN, "--elastic"): (),
    ("reproduce", "list"): (),
    ("reproduce", "vision", "--collect", "{}"): ("run/*.json*",),
    ("vision.demo", "--epochs", "1", "--out", "{}/demo"): (),
    **{
        (f"bench.{name}", "--out", "{}/bench"): ()
        for name in ("boundary", "chaos", "cluster", "lengths", "loss", "scaling", "time_to_loss")
    },
}
PRELOAD = ["vision.train", "vision.demo", "pointcloud.train", "language.model", "language.prepare", "reproduce"]
PRELOAD += ["segmentation.train", "training.plan.command", "core.doctor.command", "torch.distributed.run"]

WORDS = [b"", b"x", b"-", b"-1", b"0", b"1", b"2", b"3.5", b"1e-300", b"1e300", b"nan", b"inf", b"-inf", b"99999999"]
WORDS += [b"9" * 40, b"9" * 5000, b"a" * 5000, b"None", b"true", b"auto", b"0x10", b"1,2", b"1:2", b"{}", b"[]"]
WORDS += ["\u0661".encode(), "\U0001f642".encode(), b"\xff", b"a\nb", b"'", b"%s", b"../..", b"~", b"/", b"/dev/null"]
WORDS += [b"/proc/x.png", b"/dev/full", b"/nosuch/x", b"/etc/passwd"]
VARIABLES = """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME SLURM_NTASKS_PER_NODE
    SLURM_TASKS_PER_NODE SLURM_LOCALID CO2_WORKER CO2_STORE CO2_SECRET CO2_LAUNCH CO2_DATA CO2_CACHE HOME CXX
    TORCHELASTIC_ERROR_FILE TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE NCCL_IB_DISABLE TORCH_NCCL_BLOCKING_WAIT
    PET_NNODES PET_NPROC_PER_NODE
"""


@dataclass(frozen=True)
class Fuzz:
    """How many cases, and which."""

    cases: int = 1000
    first: int = 0
    """Number of the first case."""
    seed: int = 0
    limit: float = 20.0
    """Seconds after which a case is ended. It counts as accepted, because it trains or measures."""
    jobs: int = 1
    """Cases that run at the same time."""
    out: Path = Path("results")

    def check(self) -> None:
        require(self, positive="limit", ones="cases jobs")


@dataclass(frozen=True)
class Case:
    """One command with one hostile value. `damage` is what was done to a file."""

    command: tuple[str, ...]
    env: dict[str, str]
    damage: str = ""


def main() -> None:
    asked = read_options(Fuzz, "bench.chaos.inputs", description=__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs `finally`
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    found: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="fuzz") as temporary, ThreadPoolExecutor(asked.jobs) as pool:
        folder = Path(temporary)
        options = prepare(context, folder / "whole")

        def run(number: int) -> tuple[int, str]:
            shutil.copytree(folder / "whole", here := folder / str(number))
            case = draw(random.Random(f"{asked.seed} {number}"), options, here)
            said, status = suffer(context, case, here, asked.limit)
            last = said.strip().splitlines()[-1:] or [""]
            fault = "Traceback (most" in said or status not in (0, 1, 2, None)
            if fault:
                print(json.dumps({"case": number, "status": status, **vars(case), "last": last[0][:300]}), flush=True)
            shutil.rmtree(here, ignore_errors=True)
            return number, "fault" if fault else "limit" if status is None else f"status {status}"

        try:
            for number, end in pool.map(run, range(asked.first, asked.first + asked.cases)):
                found.setdefault(end, []).append(number)
                if (number + 1) % 100 == 0:
                    print(f"{number + 1} cases, {len(found.get('fault', []))} faults", file=sys.stderr, flush=True)
        finally:  # SIGTERM and Ctrl-C keep what was found
            ends = {end: len(numbers) for end, numbers in sorted(found.items())}
            row = {"cases": sum(ends.values()), "ends": ends, "faults": found.get("fault", [])}
            save(asked.out, "inputs", header("bench.chaos.inputs", asked) | row | {"limits": found.get("limit", [])})
            print(f"{row['cases']} cases: {', '.join(f'{count} {end}' for end, count in ends.items())}")
    sys.exit("fault" in found)


def prepare(context: Any, folder: Path) -> dict[str, list[str]]:
    """Makes the whole files that cases damage. Returns the options of each command."""
    folder.mkdir()
    (folder / "text.txt").write_text("One document of some words.\n" * 200)
    (folder / "text.jsonl").write_text('{"text": "Another document, also of words."}\n' * 200)
    (folder / "model").mkdir()
    model = {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 1000, "n_positions": 128}
    (folder / "model" / "config.json").write_text(json.dumps(model))
    link = {"workers": 4, "bandwidth_bits_per_second": 1e9, "latency_seconds": 1e-4}
    device = {"type": "cuda", "name": "NVIDIA A100-SXM4-80GB", "memory_bytes_per_worker": 8e10}
    nodes = [{"hostname": f"node{n}", "ranks": [2 * n, 2 * n + 1], "device": device["name"]} for n in range(2)]
    report = {"format": 1, "workers": 4, "workers_per_node": 2, "nodes": nodes, "device": device}
    report["links"] = {"within": link, "across": link, "all": link}
    (folder / "cluster.json").write_text(json.dumps(report))
    said, status = suffer(context, Case(TRAIN, {}), folder, 300.0)
    if status:
        raise RuntimeError(f"the undamaged command fails:\n{said}")
    options = {}
    for command in COMMANDS:
        asks = "--help-all" if command[1:2] and command[0].endswith((".train", ".finetune")) else "--help"
        head = command[: 2 if asks == "--help-all" or command[1] == "methods" else 1]
        said, _ = suffer(context, Case((*head, asks), {}), folder, 60.0)
        options[" ".join(command)] = re.findall(r"^[│ ]*(?:-\w, )?(--\w[\w.-]*)", said, re.MULTILINE)
    return options


def draw(rng: random.Random, options: dict[str, list[str]], folder: Path) -> Case:
    """Draws a case, and damages a file in its folder if the case says so."""
    command = rng.choice([*COMMANDS])
    kind = rng.choice(("option", "option", "environment", "file"))
    if kind == "file":
        command = rng.choice([known for known, files in COMMANDS.items() if files])
        paths = sorted(p for files in COMMANDS[command] for p in folder.glob(files) if p.is_file())
        return Case(command, {}, damage(rng, rng.choice(paths)))
    word = os.fsdecode(rng.choice(WORDS))
    if kind == "environment":
        env = {}
        if rng.random() < 0.5:
            with hold_port() as held:
                env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
                env["MASTER_PORT"] = str(held.getsockname()[1])
        return Case(command, env | {rng.choice(VARIABLES.split()): word})
    if rng.random() < 0.3:  # in place of one of its own values
        place = rng.randrange(1, len(command))
        return Case((*command[:place], word, *command[place + 1 :]), {})
    return Case((*command, rng.choice(options[" ".join(command)] or ["--x"]), word), {})


def damage(rng: random.Random, path: Path) -> str:
    """Damages a file in one of several ways. Returns a description."""
    content = path.read_bytes()
    kind = rng.choice(("cut", "flip", "fill", "empty", "folder", "gone", "value", "value", "value"))
    numbers = [*re.finditer(rb'-?\d[\d.e+-]*|"[^"]*"|true|false|null', content)] if len(content) < 1 << 16 else []
    if kind == "value" and numbers:
        at = rng.choice(numbers)
        word = rng.choice([*WORDS, b'"x"', b"[[]]", b"1e-300", b"[" * 5000, b'"\\ud800"'])
        path.write_bytes(content[: at.start()] + word + content[at.end() :])
        return f"{path.name}: {at.group()[:40]!r} became {word[:40]!r}"
    if kind == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif kind in ("folder", "gone"):
        path.unlink()
        if kind == "folder":
            path.mkdir()
    elif kind != "empty" and content:
        at, size = rng.randrange(len(content)), 1 if kind == "flip" else 64
        path.write_bytes(content[:at] + rng.randbytes(size) + content[at + size :])
    else:
        path.write_bytes(b"")
    return f"{path.name}: {kind}"


def suffer(context: Any, case: Case, folder: Path, limit: float) -> tuple[str, int | None]:
    """Runs a case. Returns what it printed, and its status, or None if the limit has ended it."""
    command, log = [word.replace("{}", str(folder)) for word in case.command], folder / "log"
    log.unlink(missing_ok=True)
    process = context.Process(target=_run, args=(command, case.env, str(folder), str(log)))
    with STARTING:  # start() would poll the processes of other threads, and their status would be lost
        process.start()
        multiprocessing.process._children.discard(process)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        process.join(limit)
        status = process.exitcode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
        process.join()
    return log.read_text(errors="replace") if log.exists() else "", status


def _run(command: Sequence[str], env: dict[str, str], folder: str, log: str) -> None:
    os.setsid()
    os.chdir(folder)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    own = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "CO2_DATA": f"{folder}/data", "HOME": folder}
    os.environ.update({"PYTHONPATH": sys.path[0], "CO2_CACHE": f"{folder}/cache"} | own | env)
    import torch

    torch.set_num_threads(1)
    work(command[0], command[1:], {}, log)


if __name__ == "__main__":
    launch(main)
