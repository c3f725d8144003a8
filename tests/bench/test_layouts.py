"""bench.layouts: what it refuses, its tables beside the planner's predictions, and a small run."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from bench.cluster import Cluster
from bench.layouts import Layouts, StandIn, layers
from bench.layouts_report import device, predict, text
from tests.bench.emulated import python


def test_the_tables_stand_beside_the_predictions():
    o = Layouts(("dp8", "pp4.dp2"), rates=(50.0,))
    rows = [
        {"layout": name, "rate": 50.0, "seconds": [mean - 0.1, mean + 0.1], "predicted": said, "busy": 0.1}
        for name, mean, said in (("dp8", 0.5, 0.55), ("pp4.dp2", 1.0, 0.5))
    ]
    links = {"50": {"across": 6e6, "latency": 1e-3, "inside": 1e9, "inside_latency": 1e-4}}
    counted = {"dp8": (10**7, 1.02e7), "tp2.dp4": (10**7, 0.9e7)}
    options = json.loads(json.dumps(asdict(o), default=str))
    found = {"rows": rows, "bytes": counted, "links": links, "calls": [0.003, 0.01, 0.006], "options": options}
    told = text(found | {"commit": "c", "date": "d"})
    assert "| dp8 | 0.500 ± 0.141 | 0.550 | +10.0% |" in told
    assert "| dp8 | seen | 10.00 | 10.20 | +2.0% |" in told and "| tp2.dp4 | new |" in told
    assert "3.0 ms for a block's passes and update. TP adds 10.0 ms, FSDP2 6.0 ms" in told
    assert "Within 5 %: 1 of 2. The worst: 10.0%." in told
    assert "Of the new ones within 5 %: 0 of 1." in told
    assert "| 50 | -1.00 | pp4.dp2 | dp8 | +100.0% | 30.0% | no |" in told and "| 50 | 6 | 1 | 1000 | 0.1 |" in told


def test_the_stand_in_s_device_takes_what_it_paces():
    """A lone rank: forward and backward of all layers and of the head, and AdamW's pass over memory."""
    o = Layouts(("dp1",), nodes=1, ranks_per_node=1, batch=8)
    links = {"inside": 1e9, "across": 1e9, "inside_latency": 0.0, "latency": 0.0}
    forward, backward, head = layers(o)
    seconds, _ = predict(o, "dp1", links, device(o, 1e12))
    assert seconds == pytest.approx(8 * (4 * (forward + backward) + 3 * head), rel=1e-3)


@pytest.mark.parametrize(("rate", "burst"), [(50, "32kb"), (200, "49kb"), (1000, "244kb"), (4000, "256kb")])
def test_a_link_lets_pass_at_once_what_it_carries_in_two_milliseconds(rate: float, burst: str):
    assert f" burst {burst} " in Cluster(2, rate, burst_ms=2.0)._tbf("e0")
    assert " burst 256kb " in Cluster(2, rate)._tbf("e0")


def test_a_rank_s_own_computing_lies_beneath_the_stand_in_s(monkeypatch: pytest.MonkeyPatch):
    """Of 0.3 s of a pass, 0.1 of which the thread computes, 0.2 remain; what takes longer is made up for later."""
    clock, slept = [5.0], []
    monkeypatch.setattr("bench.layouts.computed", lambda: clock[0])
    monkeypatch.setattr("bench.layouts.time.sleep", slept.append)
    stand_in, module = StandIn(), torch.nn.Linear(1, 1)
    stand_in.takes(module, 0.3, 0.6)
    clock[0] += 0.1
    y = module(torch.ones(1, 1, requires_grad=True))
    clock[0] += 0.9
    y.sum().backward()
    module(torch.ones(1, 1))
    assert slept == pytest.approx([0.2, 0.0, 0.0])
    module(torch.ones(1, 1))
    assert slept[3] == pytest.approx(0.3)


@pytest.mark.slow
def test_layouts_are_measured(tmp_path: Path):
    """What is counted and what is predicted agree for each kind of parallelism."""
    names = ["pp2.dp2", "tp2.dp2", "dp4.fsdp", "pp2.co2x2"]
    small = ["--nodes", "2", "--batch", "8", "--context", "64", "--layer_ms", "4", "--rates", "200", "1000"]
    python("-m", "bench.layouts", "--layouts", *names, *small, "--tau", "2", "--repeats", "1", "--out", tmp_path)
    found = json.loads((tmp_path / "layouts.json").read_text())
    assert [*found["bytes"]] == names and len(found["rows"]) == 8
    assert all(said == pytest.approx(n, rel=0.1) for n, said in found["bytes"].values())
    assert all(row["seconds"][0] > 0.5 * row["predicted"] > 0 for row in found["rows"])
