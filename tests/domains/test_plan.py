"""Which ranks hold which document."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from core.errors import UserError
from core.testing import run_distributed
from language.lengths.plan import GRAIN, Island, bundled, layer_seconds, plan

ISLAND = Island(2, 4, attention=1e-9, linear=1e-5, inside=(1e-5, 1e-7), across=(1e-4, 1e-6))


def documents(number: int, seed: int = 0, median: float = 500.0, sigma: float = 1.5) -> Tensor:
    """Cumulative lengths of a log-normal law, int64 [number + 1]."""
    lengths = np.random.default_rng(seed).lognormal(math.log(median), sigma, number).astype(np.int64) + 1
    return torch.tensor([0, *lengths]).cumsum(0)


def test_a_ring_is_no_larger_than_it_must_be_and_takes_the_devices_that_have_least_to_do():
    """One long document among short ones is split as far as its share demands; the short ones stay whole."""
    lengths = [20_000, *[100] * 1000]
    rings = plan(torch.tensor([0, *lengths]).cumsum(0), ISLAND)
    share = sum(map(ISLAND.whole, lengths)) / ISLAND.size
    assert len(rings[0]) == math.ceil(ISLAND.whole(20_000) / share) == 3 and not ISLAND.crosses(rings[0])
    assert {len(ring) for ring in rings[1:]} == {1} and layer_seconds(lengths, rings, ISLAND) < 1.02 * share
    assert plan(torch.tensor([0, 100_000]), ISLAND) == [tuple(range(8))]
    slow = replace(ISLAND, across=(1.0, 1.0))
    assert plan(torch.tensor([0, 100_000]), slow) == [(0, 1, 2, 3)]
    slower = replace(slow, inside=(1000.0, 0.0))
    assert plan(torch.tensor([0, 100_000]), slower) == [(0,)]
    one_node = replace(ISLAND, nodes=1)
    rings = plan(torch.tensor([0, 10_000, 20_000]), one_node)
    assert sorted(rings) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("number", [0, 1, 7, 200, 3000])
def test_every_document_has_a_ring_and_work_is_even(number: int):
    ends = documents(number)
    rings, lengths = plan(ends, ISLAND), ends.diff().tolist()
    assert len(rings) == number
    assert all(ring and ring == tuple(sorted(set(ring))) and set(ring) <= set(range(8)) for ring in rings)
    share = sum(map(ISLAND.whole, lengths)) / ISLAND.size
    assert layer_seconds(lengths, rings, ISLAND) <= 1.02 * share + 1e-3


def test_documents_that_cost_little_are_placed_in_bundles():
    lengths = documents(10_000).diff().tolist()
    items = bundled(lengths, ISLAND)
    assert sorted(i for item in items for i in item.documents) == list(range(10_000))
    grain = GRAIN * sum(map(ISLAND.whole, lengths)) / ISLAND.size
    costs = [sum(ISLAND.whole(lengths[i]) for i in item.documents) for item in items]
    assert len(items) < 2000
    for item, cost in zip(items, costs, strict=True):
        assert item.whole if cost <= grain else len(item.documents) == 1


def planned_on(rank: int, world_size: int) -> list[tuple[int, ...]]:
    torch.set_num_threads(1 + rank)
    return plan(documents(500), ISLAND)


def test_every_rank_computes_the_same_plan():
    first, *others = run_distributed(planned_on, 3)
    assert others == [first, first] and first == plan(documents(500), ISLAND)


def test_memory_splits_what_is_cheap_enough_to_stay_whole():
    cheap = replace(ISLAND, attention=1e-15, linear=0.0, inside=(1.0, 1.0))
    ends = torch.tensor([0, 900, 1000])
    assert {len(ring) for ring in plan(ends, cheap)} == {1}
    rings = plan(ends, replace(cheap, room=250.0))
    shares = [(length / len(ring), ring) for length, ring in zip([900, 100], rings, strict=True)]
    held = [sum(share for share, ring in shares if d in ring) for d in range(8)]
    assert max(held) <= 250 and sum(held) == pytest.approx(1000)
    assert plan(torch.tensor([0, 2000]), replace(cheap, room=250.0)) == [tuple(range(8))]
    assert plan(torch.tensor([0, 2000]), replace(cheap, attention=0.0, room=250.0)) == [tuple(range(8))]


def test_what_cannot_be_planned_is_one_line():
    with pytest.raises(UserError, match="1001 tokens in a step, but 8 devices hold 1000: give"):
        plan(torch.tensor([0, 1001]), replace(ISLAND, room=125.0))
    with pytest.raises(UserError, match="attention=-1e-09: a cost is 0 or more"):
        replace(ISLAND, attention=-1e-9)
    with pytest.raises(UserError, match=r"inside=\(nan, 0.0\)"):
        replace(ISLAND, inside=(math.nan, 0.0))
    with pytest.raises(UserError, match="0 nodes of 4 devices"):
        replace(ISLAND, nodes=0)
