"""Documents split over the ranks of an island: which ranks hold which, and ring attention beside whole documents'."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import language.lengths.ring
from core.testing import run_distributed
from language.lengths.plan import Island, layer_seconds, plan
from language.lengths.ring import Shares, flash, flash_backward, ring_attention
from tests.on_ranks import on_ranks

# -- which ranks hold which document ----------------------------------------------------------------------------------


ISLAND = Island(2, 4, attention=1e-9, linear=1e-5, inside=(1e-5, 1e-7), across=(1e-4, 1e-6))


def documents(number: int, seed: int = 0, median: float = 500.0, sigma: float = 1.5) -> Tensor:
    """Cumulative lengths of a log-normal law, int64 [number + 1]."""
    lengths = np.random.default_rng(seed).lognormal(math.log(median), sigma, number).astype(np.int64) + 1
    return torch.tensor([0, *lengths]).cumsum(0)


def test_a_ring_is_no_larger_than_it_must_be_and_takes_the_devices_that_have_least_to_do():
    """One long document among short ones is split as far as its share demands; the short ones stay whole."""
    lengths = [20_000, *[100] * 1000]
    rings = plan(torch.tensor([0, *lengths]).cumsum(0), ISLAND)
    share = sum(map(ISLAND.whole, lengths)) / ISLAND.size
    assert len(rings[0]) == math.ceil(ISLAND.whole(20_000) / share) == 3 and not ISLAND.crosses(rings[0])
    assert {len(ring) for ring in rings[1:]} == {1} and layer_seconds(lengths, rings, ISLAND) < 1.02 * share
    assert plan(torch.tensor([0, 100_000]), ISLAND) == [tuple(range(8))]
    slow = replace(ISLAND, across=(1.0, 1.0))
    assert plan(torch.tensor([0, 100_000]), slow) == [(0, 1, 2, 3)]
    slower = replace(slow, inside=(1000.0, 0.0))
    assert plan(torch.tensor([0, 100_000]), slower) == [(0,)]
    one_node = replace(ISLAND, nodes=1)
    rings = plan(torch.tensor([0, 10_000, 20_000]), one_node)
    assert sorted(rings) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("number", [0, 1, 7, 200, 3000])
def test_every_document_has_a_ring_and_work_is_even(number: int):
    ends = documents(number)
    rings, lengths = plan(ends, ISLAND), ends.diff().tolist()
    assert len(rings) == number
    assert all(ring and ring == tuple(sorted(set(ring))) and set(ring) <= set(range(8)) for ring in rings)
    share = sum(map(ISLAND.whole, lengths)) / ISLAND.size
    assert layer_seconds(lengths, rings, ISLAND) <= 1.02 * share + 1e-3


# -- ring attention beside attention of each whole document -----------------------------------------------------------


HEADS, WIDTH = 2, 8


def ends(lengths: Sequence[int]) -> Tensor:
    """Cumulative lengths, int64 [documents + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0)


