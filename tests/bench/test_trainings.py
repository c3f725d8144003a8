"""What slow_links, time_to_loss and zeroth each need of a training: its log, its end, its learning rate."""

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import trainings
from bench.cluster import sent_bytes
from bench.memory import peak_bytes, reset_peak
from bench.trainings import Metrics, best_lr, flags


def test_half_a_line_is_left_for_later(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(tmp_path)
    assert metrics.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert metrics.read() == [{"step": 1}]
    with open(path, "a") as file:
        file.write('ep": 2}\n{"step": 3}\n')
    assert metrics.read() == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_workers_leave_an_evaluation_together_with_the_clock_stopped(monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    class Run:
        @contextlib.contextmanager
        def paused(self) -> Iterator[None]:
            order.append("stop")
            yield
            order.append("go")

    monkeypatch.setattr(trainings.dist, "barrier", lambda: order.append("barrier"))
    assert trainings.together(lambda run, number: {"loss": number})(Run(), 3.0) == {"loss": 3.0}
    assert order == ["stop", "barrier", "go"]


def rank(folder: Path, loss: float, log: Path) -> str:
    """A rank that trains nothing, and fails where the loss is not below 5."""
    trainings.write_to(log)
    os.write(1, b"from a rank\n")
    if loss > 5:
        raise ValueError("no such loss")
    if os.environ["RANK"] == "0":
        (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
        (folder / "summary.json").write_text(json.dumps({"loss": loss}))
    return os.environ["RANK"]


def test_a_run_leaves_its_summary_its_rows_and_what_its_ranks_return_or_why_it_failed(tmp_path: Path):
    one, other = tmp_path / "runs" / "one", tmp_path / "runs" / "other"
    found = trainings.train(rank, None, 2, one, one, 2.0, timeout=60)
    assert found == {"ranks": ["0", "1"], "summary": {"loss": 2.0}, "rows": [{"step": 1}, {"step": 2}]}
    assert (one / "log.txt").read_text() == 2 * "from a rank\n"
    assert trainings.train(rank, None, 1, other, other, 9.0, timeout=60) == {"failed": "ValueError: no such loss"}


def test_each_method_gets_its_own_best_learning_rate():
    rows = [
        {"method": "ddp", "lr": 0.5, "loss": 3.0},
        {"method": "ddp", "lr": 1.0, "loss": 2.5},
        {"method": "ddp", "lr": 2.0, "loss": None},
        {"method": "co2", "lr": 2.0, "failed": "x"},
    ]
    assert best_lr(rows, "ddp") == 1.0 and best_lr(rows, "co2") is None
    rows += [{"method": "zo", "lr": 1e-3, "final": float("nan")}, {"method": "zo", "lr": 1e-2, "final": 4.0}]
    assert best_lr(rows, "zo", "final") == 1e-2


def test_options_become_a_command_line():
    assert flags({"seed": 3, "optim.lr": 0.5}) == ["--seed", "3", "--optim.lr", "0.5"]


def test_the_peak_is_that_since_the_reset():
    base = reset_peak()
    with mmap.mmap(-1, 32 << 20) as held:  # what malloc gives may have been resident before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    assert 30 << 20 < peak_bytes() - base < 60 << 20
    assert reset_peak() - base < 16 << 20


def test_counters_are_those_of_the_interface():
    assert sent_bytes("lo") >= 0
    with pytest.raises(OSError, match="no interface nonesuch0"):
        sent_bytes("nonesuch0")
