"""bench.timeline: a trace over a throttled link, with real processes."""

import json
from pathlib import Path

import pytest

from bench.timeline import TracedLink, within
from tests.bench.emulated import python


def test_a_link_keeps_when_bytes_are_on_it():
    link = TracedLink(mbit=8.0)  # 1 MB/s
    first, second = (link.reserve(nbytes) for nbytes in (1e6, 2e6))
    assert [end for _, end in link.spans] == [first, second] and 2.0 <= second - first < 2.1
    assert within([(0.5, 0.9), (0.9, 1.2), (2.9, 5.0), (3.0, 5.0)], 1.0, 2.0) == [(-0.1, 0.2), (1.9, 4.0)]


@pytest.mark.slow
def test_ddp_and_local_sgd_wait_for_what_co2_hides(tmp_path: Path):
    options = ["--workers", "2", "--rate", "200", "--tau", "4", "--step_ms", "60", "--seconds", "0.6"]
    python("-m", "bench.timeline", *options, "--out", tmp_path)
    rows = json.loads((tmp_path / "timeline.json").read_text())["rows"]
    assert [(row["method"], row["rank"]) for row in rows] == [
        (method, rank) for method in ("ddp", "local", "co2", "co2_recommended") for rank in (0, 1)
    ]
    steps = {row["method"]: row["finished_steps"] for row in rows if row["rank"] == 0}
    assert steps["ddp"] < steps["local"], steps
    for row in rows:
        assert row["allreduces"] and all(start < end for start, end in row["steps"])
    # Local-SGD computes nothing while an all-reduce is on the link; CO2 does
    ours = {row["method"]: row for row in rows if row["rank"] == 0}
    assert overlap(ours["local"]) < 0.01 < 0.1 < overlap(ours["co2"])


def overlap(row: dict) -> float:
    """Seconds in which a worker computes while an all-reduce is on the link."""
    pairs = ((step, flight) for step in row["steps"] for flight in row["allreduces"])
    return sum(max(0.0, min(step[1], flight[1]) - max(step[0], flight[0])) for step, flight in pairs)
