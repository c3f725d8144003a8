"""Recipes from the command line, and how a mistake is reported."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from core import UserError
from training.recipe import Recipe, launch, parse


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
        (["--optim.lr", "inf"], "optim lr=inf: give a learning rate above 0 and below 10000"),
        (["--optim.lr", "nan"], "optim lr=nan: give a learning rate"),
        (["--optim.momentum", "1e308"], "optim momentum=1e+308: give a number in [0, 1)"),
        (["--optim.betas", "0.9", "1"], "optim betas=(0.9, 1.0): give numbers in [0, 1)"),
        (["--optim.nesterov", "--optim.momentum", "0"], "optim nesterov=True: give a momentum above 0 with it"),
        (["--slowmo.outer_lr", "inf"], "slowmo.outer_lr=inf: give a finite number"),
        (["--link_mbit", "0"], "link_mbit=0.0: give a rate above 0"),
        (["--timeout", "0"], "timeout=0.0: give seconds"),
        (["--timeout", "1e300"], "timeout=1e+300: give seconds"),
        (["--batch_size", "0"], "batch_size=0: give 1 or more"),
        (["--width", "100000000000000000000"], "width=100000000000000000000: give 1000000000 or less"),
        (["--seed", "-1"], "seed=-1: give 0 or more"),
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


def test_launch_prints_one_line_for_a_full_disk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)

    def main() -> None:
        with open("/dev/full", "w") as file:
            file.write("a line")

    launch(main)
    assert codes == [2]
    assert capsys.readouterr().err == (
        "error: the run folder: No space left on device; make room or choose another --out\n"
    )


def test_launch_does_not_hide_a_bug():
    def main() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        launch(main)
