"""The campaign of harm: what is planned, and what its table says of what became of it."""

from collections import Counter
from typing import Any

from bench.chaos.__main__ import CONFIGS, ELASTIC, HEAD, Campaign, plan, steps, table
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
    return told | {"came_back": 0, "harm": harm, "test_loss": loss} | more


def test_the_table_says_what_became_of_the_runs():
    killed = {"phase": "local", "seed": 1}
    rows = [
        *(row("none", loss, seed=seed) for seed, loss in enumerate((1.0, 1.2, 1.4))),  # mean 1.2, deviation 0.2
        row("kill", 1.79, **killed, attempts=2),
        row("kill", 1.81, **killed),
        row("kill", 1.2, **killed, hung=True, status=1),
        row("rejoin", 1.0, config=ELASTIC[0], phase="local", steps=steps(ELASTIC[0]), came_back=1),
    ]
    lines = table(rows).splitlines()
    assert "| kill, local | co2 | 3 | 2 | 1 | 1 | 0 | 1 of 2 | 1.200 ± 0.200 |" in lines
    assert "| rejoin, local | elastic | 1 | 1 | 1 | 0 | 1 | not known | not run |" in lines
    assert len(HEAD) == lines[-1].count("|") - 1
