"""The command line, the run folder, cadences and checkpoints."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from core import UserError
from core.testing import run_distributed
from training import checkpoint
from training.counters import Averages, Every
from training.recipe import Recipe, launch, parse
from training.run import Run
from training.sampling import generator


@dataclass(frozen=True)
class Toy(Recipe):
    """A recipe of a test."""

    width: int = 3


RECIPES = {"toy_a": Toy(), "toy_b": Toy(width=5)}


def test_overrides_reach_every_level():
    recipe = parse(
        RECIPES, ["toy_b", "--method", "slowmo", "--co2.tau", "24", "--co2.clip", "None", "--optim.lr", "0.3"]
    )
    assert (recipe.name, recipe.width, recipe.method) == ("toy_b", 5, "slowmo")
    assert (recipe.co2.tau, recipe.co2.clip, recipe.optim.lr) == (24, None, 0.3)
    assert recipe.folder == Path("runs/toy_b-slowmo-seed0")


def test_unknown_recipe_suggests_the_near_one():
    with pytest.raises(UserError, match="recipe 'toy_' does not exist; did you mean toy_"):
        parse(RECIPES, ["toy_"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--widht", "3"], "--width"),
        (["--co2.tau", "0"], "tau=0: give a whole number"),
        (["--epochs", "0"], "epochs=0: give 1 or more"),
        (["--method", "dpd"], "ddp"),
        (["--co2.gap", "none"], "unstable"),
    ],
)
def test_bad_options_end_with_status_2_and_a_remedy(options: list[str], said: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as stop:
        parse(RECIPES, ["toy_a", *options])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert said in " ".join((captured.err + captured.out).replace("│", " ").split())


def test_launch_prints_one_line_for_a_users_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)

    def main() -> None:
        raise UserError("no such folder 'x': make it")

    launch(main)
    assert codes == [2]
    assert capsys.readouterr().err == "error: no such folder 'x': make it\n"


def test_launch_does_not_hide_a_bug():
    def main() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        launch(main)


def test_every_fires_once_per_period_even_when_asked_late():
    every = Every(10)
    assert [step for step in range(1, 45) if step % 7 == 0 and every.due(step)] == [14, 21, 35, 42]
    assert not any(Every(0).due(step) for step in range(100))
    assert not Every(10, start=25).due(29) and Every(10, start=25).due(30)


def test_averages_are_means_since_the_last_pop():
    means = Averages()
    means.add(loss=torch.tensor(1.0), top1=torch.tensor(0.5))
    means.add(loss=torch.tensor(3.0), top1=torch.tensor(1.0))
    assert {k: v.item() for k, v in means.pop().items()} == {"loss": 2.0, "top1": 0.75}
    means.add(loss=torch.tensor(5.0), top1=torch.tensor(0.0))
    assert means.pop()["loss"] == 5.0


def train(folder: Path, steps: int, *, resume: bool = False, stop_after: int | None = None) -> list[torch.Tensor]:
    """A few steps of a linear model under Run, with dropout so that random state matters; the final parameters."""
    recipe = replace(Toy(name="toy", batch_size=1, out=folder, resume=resume, device="cpu"), method="co2")
    recipe = replace(recipe, co2=replace(recipe.co2, tau=3))
    with Run(recipe) as run:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        wrapped, method = run.make_method(model, optimizer)
        step = run.load(method, model=model, optimizer=optimizer)
        run.progress(steps, step)
        while step < steps:
            wrapped(torch.randn(2, 4, generator=generator(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if method.step() and step == stop_after:
                run.save(step, method, model=model, optimizer=optimizer)
                break
            run.log(step, loss=float(step))
        else:
            method.finish()
            run.summarise(step)
        return [p.detach().clone() for p in model.parameters()]


def test_resume_goes_on_bit_for_bit(tmp_path: Path):
    whole = train(tmp_path / "whole", 20)
    train(tmp_path / "parts", 20, stop_after=9)
    resumed = train(tmp_path / "parts", 20, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    other = train(tmp_path / "other", 19)
    assert not all(torch.equal(a, b) for a, b in zip(whole, other, strict=True)), "the comparison must be able to fail"


def test_run_folder_is_complete_and_never_overwritten(tmp_path: Path):
    train(tmp_path, 6)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["recipe"]["co2"]["tau"] == 3 and config["versions"]["torch"] == torch.__version__
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[4]["loss"] == 5.0
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 6
    assert list(tmp_path.glob("events.out.tfevents*"))
    with pytest.raises(UserError, match="holds a run: add --resume"):
        train(tmp_path, 6)


def test_checkpoints_are_complete_or_ignored(tmp_path: Path):
    device = torch.device("cpu")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"value": step}, rank=0, world_size=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step000000002", "step000000003"]
    (tmp_path / "step000000003" / "rank0of1.pt").rename(tmp_path / "step000000003" / "rank0of1.tmp")  # killed here
    assert checkpoint.load(tmp_path, rank=0, world_size=1, device=device) == {"value": 2}
    with pytest.raises(UserError, match="was written by 1 workers, this run has 2"):
        checkpoint.load(tmp_path, rank=0, world_size=2, device=device)
    assert checkpoint.load(tmp_path / "nothing", rank=0, world_size=1, device=device) is None


def save_at_different_steps(rank: int, world_size: int, folder: str) -> tuple[int, int]:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    with Run(replace(Toy(name="toy", batch_size=2, out=Path(folder), device="cpu"), method="local")) as run:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        _, method = run.make_method(model, optimizer)
        for _ in range(3 + 2 * rank):
            optimizer.step()
            schedule.step()
            method.step()
        method.finish()
        return run.save(3 + 2 * rank, method, model=model, schedule=schedule), schedule.last_epoch


def test_workers_stopped_at_different_steps_save_one_checkpoint(tmp_path: Path):
    assert run_distributed(save_at_different_steps, 2, str(tmp_path)) == [(5, 5), (5, 5)]
    (step,) = (tmp_path / "checkpoints").iterdir()
    assert step.name == "step000000005" and len(list(step.iterdir())) == 2


def test_resuming_without_a_complete_checkpoint_says_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    train(tmp_path, 20, stop_after=9)
    next(tmp_path.glob("checkpoints/step*/rank0of1.pt")).unlink()
    train(tmp_path, 3, resume=True)
    assert f"warning: no complete checkpoint in {tmp_path}: starting from step 0" in capsys.readouterr().err
