"""The planner's speed of each method, by hand and against measured rows."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Any

import pytest

from core.tau import smallest_tau
from tests.imports import ROOT
from tests.scripts import refused
from training.plan.command import main
from training.plan.methods import METHODS, RECOMMENDED, Speed, Work, predict

RESULTS = ROOT / "results"
LINK_DECIDES = 0.2  # predicted exposed share from which the link, and not the CPU, sets the speed
GBIT = Work(parameters=125e6, step=0.5, gbit=1.0)


def measured(name: str) -> tuple[dict[str, Any], dict[tuple[Any, ...], list[dict[str, Any]]]]:
    """A file of bench.scaling, and its rows of several workers by (method, tau's setting, workers, Mbit/s)."""
    found = json.loads((RESULTS / name).read_text())
    cells = defaultdict(list)
    for row in found["rows"]:
        if row["workers"] > 1:
            cells[row["method"], row["tau_setting"], row["workers"], row["rate_mbit"]].append(row)
    return found, cells


def compared(name: str, boundary: float) -> dict[tuple[Any, ...], tuple[float, Speed]]:
    """Cell -> the median of the measured steps per second of a worker, and the prediction."""
    found, cells = measured(name)
    alone = median(row["step_seconds"] for row in found["rows"] if row["workers"] == 1)
    pairs = {}
    for (method, setting, workers, mbit), rows in cells.items():
        work = Work(found["model"]["params"], alone, mbit / 1e3, boundary=boundary)
        speed = median(row["steps"] / row["seconds"] for row in rows)
        method = RECOMMENDED if method == "co2_recommended" else method
        tau = int(median(row["tau"] for row in rows))
        pairs[method, setting, workers, mbit] = speed, predict(method, work, workers, tau)
    return pairs


def test_steps_a_second_are_those_measured_where_the_link_decides_and_hidden_where_they_were():
    """Over 2 to 16 workers and 50 to 1000 Mbit/s. The link decides where at least 20 % are predicted to be exposed."""
    errors, cells = defaultdict(list), {}
    for cell, (speed, found) in compared("scaling.json", boundary=0.002).items():
        cells[cell] = found.steps_per_second / speed
        if found.exposed_share >= LINK_DECIDES:
            errors[cell[0]].append(abs(cells[cell] - 1))
    off = [cell for cell, ratio in cells.items() if abs(ratio - 1) > 0.1]
    assert (len(cells), len(off)) == (108, 10), "docs/planning.md says so"
    assert all(workers == 16 or (method, mbit) == ("ddp", 1000) for method, _, workers, mbit in off)
    every = [error for of in errors.values() for error in of]
    assert len(every) >= 30 and median(every) <= 0.10
    for method in ("ddp", "local", "slowmo", "overlap_local", "co2"):
        assert median(errors[method]) <= 0.10, (method, errors[method])
    # Four workers over 5 to 1280 Mbit/s: every cell is at the speed that the step alone allows, as predicted.
    pairs = compared("utilisation/scaling.json", boundary=0.003)
    cells = [pair for (method, setting, *_), pair in pairs.items() if (method, setting) == (RECOMMENDED, "auto")]
    assert len(cells) == 9
    for speed, found in cells:
        assert found.exposed_share == 0 and found.steps_per_second == pytest.approx(speed, rel=0.05)


def test_the_same_tau_is_chosen_and_as_many_bytes_are_sent_as_measured():
    """co2 with tau auto over float32: the predicted all-reduces, the config's margin."""
    _, cells = measured("scaling.json")
    for (method, setting, workers, mbit), rows in cells.items():
        if (method, setting) == ("co2", "auto") and mbit < 1000 and workers < 16:
            work = Work(531_440, 0.04, mbit / 1e3)
            chosen = smallest_tau(work.allreduce(workers), work.step, 0.25)
            assert chosen == pytest.approx(median(row["tau"] for row in rows), abs=1), (workers, mbit)
    work = Work(531_440, 0.04, 8e-3)
    for (method, setting, workers, _), rows in cells.items():
        if setting != "auto":
            sent = predict(method, work, workers, setting).bytes_sent
            assert all(sent == pytest.approx(row["bytes_sent_per_worker"] / row["steps"], rel=0.01) for row in rows)
    _, cells = measured("utilisation/settled/scaling.json")  # over int4, at tau 12
    for (_, _, workers, _), rows in cells.items():
        found = predict(RECOMMENDED, work, workers)
        of_twelve = found.bytes_sent * found.tau / 12
        assert found.compression == "int4"
        assert all(of_twelve == pytest.approx(row["bytes_sent_per_worker"] / row["steps"], rel=0.01) for row in rows)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_each_method_by_hand():
    """500 MB over 1 Gbit/s among 8 workers: an all-reduce of 7 s, beside steps of half a second."""
    found = {method: predict(method, GBIT, 8, tau=12) for method in METHODS}
    assert all(found[m].step_seconds == pytest.approx(0.5 + 7 / 12) for m in ("local", "slowmo", "diloco"))
    assert all(found[m].step_seconds == pytest.approx(7 / 12) for m in ("co2", "overlap_local"))
    hidden = 1 / 3 * (1 - 2**20 / 500e6)  # of the step, once the first bucket is full
    assert found["ddp"].step_seconds == pytest.approx(0.5 + 7 - hidden)
    assert found["ddp"].bytes_sent == 875e6 == 12 * found["co2"].bytes_sent
    best = found[RECOMMENDED]
    took = 7 * 132 / 1024
    assert (best.compression, best.tau, best.fragments, best.exposed_share) == ("int4", 4, 2, 0)
    assert best.allreduce_seconds == pytest.approx(took)
    assert found["co2"].exposed_share == pytest.approx(1 / 7)


def test_a_boundary_hops_and_the_link_decide_tau_and_compression():
    slow = replace(GBIT, boundary=0.1, latency=0.01)
    assert predict("co2", slow, 8, tau=48).step_seconds == pytest.approx(0.5 + 0.1 / 48)
    assert predict("local", slow, 8, tau=48).step_seconds == pytest.approx(0.5 + (0.1 + 7 + 0.14) / 48)
    assert predict(RECOMMENDED, replace(slow, boundary=0.2), 8).tau == 8, "0.2 s is 5 % of eight steps"
    assert slow.allreduce(8, "int4") == pytest.approx(7 * 132 / 1024 + 0.08)
    fast = replace(GBIT, gbit=800.0)
    found = predict(RECOMMENDED, fast, 8)
    assert (found.compression, found.tau, found.exposed_share) == ("float32", 1, 0)
    found = predict(RECOMMENDED, replace(GBIT, gbit=8e-4), 8)
    assert found.tau == 192 and found.exposed_share > 0.9


def test_the_command_lists_every_method(capsys: pytest.CaptureFixture[str]):
    main(["methods", "--parameters", "125e6", "--step", "0.5", "--gbit", "1", "--workers", "2", "10000"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(METHODS) and lines[-1].split()[:3] == ["10,000", "co2", "recommended"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("--step 0", "step=0: give a finite number above 0"),
        ("--gbit inf", "gbit=inf: give a finite number above 0"),
        ("--latency -1", "latency=-1: give a finite number, 0 or more"),
        ("--workers 1", "workers=1: give 2 to 1000000"),
        ("--tau 0", "tau=0: give 1 or more"),
    ],
)
def test_a_mistake_is_one_line(changes: str, said: str):
    with refused(said):
        main(["methods", "--parameters", "1e6", "--step", "1", "--gbit", "1", *changes.split()])
