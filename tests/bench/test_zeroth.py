"""The measurement of zeroth-order training: its tables, the memory limit, and with namespaces the bytes on the wire."""

import pytest
import torch

from bench import zeroth
from bench.cluster import Cluster, run_ranks
from bench.trainings import FAST
from bench.zeroth import LADDER, WAYS, Job, counted, measure_blocks, opened, random_base, smallest, text
from tests.bench.emulated import script

SHAPE = 2, 64


def test_offload_and_recomputation_change_no_loss(tmp_path):
    base = random_base(tmp_path / "base", SHAPE)
    before = base.read_bytes()
    losses = [zeroth._train(Job(way, SHAPE, base, 2, 3))["loss"] for way in WAYS]
    assert base.read_bytes() == before, "which the next way begins with"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[3] == pytest.approx(losses[2], rel=1e-5)


def test_streamed_weights_lie_in_the_file(tmp_path):
    base = random_base(tmp_path / "base", SHAPE)
    whole, mapped = opened(base, SHAPE, streamed=False), opened(base, SHAPE, streamed=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), mapped.parameters(), strict=True))
    assert mapped.lm_head.weight is mapped.transformer.wte.weight
    with torch.no_grad():
        mapped.transformer.h[0].mlp.c_fc.weight.fill_(7.0)
        mapped.transformer.wte.weight.fill_(7.0)
    again = opened(base, SHAPE, streamed=False)
    assert (again.transformer.h[0].mlp.c_fc.weight == 7.0).all() and (again.transformer.wte.weight != 7.0).any()


def test_the_smallest_limit_of_the_ladder(monkeypatch, tmp_path):
    tried = []

    def run(job: Job):
        tried.append(job.limit)
        return {"cpu_seconds": job.limit} if job.limit >= 1.5 else None

    monkeypatch.setattr(zeroth, "run", run)
    assert smallest(Job("zo", SHAPE, tmp_path)) == (1.5, {"cpu_seconds": 1.5}) and len(tried) <= 5
    monkeypatch.setattr(zeroth, "run", lambda job: None)
    assert smallest(Job("zo", SHAPE, tmp_path)) == (None, None)
    assert list(LADDER) == sorted(set(LADDER))


def test_the_tables():
    limit = [
        {"way": "AdamW", "weights_mb": 100.0, "limit": 5.0, "cpu_seconds_a_step": 2.5},
        {"way": "zo", "weights_mb": 100.0, "limit": None, "cpu_seconds_a_step": None},
    ]
    speed = [{"forward_ms": 60.0, "mesh": mesh, "exposed_ms": 1.0} for mesh in ("one process", "2 x 2")]
    speed = [row | {"steps_per_second": speed} for row, speed in zip(speed, (8.0, 30.0), strict=True)]
    traffic = [{"parameters": 10**6, "workers": 4, "bytes_a_step": 512.4}]
    page = text({"limit": limit, "speed": speed, "traffic": traffic, "commit": "c", "date": "d"})
    assert "| AdamW | 500 | 5 | 2.50 |" in page and "| zo | not in 800 |  |  |" in page
    assert "| 60 | 2 x 2 | 30.00 | 3.75 | 1.0 |" in page and "| 1,000,000 | 4 | 512 |" in page


@pytest.mark.slow
def test_memory_is_limited(tmp_path):
    """In a process that has done nothing else: three blocks of eight pass through less memory than AdamW needs."""
    code = f"""
        from pathlib import Path
        from bench import zeroth
        from bench.cluster import prepare_to_fork
        prepare_to_fork()
        base = zeroth.random_base(Path({str(tmp_path / "base")!r}), (8, 256))
        for way, limit in (("AdamW", 2.5), ("AdamW", 8.0), ("zo, offload", 2.5), ("zo, offload", 0.1)):
            print(way, limit, zeroth.run(zeroth.Job(way, (8, 256), base, 2, 2, limit)) is not None)
    """
    lines = "AdamW 2.5 False\nAdamW 8.0 True\nzo, offload 2.5 True\nzo, offload 0.1 False\n"
    assert script(tmp_path, code) == lines


@pytest.mark.slow  # of time, which a busy machine has not
def test_uploads_hide_and_three_blocks_lie_on_the_device():
    first = next(iter(measure_blocks(zeroth.ZerothBench())))
    assert first["blocks_on_device"] == 3 and first["hidden"] > 0.7


@pytest.mark.root
def test_the_kernel_counts_at_most_4_kib_a_step_and_worker():
    with Cluster(4, FAST) as cluster:
        assert 0 < max(run_ranks(counted, cluster, 1, 4, 1000, 10, timeout=120)) <= 4096
