"""What bench.ring expects and refuses, and on real processes that delays are hidden."""

import pytest

from bench.ring import Ring, expected, measure
from core.testing import run_distributed


def test_what_the_schedule_expects():
    assert expected(2, 30, 60, at_once=False) == (120, 150)  # the gradients' way home is in nobody's shadow
    assert expected(2, 30, 60, at_once=False, whole=True) == (180, 180)
    assert expected(2, 30, 60, at_once=True) == (150, 180)
    assert expected(3, 100, 60, at_once=False) == (260, 400)
    assert expected(3, 100, 60, at_once=True) == (380, 580)
    assert expected(3, 0, 60, at_once=False) == expected(3, 0, 60, at_once=True)


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("whole", [10, pytest.param(0, marks=pytest.mark.slow)])
def test_delays_hide_as_the_schedule_expects(ranks: int, whole: int):
    """By clocks that count, so that no busy machine matters: a delay that is shorter than a block costs nothing."""
    o = Ring(workers=ranks, delays=(0.0, 30.0, 60.0, 100.0), whole=whole)
    for row in run_distributed(measure, ranks, o)[0]:
        told = expected(ranks, row["delay"], 60.0, row["at_once"], whole=bool(whole))
        assert [1e3 * row[which][0] for which in ("forward", "backward")] == pytest.approx(told)


@pytest.mark.slow
def test_on_the_machine_s_clock_the_blocks_and_delays_pass():
    """The faster of two repeats, which a busy machine makes longer, never shorter."""
    o = Ring(workers=2, clock="real", delays=(100.0,), block=200.0, repeats=2)
    for row in run_distributed(measure, 2, o, timeout=200)[0]:
        for which, told in zip(("forward", "backward"), expected(2, 100.0, 200.0, row["at_once"]), strict=True):
            assert told - 1.0 <= 1e3 * min(row[which]) < 2 * told
