"""What is reported of communication: sums and shares."""

import time

import pytest
import torch

from core.stats import Overlap, RoundStats, between, mark


def test_marks_on_a_cpu_are_the_hosts_clock():
    before = time.perf_counter()
    now = mark(torch.device("cpu"))
    assert isinstance(now, float) and before <= now <= time.perf_counter()
    assert between(1.0, 3.0) == 2.0 and between(1.0, 3.0, parts=4) == 0.5


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
    resumed.load_state_dict(overlap.state_dict())
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
