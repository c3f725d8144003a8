"""bench.regimes: the modeled seconds, the choice of a run, and the comparison of the best of both kinds."""

import math
from pathlib import Path

import pytest
import torch

from bench.loss.__main__ import Rows
from bench.regimes import (
    BLOCKING,
    DDP,
    FRAGMENTS,
    HIDDEN,
    INT4,
    LOCAL,
    Link,
    Run,
    at_seconds,
    cell,
    choose,
    curve,
    hidden,
    in_turn,
    line,
    of_rows,
)
from bench.report import TUNING_SEED


def loss(found: Run, seed: int, steps: int) -> float | None:
    """Falls as steps^-0.5. A tau of 6 costs nothing, others 2 %, and a step of delay 1 % each. tau 48 diverges."""
    if found.tau == 48:
        return None
    return (
        (2 + seed / 100)
        * (steps / 2000) ** -0.5
        * (1.02 if found.tau != 6 else 1.0)
        * 1.01 ** (0 if found == DDP else found.delay)
    )


def test_the_seconds_of_a_step():
    assert pytest.approx(0.12890625) == INT4, "4 bits, and 4 bytes for 256 elements"
    seconds = Link(4 / INT4).step_seconds  # an all-reduce takes four local steps
    assert seconds(Run(LOCAL, 8)) == 1.5 and seconds(hidden(8, 1)) == 1.375
    assert seconds(hidden(8, 4)) == seconds(hidden(24, 8)) == 1
    assert seconds(hidden(2, 2)) == 2, "the all-reduce outlasts the round"
    assert seconds(in_turn(8, 1, 4)) == 1 and seconds(in_turn(8, 1, 2)) == 1.25, "each part waits for one step"
    assert seconds(DDP) == pytest.approx(1 + 4 - 2 / 3) and Link(1.0).step_seconds(DDP) == 1


def test_the_codec_and_slower_steps_cost_seconds():
    """Four local steps of transfer and two of encoding. Steps during an all-reduce take 1.5 times as long."""
    codec, slow, both = (Link(4 / INT4, *costs).step_seconds for costs in ((0.5,), (0.0, 0.5), (0.5, 0.5)))
    assert codec(Run(LOCAL, 8)) == 1.75 and codec(hidden(8, 4)) == 1.25 and codec(hidden(8, 6)) == 1
    assert slow(Run(LOCAL, 8)) == 1.5, "a blocking method computes nothing meanwhile"
    assert both(hidden(8, 6)) == pytest.approx(1 + 2 / 8), "four steps in the seconds of six"
    assert both(hidden(8, 2)) == pytest.approx(1 + 4 / 8), "waits behind two steps that took three"
    late = Link(4 / INT4, latency=0.5).step_seconds
    assert late(Run(LOCAL, 8)) == 1 + 4.5 / 8 and late(in_turn(8, 1, 4)) == 1 + 2 / 8, "once for each fragment"


def test_a_run_s_loss_between_its_three_lengths():
    found = curve(loss, Run(LOCAL, 6), 0)
    assert found is not None and curve(loss, Run(LOCAL, 48), 0) is None
    assert found.loss(2000) == 2
    for steps in (250, 600, 1200, 1500, 3000):
        assert found.loss(steps) == pytest.approx(2 * (steps / 2000) ** -0.5)
        assert found.steps(found.loss(steps)) == pytest.approx(steps)
    steeper = curve(lambda *of: {500: 8.0, 1000: 4.0, 2000: 3.0}[of[2]], Run(LOCAL, 6), 0)
    assert steeper is not None and (steeper.loss(250), steeper.steps(6)) == pytest.approx((16, 1000 * 1.5**-1))
    assert steeper.loss(4000) == pytest.approx(3 * 3 / 4) and steeper.loss(1000) == 4
    diverged = curve(lambda *of: {500: None, 1000: 4.0, 2000: 3.0}[of[2]], Run(LOCAL, 6), 0)
    assert diverged is not None and diverged.loss(999) == math.inf and diverged.loss(2000) == 3
    three_times_as_long = at_seconds(loss, Run(LOCAL, 6), Link(12 / INT4), 0)
    assert three_times_as_long == pytest.approx(found.loss(2000 / 3))


def test_a_run_that_waits_for_nothing_needs_no_shorter_run():
    asked: list[int] = []

    def noted(found: Run, seed: int, steps: int) -> float | None:
        asked.append(steps)
        return loss(found, seed, steps)

    assert at_seconds(noted, hidden(6, 2), Link(2 / INT4), 0) == loss(hidden(6, 2), 0, 2000) and asked == [2000]
    at_seconds(noted, hidden(6, 1), Link(2 / INT4), 0)
    assert asked[1:] == [1000, 2000]
    at_seconds(noted, hidden(6, 1), Link(12 / INT4), 0)
    assert asked[3:] == [1000, 2000, 500], "2.8 times as long"


def test_the_best_of_both_kinds_are_compared_on_other_seeds():
    link = Link(2 / INT4)
    assert (choose(loss, link, BLOCKING), choose(loss, link, HIDDEN)) == (Run(LOCAL, 768), hidden(6, 2))
    found = cell(loss, "bytes", link, (0, 1, 2))
    expected = (1 + 2 / 768) * 1.02**2 / 1.01**4
    assert found.faster == pytest.approx([expected] * 3)
    assert found.than_ddp == pytest.approx([(1 + 2 - 2 / 3) * 1.02**2 / 1.01**4] * 3)
    assert line(found)[1:3] == ("tau 768", "tau 6, 2 steps late")
    cut = cell(loss, "bytes", link, (0, 1, 2), FRAGMENTS)
    assert line(cut)[2] == "tau 6, 4 fragments, 1 step late" and cut.faster[0] == pytest.approx(expected * 1.01**2)


def test_a_plan_with_several_rows_counts_with_their_mean(tmp_path: Path):
    files = [Rows(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for file, value in zip((files[0], files[0], files[1]), (1.0, 2.0, 6.0), strict=True):
        result = {"loss": value, "seconds": 1.0, "device": "cpu"}
        file.add_run(DDP.plan("bytes", 0), result)
    for rows in (files, [Rows(file.path) for file in files]):
        assert of_rows("bytes", rows)(DDP, 0, 2000) == 3.0
    files[1].add_run(DDP.plan("bytes", 0), result | {"loss": None})
    assert of_rows("bytes", files)(DDP, 0, 2000) is None


def test_every_run_can_be_made():
    for found in (DDP, *BLOCKING, *HIDDEN, *FRAGMENTS):
        plan = found.plan("bytes", TUNING_SEED)
        assert (plan.split, plan.tau, found.plan("bytes", 0).split) == ("tuning", found.tau, "test")
        found.plan("bytes", 0).settings.make(torch.zeros(2, 400), found.tau)
