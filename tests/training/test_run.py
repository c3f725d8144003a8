"""The run around a loop: its folder, what is due after a step, signals, resuming, evaluations, what the host reads."""

import json
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from core import CO2Config, UserError
from core.testing import run_distributed
from tests.on_ranks import on_ranks
from tests.runs import Loop, Plain, rows, summary
from training.data.samples import generator
from training.folder.run_folder import table
from training.loop.run import Run
from training.optim import OptimConfig
from training.weights.evaluate import evaluate_run


@dataclass(frozen=True)
class Toy(Plain):
    """A linear model, rounds of three steps."""

    co2: CO2Config = CO2Config(tau=3)
    optim: OptimConfig = OptimConfig(schedule="constant")
    batch_size: int = 1
    log_every: int = 1


def train(folder: Path, steps: int, *, crash_at: int | None = None, **settings: Any) -> list[torch.Tensor]:
    """A few steps of a linear model under Run, with dropout so that random state matters; the final parameters."""
    recipe = Toy(out=folder, **settings)
    with Run(recipe) as run:
        loop = Loop(run, nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), steps)
        for step in range(loop.start, steps):
            loss = loop.wrapped(torch.randn(2, 4, generator=generator(step))).square().sum()
            loop.step(loss)
            if run.step == crash_at:
                run.save()
                break
        else:
            loop.method.finish()
            run.end({"loss": loss.item()})
        return [p.detach().clone() for p in loop.model.parameters()]


def test_a_resume_on_data_that_give_another_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train(tmp_path / "now", 12, crash_at=6)
    said = r"is a run of 12 steps, .* and with these data it has 15: restore the data, add --extend .* another --out"
    with pytest.raises(UserError, match=said):
        train(tmp_path / "now", 15, resume=True)
    train(tmp_path / "now", 15, crash_at=9, resume=True, extend=True)
    train(tmp_path / "now", 18, resume=True)  # --extend stays set
    counted = Run._counted
    monkeypatch.setattr(Run, "_counted", lambda self: {k: v for k, v in counted(self).items() if k != "total"})
    train(tmp_path / "older", 12, crash_at=6)
    monkeypatch.undo()
    train(tmp_path / "older", 15, resume=True)
    assert summary(tmp_path / "older")["steps"] == 15


