"""bench.lengths_rings: what its stand-in spends, and what the table says of the times."""

import pytest

from bench.lengths_rings import PAPERS, WAYS, Bench, stepped, text_of, verdicts
from core.testing import run_distributed
from language.lengths.plan import Island

ISLAND = Island(1, 2, attention=2e-6, linear=1e-4, inside=(0.0, 0.0), across=(0.0, 0.0))
LENGTHS = [100, 40, 40, 1]


def spent(rank: int, ranks: int) -> list[tuple[float, float]]:
    """For each way the seconds of its computing on this rank, and of the slowest from begin to end."""
    found = []
    for place in WAYS.values():
        took, spans = stepped(place(LENGTHS, ISLAND), ISLAND, 2)
        found.append((sum(end - begin for begin, end, _ in spans), took))
    return found


def test_a_rank_computes_for_as_long_as_its_share_would_take():
    for way, *of_ranks in zip(WAYS, *run_distributed(spent, 2), strict=True):
        lengths, rings = WAYS[way](LENGTHS, ISLAND)
        work = sum(map(ISLAND.whole, lengths))
        assert sum(busy for busy, _ in of_ranks) == pytest.approx(work, rel=0.02), way  # chunks differ by a token
        assert of_ranks[0][1] == of_ranks[1][1] >= max(busy for busy, _ in of_ranks)


def row(law: str, seed: int, **seconds: float) -> dict:
    times = dict.fromkeys(WAYS, 1.0) | seconds
    sizes = dict(tokens=1000, documents=9, least=0.9, stretch=2.0, width=4)
    return dict(link=PAPERS, law=law, seed=seed, seconds=times, model=times, **sizes)


def test_the_table_says_where_the_plan_wins_and_where_it_loses():
    rows = [row("log_normal", 0, even=3.0, grouped=1.01), row("log_normal", 1, even=2.0, grouped=1.03)]
    rows += [row("uniform", seed, whole=0.96, cut=0.9) for seed in (0, 1)]
    options = vars(Bench(laws=("log_normal", "uniform"), links=(PAPERS,), draws=2))
    result = {"rows": rows, "options": options, "commit": "c", "date": "d"}
    assert list(verdicts(result)) == [
        "even context parallelism, at least 2 times under each law: met",
        "groups, after FlexSP, at least 1.05 times under each law: missed under log_normal",
        "uniform lengths, at least 0.97 of the best way: missed, whose time is 0.96 of the plan's",
        "cut packing, which trains another model, is faster under uniform at 200 Gbit/s",
    ]
    text = text_of(result)
    assert "| 200 | log_normal | 2 ± 0 | 2.50 ± 0.71 | 1.02 ± 0.01 |" in text and "seeds 0 to 1" in text
    other = text_of(result | {"options": options | {"links": (25.0,)}, "rows": [dict(r, link=25.0) for r in rows]})
    assert "Zeppelin's ratio: not run." in other
