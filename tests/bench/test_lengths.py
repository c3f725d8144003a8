"""bench.lengths: what it counts as waiting, and its ways to deal; bench.lengths_loss: its verdict."""

from pathlib import Path

import numpy as np
import pytest

from bench import lengths, lengths_loss
from bench.lengths import Bench, Case, cells, measure, one_run, owners, text, wait, wait_with_slack


def test_waits_by_hand():
    assert wait(np.array([1.0, 1.0, 2.0])) == pytest.approx(1 - 4 / 6)
    assert wait(np.array([3.0, 3.0])) == 0
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
    assert first == again
    assert first["mean"]["round"] < 0.01 < 0.03 < first["mean"]["tokens"] < first["mean"]["counts"]
    assert first["slack"]["round"] < first["slack"]["tokens"] < first["mean"]["tokens"] + 0.02


def test_the_page_says_where_marks_are_met_and_where_nothing_is_won(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lengths, "CASES", (Case("uniform", 2048), Case("log_normal", 8192)))
    bench = Bench(workers=(4,), taus=(6, 24), rounds=2, seeds=(0,))
    rows = list(measure(bench))
    result = {"rows": rows, "options": {"seeds": [0], "rounds": 2}, "commit": None, "date": "today"}
    page = text(result)
    assert "tau 24: at most 1 %: met in every row" in page and "tau 6: at most 3 %: met in every row" in page
    assert "nothing is to be won: uniform at 2,048 positions\n" in page
    assert len(cells(rows[0])) == len(lengths.TITLES)
    for row in rows:
        row["mean"][0]["round"] = 0.05
    assert "tau 24: at most 1 %: missed" in text(result)


def test_the_losses_verdict_is_within_the_seeds_or_not():
    apart = {"tokens": [1.0, 1.2, 1.1], "round": [1.5, 1.7, 1.6]}
    found = lengths_loss.verdict(apart)
    assert "+0.5000 ± 0.0000" in found and found.endswith("spread by up to 0.1000: round ends higher.")
    near = {"tokens": [1.0, 1.2, 1.1], "round": [1.01, 1.18, 1.12]}
    assert lengths_loss.verdict(near).endswith("spread by up to 0.1000: round ends equal within that.")
    assert lengths_loss.verdict({"round": [1.0], "tokens": [1.1]}).endswith("by up to 0.0000: round ends lower.")
    recipe = lengths_loss.recipe_of(lengths_loss.Bench(), "round", 1, Path("x"))
    assert (recipe.balance, recipe.seed, recipe.co2.tau) == ("round", 1, 6)
