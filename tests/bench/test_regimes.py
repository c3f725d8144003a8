"""bench.regimes: the modeled seconds, the choice of a run, and the comparison of the best of both kinds."""

from pathlib import Path

import pytest

from bench import regimes
from bench.loss.__main__ import Rows
from bench.regimes import (
    BLOCKING,
    DDP,
    HIDDEN,
    INT4,
    LOCAL,
    PLAIN_DDP,
    Run,
    at_seconds,
    cell,
    choose,
    curve,
    hidden,
    line,
    of_rows,
)
from bench.report import TUNING_SEED
from core import UserError


def loss(found: Run, seed: int, steps: int) -> float | None:
    """Falls as steps^-0.5. A tau of 6 costs nothing, others 2 %, and a step of delay 1 % each. tau 48 diverges."""
    if found.tau == 48:
        return None
    return (
        (2 + seed / 100)
        * (steps / 2000) ** -0.5
        * (1.02 if found.tau != 6 else 1.0)
        * 1.01 ** (0 if found in (DDP, PLAIN_DDP) else found.delay)
    )


def test_the_seconds_of_a_step():
    assert pytest.approx(0.12890625) == INT4, "4 bits, and 4 bytes for 256 elements"
    r = 4 / INT4  # four local steps
    assert Run(LOCAL, 8).step_seconds(r) == 1.5 and hidden(8, 1).step_seconds(r) == 1.375
    assert hidden(8, 4).step_seconds(r) == hidden(24, 8).step_seconds(r) == 1
    assert hidden(2, 2).step_seconds(r) == 2, "the all-reduce outlasts the round"
    assert DDP.step_seconds(r) == pytest.approx(1 + 4 - 2 / 3) and DDP.step_seconds(1.0) == 1
    assert PLAIN_DDP.step_seconds(r) == pytest.approx(1 + 4)
    assert Run(LOCAL, 8).exposed_share(r) == pytest.approx(1 / 3)


def test_a_run_s_loss_between_its_two_lengths():
    found = curve(loss, Run(LOCAL, 6), 0)
    assert found is not None and curve(loss, Run(LOCAL, 48), 0) is None
    assert (
        found.power == pytest.approx(0.5)
        and found.loss(2000) == 2
        and found.loss(1500) == pytest.approx(2 * 0.75**-0.5)
    )
    assert found.steps(found.loss(1200)) == pytest.approx(1200)
    assert at_seconds(loss, Run(LOCAL, 6), 12 / INT4, 0) == pytest.approx(found.loss(2000 / 3)), (
        "three times as long a step"
    )


def test_the_best_of_both_kinds_are_compared_on_other_seeds():
    r = 2 / INT4
    assert choose(loss, r) == (Run(LOCAL, 384), hidden(6, 2))
    found = cell(loss, "bytes", r, (0, 1, 2))
    expected = (1 + 2 / 384) * 1.02**2 / 1.01**4
    assert found.faster == pytest.approx([expected] * 3) and found.losses == pytest.approx([expected**-0.5] * 3)
    assert found.than_ddp == pytest.approx([(1 + 2 - 2 / 3) * 1.02**2 / 1.01**4] * 3)
    assert found.than_plain_ddp == pytest.approx([3 * 1.02**2 / 1.01**4] * 3)
    assert line(found)[1:4] == ("tau 384", "1%", "tau 6, 2 steps late") and line(found)[-1] == "-0.2 %"


def test_a_plan_with_several_rows_counts_with_their_mean(tmp_path: Path):
    files = [Rows(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for file, value in zip((files[0], files[0], files[1]), (1.0, 2.0, 6.0), strict=True):
        result = {"loss": value, "loss_of_mean": value, "seconds": 1.0, "device": "cpu", "trajectory": []}
        file.add_run(DDP.plan("bytes", 0), result)
    for rows in (files, [Rows(file.path) for file in files]):
        assert of_rows("bytes", rows)(DDP, 0, 2000) == 3.0
    files[1].add_run(DDP.plan("bytes", 0), result | {"loss": None})
    assert of_rows("bytes", files)(DDP, 0, 2000) is None


def test_every_run_can_be_made_and_the_tuning_seed_is_not_reported(tmp_path: Path):
    for found in (DDP, *BLOCKING, *HIDDEN):
        plan = found.plan("bytes", TUNING_SEED)
        assert (plan.split, plan.tau, found.plan("bytes", 0).split) == ("tuning", found.tau, "test")
        found.plan("bytes", 0).settings.make(regimes.torch.zeros(2, 4), found.tau)
    with pytest.raises(UserError, match="seeds=100"):
        regimes.Options(seeds=(TUNING_SEED,)).check()
