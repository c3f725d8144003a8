"""The measurement of zeroth-order training: its tables, its options, and with namespaces the bytes on the wire."""

import pytest

from bench import report, zeroth
from bench.cluster import Cluster, run_ranks
from bench.trainings import FAST
from bench.zeroth import ZerothBench, counted
from bench.zeroth_memory import Stack, measure_memory, measure_sharing, opt_table, opt_text
from bench.zeroth_quality import quality_text, recipes, tuned_lr, tuning_text


def test_opts_table_is_embedding_head_and_three_blocks_with_one_constant():
    rows = list(opt_table())
    assert rows[-1]["weights_gb"] == pytest.approx(13.39, abs=0.01)  # 2 (102,594 h + 3 (12 h^2 + 13 h)), h = 12,288
    assert rows[0]["with_rest_gb"] == pytest.approx(rows[0]["published_gb"])
    for row in rows[1:]:
        assert abs(row["with_rest_gb"] / row["published_gb"] - 1) < 0.15, row
    assert "| OPT-175B | 18.04 | 13.39 |" in opt_text(rows)


def row(method: str, rate: float | None, seed: int, losses: list[tuple[float, float]]) -> dict:
    found = {"method": method, "rate_mbit": rate, "seed": seed, "lr": 1e-3, "losses": losses, "final": losses[-1][1]}
    return found | {"steps": 10, "steps_per_second": 2.0, "bytes_a_step": 120}


def test_methods_are_timed_to_where_the_worst_of_mezos_seeds_ended():
    rows = [
        row("MeZO, one process", None, 0, [(1, 5.0), (2, 4.0)]),
        row("MeZO, one process", None, 1, [(1, 5.0), (3, 4.5)]),
        row("zo", 50.0, 0, [(1, 4.6), (2, 4.4)]),
        row("zo", 50.0, 1, [(1, 4.5), (2, 4.4)]),
        row("ddp, AdamW", 50.0, 0, [(9, 4.6)]),
        {"method": "co2", "rate_mbit": 50.0, "seed": 0, "failed": "gone"},
    ]
    text = quality_text(rows)
    assert "The target is 4.5000" in text
    assert "| zo | 50 | 0.001 | 10 | 4.4000 ± 0.0000 | 2.00 ± 0.00 | 120 | 1.5 ± 0.7 (2 of 2) |" in text
    assert "| ddp, AdamW | 50 | 0.001 | 10 | 4.6000 | 2.00 | 120 | not reached (0 of 1) |" in text
    assert "| co2 | failed: gone |" in text
    assert (
        "| MeZO, one process | none | 0.001 | 10 | 4.2500 ± 0.3536 | 2.00 ± 0.00 | 120 | 2.5 ± 0.7 (2 of 2) |" in text
    )


def test_the_learning_rate_is_that_of_the_run_that_ended_lowest():
    def tried(method: str, lr: float, **found: float | str) -> dict:
        return {"method": method, "lr": lr} | found

    rows = [
        tried("zo", 1e-4, final=5.0),
        tried("zo", 1e-3, final=4.0),
        tried("zo", 1e-2, final=float("nan")),
        tried("zo", 1e-1, failed="DivergedError"),
        tried("co2", 1e-3, final=4.5),
        tried("co2", 1e-2, final=4.25),
        tried("ddp, AdamW", 1e-3, failed="gone"),
    ]
    names = ("zo", "MeZO, one process", "co2", "ddp, AdamW")
    assert [tuned_lr(rows, name) for name in names] == [1e-3, 1e-3, 1e-2, None]
    text = tuning_text(rows)
    assert "| final loss at | 0.0001 | 0.001 | 0.01 | 0.1 |  |" in text
    assert "| zo | 5.0000 | **4.0000** | failed | failed |  |" in text
    assert "| co2 |  | 4.5000 | **4.2500** |  | at the grid's end |" in text
    assert "| ddp, AdamW |  | failed |  |  |  |" in text


def test_every_method_starts_from_the_same_weights_and_sees_as_large_batches(tmp_path):
    made = recipes(ZerothBench(epochs=20, epoch_steps=7), tmp_path)
    assert {r.init_from for _, r in made.values()} == {tmp_path}
    assert {(r.batch_size, r.epoch_steps, r.context) for _, r in made.values()} == {(32, 7, 64)}
    assert made["zo"][1] == made["MeZO, one process"][1], "but for the workers"
    assert made["co2"][1].epochs == made["ddp, AdamW"][1].epochs == 4


@pytest.mark.slow
def test_workers_of_a_node_upload_equal_parts():
    rows = list(measure_sharing())
    assert [rows[0]["bytes_a_step"] / row["bytes_a_step"] for row in rows] == [1, 2, 4]
    text = zeroth.text({"options": {}, "opt": [], "sharing": rows} | report.header("bench.zeroth", ZerothBench()))
    assert "| 4 | 394,752 |" in text and "The weights are the same, bit for bit." in text


@pytest.mark.slow  # of time, which a busy machine has not
def test_uploads_hide_and_three_blocks_lie_on_the_device():
    first = next(iter(measure_memory()))
    assert first["blocks_on_device"] == 3 and first["hidden"] > 0.7
    assert len(Stack(3, 8, 0.0).blocks) == 3


@pytest.mark.root
def test_the_kernel_counts_at_most_4_kib_a_step_and_worker():
    with Cluster(4, FAST) as cluster:
        assert 0 < max(run_ranks(counted, cluster, 1, 4, 1000, 10, timeout=120)) <= 4096
