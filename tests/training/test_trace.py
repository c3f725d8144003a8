"""The trace of some rounds."""

import json
from pathlib import Path

import torch
from torch.profiler import record_function

from training.round_log import Trace


def test_the_trace_covers_the_rounds_asked_for(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json", first=2, rounds=2)
    wrote = []
    for i in range(6):
        with record_function(f"local step {i}"):
            torch.ones(3).sum()
        wrote.append(trace.close_round())
    assert wrote == [False, False, False, True, False, False] and not trace.finish()
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"local step 2", "local step 3"} <= names
    assert not {"local step 1", "local step 4"} & names


def test_a_run_that_ends_early_still_writes_its_trace(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json", first=1, rounds=5)
    assert not trace.finish() and not trace.began
    trace.close_round()
    assert trace.finish() and (tmp_path / "trace.json").exists()
