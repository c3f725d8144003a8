"""When L-GreCo decides: at fixed reductions, or at most a share of the time, alike on all workers; and without waiting
where NCCL would."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from core.lgreco import reducer
from core.lgreco.clock import IN_HAND, Clock
from core.lgreco.config import LGrecoConfig
from core.stats import between
from core.testing import run_distributed
from tests.core import test_stats
from tests.core.test_lgreco import SETTINGS, SHAPES, built, once
from tests.core.test_lgreco_state import train
from tests.core.test_nccl import HostReads


def test_plans_by_hand():
    """A second for a decision, reductions of 0.1 s: at 1 %, less what is kept in hand, two take 250 s."""
    clock = Clock(20, 3, 0.01)
    assert [clock.due(n) for n in (1, 2, 3, 4)] == [False, False, True, True]
    told = clock.plan(3, spent=1.0, reductions=2.0, elapsed=0.2)
    assert told == "; next in 2498 reductions, for deciding to take 0.01 of the time at most"
    assert not clock.due(2500) and clock.due(2501)
    assert clock.plan(2501, spent=2.0, reductions=2500.0, elapsed=1000.0) == "", "it has become cheap: every again"
    assert not clock.due(2520) and clock.due(2521)
    always = Clock(20, 3, 1.0)
    assert always.plan(3, 1.0, 2.0, 0.2) == "" and always.due(23)


def test_decisions_come_at_fixed_reductions_twice_as_far_apart_up_to_every():
    """However long deciding takes; and of the reductions since the last one the last ten count."""
    config = LGrecoConfig()
    assert config.time_share == 1.0, "by default a run can be repeated"
    clock, decided, counted = Clock(100, 10, config.time_share), [], []
    for number in range(1, 400):
        counted += [number] if clock.counts(number) else []
        if clock.due(number):
            decided.append(number)
            assert clock.plan(number, spent=1e3 * number, reductions=number, elapsed=1.0) == ""
    assert decided == [10, 20, 40, 80, 160, 260, 360]
    assert counted == [n for d in [*decided, 460] for n in range(d - 9, d + 1) if n < 400]


@pytest.mark.parametrize("each", [0.003, 0.05, 2.0])
def test_deciding_keeps_its_share(each: float):
    """100 s of reductions of unlike lengths; programmes are a fifth of a decision, and known a decision late."""
    clock, spent, elapsed, decisions, number = Clock(5, 2, 0.01), 0.0, 0.0, 0, 0
    while elapsed < 100.0:
        number += 1
        if clock.due(number):
            decisions += 1
            spent += 0.8 * each
            clock.plan(number, spent, number - 1.0, elapsed)
            spent += 0.2 * each
            assert decisions == 1 or spent <= 0.0105 * elapsed
        elapsed += 0.02 if number % 2 else 0.04
    most = IN_HAND * 0.01 * 100.0 / each
    assert decisions >= min(number / 5 - 1, int(most) - 1, 1) and decisions <= max(1, most + 1, number / 5)


class Event(test_stats.Event):
    """Passed once the device's clock, in milliseconds, has come by; who waits makes it."""

    now = device = 0.0

    def __init__(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.device

    def synchronize(self) -> None:
        Event.device = max(Event.device, self.at)


def test_on_a_gpu_it_counts_the_devices_time_and_waits_once(monkeypatch: pytest.MonkeyPatch):
    """Reductions of 30 s of which deciding takes 2 s, and 3 s the second time. The host is ahead of all of them."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock, told, Event.now, Event.device = Clock(1, 1, 0.5), torch.zeros(3, dtype=torch.float64), 0.0, 0.0
    expected = {1: (2.0, 0.0, 0.0), 2: (4.0, 0.0, 0.0), 3: (7.5, 2.0, 60.0)}
    for number, (spent, reductions, elapsed) in expected.items():
        clock.tick(Event())
        began = Event()
        Event.now += 3000.0 if number == 2 else 2000.0
        clock.spend(between(began, Event()))
        clock.tell(told)
        assert told.tolist() == [spent, reductions, elapsed]
        assert Event.device == (2000.0 if number < 3 else 60000.0), "only the first one was waited for"
        clock.plan(number, *told.tolist())
        Event.now += 27000.0 if number == 2 else 28000.0
        Event.device = 60000.0 if number == 2 else Event.device


def test_asking_is_timed_where_it_runs(monkeypatch: pytest.MonkeyPatch):
    """The curves take 2 s of a device, and none of the host's."""
    mean, real = built("rank4", LGrecoConfig("any", first=1)), reducer.curve

    def curve(*args: Any) -> Any:
        Event.now += 2000.0 / len(SHAPES)
        return real(*args)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(reducer, "curve", curve)
    monkeypatch.setattr(reducer, "mark", lambda device: Event())
    once(mean, 0, 0)
    assert mean.reducer.allocation.seconds[0] == pytest.approx(2.0)
    assert mean.reducer.clock.numbers[2].item() >= 2.0


def unlike_clocks(rank: int, world_size: int) -> tuple[list[int], list[str]]:
    """Worker 1 takes far longer to decide."""
    mean = built("int4", LGrecoConfig(every=1, first=1, time_share=0.5))
    decided, told = [], []
    for round in range(12):
        if rank:
            mean.reducer.clock.spend(1.0)
        time.sleep(0.01)
        once(mean, rank, round)
        found = mean.reducer.allocation
        if found is not None and found.number not in decided:
            decided.append(found.number)
            told.append(found.reason.partition("; next")[2])
    mean.close()
    return decided, told


def test_workers_decide_together():
    first, second = run_distributed(unlike_clocks, 2)
    assert first == second, "also what they say of it"
    assert 1 <= len(first[0]) < 12 and any(first[1])


@pytest.mark.parametrize("setting", SETTINGS[:5], ids=lambda s: s[0])
def test_over_nccl_the_launch_after_decides_the_same(setting: Any, monkeypatch: pytest.MonkeyPatch):
    """Bit for bit what is decided at once, also from a checkpoint in between."""
    at_once, later, resumed = built(*setting), built(*setting), built(*setting)
    monkeypatch.setattr(reducer.LGreco, "_at_once", lambda self, group: self is at_once.reducer)
    for round in range(7):
        train(at_once, range(round, round + 1)), train(later, range(round, round + 1))
        assert torch.equal(at_once.buckets[0].payload, later.buckets[0].payload), round
    assert later.reducer.allocation is not None
    for round in range(3):
        train(resumed, range(round, round + 1))
    again = built(*setting)
    for name, flats in resumed.reducer.state.items():
        for to, source in zip(again.reducer.state[name], flats, strict=True):
            to.copy_(source)
    again.flight.restore(3, False)
    for round in range(3, 7):
        train(again, range(round, round + 1))
    assert torch.equal(again.buckets[0].payload, later.buckets[0].payload)


def test_asking_reads_nothing_from_a_device():
    mean = built("rank4", LGrecoConfig("any", first=1))
    with HostReads() as reads:
        asked = mean.reducer._ask(1)
        mean.reducer._hear(asked, 1)
    assert reads.seen == [] and mean.reducer.allocation is None
