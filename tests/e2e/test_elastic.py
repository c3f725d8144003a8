"""Elastic runs as users start them, with real kills from outside."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.imports import ROOT
from tests.runs import logged, rows, summary
from tests.scripts import wait_until

ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
VISION = ("vision.train", "digits_small", "--batch_size", "48")
OPTIONS = ("--elastic", "--device", "cpu", "--log_every", "1")


def start(folder: Path, restarts: int, *options: str, of: tuple[str, ...] = VISION) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "training.launch", "--standalone", "--nproc-per-node", "3"]
    argv = [*launch, "--max-restarts", str(restarts), "-m", *of, *OPTIONS, "--out", str(folder), *options]
    return subprocess.Popen(argv, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def children(process: subprocess.Popen[str]) -> dict[str, int]:
    """RANK -> number of each worker."""
    found = {}
    for listing in Path(f"/proc/{process.pid}/task").glob("*/children"):
        for pid in listing.read_text().split():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {v[5:].decode(): int(pid) for v in variables if v.startswith(b"RANK=")}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "of", [VISION, ("language.train", "gpt2_pydoc_small", "--batch_size", "6")], ids=["vision", "language"]
)
def test_a_run_goes_on_and_takes_a_worker_back(of: tuple[str, ...], tmp_path: Path):
    process = start(tmp_path, 1, "--epochs", "400", of=of)
    wait_until(lambda: len(rows(tmp_path)) > 10, process)
    os.kill(children(process)["1"], signal.SIGKILL)
    wait_until(lambda: any("1.1 came" in line.get("workers", "") for line in rows(tmp_path)), process)
    came = rows(tmp_path)[-1]["step"]
    wait_until(lambda: rows(tmp_path)[-1]["step"] > came + 20, process)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in text, text
    assert summary(tmp_path)["stopped_by_signal"] == signal.SIGTERM
    steps = [row["step"] for row in rows(tmp_path) if "train_loss" in row]
    assert steps == list(range(1, len(steps) + 1)), "worker 0 lives, and takes each step once"
    assert logged(tmp_path, "workers") == ["2 workers: 1.0 lost", "3 workers: 1.1 came"]
    losses = logged(tmp_path)
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.slow
def test_nothing_outlives_the_launcher(tmp_path: Path):
    process = start(tmp_path, 1, "--epochs", "40")
    wait_until(lambda: len(rows(tmp_path)) > 5, process)
    workers = children(process)
    assert set(workers) == {"0", "1", "2"}
    process.kill()
    until = time.monotonic() + 60
    while left := [pid for pid in workers.values() if Path(f"/proc/{pid}/cmdline").exists() and alive(pid)]:
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.2)
    process.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
