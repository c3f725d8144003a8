"""bench.chaos: its plan, its verdicts, the damage that it does, and what it reads from the workers' rounds."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.__main__ import CONFIGS, COUNTS, CRASHES, HARMS, Campaign, damage, plan, right, steps
from bench.chaos.crew import different_rounds


def test_the_plan_has_all_that_was_asked_for_and_is_the_same_each_time():
    rows = list(plan(Campaign()))
    assert rows == list(plan(Campaign())) != list(plan(Campaign(seed=1)))
    asked = {harm: getattr(Campaign(), COUNTS[harm]) for harm in HARMS} | {"none": len(CONFIGS)}
    assert Counter(row["harm"] for row in rows) == asked
    for harm, (configs, phases) in HARMS.items():
        tried = {(row["config"], row["phase"]) for row in rows if row["harm"] == harm}
        assert tried <= {(c, p) for c in configs for p in phases} - {("ddp", "flight")}
        assert len(tried) == min(asked[harm], len(configs) * len(phases) - (harm == "kill")), harm
    assert all(row["step"] < steps(row["config"]) for row in rows if "step" in row)
    islands = [row["ranks"] for row in rows if (row["harm"], row["config"]) == ("two kills", "elastic, islands")]
    assert islands and all(a < 2 <= b for a, b in islands), "a rank of each"
    undisturbed = {row["config"] for row in rows if row["harm"] == "none"}
    assert undisturbed == {row["config"] for row in rows}, "each run has one to be compared with"


def row(harm: str, config: str = "co2", **more: Any) -> dict[str, Any]:
    found = {"harm": harm, "config": config, "phase": "local", "seed": 0, "attempts": 1, "status": 0, "hung": False}
    found |= {"steps": steps(config), "test_loss": 1.0, "digest": "a", "different_rounds": [], "traceback": False}
    return found | more


def test_a_run_is_right_or_wrong():
    kills = ({"status": 1}, {"steps": 9}, {"hung": True}, {"traceback": True}, {"test_loss": None}, {"digest": "b"})
    wrong = [row("kill", **fault) for fault in kills]
    wrong += [row("stream", attempts=2), row("kill", "elastic", attempts=2)]
    wrong += [row("kill", "elastic", different_rounds=["0.7"])]
    well = [row("kill", attempts=2), row("nan", digest="b"), row("kill", "elastic", digest="b")]
    well += [row("stop", "elastic", attempts=2), row("kill", "co2, recommended", digest="b", attempts=2)]
    assert [right(run, [row("none")]) for run in wrong + well] == [False] * len(wrong) + [True] * len(well)


@pytest.mark.parametrize("kind", CRASHES)
def test_damage_is_done_to_the_newest_files(kind: str, tmp_path: Path):
    for step in (11, 22):
        (folder := tmp_path / "checkpoints" / f"step{step:09}").mkdir(parents=True)
        (folder / "manifest.json").write_text("whole")
    (tmp_path / "metrics.jsonl").write_text("a line\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    damage(random.Random(0), tmp_path, kind)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed and not any("step000000011" in str(path) for path in changed)


def test_it_finds_rounds_whose_outer_iterates_differ(tmp_path: Path):
    (tmp_path / "rounds1.0.0").write_text("1 1 aa 10.0\n1 2 bb 11.5\n1 3 cc 20.0\n")
    (tmp_path / "rounds1.1.0").write_text("1 1 aa 10.1\n1 2 bX 11.0\n1 3 cc 20.5\n")
    (tmp_path / "rounds2.0.0").write_text("2 2 dd 99.0\n2 4 ee 100.0\n")  # resumed
    assert different_rounds(tmp_path) == ["1.2"]
