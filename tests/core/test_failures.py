"""A worker that dies or stalls: the others fail in time and name it, nobody else, and use nothing that is partial."""

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.cluster import hold_port
from core import CO2, CO2Config, CollectiveError, CompressionConfig, make_method, node_mesh
from core.comm import AsyncAllReduce
from core.guards import failure as peers
from core.guards.failure import Address, Peers
from core.testing import run_distributed
from tests import problems
from tests.on_ranks import on_ranks
from tests.ports import listening_at
from tests.problems import Mean, flat, sgd_step, wait_for

TIMEOUT, STALLED = 4.0, 1.5
PATIENCE = 25.0  # seconds on a busy machine beyond the timeout
LONG = TIMEOUT + 2 * PATIENCE  # until the others have waited and have looked who is silent


def die(how: str, peers: list[Path]) -> None:
    """peers: the files of the others, which a stalled worker outlasts."""
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exception":
        raise KeyError("deliberate")
    wait_for(*peers, seconds=LONG)


def bad_worker(rank, world_size, name, how, who, folder, compression="float32") -> dict[str, Any] | None:
    """Worker `who` dies or stalls before its tenth step; the survivors write what they saw to the folder."""
    params = problems.odd_parameters()
    config = CO2Config(tau=2, compression=CompressionConfig(compression))
    _, method = make_method(name, nn.ParameterList(params), co2=config, timeout=TIMEOUT)
    if how == "stall":
        method.allreduce.timeout = STALLED  # from now on: two workers may be farther apart at their start
    for step in range(40):
        if rank == who and step == 9:
            die(how, [Path(folder, f"{r}.pt") for r in range(world_size) if r != who])
        sgd_step(params, rank, step)
        before, outer = flat(params), [f.clone() for fs in method.state.values() for f in fs]
        start = time.perf_counter()
        try:
            method.step()
        except CollectiveError as error:
            seen = {"message": str(error), "seconds": time.perf_counter() - start, "step": step}
            now = [f for fs in method.state.values() for f in fs]
            seen["kept"] = torch.equal(before, flat(params)) and all(
                torch.equal(a, b) for a, b in zip(outer, now, strict=True)
            )
            seen["again"] = again(method)
            torch.save(seen, f"{folder}/{rank}.pt")
            return seen
    return None


def again(method: Any) -> list[tuple[str, float]]:
    """What further calls do after a failure: the message of each, and the seconds that it took."""
    messages = []
    for call in (method.step, method.step, method.finish, method.state_dict):
        start = time.perf_counter()
        with pytest.raises(CollectiveError) as caught:
            call()
        messages.append((str(caught.value), time.perf_counter() - start))
    return messages


def check(seen: dict[str, Any], rank: int, who: int) -> None:
    message = seen["message"]
    assert f"rank {rank}: the all-reduce of round" in message
    remedy = "(look at what it printed: after an error resume|if that worker is only slow, give)"
    assert re.search(rf" failed; no answer from rank {who}( \(in .*?\))?: {remedy} [^\n]* \(.+\)$", message), message
    assert seen["seconds"] < TIMEOUT + PATIENCE
    assert 9 <= seen["step"] <= 13, "the failure must show at a boundary soon after"
    assert seen["kept"], "a failed round must leave parameters and outer state as they were"
    assert all(text == message and seconds < 2 for text, seconds in seen["again"])


@pytest.mark.parametrize(
    ("world_size", "who", "name", "compression"),
    [
        (2, 1, "co2", "float32"),
        (4, 0, "co2", "float32"),
        (4, 2, "co2", "float32"),
        (3, 1, "co2", "int8"),
        (3, 1, "slowmo", "float32"),
        (3, 2, "overlap_local", "float32"),
    ],
)
def test_the_others_name_a_killed_worker(world_size: int, who: int, name: str, compression: str, tmp_path: Path):
    results = run_distributed(
        bad_worker, world_size, name, "sigkill", who, str(tmp_path), compression, expect_death=(who,)
    )
    for rank in set(range(world_size)) - {who}:
        check(results[rank], rank, who)
        assert "after an error resume" in results[rank]["message"] or results[rank]["seconds"] > TIMEOUT


def test_the_others_name_a_worker_that_raised(tmp_path: Path):
    with pytest.raises(RuntimeError, match="(?s)^rank 1:.*KeyError: 'deliberate'"):
        run_distributed(bad_worker, 3, "co2", "exception", 1, str(tmp_path))
    for rank in (0, 2):
        check(torch.load(tmp_path / f"{rank}.pt"), rank, 1)


