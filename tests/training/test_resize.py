"""Checkpoints of a whole run: how many bytes they take, and another number of workers that goes on with them."""

import contextlib
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core import UserError
from core.testing import run_distributed
from tests.runs import Loop, Toy
from training.data.samples import generator
from training.loop.run import Run

SAVED, LANDED, STEPS = 9, 12, 14  # what is sent at step 9, where a round ends, lands at step 12


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Linear(50, 2))


def train(recipe: Toy, save_at: int = 0, until: int = STEPS) -> tuple[dict[int, list[Tensor]], list[Tensor]]:
    """Trains to step `until`, with a checkpoint at `save_at`; the parameters at some steps, and what Adam held at the
    start."""
    with Run(recipe) as run:
        loop, seen = Loop(run, network(), STEPS), {}
        held = [s["exp_avg"].clone() for s in loop.optimizer.state.values()]
        for step in range(loop.start, until):
            x = torch.randn(5, 40, generator=generator(step, run.rank))
            due = loop.step(loop.wrapped(x).square().mean())
            seen[run.step] = [p.detach().clone() for p in loop.model.parameters()]
            if run.step == save_at or due.checkpoint:
                run.save()
        if until == SAVED:
            held = [s["exp_avg"].clone() for s in loop.optimizer.state.values()]
    return seen, held


def workers(rank: int, world_size: int, folder: str, resume: bool, changes: dict[str, Any]) -> Any:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    recipe = replace(Toy(out=Path(folder), resume=resume), **changes)
    try:
        if resume:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                return *train(recipe), said.getvalue()
        _, held = train(recipe, SAVED, SAVED)
        os.rename(folder, f"{folder} kept") if rank == 0 else None
        torch.distributed.barrier()
        seen, _ = train(recipe, 0, STEPS)
        torch.distributed.barrier()
        if rank == 0:
            os.rename(folder, f"{folder} whole")
            os.rename(f"{folder} kept", folder)
        return seen, held
    except UserError as error:
        return str(error)


def by_worker(folder: Path, n: int, resume: bool, **changes: Any) -> list[Any]:
    return run_distributed(workers, n, str(folder), resume, changes, timeout=120)


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.allclose(x, y, rtol=1e-6, atol=1e-7) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of a run of three workers that was saved, and what they saw."""
    folder = tmp_path_factory.mktemp("three") / "run"
    return folder, by_worker(folder, 3, resume=False)


def test_fewer_and_more_workers_go_on_from_the_same_outer_iterate(of_three: tuple[Path, list[Any]], tmp_path: Path):
    """What they start from at step 12 is what the three that saved at step 9 had sent until then."""
    saved, whole = of_three
    for n, said in ((2, "optimizer's states of rank 2 and above are dropped"), (4, "rank 3 and above copy")):
        copied = tmp_path / str(n)
        shutil.copytree(saved, copied)
        resumed = by_worker(copied, n, resume=True)
        for rank, (seen, held, told) in enumerate(resumed):
            assert (rank > 0) ^ (f"warning: 3 workers wrote the checkpoint, {n} go on: " in told and said in told)
            assert min(seen) == SAVED + 1
            assert equal(seen[LANDED], whole[0][0][LANDED]) and not equal(seen[LANDED], whole[0][0][SAVED]), (n, rank)
            assert equal(held, whole[rank % 3][1]), "Adam's state is its own, or a copy"
        history = json.loads((copied / "config.json").read_text())["history"]
        assert history[-1]["world_size"] == n and history[-1]["step"] == SAVED


def test_a_manifest_that_names_fewer_workers_than_wrote_it_is_refused(of_three: tuple[Path, list[Any]], tmp_path: Path):
    shutil.copytree(of_three[0], tmp_path / "run")
    for file in (tmp_path / "run").glob("checkpoints/*/manifest.json"):
        manifest = json.loads(file.read_text())
        file.write_text(json.dumps({"files": {"rank0.pt": manifest["files"]["rank0.pt"]}}))
    (said,) = by_worker(tmp_path / "run", 1, resume=True)
    assert "manifest.json is damaged, it names other workers than those that wrote the checkpoint" in said


def test_what_is_cut_for_a_number_of_workers_needs_as_many(tmp_path: Path):
    by_worker(tmp_path / "run", 2, resume=False, shard=True)
    refused = by_worker(tmp_path / "run", 1, resume=True, shard=True)
    assert "is of 2 workers, here there are 1" in refused[0] and "resume with as many" in refused[0]


def nbytes(folder: Path) -> float:
    """Of the newest checkpoint's tensors, without what says where they lie."""
    newest = max((folder / "checkpoints").glob("step*"))
    return sum(path.stat().st_size for path in newest.glob("*.pt"))


