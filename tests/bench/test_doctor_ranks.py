"""core.doctor on the emulated cluster."""

import json
import os
from pathlib import Path

import pytest

from tests.bench.emulated import python


@pytest.mark.slow
def test_the_command_on_nodes_of_two(tmp_path: Path):
    """By torchrun on each node: what links carry within and across, one screen, and the file."""
    file = tmp_path / "cluster.json"
    doctor = ["-m", "core.doctor", "--params", "125e6", "--step_ms", "80", "--out", str(file)]
    nodes = ["--nodes", "2", "--ranks-per-node", "2", "--rate", "100mbit", "--"]
    said = python("-m", "bench.cluster", *nodes, *doctor, timeout=400, skips=True)
    _, *screen = said.splitlines()
    assert len(screen) <= 20 and max(map(len, screen)) <= 100, said
    assert screen[0] == f"workers      4 on 2 nodes ({os.uname().nodename}), gloo"
    found = json.loads(file.read_text())
    rates = {name: link["bandwidth_bits_per_second"] for name, link in found["links"].items()}
    assert rates["across"] == pytest.approx(100e6, rel=0.1) and rates["within"] > 1e9
    assert (found["workers_per_node"], [node["ranks"] for node in found["nodes"]]) == (2, [[0, 1], [2, 3]])
    (settings,) = found["settings"]
    chosen = settings["tau"], settings["compression"]
    assert chosen == (192, "int4"), "8 s of an all-reduce, and 2.5 times as long to rest"
    seconds = {name: compression["seconds"] for name, compression in found["compressions"].items()}
    assert seconds["float32"] > 4 * seconds["int4"] > 4 * 5
