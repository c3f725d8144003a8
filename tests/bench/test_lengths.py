"""bench.lengths: what it counts as waiting, and its ways to deal and to place documents."""

from itertools import combinations

import numpy as np
import pytest
import torch

from bench import lengths
from bench.lengths import (
    ATTENTION,
    BITS,
    LINEAR,
    PLACED,
    TABLES,
    Bench,
    Case,
    drawn,
    measure_waits,
    one_run,
    owners,
    partitions,
    stepped,
    wait,
    wait_with_slack,
)
from core.testing import run_distributed
from language.lengths.plan import Island, layer_seconds, plan


def test_waits_by_hand():
    assert wait(np.array([1.0, 1.0, 2.0])) == pytest.approx(1 - 4 / 6) and wait(np.array([3.0, 3.0])) == 0
    # each is the slow one in turn: the mean, half a round, is there before anyone needs it
    turns = np.array([[1.0, 2.0], [2.0, 1.0]] * 50)
    assert wait_with_slack(turns, exchange=0.1) < 0.02 < 0.25 == wait(turns[0])
    one_slow = np.array([[1.0, 2.0]] * 50)
    assert wait_with_slack(one_slow, exchange=0.1) == pytest.approx(0.25)


def test_cut_packing_makes_rows_of_the_positions():
    pieces, owner = owners("cut packing", np.array([3, 9, 2, 4]), 4, 2, 100.0, False)
    assert pieces.tolist() == [3, 1, 4, 4, 2, 2, 2] and owner.tolist() == [0, 0, 1, 0, 1, 1, 0]
    assert owners("counts", np.array([3, 9, 2]), 4, 2, 100.0, False)[1].tolist() == [0, 1, 0]


def test_round_waits_less_and_a_rerun_gives_the_same():
    case, pool = Case("log_normal", 8192), lengths.documents_of(Case("log_normal", 8192), 0)[:20_000]
    first, again = (one_run(case, pool, 4, 6, 3, 0) for _ in range(2))
    assert first == again and first["mean"]["round"] < 0.01 < 0.03 < first["mean"]["tokens"] < first["mean"]["counts"]
    assert first["slack"]["round"] < first["slack"]["tokens"] < first["mean"]["tokens"] + 0.02


# -- plans ------------------------------------------------------------------------------------------------------------


def optimum(of: list[int], i: Island, bound: float) -> float:
    """Least layer_seconds over all sets of devices, by branch and bound below `bound`."""
    rings = [ring for g in range(1, i.size + 1) for ring in combinations(range(i.size), g)]
    order = sorted(of, reverse=True)
    costs = [[(ring, *i.share(n, ring)) for ring in rings] for n in order]
    left = [sum(map(i.whole, order[depth:])) for depth in range(len(order) + 1)]
    best = bound

    def descend(depth: int, state: list[tuple[float, ...]]) -> None:
        nonlocal best
        busy = [max(work, hops) + i.linear * tokens for work, hops, tokens in state]
        spent = sum(work + i.linear * tokens for work, _, tokens in state)
        if max(max(busy), (spent + left[depth]) / i.size) >= best * (1 - 1e-9):
            return
        if depth == len(order):
            best = max(busy)
            return
        seen = set()
        for ring, *more in costs[depth]:
            after = [tuple(map(sum, zip(s, more, strict=True))) if d in ring else s for d, s in enumerate(state)]
            nodes = (tuple(sorted(after[n : n + i.devices])) for n in range(0, i.size, i.devices))
            if (key := tuple(sorted(nodes))) not in seen:  # devices of a node are alike, and nodes
                seen.add(key)
                descend(depth + 1, after)

    descend(0, [(0.0, 0.0, 0.0)] * i.size)
    return best


@pytest.mark.parametrize("draws", [8, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("link", [800e9, 25e9, 1e9])
def test_plans_are_close_to_the_optimum(link: float, draws: int):
    """On 2 nodes of 2 devices; none ends below the bound that a plan is."""
    hops = (20e-6, BITS / 1600e9), (50e-6 if link > 5e9 else 1e-3, BITS / link)
    i, ratios = Island(2, 2, ATTENTION, LINEAR, *hops), []
    for seed in range(draws):
        some = drawn("github_like", seed, 3 + seed % 5)
        took = layer_seconds(some, plan(torch.tensor([0, *some]).cumsum(0), i), i)
        ratios.append(took / optimum(some, i, took * (1 + 1e-6)))
    assert sum(ratios) / draws <= 1.02 and max(ratios) <= 1.10 and min(ratios) > 1 - 1e-5


def test_the_optimum_and_the_ways_on_cases_that_are_plain():
    free = Island(1, 3, attention=1.0, linear=0.0, inside=(0.0, 0.0), across=(0.0, 0.0))
    assert optimum([3], free, 10.0) == pytest.approx(3.0)  # split over all three
    dear = Island(1, 3, attention=1.0, linear=0.0, inside=(100.0, 0.0), across=(0.0, 0.0))
    assert optimum([3, 2, 1, 1], dear, 100.0) == pytest.approx(9.0)  # hops of 100 s: the longest stays whole
    assert optimum([3, 3, 3, 3], dear, 100.0) == pytest.approx(18.0)
    # Documents of 4, 2 and 2 tokens on two devices, a second for each squared token and for each token.
    i = Island(1, 2, attention=1.0, linear=1.0, inside=(0.0, 0.0), across=(0.0, 0.0))
    seconds = {way: layer_seconds(*place([4, 2, 2], i), i) for way, place in PLACED.items()}
    assert seconds == pytest.approx({"plan": 16.0, "even": 16.0, "grouped": 16.0, "whole": 20.0, "cut": 20.0})
    assert layer_seconds(*PLACED["cut"]([8], i), i) == 20.0  # two pieces of 4; the whole document costs 72
    assert partitions(4) == [[4], [2, 2], [2, 1, 1], [1, 1, 1, 1]] and len(partitions(16)) == 36


ISLAND = Island(1, 2, attention=2e-6, linear=1e-4, inside=(0.0, 0.0), across=(0.0, 0.0))
LENGTHS = [100, 40, 40, 1]


def spent(rank: int, ranks: int) -> list[tuple[float, float]]:
    return [stepped(place(LENGTHS, ISLAND), ISLAND, 2) for place in PLACED.values()]


def test_a_rank_computes_for_as_long_as_its_share_would_take():
    for way, *of_ranks in zip(PLACED, *run_distributed(spent, 2), strict=True):
        work = sum(map(ISLAND.whole, PLACED[way](LENGTHS, ISLAND)[0]))
        assert sum(busy for _, busy in of_ranks) == pytest.approx(work, rel=0.02), way  # chunks differ by a token
        assert of_ranks[0][0] == of_ranks[1][0] >= max(busy for _, busy in of_ranks)


def test_rows_of_waits_have_what_the_table_shows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lengths, "CASES", (Case("uniform", 2048), Case("log_normal", 8192)))
    waits = list(measure_waits(Bench(workers=(4,), taus=(6,), rounds=2, seeds=(0,))))
    lines = TABLES["waits"].lines(waits)
    assert [line[:6] for line in lines] == [
        ["uniform", "2048", "768", "4", "6", "1"],
        ["log_normal", "8192", "768", "4", "6", "1"],
    ]
    assert all(cell.endswith("%") for line in lines for cell in line[6:])
