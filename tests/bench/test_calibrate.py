"""Calibration: constants recovered from rows that the model itself made, and rows held out."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import utilisation
from bench.simulator import calibrate
from bench.simulator.events import simulate
from core.errors import UserError

TRUE = calibrate.Constants(
    step=0.04,
    spread=0.0006,
    link=calibrate.Link(0.9, 0.004, 0.02),
    hidden_link=calibrate.Link(0.7, 0.004, 0.02),
    ddp_link=calibrate.Link(0.8, 0.001, 0.005),
    boundary={"": 0.004, "ddp": 0.0002, "local": 0.003, "co2": 0.006},
    overlap=0.6,
)
BYTES, BATCH = 4_000_000, 8
CELLS = [("ddp", 1), ("local", 12), ("slowmo", 48), ("overlap_local", 12), ("co2", 3), ("co2", 12), ("co2", 48)]


def scaling_row(method: str, tau: int, workers: int, rate: float | None, seed: int) -> dict:
    """A row as bench.scaling would write it, had the model with TRUE constants run."""
    row = dict(method=method, tau_setting=tau, tau=tau, workers=workers, rate_mbit=rate, repeat=0, compute="stand-in")
    work = calibrate.work_of(row, TRUE, BYTES)
    rounds = max(4, 96 // tau)
    run = simulate(method, work, tau, rounds + 1, seed=seed, warmup=1)
    noise = np.random.default_rng([seed, 99]).normal(1, 0.002, 3)
    return row | dict(
        steps=round(run.steps),
        seconds=run.seconds,
        samples_per_second=workers * BATCH * run.steps / run.seconds,
        step_seconds=TRUE.step * noise[0],
        step_spread=TRUE.spread * noise[1],
        rounds=rounds,
        exposed_seconds=run.exposed_seconds,
        exposed_share=run.exposed_share,
        allreduce_seconds=run.allreduce_seconds,
        boundary_seconds=work.boundary * noise[2],
        bytes_sent_per_worker=0,
        late=False,
    )


def scaling_data(workers=(2, 4, 8, 16), rates=(50.0, 200.0, 1000.0)) -> dict:
    rows = [scaling_row(m, tau, 1, None, 7) for m, tau in CELLS]
    for n in workers:
        for rate in rates:
            rows += [scaling_row(m, tau, n, rate, 1000 + len(rows) + i) for i, (m, tau) in enumerate(CELLS)]
    model = {"params": BYTES // 4, "bytes": BYTES, "layers": 8}
    return {"format": 1, "link": "namespaces + tbf", "model": model, "step_ms": 40.0, "batch": BATCH, "rows": rows}


def test_calibration_recovers_the_constants_from_the_smaller_counts():
    data = scaling_data()
    fitted, held_out, words = calibrate.split(data["rows"])
    assert words == "fitted to workers 2, 4; held out: workers 8, 16" and len(held_out) == 2 * 3 * 7
    c = calibrate.fit(fitted, BYTES)
    assert (c.step, c.spread) == pytest.approx((TRUE.step, TRUE.spread), rel=0.01)
    for mine, true in ((c.link, TRUE.link), (c.hidden_link, TRUE.hidden_link), (c.ddp_link, TRUE.ddp_link)):
        assert mine.efficiency == pytest.approx(true.efficiency, rel=0.01)
        assert mine.latency == pytest.approx(true.latency, rel=0.1, abs=2e-4)
        assert mine.overhead == pytest.approx(true.overhead, rel=0.1, abs=1e-3)
    assert c.overlap == pytest.approx(TRUE.overlap, abs=0.05)
    assert c.boundary["co2"] == pytest.approx(0.006, rel=0.01)
    errors = [calibrate.predict(row, c, BYTES, BATCH)[0] / row["samples_per_second"] - 1 for row in held_out]
    assert np.median(np.abs(errors)) < 0.005 and np.abs(errors).max() < 0.02
    shares = [calibrate.predict(row, c, BYTES, BATCH)[1] - row["exposed_share"] for row in held_out]
    assert np.abs(shares).max() < 0.015


def test_what_is_held_out_falls_back_to_rates():
    four = scaling_data(workers=(4,), rates=(50.0, 200.0, 1000.0))["rows"]
    fitted, held_out, words = calibrate.split(four)
    assert {r["rate_mbit"] for r in fitted} == {None, 50.0, 1000.0} and {r["rate_mbit"] for r in held_out} == {200.0}
    assert "rate_mbit 200" in words
    with pytest.raises(UserError, match="two worker counts"):
        calibrate.split([r for r in four if r["rate_mbit"] == 50.0])


def test_bad_files_name_what_is_wrong(tmp_path: Path):
    path = tmp_path / "scaling.json"
    row = scaling_row("local", 12, 2, 50.0, 0)
    data = {"format": 1, "model": {"params": 1, "bytes": 4}, "batch": 8, "rows": [row]}
    lacking = {key: value for key, value in row.items() if key != "tau"}
    cases = {
        "{": "not JSON",
        "[]": "not of format 1",
        json.dumps(data | {"format": 2}): "not of format 1",
        json.dumps(data | {"rows": []}): "no rows",
        json.dumps(data | {"model": {"params": 1}}): "model lacks bytes",
        json.dumps(data | {"rows": [lacking]}): "row 0 lacks tau",
        json.dumps(data | {"rows": [row | {"method": "magic"}]}): "method 'magic'",
        json.dumps(data | {"rows": [row | {"seconds": 0}]}): "seconds is 0",
        json.dumps(data | {"rows": [row | {"rate_mbit": None}]}): "rate_mbit=None",
    }
    for text, words in cases.items():
        path.write_text(text)
        with pytest.raises(UserError, match=words):
            calibrate.read(path)


# -- utilisation ------------------------------------------------------------------------------------------------


def test_the_rate_needed_by_hand():
    """From 0.4 to 0.8 between 10 and 100 Mbit/s: 0.6 at the geometric mean; what comes after a dip counts."""
    points = [(10.0, 0.4), (100.0, 0.8), (1000.0, 0.99)]
    shares = (0.3, 0.4, 0.6, 0.8, 0.99, 0.999)
    assert [utilisation.needed(points, share) for share in shares] == ["< 10", "< 10", "31.6", "100", "1000", "> 1000"]
    assert utilisation.needed([(1.0, 0.9), (2.0, 0.5), (4.0, 1.0)], 0.75) == "2.83"


def test_measured_and_modelled_agree_where_the_model_made_the_rows():
    """Local-SGD at tau 12 waits for every all-reduce: 0.48 s of computing, so half of the time at 0.48 s of waiting."""
    data = scaling_data(workers=(4,), rates=(10.0, 20.0, 50.0, 100.0, 200.0, 1000.0)) | {
        "date": "today",
        "commit": "abc",
    }
    lines = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in utilisation.markdown(data).splitlines()
    }
    seen, model = lines["local tau 12"][0].split(" (")
    assert float(seen) == pytest.approx(float(model.rstrip(") |")), rel=0.1)
    rate = (
        2 * 3 / 4 * BYTES * 8e-6 / TRUE.link.efficiency / (12 * TRUE.step - 6 * TRUE.link.latency - TRUE.link.overhead)
    )
    assert float(seen) == pytest.approx(rate, rel=0.1)
    assert float(lines["co2 tau 48"][0].split(" (")[0].strip("< ")) < float(seen)
    assert lines["ddp"][4].startswith("> 1000")


def test_too_few_rates_are_refused():
    data = scaling_data(workers=(4,), rates=(50.0, 200.0)) | {"date": "today", "commit": "abc"}
    with pytest.raises(UserError, match="rates 50, 200: measure at three rates or more"):
        utilisation.markdown(data)