@pytest.mark.parametrize(("world_size", "who"), [(2, 0), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_the_others_name_a_stalled_worker(world_size: int, who: int, tmp_path: Path):
    results = run_distributed(
        bad_worker, world_size, "co2", "stall", who, str(tmp_path), timeout=90, expect_death=tuple(range(world_size))
    )
    for rank in set(range(world_size)) - {who}:
        check(results[rank], rank, who)
        assert results[rank]["seconds"] >= STALLED / 2, "it must have been waited for"
    assert results[who] is not None, "the stalled worker itself must find out when it wakes"


def absent_peer(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 never launches; rank 0's partial sums must not come out of wait()."""
    mean = Mean([torch.zeros(3)], timeout=2.0, failures=peers)
    if rank == 1:
        wait_for(Path(folder, "seen"), seconds=LONG)
        return ""
    mean.launch()
    with pytest.raises(CollectiveError) as caught:
        mean.wait()
    with pytest.raises(CollectiveError, match="rank 0"):
        mean.launch()
    assert not mean.allreduce.in_flight
    Path(folder, "seen").touch()
    return str(caught.value)


def test_a_mean_without_its_peer_raises_after_the_timeout(tmp_path: Path):
    message = run_distributed(absent_peer, 2, str(tmp_path), expect_death=(0, 1))[0]
    assert "rank 0" in message and "round 0" in message and "no answer from rank 1" in message and "2 s" in message


@pytest.mark.parametrize("shard", [False, True])
def test_calls_after_a_failure_move_nothing(shard: bool):
    p = nn.Parameter(torch.arange(4.0))
    _, method = make_method("co2", nn.ParameterList([p]), co2=CO2Config(tau=2), shard=shard)
    with torch.no_grad():
        for _ in range(4):
            p.sub_(0.1)
            method.step()
        p.sub_(0.1)
    before = p.detach().clone()
    method.allreduce.failed, method.allreduce.in_flight = "rank 0: it failed", False  # as a failure leaves it
    for call in (method.finish, method.step, method.step, method.finish):
        with pytest.raises(CollectiveError):
            call()
        assert torch.equal(p, before), "a boundary after a failure must not read what has landed in part"


@on_ranks(2, expect_death=(1,))
def test_a_worker_that_dies_before_a_node_is_compared_is_one_line_for_the_others(rank: int):
    method = CO2([nn.Parameter(torch.ones(3))], CO2Config(tau=1), mesh=node_mesh("cpu", 2))
    if rank == 1:
        die("sigkill", [])
    with pytest.raises(CollectiveError, match=r"^rank 0: the comparison of a node's parameters failed[^\n]*$"):
        method.step()
    with pytest.raises(CollectiveError, match="comparison"):
        method.finish()


def one_is_gone(rank: int, world_size: int, folder: str, who: int, how: str) -> list[int] | None:
    peers.register()
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    dist.barrier()
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        return None
    time.sleep(0.5 + rank / 4)  # the last one looks when the others are through
    found = peers._peers.find_failed()
    if how == "stopped" and rank == 2:  # woken again, for the test to end
        os.kill(int(Path(folder, f"{who}.pid").read_text()), signal.SIGCONT)
    return found


@pytest.mark.parametrize(
    ("who", "how"), [pytest.param(0, "killed", marks=pytest.mark.slow), (2, "killed"), (1, "stopped")]
)
def test_a_process_that_has_ended_or_is_stopped_is_named(who: int, how: str, tmp_path: Path):
    found = run_distributed(one_is_gone, 3, str(tmp_path), who, how, expect_death=(who,))
    assert [found[rank] for rank in range(3) if rank != who] == [[who]] * 2


@on_ranks(2)
def test_a_worker_listens_at_the_address_that_it_tells_and_nowhere_else(rank: int):
    peers.register()
    assert peers._peers is not None
    assert listening_at(peers._peers.address.port) == {peers._peers.address.host}


def one_wakes(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 is stopped, and wakes when rank 0 has named it."""
    background = AsyncAllReduce(torch.device("cpu"), timeout=2.0, failures=peers)
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


@pytest.mark.slow
def test_one_that_wakes_does_not_blame_the_others(tmp_path: Path):
    first, second = run_distributed(one_wakes, 2, str(tmp_path), timeout=60)
    assert "no answer from rank 1" in first
    assert "no answer from rank" not in second


def one_hangs(rank: int, world_size: int, folder: str, known: bool) -> list[int] | None:
    peers.register()
    if rank == 1:
        wait_for(Path(folder, "0"), Path(folder, "2"))
        return None
    found = peers._peers.find_failed(range(world_size) if known else ())
    Path(folder, str(rank)).touch()
    return found


@pytest.mark.parametrize(("known", "named"), [(True, [1]), pytest.param(False, [], marks=pytest.mark.slow)])
def test_one_that_only_hangs_is_named_where_it_is_known_who_takes_part(known: bool, named: list[int], tmp_path: Path):
    found = run_distributed(one_hangs, 3, str(tmp_path), known)
    assert found[0] == found[2] == named


def failing_one_after_the_other(rank: int, world_size: int, folder: str, first: int | None) -> list[int] | None:
    """Rank 1 fails, finds out what it can, and ends; only then rank 0 fails."""
    peers.register()
    told, through = Path(folder, "told"), Path(folder, "through")
    if rank == first:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        time.sleep(0.3)
        peers._peers.find_failed()
        told.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        wait_for(through)
        return None
    wait_for(told)
    time.sleep(0.5)  # it has ended
    found = peers._peers.find_failed()
    through.touch()
    return found


@pytest.mark.parametrize(("first", "named"), [(2, [2]), pytest.param(None, [], marks=pytest.mark.slow)])
def test_one_that_has_asked_itself_is_not_blamed(first: int | None, named: list[int], tmp_path: Path):
    found = run_distributed(failing_one_after_the_other, 3, str(tmp_path), first, expect_death=(1, 2))
    assert found[0] == named


def test_an_address_of_no_use_here_blames_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "ANSWERS_WITHIN", 0.3)
    held = hold_port()  # nobody listens there
    for machine, named in (("another machine", []), (socket.gethostname(), [1])):
        here: Any = Peers()
        here.known = {1: Address("127.0.0.1", held.getsockname()[1], machine, "")}
        assert here.find_failed() == named
    held.close()


def test_where_no_other_machine_can_be_reached_nobody_is_blamed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "ANSWERS_WITHIN", 0.3)
    here: Any = Peers()
    monkeypatch.setattr(here, "ask_one", lambda address, say: "silent")
    here.known = {rank: Address("192.0.2.7", 9, "elsewhere", "") for rank in (1, 2)}
    assert here.find_failed() == []
