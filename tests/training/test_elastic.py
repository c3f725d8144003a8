"""Elastic runs: how samples are dealt, checkpoints of the first worker alone, and whole runs."""

import functools
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.chaos.crew import Crew
from core import CO2Config, CompressionConfig, UserError, testing
from core.checkpoint import runs as checkpoint
from core.elastic import elastic_co2
from core.elastic.members import Members
from core.tau import AdaptiveTau
from tests.runs import logged, rows, summary
from tests.training.elastic_toy import STEPS, toy
from training import elastic as elastic
from training.data.samples import train_keys
from training.elastic import Deal
from training.optim import OptimConfig, make_schedule
from training.recipe import Recipe
from training.start.script import launch

# -- data ---------------------------------------------------------------------------------------------------


def deal_out(samples: int, share: int, changes: dict[int, int], steps: int) -> list[list[tuple[int, int]]]:
    """(epoch, sample) of each step, by all workers together; changes: step -> their number from there on."""
    deal, seen = Deal(1, 0, 0, changes[0]), []
    for step in range(steps):
        if step in changes and step:
            deal = deal.again(deal.number + 1, step, changes[step], samples, share)
        at = deal.at + step - deal.since
        of_step = []
        for rank in range(deal.workers):
            recipe = SimpleNamespace(seed=3, batch_size=share * deal.workers)
            for _, keys in train_keys(recipe, samples, rank, deal.workers, at, at + 1):
                of_step += [(epoch, i) for _, epoch, i in keys]
        seen.append(of_step)
    return seen


@pytest.mark.parametrize("changes", [{0: 4, 5: 3}, {0: 2, 3: 4, 9: 1, 20: 3}, {0: 3, 4: 2, 5: 3, 6: 2}])
def test_no_sample_is_dealt_twice_and_few_are_missed(changes: dict[int, int]):
    samples, share = 100, 3
    flat = [s for step in deal_out(samples, share, changes, 40) for s in step]
    assert len(flat) == len(set(flat)), "no sample twice in an epoch"
    last = max(epoch for epoch, _ in flat)
    for epoch in range(last):
        missed = samples - sum(e == epoch for e, _ in flat)
        assert missed < share * 4 * (1 + len(changes))  # a global batch a change, and the epoch's incomplete last one


# -- checkpoints ----------------------------------------------------------------------------------------------


def first_worker(folder: Path) -> elastic.Elastic:
    """One that trains nothing."""
    return elastic.Elastic(Recipe(batch_size=1, elastic=True, device="cpu", out=folder))


def test_the_first_worker_alone_saves_what_all_others_get(tmp_path: Path, capsys: pytest.CaptureFixture):
    """In the format of any run; nothing of a model that is not finite."""
    worker, model = first_worker(tmp_path), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = make_schedule(optimizer, 9, OptimConfig())
    worker.members = Members(dist.HashStore(), "0.0")
    worker.method = elastic_co2(model.parameters(), CO2Config(tau=3), members=worker.members)
    worker.model, worker.optimizer, worker.schedule = model, optimizer, schedule
    for worker.drawn, bias in enumerate((1.0, 2.0, float("nan"), float("inf"))):
        nn.init.constant_(model.bias, bias)
        worker.save()
        assert worker._saved() == (worker.drawn < 2)
    assert capsys.readouterr().err.count("not finite: no checkpoint is written") == 2
    found = checkpoint.load_newest(worker.folder.checkpoints, rank=0)
    assert found is not None and found[1] == 1
    worker.take(worker.method, found[0])
    assert worker.drawn == 1 and model.bias.item() == 2.0


def test_its_gpu_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a run whose workers stay: pinned memory, and what names no device, would go by way of the first one."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("CO2_WORKER", raising=False)
    worker = first_worker(tmp_path)
    worker.device = torch.device("cuda:1")
    with pytest.raises(UserError, match="core.elastic.launch"):
        worker._meet()
    assert taken == [torch.device("cuda:1")]


def test_the_recommended_settings_go_with_it(monkeypatch: pytest.MonkeyPatch):
    """Compression auto means float32, and the number of fragments follows from measured times."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    co2 = replace(CO2Config.recommended(), tau=6)
    assert co2.compression.format == "auto" and Recipe(elastic=True, co2=co2).co2 == co2
    method = elastic_co2([nn.Parameter(torch.zeros(2))], co2, members=Members(dist.HashStore(), "0.0"))
    assert method.config == replace(co2, compression=CompressionConfig())
    assert method.hook(AdaptiveTau).tuner.cuts and method.hook(AdaptiveTau).tuner.given == 6


# -- whole runs -----------------------------------------------------------------------------------------------


CO2_OF_TOY = CO2Config(tau=3, gap="none", merge="keep_local", outer_momentum=0.0, outlier=20.0)
LINEAR = {"linear": True, "per_node": 1, "co2": CO2_OF_TOY, "batch_size": 6, "timeout": 20.0}
LINEAR |= {"optim": OptimConfig(momentum=0.0, schedule="constant")}
KILL, AFTER = signal.SIGKILL, 13


def crew(folder: Path, harm: Any = None, *, workers: int = 3, comes: bool = False, **more: Any) -> Crew:
    """Workers that train the toy's linear model."""
    target = functools.partial(toy, str(folder), True, harm and (*harm, AFTER), comes, **LINEAR | more)
    return Crew(testing._context(), target, (), workers, int(comes), late=90)


