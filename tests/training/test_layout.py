"""A layout's name, where its ranks stand, and what is refused of it, in one line that names the value and a remedy."""

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from core import CO2Config, UserError
from language.model import build_model
from language.recipes import RECIPES
from tests.layouts import build
from tests.scripts import refused
from training.checks import check_start
from training.layout import Layout, Place
from training.layouts.parallel import check_cut, take_stage
from training.recipe import parse

NAMES = {
    "tp2.pp2.dp2": Layout(tp=2, pp=2, dp=2),
    "tp2.pp4.dp1.v2.mb8.fsdp.co2x3": Layout(tp=2, pp=4, v=2, microbatches=8, zero=3, islands=3),
    "tp1.pp1.dp4.zero1": Layout(dp=4, zero=1),
    "tp1.pp1.dp4.zero2.co2x2": Layout(dp=4, zero=2, islands=2),
}


def test_a_name_is_read_and_written():
    """Axes of size one may be left out, and axes come in any order."""
    for name, layout in NAMES.items():
        assert Layout.parse(name) == layout and str(layout) == name
    assert Layout.parse("co2x2.pp2.zero3.dp2") == Layout(pp=2, dp=2, zero=3, islands=2)


def test_every_rank_has_a_place_of_its_own_and_parts_of_stages_cover_the_layers_once():
    layout = Layout(tp=2, pp=3, dp=2, islands=2)
    places = [layout.place(rank) for rank in range(layout.devices)]
    assert len({*places}) == 24 and places[:3] == [Place(0, 0, 0, 0), Place(0, 0, 0, 1), Place(0, 0, 1, 0)]
    assert [layout.rank(place) for place in places] == list(range(24))
    assert (layout.island_size, layout.data_workers, layout.parts) == (12, 4, 3)
    layout = Layout(pp=2, v=3, microbatches=4)
    found = [layout.layers_of(stage, 12) for stage in (0, 1)]
    assert found[0] == [range(0, 2), range(4, 6), range(8, 10)]
    assert sorted(i for own in found for part in own for i in part) == list(range(12))


def cut(heads: int, key_heads: int, vocabulary: int) -> Callable[[str], object]:
    sizes = {"layers": 8, "heads": heads, "key_heads": key_heads, "vocabulary": vocabulary}
    return lambda name: Layout.parse(name).check_model(**sizes)


def cut_gpt2(name: str) -> None:
    check_cut(build("gpt2"), Layout.parse(name))


def cut_transnormer(name: str) -> None:
    with torch.device("meta"):
        model = build_model("transnormer_tiny", vocab_size=64, context=8, dropout=0.0)
    check_cut(model, Layout.parse(name))


def train_by(name: str) -> None:
    parse(RECIPES, ["gpt2_pydoc_small", "--layout", *name.split()])


@pytest.mark.parametrize(
    ("asked", "name", "part"),
    [
        (Layout.parse, "tp2.xx2", "'xx2' is no axis"),
        (Layout.parse, "tp2.tp4", "has tp twice"),
        (Layout.parse, "tp0", "tp is 0: give 1 or more"),
        (Layout.parse, "dp2.zero4", "zero4: there are the ZeRO stages 1, 2 and 3"),
        (Layout.parse, "pp4.mb2", "2 micro-batches: fewer than 4 stages: give mb4 or more"),
        (Layout.parse, "pp4.v2.mb6", "v2 with mb6: needs a multiple of pp=4: give mb8"),
        (lambda name: Layout.parse(name).check_runs(), "tp2.fsdp", "fsdp: dp is 1, nothing to share out"),
        (cut_gpt2, "tp3", "tp=3 does not divide 8 attention heads: give tp 2 or 4"),
        (cut_gpt2, "pp2.v3.mb2", "pp * v = 6 does not divide 8 layers: give pp * v 4 or 8"),
        (cut(8, 2, 64), "tp4", "2 heads of keys"),
        (cut_transnormer, "pp2", "give one of gpt2, llama"),
        (train_by, "pp2.dp2 --method co2", "it is of method ddp, given is 'co2'"),
        (train_by, "pp2.dp2 --zero 2", "zero=2 does not go with layout=tp1.pp2.dp2: leave it out"),
        (train_by, "pp2.dp2 --batch_size 30", "choose a multiple of 4, such as 32"),
        (train_by, "pp2.dp2 --dry_run", "python -m training.plan"),
        (train_by, "tp2.dp2.zero1", "takes no DTensors"),
    ],
)
def test_what_cannot_be_is_refused(asked: Callable[[str], object], name: str, part: str):
    with refused(part):
        asked(name)


@pytest.mark.parametrize(("given", "near"), [(30, 32), (1, 8), (0, 8), (12, 16), (11, 8)])
def test_a_batch_that_does_not_divide_names_the_nearest_that_does(given: int, near: int):
    with pytest.raises(UserError, match=f"choose a multiple of 8, such as {near}$"):
        Layout(pp=4, dp=2).check_batch(given)
    Layout(pp=4, dp=2).check_batch(near)


@pytest.mark.parametrize(("started", "said"), [(8, "8 processes were started: start 4"), (1, "1 process was started")])
def test_another_number_of_processes_is_refused(started: int, said: str):
    with pytest.raises(UserError, match=said):
        Layout(tp=2, pp=2).check_devices(started)
    Layout(tp=2, pp=2).check_devices(4)


def test_the_layout_s_name_says_the_method_and_other_recipes_are_as_they_were():
    assert parse(RECIPES, ["gpt2_pydoc_small", "--layout", "tp2.pp2"]).method == "ddp"
    between = parse(RECIPES, ["gpt2_pydoc_small", "--layout", "tp2.co2x2"])
    assert between.method == "co2" and between.recommended and between.data_workers(4) == 2
    assert all(recipe.layout == "" for recipe in RECIPES.values())
    recipe: Any = dataclasses.replace(RECIPES["gpt2_pydoc_small"], layout="dp4.fsdp", method="ddp")
    assert recipe.data_workers(4) == 4


def test_fragments_of_ranks_that_hold_stages_are_refused_before_the_run():
    config = dataclasses.replace(CO2Config.recommended(tau=6), fragments=2)
    recipe: Any = dataclasses.replace(RECIPES["gpt2_pydoc_small"], layout="dp2.co2x2", method="co2", co2=config)
    check_start(recipe, 4)
    with refused("fragments=2: each stage cuts its own part"):
        check_start(dataclasses.replace(recipe, layout="pp2.co2x2"), 4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_stages_one_after_the_other_are_the_whole_model(kind: str):
    """Every layer in one part, in order, with the names of the whole model."""
    tokens = torch.arange(8).view(2, 4)
    whole, layout = build(kind), Layout(pp=2, v=2, microbatches=2)
    expected = whole(tokens).logits
    models = [build(kind) for _ in range(layout.pp)]
    parts = [take_stage(model, layout, stage) for stage, model in enumerate(models)]
    x: Any = tokens
    for i, stage in product(range(layout.v), range(layout.pp)):
        x = parts[stage][i](x)
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
    names = [{name for name, _ in model.named_parameters()} for model in models]
    shared = {"transformer.wte.weight"} if kind == "gpt2" else set()
    assert names[0] & names[1] == shared
    take_stage(whole, Layout(dp=2), 0)
    assert names[0] | names[1] == {name for name, _ in whole.named_parameters()}
