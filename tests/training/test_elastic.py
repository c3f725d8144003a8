"""Elastic runs: how samples are dealt, checkpoints of the first worker alone, and whole runs."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.chaos.crew import Crew, wrap
from core import CO2Config, CompressionConfig, UserError, testing
from core.checkpoint import runs as checkpoint
from core.elastic.joining import elastic_co2
from core.elastic.members import Members
from core.tau import AdaptiveTau
from tests.runs import Loop, logged, rows, summary
from training import elastic as elastic
from training.data.samples import generator, worker_batches
from training.elastic import Deal, repeated
from training.folder.rounds import RoundLog
from training.folder.run_folder import RunFolder
from training.loop.progress import Progress, TrainState
from training.loop.run import Run
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
            place = {"seed": 3, "rank": rank, "world_size": deal.workers, "start": at, "total": at + 1}
            for epoch, _, index in worker_batches(samples, share * deal.workers, **place):
                of_step += [(epoch, i) for i in index.tolist()]
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


def first_worker(folder: Path, device: torch.device | None = None) -> elastic.Elastic:
    """One that trains nothing."""
    progress = Progress(Recipe(batch_size=1), device or torch.device("cpu"))
    run_folder = RunFolder(folder, 0, progress.clock)
    return elastic.Elastic(progress, run_folder, RoundLog(progress.recipe, run_folder, progress.device))


def test_the_first_worker_alone_saves_what_all_others_get(tmp_path: Path, capsys: pytest.CaptureFixture):
    """In the format of any run; nothing of a model that is not finite."""
    worker, model = first_worker(tmp_path), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = make_schedule(optimizer, 9, OptimConfig())
    worker.members = Members(dist.HashStore(), "0.0")
    worker.method, _ = elastic_co2(model.parameters(), CO2Config(tau=3), members=worker.members)
    worker._trained = TrainState(model, optimizer, schedule, worker.method, "co2", worker.run.snapshots)
    for worker.drawn, bias in enumerate((1.0, 2.0, float("nan"), float("inf"))):
        nn.init.constant_(model.bias, bias)
        worker.save()
        assert worker.saved() == (worker.drawn < 2)
    assert capsys.readouterr().err.count("not finite: no checkpoint is written") == 2
    found = checkpoint.load_newest(worker.folder.checkpoints, rank=0)
    assert found is not None and found[1] == 1
    worker.restore(found[0])
    assert worker.drawn == 1 and model.bias.item() == 2.0


def test_its_gpu_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As in a run whose workers stay: pinned memory, and what names no device, would go by way of the first one."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.delenv("CO2_WORKER", raising=False)
    with pytest.raises(UserError, match="training.launch"):
        first_worker(tmp_path, torch.device("cuda:1")).meet()
    assert taken == [torch.device("cuda:1")]


def test_the_recommended_settings_go_with_it():
    """Their compression and fragments are auto. Elastic workers make float32 and 1 of them."""
    co2 = replace(CO2Config.recommended(4), tau=6)
    assert co2.compression.format == "auto" and Recipe(elastic=True, co2=co2).co2 == co2
    method, joining = elastic_co2([nn.Parameter(torch.zeros(2))], co2, members=Members(dist.HashStore(), "0.0"))
    assert method.config == replace(co2, compression=CompressionConfig(), fragments=1)
    assert method.hooks[0] is joining and not any(isinstance(hook, AdaptiveTau) for hook in method.hooks)


# -- whole runs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toy(Recipe):
    """Rounds of three steps."""

    co2: CO2Config = CO2Config(tau=3, gap="none", merge="keep_local", outer_momentum=0.0, outlier=20.0)
    optim: OptimConfig = OptimConfig(momentum=0.0, schedule="constant")
    batch_size: int = 6
    log_every: int = 1
    elastic: bool = True
    timeout: float = 20.0


STEPS, EPOCH, SAMPLES = 40, 8, 48


def toy(folder: str, where: str, who: str, resume: bool, pace: float) -> None:
    """A linear model on numbers, evaluated on its weights; dies where the test says."""
    recipe = Toy(name="toy", out=Path(folder), device="cpu", resume=resume)

    def dies(here: str) -> None:
        if where == here and os.environ["CO2_WORKER"] in who and run.step > 12:
            if here == "exit":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGTERM if here == "signal" else signal.SIGKILL)

    write = checkpoint.publish

    def half(*paths: Any) -> None:
        dies("checkpoint")
        write(*paths)

    checkpoint.publish = half
    # who leads after the first worker is late for the next sum, by more than workers have to connect
    wrap(RunFolder, "lead", lambda *_: time.sleep(float(os.environ["CO2_WORKER"] != "0.0")))

    def batches(recipe: Toy, rank: int, world_size: int, start: int, total: int) -> Any:
        place = {"seed": 0, "rank": rank, "world_size": world_size, "start": start, "total": total}
        for _, _, index in worker_batches(SAMPLES, recipe.batch_size, **place):
            yield torch.stack([torch.randn(4, generator=generator(i)) for i in index.tolist()])

    @repeated
    def evaluate() -> float:
        dies("evaluation")
        total, count = run.sum(sum(p.sum().item() for p in loop.model.parameters()), 1.0)
        run.folder.log(run.step, {"mean": total / count})
        return total / count

    with Run(recipe) as run:
        loop = Loop(run, nn.Linear(4, 1), STEPS, EPOCH, SAMPLES)
        for x in run.batches(batches):
            dies("step")
            dies("signal")
            dies("exit")
            time.sleep(pace)
            due = loop.step((loop.wrapped(x) - x.sum(1, keepdim=True)).square().mean())
            if due.evaluation:
                evaluate()
            if due.checkpoint:
                run.save()
            if due.stop:
                return run.stop()
        loop.method.finish()
        run.end({"mean": evaluate()})


def train(
    folder: Path, where: str = "", who: str = "", resume: bool = False, pace: float = 0.0, workers: int = 3
) -> Any:
    crew = Crew(testing._context(), toy, (str(folder), where, who, resume, pace), workers, int(pace > 0), late=90)
    assert crew.run() == 0 and not crew.timed_out
    steps = [row["step"] for row in rows(folder) if "train_loss" in row]
    assert steps == sorted(set(steps)) and len(steps) > STEPS - 9, "no step twice, whoever writes"
    end = summary(folder)
    assert end["steps"] == STEPS and end["rounds"] == STEPS // 3, "of the run, whoever writes"
    assert end["mean"] == pytest.approx(4, abs=0.2)
    return {"notes": logged(folder, "workers"), "mean": end["mean"]}


SLOW = pytest.mark.slow  # the workers' own tests, in tests/core/test_elastic.py, are like it


DEATHS = [("checkpoint", "0.0"), ("evaluation", "0.0")]
MORE = [pytest.param(*death, marks=SLOW) for death in (("step", "1.0"), ("evaluation", "2.0"))]


@pytest.mark.parametrize(("where", "who"), DEATHS + MORE)
def test_a_run_goes_on_without_a_worker(tmp_path: Path, where: str, who: str):
    assert train(tmp_path, where, who)["notes"] == [f"2 workers: {who} lost"]
    assert not list(tmp_path.glob("checkpoints/*.tmp*"))


@pytest.mark.slow
def test_the_first_worker_comes_back_and_the_run_is_resumed(tmp_path: Path):
    ended = train(tmp_path, "step", "0.0", pace=0.25)
    assert ended["notes"] == ["2 workers: 0.0 lost", "3 workers: 0.1 came"]
    assert train(tmp_path, resume=True)["mean"] == pytest.approx(ended["mean"], abs=1e-6)  # it ends where it was


def test_a_worker_that_ends_before_the_run_is_lost_whatever_its_status(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert train(tmp_path / "one", "exit", "1.0")["notes"] == ["2 workers: 1.0 lost"]
    assert capsys.readouterr().err.count("worker 1.0 ended before the run's end") == 1
    crew = Crew(testing._context(), toy, (str(tmp_path / "all"), "exit", "0.0 1.0", False, 0.0), 2, late=90)
    assert crew.run() == 1 and "none came to the run's end" in capsys.readouterr().err


def lingers() -> None:
    members = Members.from_env(timeout=2.0)
    if os.environ["RANK"] == "0":
        members.end()
    else:
        time.sleep(60)


def test_a_worker_that_does_not_end_with_the_run_is_ended_and_named(capsys: pytest.CaptureFixture):
    crew = Crew(testing._context(), lingers, (), 2, late=40)
    assert crew.run() == 0 and not crew.timed_out
    assert capsys.readouterr().err == "worker 1.0 did not end in time: ending it\n"


def mistaken(of_all: bool) -> None:
    def main() -> None:
        if not of_all and os.environ["RANK"] != "0":
            signal.pause()  # until the launcher ends it
        raise UserError("batch_size=47: give another")

    launch(main)


@pytest.mark.parametrize("of_all", [True, False])
def test_a_users_mistake_ends_all_in_one_line(capsys: pytest.CaptureFixture, of_all: bool):
    crew = Crew(testing._context(), mistaken, (of_all,), 3, restarts=2, late=60)
    assert crew.run() == 2 and not crew.timed_out and crew.started == [0, 0, 0]
    assert set(capsys.readouterr().err.splitlines()) == {"error: batch_size=47: give another"}


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("restarts", [0, 1])
def test_workers_that_are_all_killed_are_told_of(capsys: pytest.CaptureFixture, restarts: int):
    crew = Crew(testing._context(), killed, (), 3, restarts=restarts, late=60)
    assert crew.run() == 128 + signal.SIGKILL and not crew.timed_out
    *each, last = capsys.readouterr().err.splitlines()
    again = [f"worker {rank}.0 died (status -9): restarting it" for rank in range(3)] if restarts else []
    assert sorted(each) == sorted([*again, *(f"worker {rank}.{restarts} was killed by signal 9" for rank in range(3))])
    assert last.startswith("error: no worker is left, and none came to the run's end: --resume continues from")


def test_a_signal_to_one_worker_saves_and_the_run_is_resumed(tmp_path: Path):
    crew = Crew(testing._context(), toy, (str(tmp_path), "signal", "1.0", False, 0.0), 3, late=60)
    assert crew.run() == 0 and not crew.timed_out
    stopped = summary(tmp_path)
    assert stopped["stopped_by_signal"] == signal.SIGTERM and 12 < stopped["steps"] < STEPS
    train(tmp_path, resume=True, workers=2)
