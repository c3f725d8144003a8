"""What L-GreCo may choose from, what that costs and loses, by hand; and the settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core import UserError
from core.assembly.config import WireConfig
from core.lgreco.choices import Choice, Layer, LGrecoConfig, family, may_take, padded_bytes, parse, sent_bytes, uniform
from core.lgreco.decide import ITERATIONS, Decider, curve
from tests.core.test_lgreco import built
from training.data import generator


def test_costs_by_hand():
    """A matrix 40 x 30, float32, four workers: 1.5 messages of what is reduced, three of what is gathered."""
    layer = Layer(0, 0, 1200, 40, 30, 4, (40, 30))
    costs = {"int4": 1200 * 132 / 256 * 1.5, "int2": 1200 * 68 / 256 * 1.5}
    for name, bytes in (costs | {"rank4": 4 * 70 * 4 * 1.5, "top0.01": 12 * 8 * 3}).items():
        assert sent_bytes(layer, parse(name), 4) == pytest.approx(bytes)
    assert sent_bytes(layer, Choice("raw"), 4) == 4800 * 1.5
    assert sent_bytes(layer, parse("top0.01"), 1) == 96, "one worker decides as one of two"


def test_padding_by_hand():
    """Two layers of 100 and 300 elements in int4, four workers: each worker's chunk is one block, 132 bytes of it are
    sent six times, a quarter for the small one. Alone in its bucket, or its format, a layer pads for itself."""
    small, large, other = (Layer(b, 0, n, n, 1, 4, (n,)) for b, n in ((0, 100), (0, 300), (1, 300)))
    int4, int8 = parse("int4"), parse("int8")
    together = padded_bytes([small, large, other], [int4, int4, int4], 4)
    assert together == pytest.approx([6 * 132 / 4, 6 * 132 * 3 / 4, 6 * 132])
    assert padded_bytes([small, large], [int4, int8], 4) == pytest.approx([6 * 132, 6 * 260])
    assert padded_bytes([small], [Choice("raw")], 4) == [600]


def test_formats_merge_where_padding_costs_more_than_they_save():
    """Two layers of 8,000 elements, of which int4 loses no more than int8 does, and two of 64: one needs int8, one is
    of zeros. The zeros could do with int2, which alone is a block for each worker; in int4's last there is room."""
    layers = [Layer(0, 0, n, n, 1, 4, (n,)) for n in (8000, 8000, 64, 64)]
    decider = Decider(layers, "int8", LGrecoConfig(), 4)
    large, hard, zeros = {2: 9.0, 4: 1.0, 8: 1.0}, {2: 9.0, 4: 9.0, 8: 2.0}, {}
    curves = [[each.get(int(c.value), 0.0) for c in decider.choices] for each in (large, large, hard, zeros)]
    found = decider.decide(torch.tensor(curves).double(), decider.uniform, 1)
    assert [str(c) for c in found.choices] == ["int4", "int4", "int8", "int4"]
    assert [sum(found.bytes), found.uniform_bytes] == pytest.approx([6 * (16 * 132 + 260), 6 * 16 * 260])
    assert sum(found.errors) <= 4, "the uniform setting's"


def test_curves_by_hand():
    """diag(4, 3, 2, 1): rank r leaves the root of the squares of the rest; top-k what the smallest add up to."""
    matrix = torch.zeros(40, 30, dtype=torch.float64)
    matrix[range(4), range(4)] = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    layer = Layer(0, 0, 1200, 40, 30, 8, (40, 30))
    choices = [Choice("raw"), Choice("rank", 1), Choice("rank", 3), Choice("top", 2 / 1200), parse("int2")]
    errors = curve(matrix.view(-1), layer, choices, [True] * 5, seed=0)
    assert errors.tolist() == pytest.approx([0.0, 14**0.5, 1.0, 5**0.5, 6**0.5], abs=2e-3)
    assert errors[[0, 3, 4]].tolist() == pytest.approx([0.0, 5**0.5, 6**0.5], abs=1e-12)
    assert (errors[1:3] >= torch.tensor([14**0.5, 1.0]) - 1e-12).all(), "iterations find no more than is there"
    # int2: all four lie in the first block, whose step is 4: 3 becomes 4, 2 (half a step, to even) and 1 become 0
    assert curve(matrix.view(-1) * float("nan"), layer, choices, [True] * 5, seed=0).isnan().all()
    assert curve(matrix.view(-1), layer, choices, [True] * 4 + [False], seed=0)[4].isinf()


