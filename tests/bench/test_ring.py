"""What bench.ring expects and refuses, and on real processes that delays are hidden."""

import sys

import pytest

from bench.ring import Ring, expected, main, measure
from core.errors import UserError
from core.testing import run_distributed


def test_what_the_schedule_expects():
    assert expected(2, 30, 60, at_once=False) == (120, 150)  # the gradients' way home is in nobody's shadow
    assert expected(2, 30, 60, at_once=False, whole=True) == (180, 180)
    assert expected(2, 30, 60, at_once=True) == (150, 180)
    assert expected(3, 100, 60, at_once=False) == (260, 400)
    assert expected(3, 100, 60, at_once=True) == (380, 580)
    assert expected(3, 0, 60, at_once=False) == expected(3, 0, 60, at_once=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--workers 1", "workers=1"),
        ("--delays 0 0", "delays=0.0 0.0: give one or more, each once"),
        ("--delays -1", "-1.0: delays, block and whole are 0 or more"),
        ("--split 0", "split=0: give 1 or more"),
    ],
)
def test_a_mistake_is_refused(monkeypatch, options, says):
    monkeypatch.setattr(sys, "argv", ["ring", *options.split()])
    with pytest.raises(UserError, match=says):
        main()


@pytest.mark.slow
def test_a_delay_shorter_than_a_block_costs_nothing():
    """The fastest of some repeats, with blocks of 200 ms, so that a busy machine matters less."""
    o = Ring(workers=3, delays=(0.0, 100.0), block=200.0, split=64, whole=10, repeats=4)
    rows = {(row["delay"], row["at_once"]): row for row in run_distributed(measure, 3, o, timeout=200)[0]}
    for number, which in enumerate(("forward", "backward")):
        least = {cell: 1e3 * min(row[which]) for cell, row in rows.items()}
        for delay, at_once in rows:
            told = expected(3, delay, 200.0, at_once, whole=True)[number]
            assert told <= least[delay, at_once] < told + 100  # less than one delay more
        assert least[100.0, False] < least[100.0, True] - 100
