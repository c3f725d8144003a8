"""The measurement of zeroth-order training: the memory limit, and with namespaces the bytes on the wire."""

import pytest
import torch

from bench import zeroth
from bench.cluster import Cluster, run_ranks
from bench.report import FAST
from bench.zeroth import LADDER, WAYS, Job, counted, opened, random_base, smallest
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
    assert smallest(Job("zo", SHAPE, tmp_path)) == (None, None) and list(LADDER) == sorted(set(LADDER))


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


@pytest.mark.root
def test_the_kernel_counts_at_most_4_kib_a_step_and_worker():
    with Cluster(4, FAST) as cluster:
        assert 0 < max(run_ranks(counted, cluster, 1, 4, 1000, 10, timeout=120)) <= 4096
