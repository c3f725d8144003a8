"""How a train script ends: one line, once, and nothing left behind."""

import os
import resource
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time
from core import UserError
from training.script import launch

def mistake():
    raise UserError("batch_size=47: give another")

def full_disk():  # a writer of TensorBoard's thread fails first
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(sys.argv[2])
    try:
        while True:
            writer.add_scalar("loss", 1.0, 1)
    except OSError:
        time.sleep(1)  # for the thread to say what it says
        raise

launch({"mistake": mistake, "full_disk": full_disk}[sys.argv[1]])
"""


def script(folder: Path) -> Path:
    file = folder / "script.py"
    file.write_text(SCRIPT)
    return file


def environment(folder: Path) -> dict[str, str]:
    (temporary := folder / "tmp").mkdir()
    return os.environ | {"PYTHONPATH": str(Path.cwd()), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}


def test_workers_of_one_mistake_say_it_once_and_leave_nothing(tmp_path: Path):
    env = environment(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, script(tmp_path), "mistake"], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode and done.stderr.splitlines().count("error: batch_size=47: give another") == 1
    assert not list((tmp_path / "tmp").glob("co2-*"))


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_a_disk_that_is_full_under_tensorboard_is_one_line(tmp_path: Path):
    command = [sys.executable, script(tmp_path), "full_disk", tmp_path / "run"]
    done = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, timeout=120, preexec_fn=small_files
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert line.startswith("error: ") and "File too large; make room or choose another --out" in line
