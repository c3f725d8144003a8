"""A run as its list of scalars: resumed, replayed, and joined."""

import math
import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core import UserError
from core.testing import run_distributed
from core.zeroth import ScalarLog, ZerothConfig, ZerothOrder, order
from core.zeroth.weights import digest
from tests.zeroth_net import SAMPLES, Net, batch, losses_of, step_of

# -- resuming and replaying -----------------------------------------------------------------------------------------


def interrupted(rank: int, world_size: int, config: ZerothConfig) -> tuple[list, list, bytes]:
    def new():
        model = Net()
        return model, ZerothOrder(model, config, lr=0.01, timeout=60)

    (model, zo), (other, resumed) = new(), new()
    for step in range(7):
        step_of(zo, model, step)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(zo.state_dict())
    for step in range(7, 15):
        for each, net in ((zo, model), (resumed, other)):
            step_of(each, net, step)
    zo.finish()
    resumed.finish()
    numbers = zo.log.g.tobytes()
    assert resumed.log.begins_with(zo.log)
    return [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], numbers


def test_a_run_resumes_where_scalars_were_in_flight_and_replays_bit_for_bit(tmp_path):
    config = ZerothConfig(delay=1, weight_decay=0.1, directions=2, pairs=False)
    for unbroken, resumed, numbers in run_distributed(interrupted, 2, config):
        assert len(numbers) == 8 * 2 * 15 and all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))
    log = ScalarLog(0, 2, 0.1)
    log.g.frombytes(numbers)
    log.lrs = [(0, 0.02)]
    log.save(tmp_path / "run")
    assert (tmp_path / "run").stat().st_size < 8 * 2 * 15 + 200
    model = Net()
    zo = ZerothOrder(model, replace(config, delay=0), lr=1.0)
    zo.replay(ScalarLog.load(tmp_path / "run"))
    assert all(torch.equal(p.detach(), u) for p, u in zip(model.parameters(), unbroken, strict=True))
    assert zo.steps == 15


def test_a_worker_that_is_behind_replays_the_rest(tmp_path):
    first, second = Net(), Net()
    ahead, behind = ZerothOrder(first, lr=0.1), ZerothOrder(second, lr=0.1)
    for step in range(6):
        if step == 3:
            ahead.lr = 0.05
        x = batch(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ahead.step(lambda m, x=x, step=step: losses_of(m, x).mean() if step != 4 else math.nan, SAMPLES)
        if step == 2:
            behind.replay(ahead.log)
    ahead.save_scalars(tmp_path / "log")
    behind.replay(ScalarLog.load(tmp_path / "log"))
    assert any(math.isnan(g) for g in behind.log.g), "a dropped step is part of the list"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_scalars_of_another_run_are_refused(tmp_path):
    zo = ZerothOrder(Net(), lr=0.1)
    zo.step(lambda m: losses_of(m, batch(0)).mean(), SAMPLES)
    zo.save_scalars(tmp_path / "log")
    log = ScalarLog.load(tmp_path / "log")
    with pytest.raises(UserError, match="scalars are of seed=0, here it is 1"):
        ZerothOrder(Net(), ZerothConfig(seed=1), lr=0.1).replay(log)
    other = ZerothOrder(Net(), lr=0.1)
    other.step(lambda m: losses_of(m, batch(1)).mean(), SAMPLES)
    with pytest.raises(UserError, match="of another run than this one"):
        other.replay(log)
    (tmp_path / "log").write_bytes((tmp_path / "log").read_bytes()[:-3])
    with pytest.raises(UserError, match="no whole list of a zeroth-order run's scalars"):
        ScalarLog.load(tmp_path / "log")
    for text in (b"", b"[]\n", b"{}\n", b'{"format": 1}\n', b"\xff\n"):
        (tmp_path / "log").write_bytes(text)
        with pytest.raises(UserError, match="no whole list"):
            ScalarLog.load(tmp_path / "log")
    with pytest.raises(UserError, match=r"the checkpoint has eps=0.001, here 0.1: resume with its settings"):
        ZerothOrder(Net(), ZerothConfig(eps=0.1), lr=0.1).load_state_dict(zo.state_dict())


# -- workers that come and go ---------------------------------------------------------------------------------------

BEFORE, BESIDE, TOGETHER, AFTER = 6, 4, 5, 3  # steps


def one_comes_and_goes(rank: int, world_size: int, config: ZerothConfig, folder: str) -> tuple[list[str], list[Tensor]]:
    """Ranks 0 and 1 train; rank 2 replays their first steps meanwhile, takes part, and leaves."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    model = Net()
    zo = ZerothOrder(model, config, lr=0.01, group=alone if rank == 2 else pair, timeout=60)
    file, hashes = Path(folder, "log"), []

    def train_on(steps: int) -> None:
        for step in range(zo.steps, zo.steps + steps):
            step_of(zo, model, step)
            hashes.append(digest(list(model.parameters())))

    if rank == 2:
        while not file.exists():
            time.sleep(0.05)
        zo.replay(ScalarLog.load(file))
        assert zo.steps >= BEFORE - 1
    else:
        train_on(BEFORE)
        if rank == 0:
            zo.save_scalars(file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)
        train_on(BESIDE)
        hashes.clear()
    with mock.patch.object(order, "broadcast", side_effect=AssertionError("weights are sent")):
        zo.regroup()
        assert zo.steps == BEFORE + BESIDE and (zo.data_rank, zo.data_workers) == (rank, 3)
        train_on(TOGETHER)
        if rank == 2:
            zo.finish()
            zo.close()
        else:
            zo.regroup(pair)
            assert (zo.data_rank, zo.data_workers) == (0, 1)
            train_on(AFTER)
            zo.finish()
    zo.save_scalars(Path(folder, f"log{rank}"))
    zo.close()
    return hashes, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("delay", [0, 1])
def test_a_worker_joins_by_replaying_while_others_train_and_may_leave_again(delay, tmp_path):
    config = ZerothConfig(delay=delay, weight_decay=0.1)
    found = run_distributed(one_comes_and_goes, 3, config, str(tmp_path), timeout=240)
    (first, end), (second, _), (third, left) = found
    assert first == second and len(set(first)) == TOGETHER + AFTER
    assert third == first[:TOGETHER]
    for log, weights in (("log0", end), ("log2", left)):
        model = Net()
        ZerothOrder(model, config, lr=0.0).replay(ScalarLog.load(tmp_path / log))
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def joins_with_another_history(rank: int, world_size: int) -> str:
    groups = [dist.new_group([rank]) for rank in range(world_size)]
    zo = ZerothOrder(model := Net(), lr=0.01, group=groups[rank], timeout=60)
    for step in range(3 - rank):
        step_of(zo, model, step + rank)
    try:
        zo.regroup()
    except UserError as error:
        return str(error)
    return ""


def test_a_worker_with_another_history_is_refused_by_all():
    told = run_distributed(joins_with_another_history, 2)
    assert told[0] == told[1] and told[0].startswith("rank 1 cannot join: the scalars are of another run than this one")
