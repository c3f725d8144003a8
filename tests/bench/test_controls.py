"""The table of two axes, from rows made by hand; and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.search.__main__ import parse
from bench.search.controls import FRESH, STEPS, Controls, Found, change, markdown
from bench.search.engine import Plan, Result
from bench.search.rows import Rows
from tests.bench.emulated import python

OPTIONS = Controls(tasks=("digits",), taus=(6,))


def with_runs(path: Path, losses: dict[str, list[float | None]], batch: int = 16, tau: int = 6) -> Rows:
    """A file in which the methods' tuning is done, and their runs on seeds 0, 1, ... ended with these losses."""
    rows = Rows(path)
    (search, _) = OPTIONS.searches()
    for asked, ends in losses.items():
        plan = Plan("digits", parse(asked)[0], 0.05, 4, batch, search.steps, tau, "iid", 100, "tuning")
        rows.add_choice(asked, search.tuning, plan, 3)
        for seed, loss in enumerate(ends):
            rows.add_run(replace(plan, seed=seed, split="test"), Result(loss, loss, 1.0))
    return rows


def test_cells_and_changes_by_hand(tmp_path: Path):
    losses: dict[str, list[float | None]] = {
        "local:wire=float32": [1.0, 2.0, 4.0],
        "local:wire=int4": [1.1, 2.2, 4.8],
        FRESH + "int4": [1.0, None],
    }
    rows = with_runs(tmp_path / "rows.jsonl", losses)
    found = Found(rows, OPTIONS.searches()[0])
    assert found.cell("local:wire=float32") == "2.3333 ± 1.5275"
    assert found.cell(FRESH + "int4") == "diverged in 1 of 2 (else 1.0000) (2 of 3 seeds)"
    assert found.cell("ddp:wire=int4") == "not run"
    text = markdown(rows, OPTIONS.searches())
    assert "| compression of blocking means to int4 | 13.3 ± 5.8 % |" in text  # 10, 10 and 20 %
    assert (
        "| both: int4 and hiding for one step | 0.0 % |" in text
        and "| every step, of gradients (ddp) | not run |" in text
    )
    assert "### digits, tau 6" in text and "commits of the runs" in text


def test_runs_of_the_momenta_with_their_small_batch_stay_out_of_the_two_axes(tmp_path: Path):
    options = Controls(tasks=("digits",), taus=(24,))
    two_axes, momenta = options.searches()
    for batch, loss in ((16, 1.0), (2, 5.0)):
        rows = with_runs(tmp_path / "rows.jsonl", {FRESH + "int4": 3 * [loss]}, batch, 24)
    assert Found(rows, two_axes).cell(FRESH + "int4") == "1.0000 ± 0.0000"
    assert Found(rows, momenta).cell(FRESH + "int4") == "5.0000 ± 0.0000"


def test_a_change_is_over_the_seeds_that_both_have():
    assert change({0: 1.0, 1: 2.0}, {1: 3.0, 2: 9.0}) == "50.0 %"
    assert change({0: 1.0}, {0: None}) == "diverged" and change({0: 1.0}, {1: 1.0}) == "not run"


def test_every_step_is_between_methods_of_the_table():
    (search, _) = OPTIONS.searches()
    assert {method for pair in STEPS.values() for method in pair} <= set(search.methods)


@pytest.mark.slow
def test_the_command_goes_on_where_it_was_stopped(tmp_path: Path):
    """Two steps of everything, but the momenta of 64 workers, for which there is no time."""
    options = ["--tasks", "digits", "--taus", "2", "--steps", "2", "--seeds", "0", "--rows"]
    command = ["-m", "bench.search.controls", *options, tmp_path / "rows.jsonl"]
    python(*command)
    runs = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {run["workers"] for run in runs} == {4, 16, 64}
    assert python(*command).count("complete; 0 runs were new") == 2
    assert "not run" not in (tmp_path / "rows.md").read_text()
