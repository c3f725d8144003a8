"""What is reported of communication: sums and shares."""

import time

import pytest
import torch

import core.stats
from core.stats import RoundClock, RoundStats, between, mark, ready
from training.folder import Overlap


def test_marks_on_a_cpu_are_the_hosts_clock():
    before = time.perf_counter()
    now = mark(torch.device("cpu"))
    assert isinstance(now, float) and before <= now <= time.perf_counter()
    assert between(1.0, 3.0) == 2.0 and between(1.0, 3.0, parts=4) == 0.5


class Event:
    """A GPU's, at the `now` at which it was made, in milliseconds."""

    now = 0.0

    def __init__(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.mark.parametrize("gpu", [False, True])
def test_a_merge_in_mid_round_is_no_part_of_a_local_step(gpu: bool, monkeypatch: pytest.MonkeyPatch):
    """On a GPU the stream may wait in it: that would pass for slow steps, and tau auto would take too few of them."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(core.stats, "mark", lambda device: Event() if gpu else Event.now / 1e3)
    clock, Event.now = RoundClock(torch.device("cpu")), 0.0
    for merge in (7000.0, 0.0):  # the second round merges at its boundary
        Event.now += 9.0  # its first step, which is not timed
        clock.steps_begin()
        Event.now += 30.0
        if merge:
            with clock.early_merge(2):
                Event.now += merge
        Event.now += 60.0
        with clock.boundary(tau=4, local_steps=4):
            Event.now += 50.0
        assert ready(clock.stats.step_seconds) and float(clock.stats.step_seconds) == pytest.approx(0.03)
        assert float(clock.stats.merge_seconds) == pytest.approx(merge / 1e3)
        assert float(clock.stats.boundary_seconds) == pytest.approx(0.05)


def round_stats(**values: float) -> dict[str, float]:
    return RoundStats(**values).as_dict()  # pyright: ignore[reportArgumentType]


def test_a_rounds_hidden_time_and_link_rate():
    stats = round_stats(allreduce_seconds=0.5, exposed_seconds=0.1, bytes_sent=1_000_000)
    assert stats["hidden_seconds"] == pytest.approx(0.4)
    assert stats["link_mbit"] == pytest.approx(16)  # 8 Mbit in half a second
    late = round_stats(allreduce_seconds=0.5, exposed_seconds=0.7)  # waited for a peer that launched late
    assert late["hidden_seconds"] == 0.0
    assert round_stats()["link_mbit"] == 0.0  # nothing has landed in the first round


def test_a_run_adds_its_rounds_up_and_resumes():
    overlap = Overlap()
    assert overlap.hidden_share == 1.0 and overlap.link_mbit == 0.0
    overlap.add(round_stats(allreduce_seconds=0.5, exposed_seconds=0.1, bytes_sent=1_000_000))
    resumed = Overlap()
    vars(resumed).update(vars(overlap))  # as training/fixed.py keeps it
    resumed.add(round_stats(allreduce_seconds=1.5, exposed_seconds=0.5, bytes_sent=3_000_000))
    assert resumed.summary() == pytest.approx(
        {
            "rounds": 2,
            "exposed_seconds": 0.6,
            "hidden_seconds": 1.4,
            "allreduce_seconds": 2.0,
            "hidden_share": 0.7,
            "bytes_sent": 4_000_000,
            "link_mbit": 16.0,
        }
    )
