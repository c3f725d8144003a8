"""When something is due, means between two lines of the log, the time of training, and the trace of some rounds."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import record_function

from training.folder import Trace
from training.progress import Averages, Every, Stopwatch


def test_every_fires_once_per_period_even_when_asked_late():
    every = Every(10)
    assert [step for step in range(1, 45) if step % 7 == 0 and every.due(step)] == [14, 21, 35, 42]
    assert not any(Every(0).due(step) for step in range(100))
    assert not Every(10, start=25).due(29) and Every(10, start=25).due(30)


def test_averages_are_means_since_the_last_pop():
    means = Averages()
    means.add({"loss": torch.tensor(1.0), "top1": torch.tensor(0.5)})
    means.add({"loss": torch.tensor(3.0), "top1": torch.tensor(1.0)})
    assert {k: v.item() for k, v in means.pop().items()} == {"loss": 2.0, "top1": 0.75}
    means.add({"loss": torch.tensor(5.0), "top1": torch.tensor(0.0)})
    assert means.pop()["loss"] == 5.0


def test_the_clock_stands_still_in_a_pause_and_goes_on_where_a_run_ended(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Stopwatch()
    assert clock.seconds == 0.0
    clock.start(7.0)
    now[0] += 2
    with clock.paused():
        now[0] += 50
        assert clock.seconds == 9.0
    now[0] += 3
    assert clock.seconds == 12.0


def test_the_trace_covers_the_rounds_asked_for_and_is_written_where_a_run_ends_early(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json", first=2, rounds=2)
    wrote = []
    for i in range(6):
        with record_function(f"local step {i}"):
            torch.ones(3).sum()
        wrote.append(trace.go_on())
    assert wrote == [False, False, False, True, False, False] and not trace.go_on(last=True)
    names = {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"local step 2", "local step 3"} <= names and not {"local step 1", "local step 4"} & names
    trace = Trace(tmp_path / "trace.json", first=1, rounds=5)
    trace.go_on()
    assert not trace.wrote
    assert trace.go_on(last=True) and (tmp_path / "trace.json").exists()
