"""How many functions of core a boundary calls: a reader follows each of them."""

import os
import sys
import warnings
from typing import Any

import torch
from torch import nn

import core
from core import CO2, CO2Config
from core.testing import run_distributed

ROOT = os.path.dirname(core.__file__)
RECOMMENDED = {"gap": "none", "merge": "keep_local", "outer_momentum": 0.0, "delay": 2}
CONFIGS = {"paper": CO2Config.paper(4), "on arrival": CO2Config(4, **RECOMMENDED)}  # pyright: ignore[reportArgumentType]


def steps(rank: int, world_size: int, config: CO2Config) -> list[list[str]]:
    """The files of core's functions that a round's last two calls of step() call, in their order, after many rounds."""
    warnings.simplefilter("ignore")
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer, co2 = torch.optim.SGD(model.parameters(), 0.05), CO2(model.parameters(), config)
    called: list[list[str]] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            called[-1].append(os.path.relpath(frame.f_code.co_filename, ROOT))

    for step in range(1, 45):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        called.append([])
        sys.setprofile(note if step > 42 else None)
        closed = co2.step()
        sys.setprofile(None)
    assert closed
    co2.finish()
    co2.close()
    return called[-2:]


def test_a_boundary_calls_few_functions_in_few_files():
    for name, config in CONFIGS.items():
        before, called = run_distributed(steps, 2, config)[0]
        changes = sum(a != b for a, b in zip(called, called[1:], strict=False))
        returns = changes - (len({*called}) - 1)  # changes to a file that was visited before
        assert 0 < len(before) <= 6, f"{name}: {len(before)} calls of a step that closes nothing"
        assert 20 < len(called) <= 100, f"{name}: {len(called)} calls"
        assert len({*called}) <= (9 if name == "paper" else 10), f"{name}: {sorted({*called})}"
        assert changes <= 30 and returns <= 22, f"{name}: {changes} changes of file, {returns} of them back"