def test_the_curve_of_ranks_is_each_ranks_own():
    """One power iteration of the highest rank gives the errors that iterations of each rank alone give."""
    matrix = torch.randn(50, 30, generator=generator(4), dtype=torch.float64) * 0.8 ** torch.arange(30)
    layer = Layer(0, 0, 1500, 50, 30, 8, (50, 30))
    ranks = [Choice("rank", r) for r in (1, 2, 5, 12, 30)]
    errors = curve(matrix.view(-1), layer, ranks, [True] * 5, seed=3)
    for choice, error in zip(ranks, errors.tolist(), strict=True):
        q = torch.randn(30, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64)[:, : int(choice.value)]
        for _ in range(ITERATIONS):
            p = torch.linalg.qr(matrix @ q).Q
            q = matrix.T @ p
        assert error == pytest.approx(float((matrix - p @ q.T).norm()), abs=1e-6)


def test_choices_of_each_family():
    of_int4, of_rank4 = (",".join(map(str, family(parse(like), 0.5, 2))) for like in ("int4", "rank4"))
    assert of_int4 == "as it is,int4,int2,int8"
    assert of_rank4 == "as it is,rank4,rank2,rank3,rank5,rank6,rank7,rank8"
    tops = [c.value for c in family(parse("top0.01"), 0.5, 2) if c.kind == "top"]
    assert sorted(tops) == pytest.approx([0.01 * 10 ** (i / 4 - 1) for i in range(9)])
    reducer = built("rank4", LGrecoConfig(highest_rank=1e9)).reducer
    assert max(c.value for c in reducer.decider.choices) == 48, "no more than the highest that a layer has"
    small = reducer.layers[3]
    assert str(uniform(small, parse("rank4"))) == "as it is", "a vector has no rank"
    choices, matrix = reducer.decider.choices, reducer.layers[0]
    assert may_take(small, choices, parse("rank4")) == [str(c) == "as it is" for c in choices]
    assert not may_take(matrix, choices, parse("rank4"))[0], "nor is a matrix sent as it is"


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"format": "lgreco"}, "wire.like='': give int2"),
        ({"format": "lgreco", "like": "int7"}, "wire.like='int7': give int2"),
        ({"format": "lgreco", "like": "top0.7"}, "wire.like='top0.7': give"),
        ({"format": "lgreco", "like": "rank0"}, "such as rank4"),
        ({"format": "lgreco", "like": "rank2.5"}, "wire.like='rank2.5'"),
        ({"format": "lgreco", "like": "rank" + 400 * "9"}, "such as rank4"),
        ({"format": "lgreco", "like": "int4", "error_feedback": False}, "always feeds back"),
        ({"format": "int4", "like": "int4"}, "wire.like='int4' is of wire.format lgreco, not int4"),
        ({"format": "int4", "lgreco": LGrecoConfig(every=3)}, "is of wire.format lgreco, not int4"),
    ],
)
def test_bad_settings(settings: dict[str, Any], text: str):
    with pytest.raises(UserError) as caught:
        WireConfig(**settings)
    assert text in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rule", "best"), ("rule", "bench.rules.Accordion"), ("lowest_rank", 2.0)]
    + [("highest_rank", 0.5), ("every", 0), ("first", 1.5)]
    + [("rule", 5), ("lowest_rank", "1"), ("highest_rank", "2"), ("first", True)],
)
def test_bad_lgreco_settings(name: str, value: Any):
    with pytest.raises(UserError, match=f"wire.lgreco.{name}={value!r}: "):
        LGrecoConfig(**{name: value})


def test_what_saves_nothing_anywhere_is_refused():
    with pytest.raises(UserError, match="wire.like='rank1000' would save nothing in any parameter of this model"):
        built("rank1000", LGrecoConfig())
