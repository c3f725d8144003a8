"""A worker that dies or stalls: the others fail in time, name it, and never hang; nothing is computed from ruins."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core import CO2Config, CollectiveError, ShardedCO2, WireConfig, make_method, node_mesh
from core.robust import peers
from core.testing import run_distributed
from tests import problems
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


def bad_worker(
    rank: int, world_size: int, name: str, how: str, who: int, folder: str, wire: Any = "float32"
) -> dict[str, Any] | None:
    """Worker `who` dies or stalls before its tenth step; the survivors write what they saw to the folder."""
    params = problems.odd_parameters()
    config = CO2Config(tau=2, wire=WireConfig(wire))
    _, method = make_method(name, nn.ParameterList(params), co2=config, timeout=TIMEOUT)
    if how == "stall":
        method.flight.timeout = STALLED  # from now on: two workers may be farther apart at their start
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
    assert f"no answer from rank {who} (" in message
    assert "\n" not in message
    assert seen["seconds"] < TIMEOUT + PATIENCE
    assert 9 <= seen["step"] <= 13, "the failure must show at a boundary soon after"
    assert seen["kept"], "a failed round must leave parameters and outer state as they were"
    assert all(text == message and seconds < 2 for text, seconds in seen["again"])


@pytest.mark.parametrize(
    ("world_size", "who", "name", "wire"),
    [
        (2, 1, "co2", "float32"),
        (4, 0, "co2", "float32"),
        (4, 2, "co2", "float32"),
        (3, 1, "co2", "int8"),
        (3, 1, "slowmo", "float32"),
        (3, 2, "overlap_local", "float32"),
    ],
)
def test_the_others_name_a_killed_worker(world_size: int, who: int, name: str, wire: str, tmp_path: Path):
    results = run_distributed(bad_worker, world_size, name, "sigkill", who, str(tmp_path), wire, expect_death=(who,))
    for rank in set(range(world_size)) - {who}:
        check(results[rank], rank, who)


def test_the_others_name_a_worker_that_raised(tmp_path: Path):
    """The error that is shown is the worker's own, not what its death did to the others."""
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
    mean = Mean([torch.zeros(3)], timeout=2.0, roll=peers)
    if rank == 1:
        wait_for(Path(folder, "seen"), seconds=LONG)
        return ""
    mean.launch()
    with pytest.raises(CollectiveError) as caught:
        mean.wait()
    with pytest.raises(CollectiveError, match="rank 0"):
        mean.launch()
    assert not mean.flight.in_flight
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
    method.flight._failed, method.flight.in_flight = "rank 0: it failed", False  # as a failure leaves it
    for call in (method.finish, method.step, method.step, method.finish):
        with pytest.raises(CollectiveError):
            call()
        assert torch.equal(p, before), "a boundary after a failure must not read what has landed in part"


def loses_a_mate(rank: int, world_size: int) -> str:
    method = ShardedCO2([nn.Parameter(torch.ones(3))], CO2Config(tau=1), mesh=node_mesh("cpu", world_size))
    if rank == 1:
        die("sigkill", [])
    with pytest.raises(CollectiveError) as error:
        method.step()
    with pytest.raises(CollectiveError, match="comparison"):
        method.finish()
    return str(error.value)


def test_a_worker_that_dies_before_a_node_is_compared_is_one_line_for_the_others():
    message = run_distributed(loses_a_mate, 2, expect_death=(1,))[0]
    assert message.startswith("rank 0: the comparison of a node's parameters failed") and "\n" not in message
