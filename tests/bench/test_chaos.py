"""The campaign of harm: what is planned, and what its table says of what became of it."""

from collections import Counter
from typing import Any

from bench.chaos.__main__ import CONFIGS, ELASTIC, Campaign, plan, steps, table
from bench.chaos.crew import PHASES


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
    told = {"config": "co2", "attempts": 1, "status": 0, "hung": False, "steps": steps("co2"), "came_back": 0}
    return told | {"harm": harm, "test_loss": loss} | more


def test_the_table_says_what_became_of_the_runs():
    rows = [
        row("kill", 1.8, phase="local", attempts=2),
        row("kill", 1.2, phase="local", hung=True, status=1),
        row("rejoin", 1.0, config=ELASTIC[0], phase="local", steps=steps(ELASTIC[0]), came_back=1),
    ]
    lines = table(rows).splitlines()
    assert lines[2].startswith("| kill | local | co2 | 2 | 50% ± 71% | 1.5 ± 0.7 | 50% ± 71% | 0.0 ± 0.0 | 1.500 ±")
    assert lines[3] == "| rejoin | local | elastic | 1 | 100% | 1.0 | 0% | 1.0 | 1.000 |"
