"""The simulator against measured rows: the rule that tells link from cores, by hand; rows of the model's own making."""

import json
from pathlib import Path

import pytest

from bench.simulator import against
from bench.simulator.against import Cores
from tests.bench.test_calibrate import scaling_data

COST = Cores(step=0.001, round=0.004, byte=2e-9)
MEGABYTE = 1_000_000.0


def test_the_cores_load_by_hand():
    """Two workers send 2 (1/2) bytes = 1 MB a round, 2 ms of CPU; three rounds of four steps: 12 + 12 + 6 ms each."""
    row = {"method": "local", "workers": 2, "steps": 12, "rounds": 3}
    assert COST.demand(row, MEGABYTE, seconds=0.1, allreduce=1.0, cores=2) == pytest.approx(2 * 0.030 / 0.2)
    assert COST.demand(row, MEGABYTE, seconds=0.1, allreduce=1.0, cores=1) == pytest.approx(0.6)
    # an all-reduce alone: 2 x 2 ms of CPU in 2.5 ms of 2 cores
    assert COST.demand(row, MEGABYTE, seconds=0.1, allreduce=0.0025, cores=2) == pytest.approx(0.8)
    ddp = row | {"method": "ddp", "rounds": 12}  # closes no rounds, and sends every step
    assert COST.demand(ddp, MEGABYTE, seconds=0.1, allreduce=1.0, cores=2) == pytest.approx(2 * (0.012 + 0.024) / 0.2)


def with_cores(data: dict) -> dict:
    """The rows as if COST were true."""
    for row in data["rows"]:
        cpu = sum(x * c for x, c in zip(against._units(row, 4 * MEGABYTE), vars(COST).values(), strict=True))
        row["cpu_cores_busy"] = row["workers"] * cpu / row["seconds"]
    return data | {"cpu_count": 2, "commit": "abc", "date": "today"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scaling.json of the model's own making, but for one row of 16 workers, measured at half the speed."""
    path = tmp_path_factory.mktemp("results")
    data = with_cores(scaling_data())
    wrong = next(r for r in data["rows"] if (r["workers"], r["method"], r["rate_mbit"]) == (16, "slowmo", 50.0))
    wrong["samples_per_second"] /= 2
    (path / "scaling.json").write_text(json.dumps(data))
    return path


def test_what_the_rows_cost_is_recovered(folder: Path):
    rows = json.loads((folder / "scaling.json").read_text())["rows"]
    found = against.fit_cores([row for row in rows if row["workers"] < 8], 4 * MEGABYTE)
    assert (found.step, found.round, found.byte) == pytest.approx((0.001, 0.004, 2e-9), rel=1e-6)


def test_predicted_rows_agree_and_the_one_that_is_off_is_listed_with_its_load(folder: Path):
    rows = against.compare(folder).rows
    off = [row for row in rows if abs(row.error) > 0.05]
    assert [row.name for row in off] == ["slowmo, tau 48; 16 workers, 50 Mbit/s"] and off[0].error == pytest.approx(
        1, abs=0.05
    )
    assert {row.part for row in rows} == {"scaling.json, fitted to", "scaling.json, predicted"}
    # 16 workers' 16 x 7.5 MB cost 16 x 15 ms of CPU, ddp's at 1 Gbit/s within far less than 2 x 0.24 s
    busy = {row.name for row in rows if not row.link_decides}
    assert "ddp; 16 workers, 1000 Mbit/s" in busy and "ddp; 2 workers, 50 Mbit/s" not in busy
    text = against.markdown(folder)
    beyond = text.split("## Rows off")[1].split("##")[0]
    assert beyond.count("workers") == 1 and "| slowmo, tau 48; 16 workers, 50 Mbit/s |" in beyond
