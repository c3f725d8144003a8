"""Slurm's programs, played by small scripts, for the tests of slurm/*.sh."""

import importlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import reproduce
from bench.cluster import hold_port
from training.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("vision", "segmentation", "pointcloud", "gpt2", "roberta", "finetune")
SCRIPTS = [f"slurm/{task}_{cluster}.sh" for task in TASKS for cluster in reproduce.NODES]
SMALL = {
    "vision": "digits_small",
    "segmentation": "digits_small",
    "pointcloud": "surfaces_small",
    "gpt2": "gpt2_pydoc_small",
    "roberta": "roberta_pydoc_small",
    "finetune": "prompts",
}

FAKES = {
    # one node: runs what stands behind its own options
    "srun": 'echo "$@" > "$FAKES/srun_line"; while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "squeue": 'date -d "@$(cat "$FAKES/end")" +%Y-%m-%dT%H:%M:%S',
    "scontrol": """case "$1" in
show) [ "$2" = job ] && cat "$FAKES/job" || echo 127.0.0.1 ;;
requeue)
    [ ! -e "$FAKES/refuse" ] && { cat "$FAKES/requeued" 2>/dev/null; echo "$2"; } > "$FAKES/new" &&
        mv "$FAKES/new" "$FAKES/requeued" ;;
esac""",
    # a worker: handles the signals although torchrun ignores them, which a bash script could not
    "worker": """exec python3 -c '
import os, pathlib, signal, sys, time
fakes = pathlib.Path(os.environ["FAKES"])
def save(*_):
    (fakes / "summary.json").write_text(os.environ.get("SUMMARY", "stopped_by_signal"))
    sys.exit(0)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, save)
(fakes / "ready").touch()
time.sleep(60)
sys.exit(9)
'""",
}
SAY = 'printf "%s\\n" "$@" > "$FAKES/arguments"'
WORK = "worker & wait $!"
HELD: list[socket.socket] = []  # the ports of the scripts that a test starts


def install(folder: Path, **programs: str) -> dict[str, str]:
    """Writes programs into `folder`; returns an environment with them and Slurm's variables of one node of 2 GPUs."""
    for name, text in {**FAKES, **programs}.items():
        new = folder / f"{name}.new"  # put in place whole: a script before may still be starting the old one
        new.write_text(f"#!/bin/bash\n{text}\n")
        new.chmod(0o755)
        new.replace(folder / name)
    HELD.append(hold_port())
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CO2_"))}
    return kept | {
        "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FAKES": str(folder),
        "VENV": "",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node0",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURMD_NODENAME": "node0",
        "RDZV_PORT": str(HELD[-1].getsockname()[1]),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def torchruns_line(script: str, folder: Path, *options: str, **variables: str) -> tuple[list[str], str, list[str]]:
    """(torchrun's options, module, the train script's arguments) that a Slurm script ends up with."""
    env = install(folder, torchrun=SAY) | variables
    subprocess.run(["bash", script, *options], cwd=ROOT, env=env, check=True, capture_output=True, timeout=60)
    arguments = (folder / "arguments").read_text().splitlines()
    at = arguments.index("-m")
    return arguments[:at], arguments[at + 1], arguments[at + 2 :]


def directives(script: str) -> dict[str, str]:
    """{"--nodes": "16", "--requeue": ""} and so on, of a script's #SBATCH lines."""
    return dict(re.findall(r"^#SBATCH (--[a-z-]+)=?(\S*)$", (ROOT / script).read_text(), re.MULTILINE))


def recipes_of(script: str) -> dict[str, Recipe]:
    module = re.search(r"^launch (\w+\.\w+)", (ROOT / script).read_text(), re.MULTILINE)
    assert module
    return importlib.import_module(recipes_module(module[1])).RECIPES


def recipes_module(module: str) -> str:
    """Where the recipes of a train script are."""
    return module.replace(".train", ".recipes").replace(".finetune", ".finetune_recipes")


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def start(script: str, env: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = ["bash", script, *options]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
