"""The comparison with other packages: what becomes of a peer that cannot run, the columns, the table, the options."""

import math
import mmap
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.cluster import sent_bytes
from bench.memory import peak_bytes, reset_peak
from bench.peers import __main__ as compare
from bench.peers.__main__ import Bench, Choice, choices, run_all, steps_of, tune
from bench.peers.adapters import PEERS, Peer, split
from bench.peers.loop import Job, half
from bench.peers.table import cell, limit, loss_at, markdown, seconds_to, summarise, table
from bench.standin import LR, build_model
from core import UserError
from vision import data

JOB = Job("local", 4, 2, 2, 8, 0.0, 0, 5.0, None, None, Path(), Path())
DONE = {
    "seconds": 2.0,
    "steps": [0, 2, 4],
    "times": [0.0, 1.0, 2.0],
    "losses": [2.3, 1.5, 0.7],
    "rounds": 3,
    "sent": 6400.0,
    "memory": 3 * 2**20,
}


# -- peers that cannot run --------------------------------------------------------------------------------------


def test_an_absent_package_is_named():
    absent = Peer("co2-no-such-package", "co2_no_such_module", lambda task: None, "")
    assert absent.missing() == "package co2-no-such-package is not installed"
    assert PEERS["torch_powersgd"].missing() == ""


def test_other_rows_come_out_beside_an_absent_package(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(PEERS, "hivemind", replace(PEERS["hivemind"], package="co2-no-such-package"))
    monkeypatch.setattr(compare, "run_row", lambda *_: dict(DONE))
    runs, _ = run_all(Bench(repeats=2, methods=("hivemind", "co2")), tmp_path)
    assert [run["method"] for run in runs] == ["none", "hivemind", "co2"] * 2
    reasons = [run.get("reason") for run in runs]
    assert reasons == [None, "not run: package co2-no-such-package is not installed", None] * 2
    assert "hivemind           not run: package" in capsys.readouterr().out


def test_a_software_throttle_refuses_every_peer(monkeypatch, tmp_path):
    monkeypatch.setattr(compare, "run_row", lambda *_: dict(DONE))
    runs, _ = run_all(Bench(repeats=1, throttle=True), tmp_path)
    refused = {run["method"] for run in runs if "cannot hold back" in run.get("reason", "")}
    assert refused == set(PEERS)


def test_a_row_that_failed_is_not_tried_again(monkeypatch, tmp_path):
    tried = []

    def run_row(bench, method, repeat, *_):
        tried.append((method, repeat))
        return {"reason": "killed: still running after 5 s"} if method == "co2" else dict(DONE)

    monkeypatch.setattr(compare, "run_row", run_row)
    runs, _ = run_all(Bench(repeats=2, methods=("co2", "local")), tmp_path)
    assert tried == [("none", 0), ("co2", 0), ("local", 0), ("none", 1), ("local", 1)]
    assert [run["reason"] for run in runs if run["method"] == "co2"] == ["killed: still running after 5 s"] * 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError("rank 0 still running after 5 s"), "killed: still running after 5 s"),
        (UserError("ValueError: sync_every must divide"), "failed: ValueError: sync_every must divide"),
        (RuntimeError("rank 1:\nTraceback\nValueError: no period"), "failed: ValueError: no period"),
    ],
)
def test_an_error_becomes_the_reason_of_its_row_and_its_traceback_is_in_the_log(monkeypatch, tmp_path, error, reason):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(compare, "run_ranks", fail)
    assert compare.attempt(replace(JOB, logs=tmp_path), None, ()) == {"reason": reason}
    logs = [path.read_text() for path in tmp_path.glob("local-0-failed.log")]
    assert logs == ([] if reason.startswith("killed") else [str(error)])


def test_a_row_is_as_slow_as_its_slowest_worker(monkeypatch):
    def rank(seconds, sent, **more):
        return {"seconds": seconds, "times": {0: 0.0, 4: seconds}, "sent": sent, "memory": sent, "rounds": 2, **more}

    monkeypatch.setattr(compare, "run_ranks", lambda *_, **__: [rank(1.0, 10, losses=[2.0, 1.0]), rank(3.0, 20)])
    row = compare.attempt(JOB, None, ())
    assert (row["seconds"], row["times"], row["sent"], row["memory"]) == (3.0, [0.0, 3.0], 15, 15)


# -- the columns ------------------------------------------------------------------------------------------------


