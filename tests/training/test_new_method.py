"""A new method takes one file and one line: this file has all of it, and `register(ENTRY)` is the line."""

import sys
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from core import CO2Config, UserError, make_method
from core.baselines.local import Blocking
from core.baselines.table import MethodSpec, Settings, register
from tests.on_ranks import on_ranks
from tests.problems import refusal


@dataclass(frozen=True)
class PartwayConfig:
    share: float = 0.5
    """Of the way to the mean that a worker goes."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"partway.share={self.share}: give a number in (0, 1]")


class Partway(Blocking):
    """Every tau local steps each worker goes a part of the way to the workers' mean."""

    def __init__(self, params: Any, tau: int, config: PartwayConfig, **options: Any):
        super().__init__(params, tau, **options)
        self.config = config

    def _apply(self) -> None:
        for bucket in self.buckets:
            for p, mean in zip(bucket.params, bucket.payload_views, strict=True):
                p.lerp_(mean, self.config.share)


ENTRY = MethodSpec(
    "partway",
    lambda model, co2, own, args: (model, Partway(model.parameters(), co2.tau, own, **args)),
    "blocking",
    Settings("partway", PartwayConfig, "Of method partway."),
)

REFUSED: dict[str, dict[str, Any]] = {
    "tau='auto' is CO2's own choice": {"co2": CO2Config("auto")},
    "merge='keep_local' is CO2's own": {"co2": CO2Config(merge="keep_local", delay="auto")},
    "shard=True is CO2's own": {"shard": True},
    "elastic does not go with method='partway'": {"elastic": True},
}


@on_ranks(2)
def test_a_new_method_is_one_file_and_one_line(rank: int):
    """x0 = 2, x1 = 4 go a quarter of the way to 3; then x0 = 4.25, x1 = 7.75 to 6. Options are a command line's."""
    register(ENTRY)  # the one line, which would stand in core/baselines/table.py
    for name in [name for name in sys.modules if name.partition(".")[0] == "training"]:
        del sys.modules[name]  # imported before the line was there
    from training.recipe import Recipe, parse

    recipes = {"toy": Recipe()}
    options = ["--method", "partway", "--partway.share", "0.25", "--co2.tau", "2", "--optim.lr", "1"]
    recipe = parse(recipes, ["toy", *options])
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    wrapped, method = make_method(recipe.method, model, co2=recipe.co2, **recipe.own_settings)
    optimizer = torch.optim.SGD(model.parameters(), recipe.optim.lr)
    for _ in range(4):
        (-(rank + 1) * wrapped(torch.ones(1))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        method.step()
    assert model.weight.item() == pytest.approx((4.6875, 7.3125)[rank])
    method.finish()
    method.close()
    for expected, changes in REFUSED.items():
        assert expected in refusal(replace, recipe, **changes)
    with pytest.raises(UserError, match="partway.share=0.25 is method partway's own, method 'co2' does not have it"):
        parse(recipes, ["toy", "--partway.share", "0.25"])
    with pytest.raises(UserError, match="partway.share=0.25 is method partway's own"):
        make_method("co2", model, co2=recipe.co2, partway=recipe.partway)


def test_a_keyword_of_no_method_is_no_setting():
    with pytest.raises(UserError, match="no argument slowmoo=None"):
        make_method("slowmo", nn.Linear(1, 1), co2=CO2Config(tau=2), slowmoo=None)
