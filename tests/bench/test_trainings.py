"""Metrics of a run, options of a command line, and the kernel's counters."""

from pathlib import Path

import pytest

from bench.cluster import sent_bytes
from bench.report import Metrics, flags


def test_half_a_line_is_left_for_later_options_become_a_command_line_and_counters_are_the_interfaces(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path)
    assert metrics.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert metrics.read() == [{"step": 1}]
    with open(path, "a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    assert metrics.read() == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert flags({"seed": 3, "optim.lr": 0.5}) == ["--seed", "3", "--optim.lr", "0.5"] and sent_bytes("lo") >= 0
    with pytest.raises(OSError, match="no interface nonesuch0"):
        sent_bytes("nonesuch0")
