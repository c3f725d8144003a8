"""Loss against size, from rows made by hand."""

from pathlib import Path

import pytest

from bench.search.__main__ import parse
from bench.search.engine import Plan, Result
from bench.search.rows import Rows
from bench.search.sizes import METHODS, Sizes, found, picture, table
from core.errors import UserError

LOSSES = {"bytes_wide": (2.0, 2.2, 2.31), "bytes": (4.0, 5.0, None)}


def made(path: Path, steps: int = 240) -> Rows:
    rows = Rows(path)
    for task, losses in LOSSES.items():
        for asked, loss in zip(METHODS, losses, strict=True):
            plan = Plan(task, parse(asked)[0], 0.01, 4, 8, steps, 24, "iid", 0, "test")
            rows.add_choice(asked, "of a test", plan, 1)
            if loss is not None:
                rows.add_run(plan, Result(loss, loss, 1.0))
    return rows


def test_the_table_by_hand_and_a_picture(tmp_path: Path):
    runs = found(made(tmp_path / "rows.jsonl"), Sizes())
    millions = {"bytes": 0.07, "bytes_wide": 0.25}
    lines = table(runs, millions).splitlines()
    assert lines[2] == "| 0.07 | 4.0000 | 5.0000 | not run | +25.0 % |  |"
    assert lines[3] == "| 0.25 | 2.0000 | 2.2000 | 2.3100 | +10.0 % | +5.0 % |"
    picture(runs, millions, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_other_steps_are_left_out(tmp_path: Path):
    rows = made(tmp_path / "rows.jsonl", steps=480)
    with pytest.raises(UserError, match="none of 240 steps and tau 24"):
        found(rows, Sizes())
    assert found(rows, Sizes(steps=480)).keys() == LOSSES.keys()
