"""The boundary's benchmark: its model, its memory, and a small run from the command line; the compiled pass."""

import json
import mmap

import pytest
import torch

from bench import boundary
from bench.boundary import peak_bytes, reset_peak
from bench.gpu import measures
from core import outer
from tests.core.test_outer import RULES, check
from tests.scripts import run_script


def test_what_does_not_fit_is_not_run():
    row = boundary.in_process(boundary.Bench(), 10**14)
    assert row["not_run"].startswith("needs about 1600001")
    (line,) = boundary.TABLES["rows"].lines([{"parameters": 10**14} | row])
    assert line[0] == str(10**14) and line[1].startswith("needs about") and line[3] == ""


@pytest.mark.parametrize("size", [1, 2048**2, 2048**2 + 5, 2 * 2048**2 + 2048 + 3])
def test_the_model_has_the_size_asked_for(size):
    assert sum(p.numel() for p in boundary.model(size, "cpu")) == size


def test_the_compiled_pass_is_the_specification_compiled(monkeypatch):
    """Bit for bit where the compiler is left out, which takes half a minute; what it is given is outer.update."""
    monkeypatch.setattr(torch, "compile", lambda f, dynamic: f)
    measures.compiled.cache_clear()
    assert measures.compiled() is outer.update
    held = []
    for kind in (outer.Boundary, measures.CompiledBoundary):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(40, 3)), torch.nn.Parameter(torch.randn(7))]
        d, x, m = torch.randn(127), *measures.state(params)[1:]
        kind(params, d, x, m).run(outer.Rule(0.5, 1.0, 1.0, 1.0, 1.0, c=outer.norm([d])))
        held.append([*params, d, x, m])
    measures.compiled.cache_clear()
    assert all(map(torch.equal, *held))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_compiled_is_the_formulas(dtype):
    for name in ("elementwise", "norm", "unclipped"):
        check(measures.CompiledBoundary, dtype, RULES[name])


def test_a_small_run(tmp_path, capsys):
    run_script("bench.boundary", "--sizes", "1e5", "--repeats", "2", "--threads", "1", "--out", str(tmp_path))
    result = json.loads((tmp_path / "boundary.json").read_text())
    assert result["options"]["repeats"] == 2 and result["command"].startswith("python -m bench.boundary --sizes 1e5")
    (row,) = result["rows"]
    assert row["way"] == "co2" and len(row["seconds"]) == 2 and min(row["seconds"]) > 0
    assert row["bytes_moved"] == 36e5 and row["memory_counted"] == 12e5 and row["memory_measured"] > 0
    assert "| 100000 |" in capsys.readouterr().out


def test_the_peak_is_that_since_the_reset():
    base = reset_peak()
    with mmap.mmap(-1, 32 << 20) as held:  # what malloc gives may have been resident before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    assert 30 << 20 < peak_bytes() - base < 60 << 20 and reset_peak() - base < 16 << 20
