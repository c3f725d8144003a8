"""What trains in a given memory: ways of one kind take the same steps, the limit holds, and the table."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import report, zeroth_limit, zeroth_ways
from bench.zeroth_limit import LADDER, ZerothLimit, smallest, text
from bench.zeroth_ways import CONTEXT, KINDS, WAYS, Job, _train, opened, random_base
from tests.bench.emulated import script
from training.sampling import generator

SHAPE = 2, 64
TOKENS = torch.randint(1024, (8 * CONTEXT + 1,), generator=generator(1))


def job(way: str, base: Path, **more) -> Job:
    return Job(way, SHAPE, base, batch=2, steps=3, lr=KINDS[WAYS[way]], evaluates=True, **more)


def test_ways_of_one_kind_take_the_same_steps(tmp_path):
    """Recomputed, uploaded, streamed or not; and steps of every kind lower the loss on what they are taken on."""
    base = random_base(tmp_path / "base", SHAPE)
    before = base.read_bytes()
    ended: dict[str, list[float]] = {}
    for way, kind in WAYS.items():
        ended.setdefault(kind, []).append(_train(job(way, base), TOKENS, TOKENS)["loss"])
    assert base.read_bytes() == before, "which the next way begins with"
    for kind, losses in ended.items():
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5), kind
    assert len({round(losses[0], 4) for losses in ended.values()}) == len(KINDS), "kinds are unlike"
    none = _train(replace(job("AdamW", base), steps=0), TOKENS, TOKENS)["loss"]
    assert all(losses[0] < none for kind, losses in ended.items() if kind != "zo")


@pytest.mark.parametrize("way", ["zo", "AdamW"])
def test_a_learning_rate_that_diverges_has_no_loss_and_ends_nothing(way: str, monkeypatch, tmp_path):
    """One of those to choose among: the others are tried all the same."""
    monkeypatch.setattr(zeroth_ways, "wikitext", lambda: (TOKENS, TOKENS))
    base = random_base(tmp_path / "base", SHAPE)
    found = zeroth_ways.train(replace(job(way, base), lr=1e30, steps=20))
    assert found["fits"] and math.isnan(found["loss"])


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

    monkeypatch.setattr(zeroth_limit, "run", run)
    assert smallest(job("zo", tmp_path)) == (1.5, {"cpu_seconds": 1.5}) and len(tried) <= 5
    monkeypatch.setattr(zeroth_limit, "run", lambda job: None)
    assert smallest(job("zo", tmp_path)) == (None, None)
    assert list(LADDER) == sorted(set(LADDER))


def test_a_run_that_needs_more_than_two_steps_do_takes_the_next_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(zeroth_limit, "run", lambda job: {"loss": 1.0} if job.limit >= 1.0 else None)
    assert zeroth_limit.in_little(job("zo", tmp_path, limit=0.5)) == (1.0, {"loss": 1.0})
    monkeypatch.setattr(zeroth_limit, "run", lambda job: None)
    assert zeroth_limit.in_little(job("zo", tmp_path, limit=0.5)) == (None, {})


def test_the_table():
    o = ZerothLimit(ways=("AdamW", "zo, offload"), seeds=(0, 1))
    memory = [
        {"way": "AdamW", "shape": o.large, "weights_mb": 100.0, "limit": 5.0, "cpu_seconds_a_step": 2.5},
        {"way": "zo, offload", "shape": o.large, "weights_mb": 100.0, "limit": None, "cpu_seconds_a_step": None},
        {"way": "zo, offload", "shape": o.small, "weights_mb": 10.0, "limit": 0.75, "cpu_seconds_a_step": 0.5},
    ]
    row = {"way": "zo, offload", "steps": 9, "lr": 3e-4, "cpu_seconds": 7.0}
    rows = [row | {"seed": s, "loss": 4.0 + s, "accuracy": 0.2} for s in (0, 1, 100)]
    shown = text(report.header("x", o) | {"memory": memory, "rows": rows})
    assert "| AdamW | 500 | 5 | 2.50 | not run |  |  |  |  |  |  |" in shown
    quality = "0.0003 | 9 | 4.5000 ± 0.7071 | 20.00 ± 0.00 % | 7 ± 0"
    assert f"| zo, offload | not in 800 |  |  | 8 | 0.75 | {quality} |" in shown


@pytest.mark.slow
def test_memory_is_limited(tmp_path):
    """In a process that has done nothing else: three blocks of eight pass through less memory than AdamW needs."""
    code = f"""
        import torch
        from bench import zeroth_limit, zeroth_ways as ways
        from bench.cluster import prepare_to_fork
        prepare_to_fork()
        tokens = torch.arange(4000) % 1024
        ways.wikitext = lambda: (tokens, tokens)
        base = ways.random_base(ways.Path({str(tmp_path / "base")!r}), (8, 256))
        for way, limit in (("AdamW", 2.5), ("AdamW", 8.0), ("zo, offload", 2.5), ("zo, offload", 0.1)):
            job = ways.Job(way, (8, 256), base, 2, 2, 1e-4, limit=limit)
            print(way, limit, zeroth_limit.run(job) is not None)
    """
    lines = "AdamW 2.5 False\nAdamW 8.0 True\nzo, offload 2.5 True\nzo, offload 0.1 False\n"
    assert script(tmp_path, code) == lines
