"""Who of a node holds what: copies start equal, stay so and count once; what would mix different parts is refused."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from core import CO2Config, ShardedCO2
from core.flat import local_shard
from core.sharded.mesh import node_mesh
from core.sharded.placement import copies_of
from core.testing import run_distributed
from tests.problems import SlowLink, refusal


def shared_values(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], Tensor, str]:
    """A node's ranks start with unequal copies; statistics are averaged over everybody; rounding makes copies differ by
    a little, which a boundary heals, and a step by much."""
    mesh = node_mesh("cpu", 2)
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh["shard"], [Shard(0)]))
    bias, frozen = nn.Parameter(torch.full((2,), 1.0 + rank)), nn.Parameter(torch.full((2,), float(rank)), False)
    numbers = [torch.full((3,), float(rank)), distribute_tensor(torch.zeros(2), mesh["shard"], [Replicate()])]
    co2 = ShardedCO2([weight, bias, frozen], CO2Config(tau=1), mesh=mesh, buffers=numbers)
    starts = [t.detach().clone() for t in (bias, frozen, numbers[0])]
    for t in numbers:
        local_shard(t).add_(rank)
    with torch.no_grad():
        bias.add_(2e-7 * rank)
    for _ in range(3):
        co2.step()
    healed = bias.detach().clone()
    means = [local_shard(t).clone() for t in numbers]
    co2.finish()
    with torch.no_grad():
        bias.fill_(3 + rank)
    co2.resync()
    starts.append(bias.detach().clone())
    fresh = ShardedCO2([weight, bias], CO2Config(tau=1), mesh=mesh)
    with torch.no_grad():
        bias.add_(rank)
    return starts, means, healed, refusal(fresh.step)


def test_copies_start_equal_and_must_stay_so():
    results = run_distributed(shared_values, 4)
    for starts, means, healed, text in results:
        assert torch.equal(healed, results[0][2]) and healed[0] > 1
        assert [t.tolist() for t in starts] == [[1, 1], [0, 0], [0, 0, 0], [3, 3]]
        assert [t.tolist() for t in means] == [[1.5] * 3, [1.5] * 2]
        assert text.startswith("the unsharded parameters of one node's workers differ")


def resynced_in_flight(rank: int, world_size: int) -> list[float]:
    """One rank's reduction is through when the other's has still to come to its collectives inside the node."""
    weight = nn.Parameter(torch.ones(3))
    co2 = ShardedCO2([weight], CO2Config(tau=1), mesh=node_mesh("cpu", 2), link=SlowLink(0.3 * rank))
    co2.step()
    with torch.no_grad():
        weight.fill_(5.0 + rank)
    co2.resync()
    return weight.tolist()


def test_resync_in_flight_is_no_part_of_what_runs_inside_the_node():
    assert run_distributed(resynced_in_flight, 2, timeout=30) == [[5.0] * 3] * 2


def messages(rank: int, world_size: int) -> list[str]:
    mesh, lines = node_mesh("cpu", 2), []
    sharded = distribute_tensor(torch.ones(4, 3), mesh["shard"], [Shard(0)])
    across = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0), Replicate()])
    sums = DTensor.from_local(torch.ones(3), mesh["shard"], [Partial()])
    plain = nn.Parameter(torch.ones(3 + rank % 2))
    for params, how in [
        ([plain], {"mesh": mesh}),
        ([plain], {"shards": True}),
        ([nn.Parameter(across)], {"mesh": mesh}),
        ([nn.Parameter(sums)], {"mesh": mesh}),
        ([nn.Parameter(sharded)], {"mesh": mesh, "buffers": [sharded]}),
    ]:
        lines.append(refusal(ShardedCO2, params, CO2Config(), **how))
    return lines


REFUSALS = ["shards=True", "needs mesh=", "inner group is [", "Partial(sum)", "leave it out"]


def test_what_would_mix_parts_is_refused_in_one_line():
    for lines in run_distributed(messages, 4):
        assert "(3,)" in lines[0] and "(4,)" in lines[0]
        assert all(part in line for part, line in zip(REFUSALS, lines, strict=True)), lines


def counted(rank: int, world_size: int) -> list[int]:
    """Of four ranks that hold one model: [sharded twice, in one way of two, nowhere, over half of them, plain]."""
    mesh, ranks = node_mesh("cpu", 2), list(range(4))
    places = [[Shard(0), Shard(1)], [Shard(0), Replicate()], [Replicate(), Replicate()]]
    tensors = [distribute_tensor(torch.ones(4, 4), mesh, p) for p in places]
    tensors += [distribute_tensor(torch.ones(4), mesh["shard"], [Shard(0)]), torch.ones(4)]
    return [copies_of(t, ranks, shards) for shards in (False, True) for t in tensors]


def test_how_many_ranks_hold_a_tensor():
    """With shards the half of them that shares a DTensor is a stage."""
    assert run_distributed(counted, 4) == [[1, 2, 4, 2, 4, 1, 2, 4, 1, 1]] * 4
