"""The start of several processes: all of them end at once, and say why, where one was asked for something else."""

import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.cluster import hold_port
from core import UserError, testing
from core.testing import run_distributed
from training.recipe import Recipe, parse
from training.run import Run
from training.script import launch
from training.workers import _not_met, join


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
    assert f"error: rank {bad} cannot start: its options are refused, toy --optim.lr inf\n" == said[1 - bad]
    assert "Traceback" not in said[bad]


@pytest.mark.slow
def test_a_worker_without_its_data_ends_all(tmp_path: Path):
    codes, said, seconds = start(tmp_path, [], ["--fails"])
    assert codes == [2, 2] and seconds < 45
    assert said == ["error: rank 1 cannot start: no data here: bring some\n", "error: no data here: bring some\n"]


@pytest.mark.slow
def test_a_worker_that_does_not_come_is_one_line(tmp_path: Path):
    codes, said, _ = start(tmp_path, ["--timeout", "3"], ["--timeout", "3", "--late", "8"])
    assert codes[0] == 2 and said[0].splitlines()[-1] == (
        "error: not all of 2 workers came within 3 s: start all of them, or raise --timeout"
    )
    assert "Traceback" not in said[0]


def test_a_port_that_another_program_has_is_named(tmp_path: Path):
    codes, (said,), seconds = start(tmp_path, [], listens=True)
    assert codes == [2] and seconds < 45
    taken = r"MASTER_PORT=\d+ is taken by another program on 127.0.0.1"
    assert re.fullmatch(rf"error: {taken}: give another \(torchrun --master-port\)\n", said)


def test_a_store_that_goes_away_and_half_of_an_environment_are_one_line(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    gone = dist.DistNetworkError("Connection reset by peer\nException raised from recvBytes")
    expected = "rank 1 cannot meet the others at MASTER_ADDR=node0, MASTER_PORT=29500: Connection reset by peer"
    assert _not_met(gone, 60.0, waited=2.0) == expected
    assert _not_met(gone, 60.0, waited=60.1).startswith("not all of 2 workers came within 60 s")
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    said = "^RANK is set, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start the workers with torchrun"
    with pytest.raises(UserError, match=said):
        join(torch.device("cpu"), 5.0, {})


def in_one_group(rank: int, world_size: int) -> str:
    with pytest.raises(UserError) as caught:
        join(torch.device("cpu"), 60.0, {"seed": rank // 2, "epochs": 3})
    return str(caught.value)


def test_a_group_that_is_there_compares_too():
    expected = "rank 2 was started with seed=1, rank 0 with seed=0: give all workers the same command line"
    assert run_distributed(in_one_group, 3) == [expected] * 3
