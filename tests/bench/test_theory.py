"""bench.theory: a small part of it holds, and no longer does once a formula is wrong."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import quadratic, theory
from bench.quadratic import Quadratic
from bench.theory import PARTS, Theory, page, take, variances
from core.adaptive.merging import largest_outer_lr
from tests.imports import ROOT

SMALL = Theory(replicas=1000)


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch):
    for name, values in (("QS", (-0.8, 0.3, 0.9)), ("ALPHAS", (0.3, 1.0, 1.7)), ("BETAS", (0.2,)), ("TAUS", (5,))):
        monkeypatch.setattr(theory, name, values)


@pytest.mark.parametrize("part", ["regions", "momentum", "apart"])
def test_it_holds(part: str):
    found = take(SMALL, part)
    assert found.holds and all(found.holds.values()), page([found])


def test_it_does_not_once_a_formula_is_wrong(monkeypatch: pytest.MonkeyPatch):
    polynomial, added = Quadratic.polynomial, quadratic.added
    monkeypatch.setattr(Quadratic, "polynomial", lambda self: polynomial(self) + np.eye(len(polynomial(self)))[-1] / 3)
    monkeypatch.setattr(quadratic, "added", lambda steps, q: 1.03 * added(steps, q))
    for part in ("regions", "apart"):
        assert not all(take(SMALL, part).holds.values())


@pytest.mark.parametrize(("merge", "delay", "beta"), [("outer", 8, 0.2), ("keep", 3, 0.5), ("keep", 8, 0.3)])
def test_the_variance_of_a_late_mean_is_lyapunovs(merge: str, delay: int, beta: float):
    alpha = 0.5 if merge == "outer" else 1.0
    seen, _ = variances(Theory(replicas=1500), 0.8, merge=merge, tau=8, delay=delay, alpha=alpha, beta=beta)
    assert seen == pytest.approx(Quadratic(merge, 0.8, 8, delay, alpha, beta).variance(4), rel=0.02)


@pytest.mark.parametrize(("merge", "delay"), [("keep", 12), ("keep", 9), ("mix", 5), ("outer", 0)])
def test_the_packages_limit_is_that_of_the_polynomials(merge: Any, delay: int):
    for beta in (0.0, 0.6):
        assert largest_outer_lr(merge, beta, delay / 12) == pytest.approx(
            quadratic.largest(merge, 12, delay, beta), 1e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize("part", ["limits", "staleness", "rate"])
def test_the_rest_holds(part: str):
    assert all(take(Theory(), part).holds.values())


def test_the_command_writes_its_tables_and_fails_where_one_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(theory, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr("sys.argv", ["theory", "--parts", "momentum", "--out", str(tmp_path)])
    theory.main()
    (row,) = json.loads((tmp_path / "theory.json").read_text())["rows"]
    assert row["rows"][1][:2] == ["12", "3"] and (tmp_path / "theory.md").read_text().count(": holds") == 4
    monkeypatch.setattr(quadratic, "momentum_inside", lambda mu, lh, steps: np.eye(2) * lh[:, None, None])
    with pytest.raises(SystemExit, match="4 did not hold"):
        theory.main()


def test_the_committed_tables_are_whole_and_hold():
    text = (ROOT / "results" / "theory.md").read_text()
    assert len(re.findall("^## ", text, re.MULTILINE)) == len(PARTS) and "DOES NOT HOLD" not in text
