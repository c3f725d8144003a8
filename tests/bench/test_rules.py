"""The rules that L-GreCo is compared with, plugged into its reducer."""

from __future__ import annotations

import pytest
import torch

from bench.rules import calm
from core.assembly.wire import WireConfig
from core.lgreco.config import LGrecoConfig
from tests.problems import Mean


def built(like: str, rule: str) -> Mean:
    config = LGrecoConfig(rule=f"bench.rules.{rule}", first=1, every=1)
    shapes = [(99, 101), (100, 100), (5000,)]
    wire = WireConfig("lgreco", like=like, lgreco=config)
    return Mean([torch.zeros(s) for s in shapes], {"steps": 1, "weight": 1}, wire.reducer)


def reduced(mean: Mean, scale: torch.Tensor) -> list[str]:
    """The choices after a reduction of noise, each layer times its number in `scale`."""
    bucket = mean.buckets[0]
    draw = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([p.numel() for p in bucket.params])
    for flat in (flat for name in ("error_feedback", "mean_error_feedback") for flat in mean.reducer.state[name]):
        flat.zero_()
    bucket.payload.copy_(draw * scale.repeat_interleave(sizes))
    mean.reduce()
    return [str(c) for c in mean.reducer.chosen]


def test_accordions_criterion():
    before, now = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0]), torch.tensor([1.4, 1.6, 0.3, 1.0, 2.0])
    assert calm(before, now).tolist() == [True, False, False, False, True]
    assert calm(before, now, eta=0.8).tolist() == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("like", "less", "more"),
    [("int4", "int2", "int8"), ("top0.01", "top0.005", "top0.02"), ("rank4", "rank2", "rank8")],
)
def test_accordion_sends_more_where_norms_change(like: str, less: str, more: str):
    """Twice the setting at first, half where a norm stays as it was, twice where it doubles; a vector has no rank."""
    mean = built(like, "Accordion")
    vector = {"rank4": ["as it is"] * 3}.get(like, [more, less, more])
    assert reduced(mean, torch.ones(3)) == [more, more, vector[0]]
    assert reduced(mean, torch.ones(3)) == [less, less, vector[1]]
    assert reduced(mean, torch.tensor([1.0, 2.0, 2.0])) == [less, more, vector[2]]


@pytest.mark.parametrize(("like", "small"), [("int4", "int8"), ("top0.01", "top0.1"), ("rank4", "rank8")])
def test_legacys_rule_of_sizes(like: str, small: str):
    """Fewer than 10,000 elements: as released, ten times the density. A vector is sent as it is where ranks are."""
    mean = built(like, "Legacy")
    vector = "as it is" if like == "rank4" else small
    for _ in range(2):
        assert [str(c) for c in mean.reducer.chosen] == [small, like, vector], "and nothing is ever chosen anew"
        mean.launch(), mean.wait()
    assert mean.reducer.allocation is None
