"""The link that is throttled in software: lower bounds are exact, upper bounds would only time the machine."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from core import CO2Config, make_method
from core.methods import METHODS
from core.testing import run_distributed
from core.testing.link import ThrottledLink
from tests.problems import Mean

MBIT = 8.0  # a million bytes a second


def test_reservations_queue_one_behind_the_other():
    link = ThrottledLink(MBIT)
    start = time.perf_counter()
    first, second = link.reserve(100_000), link.reserve(50_000)
    assert first >= start + 0.1
    assert second - first == pytest.approx(0.05)
    assert time.perf_counter() < second, "reserving must not wait"


def test_an_idle_link_does_not_save_up_time():
    link = ThrottledLink(MBIT)
    link.reserve(1_000)
    time.sleep(0.05)
    assert link.reserve(20_000) >= time.perf_counter() + 0.02 - 1e-3


def throttled_mean(rank: int, world_size: int) -> dict[str, Any]:
    """100,000 float32 on three workers: each sends 4/3 x 400,000 bytes, 0.533 s."""
    mean = Mean([torch.zeros(100_000)], link=ThrottledLink(MBIT))
    mean.buckets[0].flat.fill_(rank)
    start = time.perf_counter()
    mean.launch()
    launched, early = time.perf_counter() - start, mean.done()
    busy = 0
    while not mean.done():  # computation goes on underneath
        torch.ones(100).sum()
        busy += 1
    landed = time.perf_counter() - start
    mean.wait()
    return {
        "launched": launched,
        "early": early,
        "busy": busy,
        "landed": landed,
        "waited": time.perf_counter() - start - landed,
        "value": mean.buckets[0].flat.mean().item(),
        "seconds": mean.flight.seconds,
        "bytes": mean.flight.bytes_sent,
    }


def test_a_throttled_mean_takes_its_time_and_overlaps_with_computation():
    for result in run_distributed(throttled_mean, 3):
        assert result["bytes"] == 533_333
        assert result["early"] is False and result["busy"] > 10
        assert result["launched"] < result["landed"]
        assert result["landed"] >= 0.533 and result["seconds"] >= 0.533
        assert result["value"] == 1.0


def wait_at_once(rank: int, world_size: int) -> tuple[float, float]:
    """Two means over one link: the second crosses after the first."""
    link = ThrottledLink(MBIT)
    means = [Mean([torch.zeros(25_000)], link=link) for _ in range(2)]
    start = time.perf_counter()
    for mean in means:
        mean.launch()
    ends = []
    for mean in means:
        mean.wait()
        ends.append(time.perf_counter() - start)
    return ends[0], ends[1]


def test_two_means_queue_on_one_link():
    for first, second in run_distributed(wait_at_once, 2):  # 100,000 bytes each
        assert first >= 0.1 and second >= 0.2


def exposed(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """Seconds that three rounds of 0.1 s of communication take, with nothing to hide it behind, and those reported."""
    totals = {}
    for name in METHODS:
        model = nn.Linear(250, 100, bias=False)
        wrapped, method = make_method(name, model, co2=CO2Config(tau=1), link=ThrottledLink(MBIT))
        start, waited = time.perf_counter(), 0.0
        for _ in range(3):
            wrapped(torch.ones(1, 250)).sum().backward()
            method.step()
            waited += method.stats.exposed_seconds
        method.finish()
        totals[name] = time.perf_counter() - start, waited
    return totals


def test_every_method_crosses_the_same_link():
    """finish() drains what is in flight, so nobody gets away with less than three crossings."""
    for totals in run_distributed(exposed, 2):
        for name, (seconds, waited) in totals.items():
            assert seconds >= 0.3, name
            assert waited >= (0.0 if name == "ddp" else 0.1), name
