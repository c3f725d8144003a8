"""Plans beside the optimum, and what the comparison with rivals is made of."""

import pytest

from bench import lengths_plans as bench
from bench.lengths_plans import LINKS, drawn, island, optimum, partitions, planned
from language.lengths.plan import Island, layer_seconds


@pytest.mark.parametrize("draws", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("link", LINKS)
def test_plans_are_close_to_the_optimum(link: str, draws: int):
    """On 2 nodes of 2 devices; all searches finish, and none ends below the bound that a plan is."""
    i, ratios = island(LINKS[link], 2, 2), []
    for seed in range(draws):
        lengths = drawn("github_like", seed, 3 + seed % 5)
        took = layer_seconds(lengths, planned(lengths, i), i)
        best = optimum(lengths, i, took * (1 + 1e-6))
        assert best is not None
        ratios.append(took / best)
    assert sum(ratios) / draws <= 1.02 and max(ratios) <= 1.10 and min(ratios) > 1 - 1e-5


def test_the_optimum_of_cases_that_are_plain():
    free = Island(1, 3, attention=1.0, linear=0.0, inside=(0.0, 0.0), across=(0.0, 0.0))
    assert optimum([3], free, 10.0) == pytest.approx(3.0)  # split over all three
    dear = Island(1, 3, attention=1.0, linear=0.0, inside=(100.0, 0.0), across=(0.0, 0.0))
    assert optimum([3, 2, 1, 1], dear, 100.0) == pytest.approx(9.0)  # hops of 100 s: the longest stays whole
    assert optimum([3, 3, 3, 3], dear, 100.0) == pytest.approx(18.0)
    assert optimum([3] * 7, free, 100.0, most=10) is None


def test_the_rivals_on_a_case_that_is_plain():
    """Documents of 4, 2 and 2 tokens on two devices, a second for each squared token and for each token."""
    i = Island(1, 2, attention=1.0, linear=1.0, inside=(0.0, 0.0), across=(0.0, 0.0))
    lengths = [4, 2, 2]
    prices = {way: bench.price(way, lengths, i) for way in bench.WAYS}
    rivals = {"even": 16.0, "grouped": 16.0, "whole": 20.0, "cut": 20.0, "thresholds": 16.0}
    assert prices == {"plan": pytest.approx(16.0)} | rivals
    assert bench.price("cut", [8], i) == 20.0  # two pieces of 4, where the whole document costs 72


def test_partitions_into_powers_of_two():
    assert partitions(4) == [[4], [2, 2], [2, 1, 1], [1, 1, 1, 1]]
    assert len(partitions(16)) == 36
