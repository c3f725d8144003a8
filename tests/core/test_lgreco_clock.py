"""When L-GreCo decides: at fixed reductions, and without waiting where NCCL would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.lgreco import reducer
from core.lgreco.choices import LGrecoConfig
from core.lgreco.decide import Clock
from tests.core import test_stats
from tests.core.test_host_reads import HostReads
from tests.core.test_lgreco import SETTINGS, SHAPES, built, once
from tests.core.test_lgreco_state import going_on, train


def test_decisions_come_at_fixed_reductions_twice_as_far_apart_up_to_every():
    """And of the reductions since the last one the last ten count."""
    clock, decided, counted = Clock(100, 10), list[int](), list[int]()
    for number in range(1, 400):
        counted += [number] if clock.counts(number) else []
        if clock.due(number):
            decided.append(number)
            clock.plan(number)
    assert decided == [10, 20, 40, 80, 160, 260, 360]
    assert counted == [n for d in [*decided, 460] for n in range(d - 9, d + 1) if n < 400]


class Event(test_stats.Event):
    """Passed once the device's clock, in milliseconds, has come by; who waits makes it."""

    now = device = 0.0

    def __init__(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.device

    def synchronize(self) -> None:
        Event.device = max(Event.device, self.at)


def test_asking_is_timed_where_it_runs(monkeypatch: pytest.MonkeyPatch):
    """The curves take 2 s of a device, and none of the host's."""
    mean, real = built("rank4", LGrecoConfig(first=1)), reducer.curve

    def curve(*args: Any) -> Any:
        Event.now += 2000.0 / len(SHAPES)
        return real(*args)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(reducer, "curve", curve)
    monkeypatch.setattr(reducer, "mark", lambda device: Event())
    once(mean, 0, 0)
    assert mean.reducer.allocation.seconds[0] == pytest.approx(2.0)


@pytest.mark.parametrize("setting", SETTINGS[:5], ids=lambda s: s[0])
def test_over_nccl_the_launch_after_decides_the_same(setting: Any, monkeypatch: pytest.MonkeyPatch):
    """As if decided at once, also from a checkpoint in between: means of one choice are equal but for rounding,
    for a BLAS rounds one product in two ways by where in memory it lies."""
    at_once, later, first = built(*setting), built(*setting), built(*setting)
    monkeypatch.setattr(reducer.LGreco, "_at_once", lambda self, group: self is at_once.reducer)
    for round in range(7):
        train(at_once, range(round, round + 1)), train(later, range(round, round + 1))
        torch.testing.assert_close(at_once.buckets[0].payload, later.buckets[0].payload, rtol=1e-12, atol=1e-12)
    assert later.reducer.allocation is not None
    train(first, range(3))
    train(again := going_on(first, setting), range(3, 7))
    assert again.reducer.chosen == later.reducer.chosen
    torch.testing.assert_close(again.buckets[0].payload, later.buckets[0].payload, rtol=1e-12, atol=1e-12)


def test_asking_reads_nothing_from_a_device():
    mean = built("rank4", LGrecoConfig(first=1))
    with HostReads() as reads:
        asked = mean.reducer._ask(1)
        mean.reducer._hear(asked, 1)
    assert reads.seen == [] and mean.reducer.allocation is None
