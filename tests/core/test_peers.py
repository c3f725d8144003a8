"""Who is gone is found out by asking: the right ones are named, and nobody where that cannot be known."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.cluster import hold_port
from core.errors import CollectiveError
from core.flight import Flight
from core.robust import peers
from core.robust.peers import Address, Peers
from core.testing import run_distributed
from tests.ports import listening_at
from tests.problems import wait_for


def one_is_gone(rank: int, world_size: int, folder: str, who: int, how: str) -> list[int] | None:
    peers.meet()
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return None
    time.sleep(0.5 + rank / 4)  # the last one looks when the others are through
    found = peers.find()
    if how == "stopped" and rank == 2:  # woken again, for the test to end
        os.kill(int(Path(folder, f"{who}.pid").read_text()), signal.SIGCONT)
    return found


@pytest.mark.parametrize(("who", "how"), [(0, "killed"), (2, "killed"), (1, "stopped")])
def test_a_process_that_has_ended_or_is_stopped_is_named(who: int, how: str, tmp_path: Path):
    found = run_distributed(one_is_gone, 3, str(tmp_path), who, how, expect_death=(who,))
    assert [found[rank] for rank in range(3) if rank != who] == [[who]] * 2


def where_it_listens(rank: int, world_size: int) -> tuple[str, set[str]]:
    peers.meet()
    assert peers._peers is not None
    return peers._peers.address.host, listening_at(peers._peers.address.port)


def test_a_worker_listens_at_the_address_that_it_tells_and_nowhere_else():
    for host, found in run_distributed(where_it_listens, 2):
        assert found == {host}


def one_wakes(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 is stopped, and wakes when rank 0 has named it."""
    background = Flight(torch.device("cpu"), timeout=2.0, roll=peers)
    value, pid = torch.ones(3), Path(folder, "pid")
    if rank == 1:
        pid.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for(pid)
    with pytest.raises(CollectiveError) as failed:
        background.launch(iter([([dist.all_reduce(value, group=background.group, async_op=True)], 0)]))
        background.wait()
    if rank == 0:
        os.kill(int(pid.read_text()), signal.SIGCONT)
    return str(failed.value)


def test_one_that_wakes_does_not_blame_the_others(tmp_path: Path):
    first, second = run_distributed(one_wakes, 2, str(tmp_path), timeout=60)
    assert "no answer from rank 1" in first
    assert "no answer from rank" not in second


def one_hangs(rank: int, world_size: int, folder: str, known: bool) -> list[int] | None:
    peers.meet()
    if rank == 1:
        wait_for(Path(folder, "0"), Path(folder, "2"))
        return None
    found = peers.find(range(world_size) if known else ())
    Path(folder, str(rank)).touch()
    return found


@pytest.mark.parametrize(("known", "named"), [(True, [1]), (False, [])])
def test_one_that_only_hangs_is_named_where_it_is_known_who_takes_part(known: bool, named: list[int], tmp_path: Path):
    found = run_distributed(one_hangs, 3, str(tmp_path), known)
    assert found[0] == found[2] == named


def failing_one_after_the_other(rank: int, world_size: int, folder: str, first: int | None) -> list[int] | None:
    """Rank 1 fails, finds out what it can, and ends; only then rank 0 fails."""
    peers.meet()
    told, through = Path(folder, "told"), Path(folder, "through")
    if rank == first:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(0.3)
        peers.find()
        told.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        wait_for(through)
        return None
    wait_for(told)
    time.sleep(0.5)  # it has ended
    found = peers.find()
    through.touch()
    return found


@pytest.mark.parametrize(("first", "named"), [(2, [2]), (None, [])])
def test_one_that_has_asked_itself_is_not_blamed(first: int | None, named: list[int], tmp_path: Path):
    found = run_distributed(failing_one_after_the_other, 3, str(tmp_path), first, expect_death=(1, 2))
    assert found[0] == named


def test_an_address_of_no_use_here_blames_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "ANSWERS_WITHIN", 0.3)
    held = hold_port()  # nobody listens there
    for machine, named in (("another machine", []), (socket.gethostname(), [1])):
        here: Any = Peers()
        here._known = {1: Address("127.0.0.1", held.getsockname()[1], machine, "")}
        assert here.find() == named
    held.close()


def test_where_no_other_machine_can_be_reached_nobody_is_blamed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "ANSWERS_WITHIN", 0.3)
    here: Any = Peers()
    monkeypatch.setattr(here, "_ask_one", lambda address, say: "silent")
    here._known = {rank: Address("192.0.2.7", 9, "elsewhere", "") for rank in (1, 2)}
    assert here.find() == []
