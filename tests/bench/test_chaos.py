"""The campaign of harm: what is planned, and what its table says of what became of it."""

from collections import Counter
from typing import Any

from bench.chaos import __main__ as campaign
from bench.chaos.__main__ import CONFIGS, ELASTIC, Campaign, agreement, plan, steps, table
from bench.chaos.worker import PHASES


def test_the_plan_has_all_that_was_asked_for_and_is_the_same_each_time():
    rows = list(plan(Campaign()))
    assert rows == list(plan(Campaign())) != list(plan(Campaign(seed=1)))
    asked = {"kill": 100, "outage": 20, "rejoin": 20, "disk": 10, "nan": 10, "none": 5 * len(CONFIGS)}
    assert Counter(row["harm"] for row in rows) == asked
    kills = Counter((row["phase"], row["config"]) for row in rows if row["harm"] == "kill")
    assert set(kills) == {(p, c) for p in PHASES for c in CONFIGS} - {("flight", "ddp")} and min(kills.values()) >= 2
    assert all(row["step"] < steps(row["config"]) for row in rows if "step" in row)
    undisturbed = {(row["config"], row["seed"]) for row in rows if row["harm"] == "none"}
    assert undisturbed >= {(row["config"], row["seed"]) for row in rows}, "each run has one to be compared with"


def row(harm: str, loss: float, **more: Any) -> dict[str, Any]:
    told = {"config": "co2", "seed": 0, "attempts": 1, "status": 0, "hung": False, "steps": steps("co2")}
    told |= {"steps_lost": 0, "left_out": 0, "came_back": 0, "pause_seconds": 0.5}
    return told | {"harm": harm, "test_loss": loss} | more


USUAL = [row("none", loss, seed=seed) for seed, loss in enumerate((1.0, 1.2, 1.4))]  # mean 1.2, deviation 0.2


def test_what_agrees():
    assert agreement(row("nan", 1.79), USUAL) == (True, False)
    assert agreement(row("nan", 1.81), USUAL) == (False, False)
    assert agreement(row("nan", 1.20001, seed=1), USUAL) == (True, True)
    assert agreement(row("nan", 1.2), USUAL[:2]) == (None, False)
    assert agreement(row("nan", 1.2, seed=2), USUAL[:2]) == (None, None)


def test_the_table_tells_of_the_worst():
    killed = {"phase": "local", "seed": 1}
    rows = [
        *USUAL,
        row("kill", 1.2, **killed, attempts=2, steps_lost=13),
        row("kill", 1.9, **killed, pause_seconds=7.0),
        row("kill", 1.2, **killed, hung=True, status=1),
        row("rejoin", 1.0, config=ELASTIC[0], phase="local", steps=steps(ELASTIC[0]), came_back=1),
    ]
    lines = table(rows).splitlines()
    assert lines.count("| kill, local | co2 | 3 | 2 | 1 | 1 |  | 13 | 7.0 | 1 of 2 | 1 of 2 |") == 2
    assert "| rejoin, local | elastic | 1 | 1 | 1 | 0 | came back in 1 | 0 | 0.5 | not run | not run |" in lines
    assert len(campaign.HEAD) == lines[-2].count("|") - 1
