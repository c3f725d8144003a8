"""How processes start and end: all at once, in one line, once, and nothing left behind."""

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.cluster import hold_port
from core import UserError, testing
from core.errors import first_to_say, warn
from core.guards.inputs import check_env
from tests.on_ranks import on_ranks
from tests.runs import logged, summary
from tests.scripts import fork_script
from training.loop.run import Run
from training.recipe import Recipe, parse
from training.start.script import SIGNALS, StopSignal, launch
from training.start.workers import _not_met, join, refuse


@dataclass(frozen=True)
class Toy(Recipe):
    fails: bool = False
    late: float = 0.0


def main() -> None:
    recipe = parse({"toy": Toy(device="cpu", batch_size=2, out=Path("run"))}, prog="toy")
    time.sleep(recipe.late)
    if recipe.fails:
        raise UserError("no data here: bring some")
    with Run(recipe):
        print("started", flush=True)


def worker(folder: str, place: dict[str, str], options: list[str], said: Path) -> None:
    """A process as a launcher other than torchrun would start it."""
    os.environ |= place
    os.chdir(folder)
    with open(said, "w") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    sys.argv = ["toy", "toy", *options]
    launch(main)


def start(folder: Path, *options: list[str], listens: bool = False) -> tuple[list[int], list[str], float]:
    """One process a list of options: how each ended, what it said, and after how many seconds.

    listens: another program has their port.
    """
    held = hold_port()
    if listens:
        held.listen()
    began, port, processes = time.monotonic(), held.getsockname()[1], []
    said = [folder / f"said{rank}" for rank in range(len(options))]
    for rank, mine in enumerate(options):
        place = {"RANK": rank, "WORLD_SIZE": len(options), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        args = str(folder), {name: str(value) for name, value in place.items()}, mine, said[rank]
        processes.append(testing._context().Process(target=worker, args=args))
    for process in processes:
        process.start()
    with held:
        for process in processes:
            process.join(60)
    return [process.exitcode for process in processes], [file.read_text() for file in said], time.monotonic() - began


def test_workers_with_other_settings_end_at_once_and_say_which(tmp_path: Path):
    codes, said, seconds = start(tmp_path, [], ["--eval_every", "2", "--per_node", "2"])
    expected = (
        "error: rank 1 was started with eval_every=2, per_node=2, rank 0 with eval_every=1, per_node=1: give all "
        "workers the same command line\n"
    )
    assert codes == [2, 2] and said == [expected] * 2 and not (tmp_path / "run").exists() and seconds < 45


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_worker_whose_option_is_bad_ends_all(bad: int, tmp_path: Path):
    options = [["--late", "0.5"], ["--late", "0.5"]]
    options[bad] = ["--optim.lr", "inf"]
    codes, said, seconds = start(tmp_path, *options)
    assert codes == [2, 2] and seconds < 45
    mistake = "optim lr=inf: give a learning rate above 0 and below 10000\n"
    assert said[bad] == f"error: {mistake}" and said[1 - bad] == f"error: rank {bad} cannot start: {mistake}"
    assert "Traceback" not in said[bad]


def test_a_port_that_another_program_has_is_named(tmp_path: Path):
    codes, (said,), seconds = start(tmp_path, [], listens=True)
    assert codes == [2] and seconds < 45
    taken = r"MASTER_PORT=\d+ is taken by another program on 127.0.0.1"
    assert re.fullmatch(rf"error: {taken}: give another \(torchrun --master-port\)\n", said)


def test_a_store_that_goes_away_and_half_of_an_environment_are_one_line(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    gone = dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes")
    expected = "rank 1 cannot reach rank 0 at MASTER_ADDR=node0, MASTER_PORT=29500: Connection reset by peer"
    assert _not_met(gone, 60.0, waited=2.0) == expected
    assert _not_met(gone, 60.0, waited=60.1).startswith("not all of 2 workers came within 60 s")
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    said = "^RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start the workers with torchrun"
    with pytest.raises(UserError, match=said):
        join(torch.device("cpu"), 5.0, {})
    monkeypatch.delenv("RANK")
    assert not join(torch.device("cpu"), 5.0, {})
    monkeypatch.setenv("WORLD_SIZE", "4")  # this worker alone would train on a quarter of each batch
    with pytest.raises(UserError, match="^WORLD_SIZE=4 is set, but not RANK: start the workers with torchrun,"):
        join(torch.device("cpu"), 5.0, {})


ENVIRONMENTS = [
    ({"RANK": "x"}, "RANK='x' in the environment: set a whole number, 0 to 1000000000, or unset it"),
    ({"WORLD_SIZE": ""}, "WORLD_SIZE='' in"),
    ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9999"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2: ranks are 0 to 1"),
    ({"MASTER_PORT": "99999999"}, "MASTER_PORT='99999999' in the environment: set a whole number, 1 to 65535"),
    ({"GLOO_SOCKET_IFNAME": "lo,nosuch0"}, "GLOO_SOCKET_IFNAME=nosuch0: not of lo"),
]


@pytest.mark.parametrize(("env", "said"), ENVIRONMENTS)
def test_an_environment_of_any_content_is_a_run_or_one_line(
    env: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        check_env()
    refuse("no reason")  # also where the environment is the reason
    assert not capfd.readouterr().err


@on_ranks(3)
def test_a_group_that_is_there_compares_too(rank: int):
    with pytest.raises(UserError) as caught:
        join(torch.device("cpu"), 60.0, {"seed": rank // 2, "epochs": 3})
    expected = "rank 2 was started with seed=1, rank 0 with seed=0: give all workers the same command line"
    assert str(caught.value) == expected


# -- how a train script ends ------------------------------------------------------------------------------------------


# a writer of TensorBoard's thread fails first
FULL_DISK = """
import sys, time
from training.start.script import launch

def full_disk():
    from torch.utils.tensorboard import SummaryWriter
    writer = SummaryWriter(sys.argv[1])
    try:
        while True:
            writer.add_scalar("loss", 1.0, 1)
    except OSError:
        time.sleep(1)  # for the thread to say what it says
        raise

launch(full_disk)
"""


@pytest.mark.slow
def test_a_disk_that_is_full_under_tensorboard_is_one_line(tmp_path: Path):
    small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    env = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    how: Any = {"env": env, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path / "run"], preexec_fn=small, **how)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert line.startswith("error: ") and "File too large; make room or choose another --out" in line


TOO_LITTLE = [
    (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB"),
        "CUDA out of memory. Tried to allocate 20.00 GiB: give a smaller --batch_size, --accumulate or --recompute",
    ),
    (MemoryError(), "MemoryError: give a smaller --batch_size"),
    (RuntimeError("could not create a primitive"), "could not create a primitive: give a smaller --batch_size"),
    (
        RuntimeError("Caught RuntimeError\nRuntimeError: unable to allocate shared memory(shm): No space left (28)\n"),
        "the loading processes failed (RuntimeError: unable to allocate shared memory(shm): No space left (28)): make "
        "/dev/shm larger (docker run --shm-size), or give --loader_workers 0\n",
    ),
]


@pytest.mark.parametrize(("error", "said"), TOO_LITTLE)
def test_too_little_memory_is_one_line(error: Exception, said: str, monkeypatch, capfd: pytest.CaptureFixture):
    def raises(other: Exception) -> None:
        raise other

    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        launch(lambda: raises(error))
    written = capfd.readouterr().err
    assert ended.value.code == 1 and written.startswith(f"error: {said}") and written.count("\n") == 1
    with pytest.raises(RuntimeError, match="of another kind"):
        launch(lambda: raises(RuntimeError("of another kind")))


@pytest.mark.parametrize("how", ["reader gone", "full"])
def test_a_run_outlives_its_output(how: str, tmp_path: Path):
    reads, writes = os.pipe()
    target = Path("/dev/full") if how == "full" else Path(f"/proc/{os.getpid()}/fd/{writes}")
    options = "vision.train", "digits_small", "--device", "cpu", "--epochs", "1", "--out", str(tmp_path)
    process = fork_script(target, *options)
    if how != "full":
        assert os.read(reads, 1)
    os.close(reads)
    process.join(60)
    os.close(writes)
    assert process.exitcode == 0 and summary(tmp_path)["steps"] == 22
    reason = "No space left on device" if how == "full" else "Broken pipe"
    lost = [f"standard {name} is lost ({reason}): the run goes on without it" for name in ("error", "output")]
    assert sorted(logged(tmp_path, "output")) == lost, "each once; which comes first depends on the reader's end"


CLOSED = """
import os, sys
from training.start.script import launch
launch(lambda: print(open("run", "w").fileno(), "é", file=open("found", "w")) or print("é"))
"""


def test_a_closed_stream_is_no_file_of_the_run_and_a_letter_is_no_error(tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(Path.cwd()), "PYTHONIOENCODING": "ascii"}
    command = f"{sys.executable} -c '{CLOSED}' <&- 2>&-"
    said = subprocess.run(command, shell=True, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert said.stdout == "\\xe9\n" and int((tmp_path / "found").read_text().split()[0]) > 2


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(errno.EPIPE, None, ""), (errno.ENOSPC, 2, "error: standard output: No space left on device; make room or print")],
)
def test_a_command_that_cannot_print_fails_unless_nobody_reads(error: int, status: Any, said: str, monkeypatch, capfd):
    class Full:
        def write(self, _: str) -> int:
            raise OSError(error, os.strerror(error))

        def flush(self) -> None:
            pass

    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stdout", Full())
    launch(lambda: print("a table"))
    assert codes == [status] * (status is not None) and capfd.readouterr().err.startswith(said)


def test_workers_of_one_launcher_say_a_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    said = []
    for rank, text in ((0, "a"), (1, "a"), (1, "b")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        said.append(first_to_say(text))
    assert said == [True, False, True]
    with warnings.catch_warnings(action="error"):
        warn("a")


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


def test_what_the_launcher_cannot_start_is_refused(tmp_path: Path):
    options = ("--nproc-per-node", "1", "--store", "etcd://a/run", "script.py")
    process = fork_script(tmp_path / "said", "training.launch", *options)
    process.join(60)
    said = (tmp_path / "said").read_text()
    assert process.exitcode == 2 and said.count("\n") == 1 and "--store etcd://a/run is for elastic" in said
