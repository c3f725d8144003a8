"""How a train script ends: one line, once, and nothing left behind."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training import script as scripts
from training.script import SIGNALS, StopSignal

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


MISTAKE = "error: batch_size=47: give another"


@pytest.mark.parametrize("launcher", [pytest.param("torch.distributed.run", marks=pytest.mark.slow), "training.launch"])
def test_workers_of_one_mistake_say_it_once_and_leave_nothing(launcher: str, tmp_path: Path):
    env, two = environment(tmp_path), ["--standalone", "--nproc-per-node=2"]
    command = [sys.executable, "-m", launcher, *two, script(tmp_path), "mistake"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines().count(MISTAKE) == 1, done.stderr
    if launcher == "training.launch":
        assert done.returncode == 2 and done.stderr.endswith(f"{MISTAKE}\n") and "Traceback" not in done.stderr
    else:
        assert done.returncode and f"traceback : {MISTAKE}" in done.stderr, "in torchrun's report, too"
        assert str(script(tmp_path)) not in done.stderr.split(MISTAKE)[0], "no traceback of ours"
    assert not list((tmp_path / "tmp").glob("co2-*"))


@pytest.mark.slow
def test_a_disk_that_is_full_under_tensorboard_is_one_line(tmp_path: Path):
    command = [sys.executable, script(tmp_path), "full_disk", tmp_path / "run"]
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    how = {"env": environment(tmp_path), "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(command, preexec_fn=small, **how)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert line.startswith("error: ") and "File too large; make room or choose another --out" in line


def test_workers_of_one_launcher_say_a_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    said = []
    for rank, text in ((0, "a"), (1, "a"), (1, "b")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        said.append(scripts._first_to_say(text))
    assert said == [True, False, True]


def test_a_second_signal_ends_the_run_at_once_and_signals_are_their_own_again_after_it(monkeypatch: pytest.MonkeyPatch):
    before = [signal.getsignal(number) for number in SIGNALS]
    stop = StopSignal()
    stop.listen()
    assert signal.getsignal(signal.SIGTERM) not in before
    stop.ignore()
    assert [signal.getsignal(number) for number in SIGNALS] == before
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stop = StopSignal()
    stop.listen()
    assert not stop.number
    for now[0] in (10.0, 11.5):  # torchrun and the terminal both send one
        signal.raise_signal(signal.SIGUSR1)
    assert stop.number == signal.SIGUSR1
    now[0] = 12.5
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    stop.ignore()
    assert signal.getsignal(signal.SIGTERM) == stop._on_signal, "of a run that is stopped nothing else is"
