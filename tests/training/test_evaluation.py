"""Of which model an evaluation in the middle of a run is: the workers' common one, or each worker's own."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from core import CO2Config
from core.testing import run_distributed
from tests.runs import Loop, rows
from tests.training.test_run import Toy
from training.data import generator
from training.optim import OptimConfig
from training.run import Run

SETTINGS = {
    "ddp": {"method": "ddp"},
    "co2": {},
    "slowmo": {"method": "slowmo"},
    "overlap_local": {"method": "overlap_local"},
    "keep": {"co2": CO2Config(tau=3, gap="none", merge="keep", delay=1)},
    "recommended": {"co2": replace(CO2Config.recommended(2), tau=3)},
    "mix": {"co2": CO2Config(tau=3, merge="mix")},
}


FAST = ["recommended", "mix"]
REST = [name for name in SETTINGS if name not in FAST]


def evaluated(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, list[bool]]:
    """Whether this worker's model was rank 0's, at each evaluation of a run with those settings."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    alike: dict[str, list[bool]] = {}

    def evaluate(run: Run, model: nn.Module) -> None:
        with run.paused():
            weight = model.weight.detach().clone()
            dist.broadcast(first := weight.clone(), 0)
            alike[name].append(bool(run.sum(float(not torch.equal(weight, first)))[0] == 0))
        run.log_evaluation({"score": 1.0})

    for name in names:
        settings = {"batch_size": 2, "optim": OptimConfig(lr=0.01, momentum=0.0, schedule="constant"), **SETTINGS[name]}
        alike[name] = []
        with Run(Toy(name="toy", out=Path(folder, name), device="cpu", **settings)) as run:
            loop = Loop(run, nn.Linear(2, 2), 12, epoch=3)
            for step in range(12):
                x = torch.randn(1, 2, generator=generator(step, rank))
                if loop.step(loop.wrapped(x).square().sum()).evaluation:
                    evaluate(run, loop.model)
            loop.method.finish()
            evaluate(run, loop.model)
            run.end({})
    return alike


@pytest.mark.parametrize("names", [FAST, pytest.param(REST, marks=pytest.mark.slow)], ids=["fast", "rest"])
def test_an_evaluation_says_of_which_model_it_is(names: list[str], tmp_path: Path):
    """It says `own` just where the workers' models do differ."""
    alike, _ = run_distributed(evaluated, 2, str(tmp_path), names)
    for name, same in alike.items():
        said = [row["of_model"] for row in rows(tmp_path / name) if "score" in row]
        assert said == ["shared" if each else "own" for each in same] and said[-1] == "shared", name
        differ = name in ("keep", "mix")
        assert (len(said) > 2) and (set(said[:-1]) == {"own" if differ else "shared"}), name
        events = EventAccumulator(str(tmp_path / name)).Reload()
        assert ("own/score" in events.Tags()["scalars"]) == differ and len(events.Scalars("score")) >= 1
