"""What the planner says: each number can be followed, rows are whole, what cannot be is not said."""

import re

import pytest
import torch

from core import UserError
from tests.training.test_plan_search import of
from training.layouts.layout import Layout
from training.plan import command, memory, time
from training.plan.case import Case, Layouts, Software, preset, preset_model
from training.plan.command import main
from training.plan.search import plan


def test_each_number_of_a_stage_by_hand():
    """tp4.pp2.dp16.v2: activations, what passes, hops."""
    model, cluster = preset_model("gpt-22b", None), preset("dgx-a100-tcp")
    p = plan(Case(model, cluster, Software(), 512, Layouts(1, 1, 1, 1, 1)), Layout.parse("tp4.pp2.dp16.v2.mb16.zero1"))
    c = p.at(p.best[0])
    first, seconds, (kept, more) = memory.of_stage(c, False), time.seconds(c), c.of_block
    assert first["activations"] == pytest.approx((24 * kept + c.given) * 2 * (1 + 1 / 4))
    assert first["passing"] == pytest.approx(more + 4 * c.block)
    assert time.hop(c) == pytest.approx(c.given / 1e9 + 50e-6)  # 64 of a node's ranks share 8 GB/s
    assert seconds["pipeline"] == pytest.approx(2 * (1 + 16 * 2) * time.hop(c))


def test_rows_with_long_names_are_one_line_and_any_chunks_of_a_stage_can_be_named(capsys: pytest.CaptureFixture[str]):
    main(["--preset", "internet-1000", "--model", "llama-7b", "--batch", "2000"])
    rows = re.findall(r"^ ?\d+ tp.*", capsys.readouterr().out, re.M)
    assert len(rows) == 10 and all(row.endswith("%") and row.count("%") == 3 for row in rows)
    assert [command.rounded(x) for x in (1008.2, 1600, 6.738, 64)] == ["1,008", "1,600", "6.74", "64"]
    main(["--preset", "laptops", "--model", "gpt-125m", "--batch", "64", "--layout", "pp2.v6.dp4"])
    assert "tp1.pp2.dp4.v6.mb4" in capsys.readouterr().out


def test_the_nearest_miss_needs_more_than_there_is():
    p = of(preset("dgx-a100-tcp"), "llama-7b", 512)
    needs, has = (float(x) for x in re.findall(r"\d+\.\d+", p.miss))
    assert has == 80 < needs < 80.1


def test_a_preset_is_not_probed_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="preset=laptops: --probe would measure a GPU, this machine has none"):
        preset("laptops", probe=True)
