"""Each worker's own part of a checkpoint, where the files are not what one save has written; the process's end."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import CO2, CO2Config, UserError
from core.checkpoint.runs import random_state, set_random_state
from core.integrations.common import load_own, save_own
from core.testing import run_distributed
from tests.imports import ROOT
from tests.on_ranks import on_ranks, total_world_size
from tests.problems import refusal, sgd_step

ENDS = """
import atexit, sys
import torch.distributed as dist
from core.integrations.common import leave_at_exit
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
atexit.register(lambda: print("still a member:", dist.is_initialized()))  # called after what is registered later
leave_at_exit()
leave_at_exit()
"""


def loads(folder: str, **parts: object) -> str:
    try:
        load_own("Test", folder, **parts)
        return ""
    except UserError as error:
        return str(error)


def spoilt(rank: int, world_size: int, folder: str) -> list[str]:
    """What each worker is told of a checkpoint as it was written, and of three that a kill may leave."""
    model = torch.nn.Linear(2, 2)
    co2 = CO2(model.parameters(), CO2Config(tau=2))
    for name, steps in (("old", 2), ("new", 3)):
        for step in range(steps):
            sgd_step(model.parameters(), rank, step)
            co2.step()
        save_own("Test", f"{folder}/{name}", co2=co2)
    dist.barrier()
    if rank == 0:
        for name in ("lacks", "mixed", "damaged"):
            shutil.copytree(f"{folder}/new", f"{folder}/{name}")
        old, *files = (next(Path(folder, n).glob("step*")) / "rank1.pt" for n in ("old", "lacks", "mixed", "damaged"))
        files[0].unlink()
        shutil.copy(old, files[1])
        files[2].write_bytes(b"PK")
    dist.barrier()
    told = [loads(f"{folder}/{name}", co2=co2) for name in ("new", "lacks", "mixed", "damaged")]
    told.append(loads(f"{folder}/new", co2=co2, scaler=co2))
    co2.finish()
    co2.close()
    return told


def test_a_checkpoint_of_a_cpu_has_no_random_state_for_a_gpu():
    state = random_state(torch.device("cpu"))
    expected = torch.rand(3)
    set_random_state(state, torch.device("cuda"))
    assert torch.equal(torch.rand(3), expected)


class Warmup:
    """A schedule's factor, as an object."""

    def __init__(self, steps: object = 10):
        self.steps = steps

    def __call__(self, step: int) -> float:
        return 0.5


class Stateful(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["warmup"] = Warmup()


def parts(kind: str) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = (Stateful if kind == "optimizer" else torch.optim.SGD)(model.parameters(), lr=0.1)
    factor = {"schedule": Warmup(Warmup()), "local": Warmup(lambda: 0)}.get(kind, Warmup())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    optimizer.step()
    co2 = CO2(model.parameters(), CO2Config(tau=2))
    return {"optimizer": optimizer, "schedule": schedule, "co2": co2}


PATHS = {"optimizer": "optimizer.state.0.warmup", "schedule": "schedule.lr_lambdas.0.steps"}


@pytest.mark.parametrize("kind", PATHS)
def test_an_object_that_torch_would_not_load_is_refused_with_its_path_and_class(kind: str, tmp_path: Path):
    name = f"{__name__}.Warmup"
    with pytest.raises(UserError) as refusal:
        save_own("Test", tmp_path / "own", **parts(kind))
    said = str(refusal.value)
    assert said.startswith(f"Test: {PATHS[kind]} is a {name}, ") and f"add_safe_globals([{name}])" in said
    assert not (tmp_path / "own").exists()
    with torch.serialization.safe_globals([Warmup]):
        save_own("Test", tmp_path / "own", **parts(kind))
        load_own("Test", tmp_path / "own", **(restored := parts(kind)))
    if kind == "schedule":
        assert isinstance(restored["schedule"].lr_lambdas[0].steps, Warmup)
    with pytest.raises(UserError, match="cannot be read"):
        load_own("Test", tmp_path / "own", **parts(kind))


def test_what_cannot_be_pickled_is_refused_with_its_path(tmp_path: Path):
    with pytest.raises(UserError, match="schedule.lr_lambdas.0.steps is a builtins.function, which cannot be saved"):
        save_own("Test", tmp_path, **parts("local"))


@on_ranks(2)
def test_an_object_on_one_worker_is_refused_by_all(rank: int, tmp_path: Path):
    said = refusal(save_own, "Test", str(tmp_path), **parts("schedule" if rank else "none"))
    assert "Warmup" in said and total_world_size(said) == [said] * 2


def test_files_that_no_one_save_has_written_are_refused_by_all(tmp_path: Path):
    first, second = run_distributed(spoilt, 2, str(tmp_path))
    assert first == second
    whole, lacks, mixed, damaged, other = first
    assert not whole
    assert "rank1.pt is missing" in lacks and "rank1.pt is damaged, its" in mixed
    assert "rank1.pt is damaged, its size differs" in damaged and "holds no scaler" in other
    assert all(line.startswith("Test: ") and line.endswith("or resume from an older checkpoint") for line in first[1:])
    assert all("\n" not in line for line in first)


@pytest.mark.slow
def test_the_process_leaves_torch_distributed_where_it_ends_well(tmp_path: Path):
    """After an exception it waits for nobody."""
    started = []
    for number, (last, member) in enumerate((("", False), ("raise SystemExit(0)", False), ("1 / 0", True))):
        command = [sys.executable, "-c", ENDS + last, str(tmp_path / f"store{number}")]
        started.append((member, subprocess.Popen(command, cwd=ROOT, text=True, stdout=-1, stderr=-1)))
    for member, process in started:
        said, errors = process.communicate(timeout=120)
        assert (said, process.returncode) == (f"still a member: {member}\n", int(member)), errors