def test_measures_by_hand():
    """64 samples a worker and two workers in 2 s; the reference took 1.5 s; 6400 bytes for a worker's 64 samples."""
    runs = [
        {"method": "none", "repeat": 0, **DONE, "seconds": 1.5, "sent": 0.0},
        {"method": "co2", "repeat": 0, **DONE},
        {"method": "ddp", "repeat": 0, **DONE, "seconds": 8.0, "times": [0.0, 4.0, 8.0]},
        {"method": "hivemind", "repeat": 0, "reason": "not run: x"},
    ]
    bench = Bench(steps=4, tau=2, workers=2, repeats=1, methods=("co2", "ddp", "hivemind"))
    none, co2, ddp, hivemind, free = summarise(asdict(replace(bench, target=1.5)), runs)
    assert co2["budget"] == 2.0  # not the reference's 1.5
    assert co2["samples_per_second"] == [64.0] and ddp["samples_per_second"] == [16.0]
    assert none["exposed"] == [0.0] and co2["exposed"] == [0.25] and ddp["exposed"] == [1 - 1.5 / 8]
    assert co2["loss_at_samples"] == ddp["loss_at_samples"] == [0.7]
    assert co2["loss_at_seconds"] == [0.7] and ddp["loss_at_seconds"] == [2.3]
    assert co2["bytes_per_sample"] == [100.0] and co2["memory_mib"] == [3.0]
    assert co2["seconds_to_target"] == [1.0] and ddp["seconds_to_target"] == [4.0]
    assert free == {"method": "limit", "seconds_to_target": [1.0]}  # ddp's losses at the reference's times
    assert hivemind["reason"] == "not run: x" and "samples_per_second" not in hivemind


# -- the tuning -------------------------------------------------------------------------------------------------


def test_every_method_is_tuned_over_the_same():
    """ddp and acco have no period to choose, and co2_auto and auto choose their own."""
    grid = [Choice(LR * factor, tau) for factor in (0.5, 1.0) for tau in (6, 24)]
    assert choices("local", (0.5, 1.0), (6, 24)) == grid
    for own in ("ddp", "acco", "ddp:wire=int4", "co2_auto", "auto"):
        assert choices(own, (0.5, 1.0), (6, 24)) == grid[::2]


def test_the_first_to_the_target_is_chosen_and_else_the_least_loss():
    results = {
        0.1: {"times": [0.0, 3.0, 4.0], "losses": [2.0, 0.5, 0.1]},
        0.2: {"times": [0.0, 2.0, 4.0], "losses": [2.0, 0.5, 0.4]},
        0.3: {"times": [0.0, 1.0, 4.0], "losses": [2.0, 0.6, float("nan")]},
        0.4: {"reason": "killed"},
    }
    options = [Choice(lr, 6) for lr in results]
    chosen, tried = tune("co2", options, lambda _, choice: results[choice.lr], target=0.5)
    assert chosen == Choice(0.2, 6) and [line["seconds"] for line in tried] == [3.0, 2.0, math.inf, math.inf]
    assert tried[3]["reason"] == "killed" and tried[2]["loss"] == math.inf
    assert tune("co2", options, lambda _, choice: results[choice.lr], target=0.05)[0] == Choice(0.1, 6)
    assert tune("co2", options[:1], lambda *_: pytest.fail("run"), target=0.05) == (options[0], [])


def test_the_tuning_has_its_own_seed_and_samples(monkeypatch, tmp_path):
    """And its choice is what the figures are of."""
    asked = []

    def run_row(bench, method, seed, sets, logs, choice, held_out="test"):
        asked.append((method, seed, choice.lr / LR, held_out))
        return {**DONE, "losses": [2.3, 1.5, 0.7 - choice.lr]}

    monkeypatch.setattr(compare, "run_row", run_row)
    runs, tried = run_all(Bench(repeats=1, methods=("local",), tune_lr=(1.0, 2.0), target=0.1), tmp_path)
    assert asked[:2] == [("local", 100, 1.0, "tuning"), ("local", 100, 2.0, "tuning")]
    assert asked[2:] == [("none", 0, 1.0, "test"), ("local", 0, 2.0, "test")]
    assert [run["lr"] for run in runs] == [LR, 2 * LR] and len(tried) == 2


def test_the_halves_share_no_sample():
    _, test = data.digits()
    tuning, figures = half(test, "tuning"), half(test, "test")
    assert len(tuning) + len(figures) == len(test)
    assert torch.equal(test.images[1], figures.images[0]) and torch.equal(test.images[2], tuning.images[1])


def test_the_target_and_the_limit():
    """ddp reaches 0.5 at its step 4, which the run without communication has done after 1.1 s."""
    ddp = {"steps": [0, 2, 4], "losses": [2.0, 1.0, 0.5], "times": [0.0, 5.0, 9.0]}
    reference = {"steps": [0, 2, 4, 6], "times": [0.0, 0.6, 1.1, 1.7]}
    assert limit(ddp, reference, 0.5) == 1.1 and limit(ddp, reference, 0.4) is None
    at_its_end = {"steps": [0, 2, 5], "losses": [2.0, 1.0, 0.5]}  # where the other took no snapshot
    assert limit(at_its_end, reference, 0.5) == 1.7
    assert seconds_to(ddp["times"], ddp["losses"], 1.0) == 5.0 and seconds_to([0.0], [math.nan], 1.0) is None


