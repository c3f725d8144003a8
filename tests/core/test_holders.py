"""Ranks of a node that hold the same elements, stages with a tied embedding or replicas: these count once."""

import time

import pytest
import torch
from torch import Tensor, nn

from core import ShardedCO2
from core.sharded.mesh import node_mesh
from core.testing import run_distributed
from tests.problems import Settings, assert_traces_equal, flat, refusal, train_reference, train_with

STEPS = 9  # 4 rounds and an incomplete one
CASES = [Settings(tau=2, outer_momentum=0.4, gap=g, clip=c) for g, c in [("elementwise", None), ("norm", 0.02)]]
SIZES = [700, 2, 3, 90, 4]
PARTS = {2: [[0, 1, 2], [3, 4, 0]], 3: [[0, 1], [2, 3], [4, 0]]}  # 0 is tied, and lies elsewhere in the last stage


def values() -> list[Tensor]:
    """The whole model's parameters."""
    return list(torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(0), dtype=torch.float64).split(SIZES))


def stages_of(rank: int, world_size: int, stages: int, replicas: int) -> list[list[Tensor]]:
    """Traces of this rank's stage, for each setting; replicas: ranks of each stage of an island."""
    n, traces = stages * replicas, []
    island, place = divmod(rank, n)
    stage, first = place // replicas, rank - place
    ranks = [range(first + i * replicas, first + (i + 1) * replicas) for i in range(stages)]
    for case in CASES:
        params = {i: nn.Parameter(values()[i].clone()) for i in PARTS[stages][stage]}
        holders = {p: ranks[stage] if i else [*ranks[0], *ranks[-1]] for i, p in params.items()}
        params = list(params.values())
        co2 = ShardedCO2(params, case.co2, mesh=node_mesh("cpu", n), shards=holders)
        traces.append(train_with(co2, params, island, STEPS))
    return traces


@pytest.mark.parametrize(
    ("islands", "stages", "replicas"),
    [(2, 2, 1), pytest.param(2, 2, 2, marks=pytest.mark.slow), pytest.param(3, 3, 1, marks=pytest.mark.slow)],
)
def test_what_several_stages_hold_counts_once_and_stays_equal(islands: int, stages: int, replicas: int):
    expected = [train_reference(case, islands, STEPS, flat(values())) for case in CASES]
    results = run_distributed(stages_of, islands * stages * replicas, stages, replicas, timeout=120)
    for rank, traces in enumerate(results):
        stage = rank // replicas % stages
        for trace, whole, first in zip(traces, expected, results[0], strict=True):
            wanted = [torch.cat([t.split(SIZES)[i] for i in PARTS[stages][stage]]) for t in whole]
            assert_traces_equal(trace, wanted)
            tied = {0: slice(SIZES[0]), stages - 1: slice(-SIZES[0], None)}.get(stage, slice(0))
            assert all(torch.equal(a[tied], b[: len(a[tied])]) for a, b in zip(trace, first, strict=True))


def comes_by_itself(rank: int, world_size: int) -> bool:
    """Whether a reduction with sends from one stage to another is through while nobody waits for it."""
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3))]
    mesh = node_mesh("cpu", 3)  # the last of three holds nothing of what the first two share
    holders = {params[0]: [0, 1] if rank < 2 else [2], params[1]: [rank]}
    co2 = ShardedCO2(params, Settings(tau=1).co2, mesh=mesh, shards=holders)
    co2.step()
    began = time.monotonic()
    while not co2.flight.done() and time.monotonic() - began < 10:
        time.sleep(0.01)
    through = co2.flight.done()
    co2.finish()
    return through


def test_what_one_stage_sends_another_is_hidden_too():
    assert run_distributed(comes_by_itself, 3, timeout=60) == [True] * 3


def refusals(rank: int, world_size: int) -> list[str]:
    lines, p = [], nn.Parameter(torch.ones(2))
    for holders in ([1 - rank], [rank, 7]):
        lines.append(refusal(ShardedCO2, [p], mesh=node_mesh("cpu", 2), shards={p: holders}))
    return lines


def test_holders_that_cannot_be_are_refused_in_one_line():
    for rank, lines in enumerate(run_distributed(refusals, 2)):
        for line, wrong in zip(lines, (f"[{1 - rank}]", f"[{rank}, 7]"), strict=True):
            assert wrong in line and "give ranks of that group" in line
