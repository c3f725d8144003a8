"""A run as its list of scalars: resumed, replayed, and joined."""

import math
import warnings

import pytest
import torch

from core import UserError
from core.testing import run_distributed
from language.zeroth import ScalarLog, ZerothConfig, ZerothOrder
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
    assert resumed.log.beyond(zo.log) == [], "the same, bit for bit"
    return [p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()], numbers


def test_a_run_resumes_and_replays_bit_for_bit(tmp_path):
    config = ZerothConfig(weight_decay=0.1, pairs=False)
    for unbroken, resumed, numbers in run_distributed(interrupted, 2, config):
        assert len(numbers) == 8 * 15 and all(torch.equal(a, b) for a, b in zip(unbroken, resumed, strict=True))
    log = ScalarLog(0, 0.1)
    log.g.frombytes(numbers)
    log.lrs = [(0, 0.02)]
    log.save(tmp_path / "run")
    assert (tmp_path / "run").stat().st_size < 8 * 15 + 200
    model = Net()
    zo = ZerothOrder(model, config, lr=1.0)
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
    ahead.log.save(tmp_path / "log")
    behind.replay(ScalarLog.load(tmp_path / "log"))
    assert any(math.isnan(g) for g in behind.log.g), "a dropped step is part of the list"
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_scalars_of_another_run_are_refused(tmp_path):
    zo = ZerothOrder(Net(), lr=0.1)
    zo.step(lambda m: losses_of(m, batch(0)).mean(), SAMPLES)
    zo.log.save(tmp_path / "log")
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