def test_ddp_takes_as_many_steps_as_fit():
    """17 x 256 + ... parameters of 4 bytes over two workers: each sends the model once a step."""
    bench = Bench(workers=2, rate=8.0, step_ms=100.0, most_seconds=10.0)
    seconds = 0.1 + 4 * sum(p.numel() for p in build_model(bench.width).parameters()) / 1e6
    assert steps_of(bench, "ddp") == int(10.0 / seconds) < steps_of(bench, "local") == bench.steps
    narrow = 0.1 + (seconds - 0.1) * 132 / 1024  # of 256 elements: half a byte each, and a scale
    assert steps_of(bench, "ddp:wire=int4") == int(10.0 / narrow) and steps_of(bench, "local:wire=int4") == bench.steps
    assert steps_of(replace(bench, rate=1e5), "ddp") == 99  # a little over 0.1 s each
    hidden = seconds - 0.1  # more than the computing, under which it runs; acco sends it twice
    assert steps_of(bench, "dpu") == int(10.0 / hidden) and steps_of(bench, "acco") == int(5.0 / hidden)
    assert steps_of(replace(bench, rate=1e5), "acco") == 100


def test_the_best_is_in_bold_and_neither_the_reference_nor_the_limit():
    runs = [{"method": name, "repeat": 0, "lr": 0.1, "tau": 2, **DONE} for name in ("none", "ddp", "co2")]
    runs[2] |= {"seconds": 1.9, "times": [0.0, 0.9, 1.9]}
    bench = Bench(steps=4, tau=2, workers=2, repeats=1, methods=("ddp", "co2"), target=1.5)
    lines = table(summarise(asdict(bench), runs)).splitlines()
    assert "**0.9**" in lines[4] and "**" not in lines[2] + lines[5] and "| limit |" in lines[5]


def test_loss_at_takes_the_last_one_known():
    assert [loss_at([0.0, 1.0, 2.0], [3.0, 2.0, 1.0], budget) for budget in (0.0, 0.9, 1.0, 9.0)] == [3, 3, 2, 1]


def test_a_table_from_rows():
    row = {
        "samples_per_second": [10.0, 30.0, 20.0],
        "exposed": [0.25, 0.25, 0.25],
        "loss_at_samples": [0.5, 0.25, 0.125],
        "loss_at_seconds": [1.0, 1.0, 1.0],
        "seconds_to_target": [1.0, None, 1.0],
        "bytes_per_sample": [None, None, None],
        "memory_mib": [1.0, 2.0, 4.0],
        "rounds": [20, 20, 20],
    }
    rows = [{"method": "co2", **row}, {"method": "hivemind", "reason": "failed: a | b " + "x" * 200}]
    head, rule, first, second = table(rows).splitlines()
    assert head.startswith("| method | samples/s | exposed share | loss at equal samples | loss at equal seconds |")
    assert rule == "|---" * 9 + "|"
    assert first == (
        "| co2 | 20 (10 to 30) | 25% | 0.250 (0.125 to 0.500) | 1.000 | not reached in 1 of 3 | not measured "
        "| 2.0 (1.0 to 4.0) | 20 |"
    )
    assert second.startswith("| hivemind | failed: a / b xxx") and "...|" not in second
    assert second.count("|") == first.count("|") and len(second) < 220


def test_the_report_names_link_and_settings():
    runs = [{"method": name, "repeat": 0, **DONE} for name in ("none", "torchft_diloco")]
    bench = Bench(steps=4, tau=2, workers=2, repeats=1, methods=("torchft_diloco",))
    options = asdict(bench)
    result = {"link": "a test's link", "versions": {"torchft-nightly": "1.2"}, "rows": summarise(options, runs)}
    text = markdown(result | {"commit": "abc", "date": "today", "options": options})
    assert "Link: a test's link. 2 workers" in text
    for said in ("Nesterov", "torchft-nightly 1.2", "commit abc, today", "0.28 M parameters"):
        assert said in text
    assert "hivemind: Optimizer" not in text


# -- pieces -----------------------------------------------------------------------------------------------------


def test_fragments_are_about_equal():
    """Layers of 20, 20, 30 and 30 parameters: 40 and 60, the activations with them."""
    sizes = [(4, 5), (4, 5), (6, 5), (6, 5)]
    layers = [module for size in sizes for module in (nn.Linear(*size, bias=False), nn.ReLU())]
    parts = split(nn.Sequential(*layers), 2)
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == [40, 60]
    assert [module for part in parts for module in part] == layers


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


def test_a_diverged_repeat_is_told_and_enters_no_median():
    assert cell([float("nan"), 0.585, float("nan")], ".3f") == "diverged in 2 of 3 (else 0.585)"
    assert cell([float("inf")], ".3f") == "diverged in 1 of 1"
    assert cell([1.0, 3.0, 2.0], ".1f") == "2.0 (1.0 to 3.0)"
