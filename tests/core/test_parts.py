"""What DES-LOC and Streaming DiLoCo do, by CO2 as it is: moments among the buffers, and an object for each fragment."""

import torch
from torch import Tensor

from core import CO2, CO2Config
from core.testing import run_distributed
from tests import problems
from tests.core.test_loops import batch, net


def averaged_moments(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Adam's second moments among the buffers, without delay; after each boundary they, and their mean before it."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(batch(rank, 99)[0]).sum().backward()
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg_sq"] for p in model.parameters()]
    co2 = CO2(model.parameters(), CO2Config(tau=2, delay=0, gap="none", outer_momentum=0.0), buffers=moments)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        problems.loss(model, batch(rank, step)).backward()
        optimizer.step()
        mean = problems.flat(moments) / world_size
        torch.distributed.all_reduce(mean)
        if co2.step():
            seen.append((problems.flat(moments), mean))
    co2.finish()
    return seen


def test_adams_second_moments_may_be_averaged_as_buffers():
    zero, one = run_distributed(averaged_moments, 2)
    for (ours, mean), (other, _) in zip(zero, one, strict=True):
        assert torch.equal(ours, other) and ours.abs().max() > 0
        torch.testing.assert_close(ours, mean, rtol=1e-12, atol=0)


def fragments(rank: int, world_size: int, staggered: bool) -> list[Tensor]:
    """Two objects over a part of the parameters each; staggered: the second's rounds end two steps later."""
    parts = [problems.odd_parameters()[:4], problems.odd_parameters()[4:-1]]
    objects = [CO2(part, CO2Config(tau=4, outer_momentum=0.2)) for part in parts]
    closed: list[list[int]] = [[], []]
    for step in range(10):
        for i, (part, co2) in enumerate(zip(parts, objects, strict=True)):
            problems.sgd_step(part, rank, step)
            if (not staggered or step >= 2 * i) and co2.step():
                closed[i].append(step)
    for co2 in objects:
        co2.finish()
    assert closed == ([[3, 7], [5, 9]] if staggered else [[3, 7], [3, 7]])
    return [problems.flat(part) for part in parts]


def test_fragments_of_a_model_may_be_averaged_in_turn():
    """Streaming DiLoCo's fragments: each is trained as if it were alone, and the first is as without the second."""
    together, in_turn = run_distributed(fragments, 2, False), run_distributed(fragments, 2, True)
    for results in (together, in_turn):
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(together[0][0], in_turn[0][0]) and not torch.equal(together[0][1], in_turn[0][1])
