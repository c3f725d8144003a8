"""What the planner says: each number can be followed, rows are whole, what cannot be is not said."""

import re

import pytest
import torch

from core import UserError
from tests.training.test_plan_search import of
from training.plan import show
from training.plan.clusters import preset
from training.plan.command import main


def test_each_number_of_a_stage_follows_from_what_is_explained(capsys: pytest.CaptureFixture[str]):
    """tp4.pp2.dp16.v2 by hand: activations, what passes, hops."""
    gpt = ["--preset", "dgx-a100-tcp", "--model", "gpt-22b", "--batch", "512"]
    main([*gpt, "--layout", "tp4.pp2.dp16.v2.mb16.zero1", "--explain", "1"])
    screen = capsys.readouterr().out
    found = {name: float(x.replace(",", "")) for name, x in re.findall(r"^  (\S.*?) {2,}([\d.,e+]+) ", screen, re.M)}
    kept, given = found["measured, kept"], found["given"]
    assert found["activations"] == pytest.approx((24 * kept + given) * 2 * (1 + 1 / 4) / 1e9, rel=1e-4)
    assert found["passing"] == pytest.approx((found["measured, more"] + 4 * found["block"]) / 1e9, rel=1e-3)
    assert found["hop"] == pytest.approx(given / 1e9 + 50e-6, rel=1e-4)  # 64 of a node's ranks share 8 GB/s
    assert found["pipeline"] == pytest.approx(2 * (1 + 16 * 2) * found["hop"], rel=1e-4)
    memory = screen.partition("gigabytes")[2].partition("seconds of a step")[0]
    *parts, total = [float(x) for x in re.findall(r"^  \w+ +([\d.]+)", memory, re.M)]
    assert sum(parts) == pytest.approx(total, abs=1e-3)
    assert "recompute none" in screen and "symbols and sources: training/plan/__init__.py" in screen
    main(["--preset", "laptops", "--model", "gpt-125m", "--batch", "64", "--explain", "1"])
    screen = capsys.readouterr().out
    assert "wire int4, merge keep" in screen
    assert re.search(r"co2 +2\.5510  .*island of 1: 4 own \(3, keep: \+ 1, narrow wire: \+ 1 \+ 1/I\)", screen)


def test_rows_with_long_names_are_one_line(capsys: pytest.CaptureFixture[str]):
    main(["--preset", "internet-1000", "--model", "llama-7b", "--batch", "2000"])
    rows = re.findall(r"^ ?\d+ tp.*", capsys.readouterr().out, re.M)
    assert len(rows) == 10 and all(row.endswith("%") and row.count("%") == 3 for row in rows)
    assert [show.rounded(x) for x in (1008.2, 1600, 6.738, 64)] == ["1,008", "1,600", "6.74", "64"]


def test_any_chunks_of_a_stage_can_be_named(capsys: pytest.CaptureFixture[str]):
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
