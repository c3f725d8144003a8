"""The boundary's benchmark: its counts, its table, and a small run from the command line."""

import json

import pytest
import torch

from bench import boundary
from core import outer
from tests.core.test_boundary import RULES, check
from tests.scripts import run_script

ROW = {
    "parameters": 10**9,
    "way": "co2",
    "seconds": [2.0, 1.0, 4.0],
    "copy_bytes_per_second": 36e9,
    "bytes_moved": 36 * 10**9,
    "memory_counted": 12 * 10**9,
    "memory_measured": 12.5e9,
}


def test_a_row_by_hand():
    assert " | ".join(boundary.cells(ROW)) == "1e+09 | co2 | 2000 (1000 to 4000) | 36.0 | 50% | 1.2e+04 | 1.25e+04"


def test_what_does_not_fit_is_not_run():
    row = boundary.in_process(boundary.Bench(), "co2", 10**14)
    assert row["not_run"].startswith("needs about 1600001")
    assert boundary.cells({"parameters": 10**14, "way": "co2"} | row)[2].startswith("not run: needs")


@pytest.mark.parametrize("size", [1, 2048**2, 2048**2 + 5, 2 * 2048**2 + 2048 + 3])
def test_the_model_has_the_size_asked_for(size):
    assert sum(p.numel() for p in boundary.model(size, "cpu")) == size


def test_the_ways_compute_the_same():
    """Three boundaries of a training that adds 0.1 to every parameter in each round."""
    ends = []
    for way in ("co2", "fast", "plain"):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(40, 3)), torch.nn.Parameter(torch.randn(7))]
        once = boundary.WAYS[way](params)
        for _ in range(3):
            with torch.no_grad():
                torch._foreach_add_(params, 0.1)
            once()
        ends.append(torch.cat([p.detach().view(-1) for p in params]))
    start = torch.manual_seed(0) and torch.cat([torch.randn(40, 3).view(-1), torch.randn(7)])
    # Delta = -0.1 from the second boundary on: m_2 = -0.1, m_3 = -0.05 - 0.1 / (1 + 0.1 / 0.1)
    torch.testing.assert_close(ends[0], start + 0.1 + 0.1, rtol=1e-5, atol=1e-6)
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-5, atol=1e-6)


def test_the_compiled_pass_is_the_specification_compiled(monkeypatch):
    """Bit for bit where the compiler is left out, which takes half a minute; what it is given is outer.update."""
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    boundary.compiled.cache_clear()
    assert boundary.compiled() is outer.update
    held = []
    for kind in ("plain", "compiled"):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(40, 3)), torch.nn.Parameter(torch.randn(7))]
        d, x, m = torch.randn(127), *boundary.state(params)[1:]
        boundary.PASSES[kind](params, d, x, m).run(outer.Rule(0.5, 1.0, 1.0, 1.0, 1.0, c=outer.norm([d])))
        held.append([*params, d, x, m])
    boundary.compiled.cache_clear()
    assert all(map(torch.equal, *held))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_compiled_is_the_formulas(dtype):
    for name in ("elementwise", "norm", "unclipped"):
        check(boundary.CompiledBoundary, dtype, RULES[name])


@pytest.mark.parametrize("ways", [("plain",), pytest.param(("co2", "fast", "plain"), marks=pytest.mark.slow)])
def test_a_small_run(tmp_path, ways):
    options = ["--sizes", "1e5", "--ways", *ways, "--repeats", "2", "--threads", "1", "--out", str(tmp_path)]
    run_script("bench.boundary", *options)
    result = json.loads((tmp_path / "boundary.json").read_text())
    assert result["options"]["repeats"] == 2 and result["command"].startswith("python -m bench.boundary --sizes 1e5")
    rows = result["rows"]
    assert [row["way"] for row in rows] == list(ways)
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert rows[0]["bytes_moved"] == 36e5 and rows[0]["memory_counted"] == 12e5
    assert all(row["memory_measured"] > 0 for row in rows)
    assert "| 1e+05 | plain |" in (tmp_path / "boundary.md").read_text()