def by_document(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """The reference, by scaled_dot_product_attention: [tokens, heads, width] of all documents end to end."""
    parts = zip(*(x.transpose(0, 1).split(list(lengths), dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 1).transpose(0, 1)


def drawn(generator: random.Random, ranks: int, longest: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """Lengths, of 0, 1 and fewer tokens than the ring has chunks among them, and rings in any order."""
    lengths = [1, 2, generator.randint(1, 2 * ranks), 0, longest, *(generator.randint(1, longest) for _ in range(3))]
    sizes = [ranks, *(generator.randint(1, ranks) for _ in lengths[1:])]
    return lengths, [tuple(generator.sample(range(ranks), size)) for size in sizes]


def worst_errors(rank: int, ranks: int, draws: int, longest: int) -> list[float]:
    """For each draw the largest difference of outputs and gradients from the reference, on any rank."""
    generator, errors = random.Random(ranks), []
    for _ in range(draws):
        lengths, rings = drawn(generator, ranks, longest)
        whole = torch.randn(4, sum(lengths), HEADS, WIDTH, dtype=torch.float64, generator=torch.manual_seed(0))
        shares = Shares(ends(lengths), rings)
        q, k, v, grad = whole[:, shares.indices]
        ours = run(ring_attention, q, k, v, grad, shares)
        expected = run(by_document, *whole, lengths)
        differences = [a - b[shares.indices] for a, b in zip(ours, expected, strict=True)]
        worst = torch.tensor(max((d.abs().max().item() for d in differences if d.numel()), default=0.0))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        errors.append(worst.item())
    return errors


def run(attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, how) -> list[Tensor]:
    """Output and gradients of q, k and v."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, how)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def test_the_ring_is_the_attention_of_each_document():
    for errors in run_distributed(worst_errors, 4, 6, 90):
        assert max(errors) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_lengths_up_to_4096(ranks: int):
    for errors in run_distributed(worst_errors, ranks, 3, 4096, timeout=600):
        assert max(errors) < 1e-12


@on_ranks(2)
def test_in_16_bits_the_blocks_are_added_in_32(rank: int):  # noqa: ARG001
    lengths, rings = [300, 41], [(1, 0), (0, 1)]
    whole = torch.randn(4, sum(lengths), HEADS, WIDTH, generator=torch.manual_seed(0)).bfloat16()
    shares = Shares(ends(lengths), rings)
    ours = run(ring_attention, *whole[:, shares.indices], shares)
    expected = run(by_document, *whole.float(), lengths)
    assert {x.dtype for x in ours} == {torch.bfloat16}
    worst = max((a.float() - b[shares.indices]).abs().max().item() for a, b in zip(ours, expected, strict=True))
    assert worst < 0.04  # half a unit in the last place of a number of 4 is 0.016


def test_every_token_is_held_once_and_work_is_even():
    """A process without a group is rank 0 of itself, so `ring_of` walks through the places."""
    lengths = [0, 1, 5, 1000]
    for ranks in (1, 2, 3, 4):
        held = [ring_of(lengths, ranks, place) for place in range(ranks)]
        assert sorted(torch.cat([shares.indices for shares in held]).tolist()) == list(range(sum(lengths)))
        for shares in held:
            starts = ends(lengths)[torch.searchsorted(ends(lengths), shares.indices, right=True) - 1]
            assert torch.equal(shares.positions, shares.indices - starts)
        work = [(shares.positions[shares.indices >= 6] + 1).sum().item() for shares in held]  # pairs, of the longest
        assert max(work) < 1.02 * min(work)


def ring_of(lengths: Sequence[int], ranks: int, place: int) -> Shares:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda group: ranks)
        patch.setattr(dist, "get_rank", lambda group: place)
        return Shares(ends(lengths), [tuple(range(ranks))] * len(lengths))


def test_what_a_gpu_would_run_is_known_to_torch():
    """Of the GPU's kernels only names, arguments and shapes can be tried without one."""
    q, k = (torch.randn(n, 2, 8, dtype=torch.bfloat16, device="meta") for n in (6, 10))
    out, lse = flash(q, k, k, causal=False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:2], torch.float32)
    grads = flash_backward(out, q, k, k, out, lse, causal=False)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


class Noted(Shares):
    """Notes when exchanges are posted and waited for."""

    def exchange(self, pieces, outgoing, incoming, lane):
        works = super().exchange(pieces, outgoing, incoming, lane)
        if not works:
            return []
        self.log.append(f"post {'keys' if lane == 0 else 'gradients'}")
        return [*works, NotedWait(self.log, lane)]  # waited for from the last to the first


class NotedWait:
    def __init__(self, log: list[str], lane: int):
        self.log, self.lane = log, lane

    def wait(self) -> None:
        self.log.append(f"wait {'keys' if self.lane == 0 else 'gradients'}")


def logged(fn, log: list[str]):
    def run(*args, **how):
        log.append("block")
        return fn(*args, **how)

    return run


@on_ranks(3)
def test_every_exchange_travels_under_a_block(rank: int):
    shares = Noted(ends([60, 5]), [(0, 1, 2), (rank,)] if rank else [(0, 1, 2), (0,)])
    shares.log = log = []
    for name in ("flash", "flash_backward"):
        setattr(language.lengths.ring, name, logged(getattr(language.lengths.ring, name), log))
    q, k, v = (torch.randn(len(shares.indices), 1, 8, requires_grad=True) for _ in range(3))
    out = ring_attention(q, k, v, shares)
    forward = log[:]
    log.clear()
    out.sum().backward()
    assert ", ".join(forward) == "post keys, block, block, wait keys, post keys, block, wait keys, block"
    backward = "post keys, block, wait keys, post keys, block, wait keys, post gradients, block, wait gradients, "
    backward += "post gradients, block, wait gradients"  # the last block is that of the rank's own document
    assert ", ".join(log) == backward