def train(folder: Path, *args: Any, **more: Any) -> Any:
    assert (run := crew(folder, *args, **more)).run() == 0 and not run.timed_out
    steps = [row["step"] for row in rows(folder / "run") if "train_loss" in row]
    assert steps == sorted(set(steps)) and len(steps) > STEPS - 9, "no step twice, whoever writes"
    end = summary(folder / "run")
    assert end["steps"] == STEPS and end["rounds"] == STEPS // 3, "of the run, whoever writes"
    assert end["mean"] == pytest.approx(4, abs=0.2)
    return {"notes": logged(folder / "run", "workers"), "mean": end["mean"]}


SLOW = pytest.mark.slow  # the workers' own tests, in tests/core/test_elastic.py, are like it


@pytest.mark.parametrize(
    ("where", "lost"),
    [("checkpoint", 0), ("evaluation", 0), *(pytest.param(*m, marks=SLOW) for m in (("step", 1), ("evaluation", 2)))],
)
def test_a_run_goes_on_without_a_worker(tmp_path: Path, where: str, lost: int):
    assert train(tmp_path, (f"{where} {lost}", KILL))["notes"] == [f"2 workers: {lost}.0 lost"]
    assert not list(tmp_path.glob("run/checkpoints/*.tmp*"))


@pytest.mark.slow
def test_the_first_worker_comes_back_and_the_run_is_resumed(tmp_path: Path):
    ended = train(tmp_path, ("step 0", KILL), comes=True)
    assert ended["notes"] == ["2 workers: 0.0 lost", "3 workers: 0.1 came"]
    assert train(tmp_path, resume=True)["mean"] == pytest.approx(ended["mean"], abs=1e-6)  # it ends where it was


def test_a_worker_that_ends_before_the_run_is_lost_whatever_its_status(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert train(tmp_path / "one", ("step 1", 0))["notes"] == ["2 workers: 1.0 lost"]
    assert capsys.readouterr().err.count("worker 1.0 ended before the run's end") == 1
    assert crew(tmp_path / "all", ("step", 0), workers=2).run() == 1
    assert "none came to the run's end" in capsys.readouterr().err


def lingers() -> None:
    members = Members.from_env(timeout=2.0)
    if os.environ["RANK"] == "0":
        members.end()
    else:
        time.sleep(60)


def test_a_worker_that_does_not_end_with_the_run_is_ended_and_named(capsys: pytest.CaptureFixture):
    assert (run := Crew(testing._context(), lingers, (), 2, late=40)).run() == 0 and not run.timed_out
    assert capsys.readouterr().err == "worker 1.0 did not end in time: ending it\n"


def mistaken(of_all: bool) -> None:
    def main() -> None:
        if not of_all and os.environ["RANK"] != "0":
            signal.pause()  # until the launcher ends it
        raise UserError("batch_size=47: give another")

    launch(main)


@pytest.mark.parametrize("of_all", [True, False])
def test_a_users_mistake_ends_all_in_one_line(capsys: pytest.CaptureFixture, of_all: bool):
    run = Crew(testing._context(), mistaken, (of_all,), 3, restarts=2, late=60)
    assert run.run() == 2 and not run.timed_out and run.started == [0, 0, 0]
    assert set(capsys.readouterr().err.splitlines()) == {"error: batch_size=47: give another"}


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_are_all_killed_are_told_of(capsys: pytest.CaptureFixture):
    run = Crew(testing._context(), killed, (), 3, restarts=1, late=60)
    assert run.run() == 128 + signal.SIGKILL and not run.timed_out
    *each, last = capsys.readouterr().err.splitlines()
    again = [f"worker {rank}.0 died (status -9): restarting it" for rank in range(3)]
    assert sorted(each) == sorted([*again, *(f"worker {rank}.1 was killed by signal 9" for rank in range(3))])
    assert last.startswith("error: no worker is left, and none came to the run's end: resume from")


def test_a_signal_to_one_worker_saves_and_the_run_is_resumed(tmp_path: Path):
    assert (run := crew(tmp_path, ("step 1", signal.SIGTERM))).run() == 0 and not run.timed_out
    stopped = summary(tmp_path / "run")
    assert stopped["stopped_by_signal"] == signal.SIGTERM and AFTER <= stopped["steps"] < STEPS
    train(tmp_path, resume=True, workers=2)