@pytest.mark.parametrize(("n", "light"), [pytest.param(1, False, marks=pytest.mark.slow), (2, False), (2, True)])
def test_bytes_of_a_checkpoint(n: int, light: bool, tmp_path: Path):
    """Adam's 8 bytes a parameter and worker; and once 16: the parameters, the outer iterate, the momentum, and what is
    in flight. A light one has one worker's Adam. The rest, as random states of 5 kB and 1.5 kB around a tensor, is the
    same for both."""
    numel = {width: width * width + width for width in (100, 400)}
    run_distributed(wide, n, str(tmp_path), list(numel), light, timeout=120)
    small, large = (nbytes(tmp_path / str(width)) for width in numel)
    assert (large - small) / (numel[400] - numel[100]) == pytest.approx(8 * (1 if light else n) + 16, abs=0.01)


def wide(rank: int, world_size: int, folder: str, widths: list[int], light: bool) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    for width in widths:
        save_wide(rank, Path(folder, str(width)), width, light)


def save_wide(rank: int, folder: Path, width: int, light: bool) -> None:
    with Run(Toy(out=folder, light_checkpoints=light)) as run:
        loop = Loop(run, model := nn.Linear(width, width), STEPS)
        for step in range(SAVED):
            loop.step(loop.wrapped(torch.randn(5, width, generator=generator(step, rank))).square().mean())
        run.save()
    file = folder / "checkpoints" / f"step{SAVED:09d}" / "rank0.pt"
    read = torch.load(file, weights_only=True)  # by torch's own means
    assert all(torch.equal(read["model"][name], p) for name, p in model.named_parameters())


def timed(rank: int, world_size: int, folder: str, methods: list[str]) -> dict[str, list[int]]:
    """At which steps checkpoints are due where a minute lasts twenty steps, by rank 0's clock."""
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": "1"}
    found: dict[str, list[int]] = {}
    clock = [0.0]
    for name in methods:
        recipe = Toy(out=Path(folder, name), method=name, checkpoint_every="1minutes", eval_every="1minutes")
        with Run(recipe) as run:
            run._now = lambda: clock[0] if rank == 0 else 1e9
            loop, found[name] = Loop(run, nn.Linear(2, 2), 60), []
            for step in range(1, 61):
                clock[0] += 3.0
                due = loop.step(loop.wrapped(torch.ones(1, 2)).sum())
                assert due.evaluation == due.checkpoint
                if due.checkpoint:
                    found[name].append(step)
                    run.save()
            loop.method.finish()
    return found


def test_checkpoints_by_the_minute_are_due_on_all_workers_at_once(tmp_path: Path):
    zero, one = run_distributed(timed, 2, str(tmp_path), ["co2", "ddp"], timeout=120)
    assert zero == one
    assert zero["co2"] == [27, 48], "a minute is over where the round ends at 21, sent at 24, and landed at 27"
    assert zero["ddp"] == [32, 56], "over at step 20, sent after step 24, read after step 32"
    alone = timed(0, 1, str(tmp_path / "alone"), ["co2", "ddp"])
    assert alone == {"co2": [21, 42], "ddp": [20, 40]}