def test_a_run_folder_is_complete_and_shown_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture):
    """The table has units behind the numbers; TensorBoard has the settings beside the results."""
    train(tmp_path, 6)
    title, *lines = capsys.readouterr().out.splitlines()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["recipe"]["co2"]["tau"] == 3 and config["versions"]["torch"] == torch.__version__
    steps = [row for row in rows(tmp_path) if "train_loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6] and steps[4]["lr"] == 0.1
    assert {"seconds", "train_loss", "hidden_share"} <= steps[4].keys()
    assert [row["step"] for row in rows(tmp_path) if "round/tau" in row] == [3, 6]
    end = summary(tmp_path)
    assert end["steps"] == 6 and end["loss"] == steps[-1]["train_loss"] and end["rounds"] == 2
    assert title == f"toy co2: {tmp_path}"
    shown = {line[:26].strip(): line[26:].split() for line in lines}
    assert shown["steps"] == ["6"] and shown["seconds"][1] == "s" and shown["steps per second"][1] == "steps/s"
    assert shown["hidden share"][1] == "%" and shown["bytes sent"] == ["0", "MB"]
    said = table({"test_top1": 0.98765, "bytes_sent": 2_549_000})
    assert said.split() == ["test", "top1", "98.77", "%", "bytes", "sent", "2.549", "MB"]
    events = EventAccumulator(str(tmp_path)).Reload()
    plugin = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(plugin).session_start_info.hparams
    assert settings["co2.tau"].number_value == 3 and settings["method"].string_value == "co2"
    assert [event.value for event in events.Scalars("summary/steps")] == [6]


def test_an_evaluation_writes_to_a_new_folder_or_refuses_before_it_begins(tmp_path, monkeypatch):
    train(tmp_path / "run", 3)
    opened = []

    def open_task(recipe: Toy) -> Any:
        opened.append(recipe)
        return nn.Sequential(nn.Linear(4, 4)), lambda run: {"loss": 1.0}

    def evaluate(out: Path) -> None:
        monkeypatch.setattr("sys.argv", ["toy", str(tmp_path / "run"), "--device", "cpu", "--out", str(out)])
        evaluate_run(Toy, open_task, "toy.evaluate")

    evaluate(out := tmp_path / "new" / "folder" / "results.json")
    assert json.loads(out.read_text()) == {"loss": 1.0} and len(opened) == 1
    for bad, said in ((out / "results.json", "File exists|Not a directory"), (out.parent, "Is a directory")):
        with pytest.raises(UserError, match=rf"out={bad}: cannot be written \(({said})\): give another file"):
            evaluate(bad)
    assert len(opened) == 1 and [*out.parent.iterdir()] == [out]


def test_a_run_shorter_than_a_round_warns(tmp_path: Path, capsys: pytest.CaptureFixture):
    train(tmp_path / "a", 2)
    said = "warning: 2 steps are less than a round of tau=3: give a smaller --co2.tau or more --epochs\n"
    assert said in capsys.readouterr().err
    train(tmp_path / "b", 3)
    assert "warning" not in capsys.readouterr().err


def due_steps(recipe: Toy, epoch: int, total: int) -> tuple[list[int], list[int], list[int]]:
    """The steps at which evaluations, checkpoints and the stop are due, a round being three steps long."""
    with Run(recipe) as run:
        loop = Loop(run, nn.Linear(1, 1), total, epoch)
        found: tuple[list[int], list[int], list[int]] = ([], [], [])
        for step in range(1, total + 1):
            due = loop.step(torch.tensor(0.0))
            for steps, is_due in zip(found, (due.evaluation, due.checkpoint, due.stop), strict=True):
                steps += [step] * is_due
    return found


def test_evaluations_and_checkpoints_are_due_where_rounds_close_but_not_at_the_end(tmp_path: Path):
    recipe = Toy(eval_every=1, checkpoint_every=2, out=tmp_path / "a")
    assert due_steps(recipe, epoch=4, total=12) == ([6, 9], [9], [])  # 12, the end, would be due for both
    assert due_steps(replace(recipe, checkpoint_every=0, out=tmp_path / "b"), 6, 18) == ([6, 12], [], [])
    often = replace(recipe, eval_every=0.5, checkpoint_every=0, out=tmp_path / "c")
    assert due_steps(often, 6, 12) == ([3, 6, 9], [], [])
    assert replace(often, eval_every=0.01).interval("eval_every", 6) == (1, 0)
    by_steps = replace(recipe, eval_every="4steps", checkpoint_every="1.5epochs", out=tmp_path / "d")
    assert due_steps(by_steps, 6, 21) == ([6, 9, 12, 18], [9, 18], [])
    by_time = replace(recipe, eval_every="1e-9minutes", checkpoint_every="1e-9minutes", out=tmp_path / "e")
    assert due_steps(by_time, 6, 12) == ([3, 6, 9], [3, 6, 9], [])


STOPS = {
    "co2": 15,  # sent at step 12, and lands at 15
    "local": 12,  # sent at step 12, and lands there
    "ddp": 24,  # sent after step 16, and read after step 24
}


@on_ranks(2)
def test_a_signal_to_one_worker_stops_all_at_the_same_step(rank: int, tmp_path: Path):
    """Only the slow rank 1 gets the signal, in mid-round; rank 0 may by then wait for it in an evaluation's sum."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    for method, stops in STOPS.items():
        recipe = Toy(batch_size=2, out=tmp_path / method, method=method)
        with Run(recipe) as run:
            loop = Loop(run, nn.Linear(2, 2), 200, epoch=3)
            for step in range(1, 201):
                time.sleep(0.002 * rank)
                if rank == 1 and step == 11:  # a round is three steps long
                    signal.raise_signal(signal.SIGUSR1)
                due = loop.step(loop.wrapped(torch.ones(1, 2)).sum())
                if due.evaluation:
                    run.sum(1.0)
                if due.stop:
                    break
            run.stop()
            assert (run.step, loop.schedule.last_epoch) == (stops, stops), method
        if rank == 0:
            end = summary(tmp_path / method)
            assert end["stopped_by_signal"] == signal.SIGUSR1 and end["steps"] == stops


def test_resuming_without_a_complete_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    train(tmp_path, 20, crash_at=9)
    whole = next(tmp_path.glob("checkpoints/step*"))
    whole.rename(f"{whole}.tmp-0")  # killed before it was whole
    train(tmp_path, 3, resume=True)
    assert f"warning: no complete checkpoint in {tmp_path}/checkpoints: starting from step 0" in capsys.readouterr().err


# -- of which model an evaluation is: the workers' common one, or each worker's own -----------------------------------


SETTINGS = {
    "ddp": {"method": "ddp"},
    "co2": {},
    "slowmo": {"method": "slowmo"},
    "overlap_local": {"method": "overlap_local"},
    "keep_local": {"co2": CO2Config(tau=3, gap="none", merge="keep_local", delay=1)},
    "recommended": {"co2": replace(CO2Config.recommended(), tau=3)},
}


FAST = ["recommended", "keep_local"]
REST = [name for name in SETTINGS if name not in FAST]


def evaluated(rank: int, world_size: int, folder: str, names: list[str]) -> dict[str, list[bool]]:
    """Whether this worker's model was rank 0's, at each evaluation of a run with those settings."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    alike: dict[str, list[bool]] = {}

    def evaluate(run: Run, model: nn.Module) -> None:
        with run.paused():
            assert not model.training
            weight = model.weight.detach().clone()
            dist.broadcast(first := weight.clone(), 0)
            alike[name].append(bool(run.sum(float(not torch.equal(weight, first)))[0] == 0))
        assert model.training
        run.log_evaluation({"score": 1.0})

    for name in names:
        settings = {"batch_size": 2, "optim": OptimConfig(lr=0.01, momentum=0.0, schedule="constant"), **SETTINGS[name]}
        alike[name] = []
        with Run(Toy(out=Path(folder, name), **settings)) as run:
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
        differ = name == "keep_local"
        assert (len(said) > 2) and (set(said[:-1]) == {"own" if differ else "shared"}), name
        events = EventAccumulator(str(tmp_path / name)).Reload()
        assert ("own/score" in events.Tags()["scalars"]) == differ and len(events.Scalars("score")) >= 1
