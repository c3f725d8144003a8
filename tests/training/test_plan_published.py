"""Published figures beside the planner's formulas: results/plan.json has what they give."""

import json
from pathlib import Path

import pytest

from results import paper
from tests.training import published
from training.plan.case import device, preset, presets

RESULTS = Path(__file__).parents[2] / "results"
FOUND = json.loads((RESULTS / "plan.json").read_text())


def test_the_cells_are_megatron_s_and_the_presets_have_the_constants_fitted_to_four_of_them():
    m = FOUND["megatron"]
    assert [row["published"] for row in m["rows"]] == [137, 138, 142, 135, 138, 140, 148, 155, 163, 163]
    assert [i for i, row in enumerate(m["rows"]) if row["fitted"]] == [0, 3, 6, 9]
    k = m["constants"]
    cluster = published.with_constants(preset("selene"), k["top"], k["passes"], k["inside"])
    predicted = [published.tflops(cell, cluster) for cell in published.MEGATRON_CELLS]
    assert predicted == pytest.approx([row["predicted"] for row in m["rows"]], rel=1e-6)
    off = [abs(p / cell[-1] - 1) for p, cell in zip(predicted, published.MEGATRON_CELLS, strict=True)]
    assert max(off[i] for i in (1, 2, 4, 5, 7, 8)) == pytest.approx(m["worst_of_six"]) and m["worst_of_six"] <= 0.10
    assert m["worst_of_constant"] == pytest.approx(146 / 163 * -1 + 1)
    k = FOUND["megatron"]["constants"]
    cells = [published.MEGATRON_CELLS[i] for i in published.FITTED]
    again = published.fit(cells, preset("selene"))
    assert (again.device.top, again.device.passes) == pytest.approx((k["top"], k["passes"]), rel=1e-3)
    for name in presets()["devices"]:
        assert (device(name).top, device(name).passes) == (round(k["top"], 2), round(k["passes"], 2))
    for name in ("dgx-a100-roce", "dgx-a100-tcp", "selene"):
        assert preset(name).inside == round(k["inside"], -9)


def test_co2_s_gain_is_within_a_fifth_and_frontier_s_spans_hold_the_published_figures():
    found = published.co2()
    assert found == pytest.approx(FOUND["co2"]) and abs(found["off"]) <= 0.2
    assert found["published"] == pytest.approx(13.4, abs=0.05)
    assert sorted(published.WORDS.values()) == sorted(paper.WORDS_PER_SECOND.values())
    found = published.frontier()
    for name, span in found["spans"].items():
        kept = FOUND["frontier"]["spans"][name]
        assert all(span[key] == pytest.approx(kept[key], rel=1e-6) for key in kept), name
        assert span["span"][0] < span["published"] < span["span"][1]
    for name in published.ASSUMED["22B"]:
        at = published.frontier_share("22B", name, 1, published.fitted_to_22b(name))
        assert at == pytest.approx(0.3838, rel=1e-3)
