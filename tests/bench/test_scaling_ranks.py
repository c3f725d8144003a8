"""bench.scaling itself, small: real processes over a link throttled in software, and in network namespaces."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.scaling import Job, Scaling, combine, measure_all
from bench.standin import BYTES, PARAMS, digits
from core.groups import ring_bytes
from tests.bench.emulated import python

METHODS = ["ddp", "slowmo:3", "co2:3"]
ROW = {
    *("method", "tau_setting", "tau", "workers", "rate_mbit", "repeat", "compute", "steps", "seconds"),
    *("samples_per_second", "step_seconds", "step_spread", "rounds", "exposed_seconds", "exposed_share"),
    *("allreduce_seconds", "boundary_seconds", "bytes_sent_per_worker", "late", "cpu_cores_busy"),
}


def measure(folder: Path, *options: str) -> dict[str, Any]:
    """scaling.json of a run with 1 and 2 workers at 100 Mbit/s, two repeats, steps of 20 ms."""
    small = ["--rates", "100", "--repeats", "2", "--seconds", "0.3", "--step_ms", "20", "--out"]
    said = python("-m", "bench.scaling", *small, folder, *options, timeout=120)
    assert "| rate_mbit | workers | method | tau_setting | rows |" in said
    return json.loads((folder / "scaling.json").read_text())


def check(result: dict[str, Any]) -> None:
    """What must hold however noisy the machine is."""
    assert len(result["rows"]) == 2 * 2 * len(METHODS)
    assert (result["format"], result["model"]["params"], result["step_ms"]) == (1, PARAMS, 20.0)
    assert result["model"]["bytes"] == BYTES
    for row in result["rows"]:
        assert set(row) == ROW and row["rounds"] >= 2 and row["steps"] == row["rounds"] * row["tau"]
        assert row["seconds"] > 0.6 * row["steps"] * 0.02  # steps that were late before may be caught up here
        assert 0 <= row["exposed_share"] < 1
        assert row["exposed_share"] == pytest.approx(row["exposed_seconds"] / row["seconds"], abs=0.02)
        scalars = 4 * (8 + row["workers"]) if row["tau"] > 1 else 0  # so many travel with each all-reduce of a round
        assert row["bytes_sent_per_worker"] == row["rounds"] * ring_bytes(BYTES + scalars, row["workers"])
        if row["workers"] > 1:
            assert row["allreduce_seconds"] > 0.8 * ring_bytes(BYTES, 2) * 8 / 100e6
        else:
            assert row["rate_mbit"] is None
    interleaved = [(row["workers"], row["repeat"]) for row in result["rows"]]
    assert interleaved == sorted(interleaved)
    two = {(r["method"], r["repeat"]): r for r in result["rows"] if r["workers"] == 2}
    for repeat in range(2):  # an all-reduce takes 0.17 s, three steps 0.06 s: every method waits, co2 the least
        assert two["co2", repeat]["exposed_seconds"] > 0
        assert two["co2", repeat]["samples_per_second"] > two["ddp", repeat]["samples_per_second"]


def test_a_lone_worker_has_every_figure():
    """In this process; what two or more wait for each other is measured by the tests below."""
    job = Job(Scaling(methods=tuple(METHODS), repeats=1, seconds=0.05, step_ms=4.0), 1, None, digits())
    rows = combine([measure_all(job)], step_ms=4.0)
    assert sorted(row["method"] for row in rows) == ["co2", "ddp", "slowmo"]
    for row in rows:
        assert set(row) == ROW and row["rounds"] >= 2 and row["steps"] == row["rounds"] * row["tau"]
        assert (row["rate_mbit"], row["bytes_sent_per_worker"], row["workers"]) == (None, 0, 1)
        assert row["seconds"] > 0.6 * row["steps"] * 0.004 and 0 <= row["exposed_share"] < 1


@pytest.mark.slow
def test_a_small_run_writes_everything(tmp_path: Path):
    result = measure(tmp_path, "--throttle", "--workers", "1", "2", "--methods", *METHODS)
    check(result)
    assert (result["link"], result["verified_mbit"]) == ("throttled in software", {})
    assert [path.name for path in tmp_path.iterdir()] == ["scaling.json"]


@pytest.mark.root
def test_a_small_run_in_namespaces(tmp_path: Path):
    result = measure(tmp_path, "--workers", "1", "2", "--methods", *METHODS, "overlap_local:auto")
    automatic = [r for r in result["rows"] if r["tau_setting"] == "auto" and r["workers"] == 2]
    assert len(automatic) == 2
    for row in automatic:  # 0.17 s under steps of 20 ms, with a quarter to spare
        assert 8 <= row["tau"] <= 30 and row["exposed_share"] < 0.3
    result["rows"] = [r for r in result["rows"] if r["tau_setting"] != "auto"]
    check(result)
    assert result["link"] == "namespaces + tbf" and result["verified_mbit"]["100"] == pytest.approx(100, rel=0.1)
